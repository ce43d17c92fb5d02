"""ZeRO for plain PyTorch, as a function.

The names below in the order of the story: find your world, choose stage, precision and optimizer, make a plan for a
model, open a store, init a state, make a step, run it. They are imported on first use, so that reading a configuration
does not wait for torch.
"""

import sys
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from zero import renamed
from zero.deepspeed import missing_names

if TYPE_CHECKING:
    from zero import losses as losses
    from zero.checkpoint import (
        load as load,
        open_checkpoint as open_checkpoint,
        open_latest as open_latest,
        save as save,
    )
    from zero.core.loss_scale import LossScaling as LossScaling
    from zero.core.optim import (
        Group as Group,
        adagrad as adagrad,
        adam as adam,
        adamw as adamw,
        lion as lion,
        sgd as sgd,
        with_ema as with_ema,
        with_moments as with_moments,
    )
    from zero.core.placement import Offload as Offload
    from zero.core.precision import Precision as Precision
    from zero.core.stage import Stage as Stage
    from zero.deepspeed.engine import Engine as Engine
    from zero.deepspeed.initialize import (
        add_config_arguments as add_config_arguments,
        init_distributed as init_distributed,
        initialize as initialize,
    )
    from zero.distributed.world import World as World
    from zero.engine.empty import empty as empty
    from zero.engine.full import (
        full_state_dict as full_state_dict,
        gathered as gathered,
        get_full as get_full,
        set_full as set_full,
    )
    from zero.engine.init import init as init, open_store as open_store
    from zero.engine.plan import Plan as Plan
    from zero.engine.state import State as State
    from zero.engine.step import (
        Metrics as Metrics,
        Step as Step,
        make_forward as make_forward,
        make_step as make_step,
        record as record,
    )
    from zero.errors import ZeroError as ZeroError
    from zero.platform.timeline import Timeline as Timeline
    from zero.tracker.track import track as track

_HOME = {
    "World": "distributed.world",
    "Stage": "core.stage",
    "Precision": "core.precision",
    "LossScaling": "core.loss_scale",
    "Offload": "core.placement",
    "adamw": "core.optim",
    "adam": "core.optim",
    "sgd": "core.optim",
    "lion": "core.optim",
    "adagrad": "core.optim",
    "Group": "core.optim",
    "with_ema": "core.optim",
    "with_moments": "core.optim",
    "empty": "engine.empty",
    "Plan": "engine.plan",
    "open_store": "engine.init",
    "init": "engine.init",
    "State": "engine.state",
    "make_step": "engine.step",
    "Step": "engine.step",
    "Metrics": "engine.step",
    "make_forward": "engine.step",
    "record": "engine.step",
    "Timeline": "platform.timeline",
    "track": "tracker.track",
    "full_state_dict": "engine.full",
    "gathered": "engine.full",
    "get_full": "engine.full",
    "set_full": "engine.full",
    "save": "checkpoint",
    "load": "checkpoint",
    "open_checkpoint": "checkpoint",
    "open_latest": "checkpoint",
    "initialize": "deepspeed.initialize",
    "init_distributed": "deepspeed.initialize",
    "add_config_arguments": "deepspeed.initialize",
    "Engine": "deepspeed.engine",
    "ZeroError": "errors",
}

__all__ = sorted(_HOME)


sys.modules.update(_theirs := missing_names.modules())
globals().update({name.removeprefix("zero."): one for name, one in _theirs.items() if name.count(".") == 1})
sys.meta_path += [renamed.Finder, missing_names.Unfound]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("functional-zero")
    if name in missing_names.HERE:
        return missing_names.found(name)
    if missing_names.answer(name) is not None:
        raise missing_names.missing("zero", name)
    if name == "losses" or name in renamed.MODULES:
        return import_module(f"zero.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'zero' has no attribute {name!r}")
    return getattr(import_module(f"zero.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
