"""Modules that were renamed since 0.1: the old names import, with a warning that names the new one."""

import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

_MOVED = {
    "core": "stage layout precision placement secret",
    "platform": "device cuda timeline",
    "distributed": "world failure",
    "engine": "plan unit state full gather reduce update",
    "trainer": "config data evaluate launch models planning saver task",
}

MODULES: Mapping[str, str] = {name: f"{room}.{name}" for room, names in _MOVED.items() for name in names.split()} | {
    "build": "settings.build",
    "meter": "tracker.meter",
    "report": "tracker.report",
    "schedule": "core.lr_schedule",
    "optim": "core.optim core.groups core.updates",
    "meta": "engine.empty",
    "step": "engine.init engine.step",
    "passes": "engine.step",
    "training": "trainer.loop",
    "exchange": "formats",
    "interop": "deepspeed",
    "ds_config": "deepspeed.config",
}
"""Module of `zero` in 0.1 -> where it is now; two where its names are in two."""


class Finder(Loader):
    """The last place where Python looks for a module; a module found here has the names of the one that it was."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """None where `name` was never a module of `zero`."""
        package, _, old = name.partition(".")
        first, _, further = old.partition(".")
        if package != "zero" or first not in MODULES:
            return None
        now = " ".join(f"zero.{module}.{further}".removesuffix(".") for module in MODULES[first].split())
        return ModuleSpec(name, cls(), loader_state=now, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        places = spec.loader_state.split()
        warnings.warn(f"{spec.name} is {' and '.join(places)} now", DeprecationWarning, stacklevel=2)
        for place in places:
            found = vars(import_module(place))
            kept = {name: value for name, value in found.items() if not name.startswith("__") or name == "__getattr__"}
            vars(module).update(kept)
