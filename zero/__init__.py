"""ZeRO for plain PyTorch, as a function.

The names below in the order of the story: find your world, choose stage, precision and optimizer, make a plan for a
model, open a store, init a state, make a step, run it. They are imported on first use, so that reading a configuration
does not wait for torch.
"""

import sys
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from zero import elsewhere

if TYPE_CHECKING:
    from zero.checkpoint import load, open_checkpoint, open_latest, save
    from zero.errors import ZeroError
    from zero.full import full_state_dict, gathered, get_full, set_full
    from zero.interop import Engine, add_config_arguments, init_distributed, initialize
    from zero.meta import empty
    from zero.optim import Group, adagrad, adam, adamw, lion, sgd, with_ema
    from zero.passes import Metrics, Step
    from zero.placement import Offload
    from zero.plan import Plan
    from zero.precision import LossScaling, Precision
    from zero.stage import Stage
    from zero.state import State
    from zero.step import init, make_forward, make_step, open_store, record
    from zero.timeline import Timeline
    from zero.world import World

_HOME = {
    "World": "world",
    "Stage": "stage",
    "Precision": "precision",
    "LossScaling": "precision",
    "Offload": "placement",
    "adamw": "optim",
    "adam": "optim",
    "sgd": "optim",
    "lion": "optim",
    "adagrad": "optim",
    "Group": "optim",
    "with_ema": "optim",
    "empty": "meta",
    "Plan": "plan",
    "open_store": "step",
    "init": "step",
    "State": "state",
    "make_step": "step",
    "Step": "passes",
    "Metrics": "passes",
    "make_forward": "step",
    "record": "step",
    "Timeline": "timeline",
    "full_state_dict": "full",
    "gathered": "full",
    "get_full": "full",
    "set_full": "full",
    "save": "checkpoint",
    "load": "checkpoint",
    "open_checkpoint": "checkpoint",
    "open_latest": "checkpoint",
    "initialize": "interop",
    "init_distributed": "interop",
    "add_config_arguments": "interop",
    "Engine": "interop",
    "ZeroError": "errors",
}

__all__ = [
    "Engine",
    "Group",
    "LossScaling",
    "Metrics",
    "Offload",
    "Plan",
    "Precision",
    "Stage",
    "State",
    "Step",
    "Timeline",
    "World",
    "ZeroError",
    "adagrad",
    "adam",
    "adamw",
    "add_config_arguments",
    "empty",
    "full_state_dict",
    "gathered",
    "get_full",
    "init",
    "init_distributed",
    "initialize",
    "lion",
    "load",
    "make_forward",
    "make_step",
    "open_checkpoint",
    "open_latest",
    "open_store",
    "record",
    "save",
    "set_full",
    "sgd",
    "with_ema",
]


sys.modules.update(_theirs := elsewhere.modules())
globals().update({name.removeprefix("zero."): one for name, one in _theirs.items() if name.count(".") == 1})
sys.meta_path.append(elsewhere.Unfound)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("functional-zero")
    if name in elsewhere.HERE:
        return elsewhere.found(name)
    if elsewhere.answer(name) is not None:
        raise elsewhere.missing("zero", name)
    if name not in _HOME:
        raise AttributeError(f"module 'zero' has no attribute {name!r}")
    return getattr(import_module(f"zero.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
