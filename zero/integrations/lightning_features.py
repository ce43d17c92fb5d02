"""The features of Lightning that an engine does not support."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden

from zero.engine.model import ParameterPlaceholder
from zero.errors import ConfigError


def check_features(module: LightningModule, trainer: Trainer, fits: bool) -> None:
    """Raise ConfigError for features of Lightning that an engine does not support."""
    has_engine = any(isinstance(parameter, ParameterPlaceholder) for parameter in module.parameters())
    unsupported = {
        "the model is compiled. Leave out torch.compile, and write ZeroStrategy(compile=True).": module._compiler_ctx,
        "the model belongs to another Trainer. Use that Trainer, or load a checkpoint into a new model.": has_engine,
        "Trainer(sync_batchnorm=True): each rank keeps its own statistics. Leave it out.": trainer.strategy._layer_sync,
    }
    if fits:
        averages = any(
            isinstance(callback, StochasticWeightAveraging | WeightAveraging) for callback in trainer.callbacks
        )
        clips_values = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
        files = type(trainer.strategy.checkpoint_io)
        unsupported |= {
            "Trainer(gradient_clip_algorithm='value'): only clipping by norm is supported. Leave it out.": clips_values,
            "StochasticWeightAveraging and WeightAveraging write whole parameters. Leave the callback out.": averages,
            f"{files.__name__} would write only weights. Leave it out.": files is not TorchCheckpointIO,
            "LightningModule.backward is overridden. Leave it out.": is_overridden("backward", module),
            "automatic_optimization=False is not supported. Return the loss from training_step, or write a loop with "
            "zero.initialize for several optimizers.": not module.automatic_optimization,
        }
    for line, applies in unsupported.items():
        if applies:
            raise ConfigError(line)
