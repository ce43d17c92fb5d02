"""Sharded data-parallel training (ZeRO) with CPU and NVMe offload for plain PyTorch.

The names are listed in the order in which a script uses them: open a `World`, choose stage, precision and optimizer,
make a `Plan` for a model, open a store, initialise a `State`, make a step. Each is imported on first use, so that a
script can read its configuration before torch is imported.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from zero.platform.installed import require

require("torch", "pydantic", "yaml", "psutil", "rich", "packaging", "safetensors", "zlib_ng")

if TYPE_CHECKING:
    from zero import deepspeed as deepspeed, losses as losses, sequence as sequence
    from zero.checkpoint.find import open_latest as open_latest
    from zero.checkpoint.load import load as load
    from zero.checkpoint.open import open_checkpoint as open_checkpoint
    from zero.checkpoint.save import save as save
    from zero.core.groups import Group as Group
    from zero.core.loss_scale import LossScaling as LossScaling
    from zero.core.lr_schedule import (
        linear_warmup as linear_warmup,
        warmup_cosine as warmup_cosine,
        warmup_linear as warmup_linear,
    )
    from zero.core.offload import Offload as Offload
    from zero.core.optim import with_moments as with_moments
    from zero.core.optimizers.adagrad import adagrad as adagrad
    from zero.core.optimizers.adam import adam as adam, adamw as adamw
    from zero.core.optimizers.ema import with_ema as with_ema
    from zero.core.optimizers.lion import lion as lion
    from zero.core.optimizers.muon import muon as muon
    from zero.core.optimizers.sgd import sgd as sgd
    from zero.core.precision import Precision as Precision
    from zero.core.stage import Stage as Stage
    from zero.deepspeed.initialization import (
        add_config_arguments as add_config_arguments,
        init_distributed as init_distributed,
        initialize as initialize,
    )
    from zero.distributed.world import World as World, open_world as open_world
    from zero.engine.init import init as init
    from zero.engine.make_step import make_forward as make_forward, make_step as make_step, record as record
    from zero.engine.meta import empty as empty
    from zero.engine.metrics import Metrics as Metrics
    from zero.engine.move import move as move
    from zero.engine.open_store import open_store as open_store
    from zero.engine.plan import Plan as Plan
    from zero.engine.state import State as State
    from zero.engine.step import Step as Step
    from zero.engine.whole import (
        full_state_dict as full_state_dict,
        gathered as gathered,
        get_full as get_full,
        set_full as set_full,
        stream_weights as stream_weights,
    )
    from zero.errors import ZeroError as ZeroError
    from zero.integrations.sequence import sequence_parallel as sequence_parallel
    from zero.platform.timeline import Timeline as Timeline
    from zero.tracker.track import track as track
    from zero.user_loop.engine import Engine as Engine

_NAMES = {
    "distributed.world": "World open_world",
    "core.stage": "Stage",
    "core.precision": "Precision",
    "core.loss_scale": "LossScaling",
    "core.offload": "Offload",
    "core.optimizers": "adamw adam sgd lion adagrad muon with_ema with_moments",
    "core.groups": "Group",
    "core.lr_schedule": "linear_warmup warmup_linear warmup_cosine",
    "engine.meta": "empty",
    "engine.plan": "Plan",
    "engine.init": "init",
    "engine.open_store": "open_store",
    "engine.state": "State",
    "engine.make_step": "make_step make_forward record",
    "engine.metrics": "Metrics",
    "engine.move": "move",
    "engine.step": "Step",
    "platform.timeline": "Timeline",
    "engine.whole": "full_state_dict gathered get_full set_full stream_weights",
    "checkpoint": "save load open_checkpoint open_latest",
    "deepspeed.initialization": "initialize init_distributed add_config_arguments",
    "user_loop.engine": "Engine",
    "tracker.track": "track",
    "integrations.sequence": "sequence_parallel",
    "errors": "ZeroError",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("functional-zero")
    if name in ("deepspeed", "losses", "sequence"):
        return import_module(f"zero.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'zero' has no attribute {name!r}")
    return getattr(import_module(f"zero.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
