"""Optimizers with torch's interface, whose parameter groups are read at every update.

`zero.initialize` returns an `Optimizer`. Schedulers write into its `param_groups`, and the next update reads them. If
the script passed a torch optimizer, both share the same group dicts, so a scheduler of either has effect.
"""

import glob
import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from zero.core.groups import Group
from zero.core.optim import Transform
from zero.core.optimizers import OPTIMIZERS, Rule
from zero.engine.model import embedding_ids
from zero.errors import ConfigError
from zero.settings import Settings
from zero.settings.build import build_optimizer

NO_STATE_DICT = (
    "the optimizer's state dict: moments are sharded over ranks. Call engine.save_checkpoint(folder) and "
    "engine.load_checkpoint(folder), and pass neither engine nor optimizer to accelerator.prepare."
)

ParamGroup = dict[str, Any]
"""An element of `param_groups`."""

USES_MATRICES = "use_muon"
"""DeepSpeed's key of a group whose parameters are updated as matrices, or not."""


TORCH = {rule.torch_class: name for name, rule in OPTIMIZERS.items() if rule.torch_class is not None}
"""The classes of torch with a counterpart here, and the counterpart's name."""


class Scheduler(Protocol):
    """The methods of a scheduler that an engine calls; torch's schedulers have them."""

    def step(self, *args: Any, **kwargs: Any) -> None: ...

    def get_last_lr(self) -> Sequence[float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Optimizer(torch.optim.Optimizer):
    """The parameter groups of a run, as a torch optimizer whose `step` calls the engine's update.

    Args:
        groups: parameters, or dicts as torch's optimizers take them.
        defaults: settings of a group that does not name them.
        kind: a name in `OPTIMIZERS`.

    Attributes:
        engine: the `Engine` that uses the optimizer; None before it is made. The type is Any, because the engine's
            module imports this module.
    """

    def __init__(self, groups: Iterable[Any], defaults: Mapping[str, Any], kind: str) -> None:
        self.engine: Any = None
        super().__init__(groups, dict(defaults))
        self.kind, self.state = kind, ShardedState()

    @classmethod
    def of(cls, passed: torch.optim.Optimizer) -> "Optimizer":
        """Make an optimizer with the groups of `passed`, sharing the dicts; return `passed` if it is an `Optimizer`.

        Raises:
            ConfigError: the class has no counterpart here, is a subclass with its own `step`, or the optimizer has made
                steps.
        """
        if isinstance(passed, Optimizer):
            return passed
        kind, name = _kind_of(passed), type(passed).__qualname__
        if any(float(state.get("step", 1)) for state in passed.state.values()):  # some have it from the start
            raise ConfigError(f"optimizer={name} has made steps, and its moments would be lost. Pass a new one.")
        if kind == "adam" and all(group.get("decoupled_weight_decay") for group in passed.param_groups):
            kind = "adamw"
        made = cls(passed.param_groups, passed.defaults, kind)
        made.param_groups = passed.param_groups
        return made

    @classmethod
    def of_config(cls, config: Settings, parameters: Iterable[Any], model: nn.Module) -> "Optimizer":
        """Make the optimizer that a config names, for parameters of `model` or groups of them."""
        chosen = config.optim
        transform = build_optimizer(config)
        defaults = {"lr": chosen.lr, "weight_decay": chosen.weight_decay, **chosen.constants}
        if (of_matrices := chosen.of_matrices) is not None:
            made = cls(parameters, defaults, chosen.name)
            matrices = _matrices(transform, model)
            made.param_groups = [part for group in made.param_groups for part in _apart(of_matrices, matrices, group)]
            return made
        if len(betas := transform.groups[0](1).betas) == 2:
            defaults["betas"] = betas
        return cls(parameters, defaults, chosen.name)

    @classmethod
    def of_nothing(cls) -> "Optimizer":
        """Make the optimizer of an engine that does not train: one group without parameters."""
        return cls([{"params": []}], {"lr": 0.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}, "sgd")

    @torch._dynamo.disable
    def step(self, closure: None = None) -> None:
        """Update all parameters, as `engine.step` does at the end of an accumulation. Collective.

        As with DeepSpeed, a call in place of `engine.step` leaves the engine's scheduler and `micro_steps` as they are.

        Args:
            closure: must be None.

        Raises:
            ConfigError: there is a closure, or the optimizer belongs to no engine.
        """
        if closure is not None:
            raise ConfigError("optimizer.step(closure): closures are not supported. Call engine.backward first.")
        self._engine().update()

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss; 1 except in fp16."""
        return float(self._engine().loss_scale)

    cur_scale = loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped because a gradient was not finite."""
        return bool(self._engine().overflow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the current step. After a step there are none, so the call has no effect.

        Args:
            set_to_none: ignored, for compatibility with torch.
        """
        if self.engine is not None:
            self.engine.forget()

    def state_dict(self) -> NoReturn:
        """Raise ConfigError, because each rank has only a shard of the moments."""
        raise ConfigError(NO_STATE_DICT)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> NoReturn:
        """Raise ConfigError, because `engine.load_checkpoint` loads moments and groups."""
        raise ConfigError(NO_STATE_DICT)

    def _engine(self) -> Any:
        if self.engine is None:
            raise ConfigError("this optimizer belongs to no engine. Use the one that zero.initialize returns.")
        return self.engine


def _kind_of(passed: torch.optim.Optimizer) -> str:
    cls = type(passed)
    known: Any = next((base for base in cls.__mro__ if base in TORCH), None)
    if known is None or inspect.unwrap(cls.step) is not inspect.unwrap(known.step):
        names = ", ".join(sorted(f"torch.optim.{supported.__name__}" for supported in TORCH))
        raise ConfigError(f"optimizer={cls.__qualname__} is not supported. Use {names}, or write Lion in the config.")
    return TORCH[known]


class ShardedState(defaultdict[Tensor, Any]):
    """The `state` of an optimizer whose moments the engine holds: an empty dict that raises ConfigError when read."""

    def __missing__(self, parameter: Tensor) -> NoReturn:
        raise ConfigError(
            "optimizer.state: moments are sharded over ranks. Read them with "
            "zero.deepspeed.utils.safe_get_full_optimizer_state(parameter, 'exp_avg')."
        )


class PassedOptimizer:
    """A wrapper of the torch optimizer that the script passed.

    The optimizer's groups are used; its own `step` and state dict raise ConfigError. The wrapper has no reference to
    the engine, so that it does not keep the engine alive.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self._may_step, self._state = optimizer, False, optimizer.state
        optimizer.state = ShardedState()
        self._hooks = (
            optimizer.register_step_pre_hook(self._check_step),
            optimizer.register_state_dict_pre_hook(_raise_state_dict),
            optimizer.register_load_state_dict_pre_hook(_raise_state_dict),
        )

    def step(self) -> None:
        """Call the optimizer's `step` only so that torch's schedulers see the call and do not warn.

        It changes nothing, because no parameter has a gradient.
        """
        self._may_step = True
        self.optimizer.step()
        self._may_step = False

    def release(self) -> None:
        """Remove the hooks and restore the state."""
        self.optimizer.state = self._state
        for hook in self._hooks:
            hook.remove()

    def _check_step(self, *_: Any) -> None:
        if not self._may_step:
            raise ConfigError("this optimizer was taken over by zero.initialize. Call engine.step().")


def _raise_state_dict(*_: Any) -> NoReturn:
    raise ConfigError(NO_STATE_DICT)


def transform(optimizer: Optimizer, names: Mapping[int, str], clip: float | None) -> Transform:
    """Make a transform that reads its settings from the optimizer's groups at every step.

    Args:
        names: map from the `id` of each of the model's parameters to its name.
        clip: the largest gradient norm; None: no clipping.

    Raises:
        ConfigError: a setting is not supported, groups differ in a setting that they must share, or a parameter is not
            the model's.
    """
    rule, first = OPTIMIZERS[optimizer.kind], optimizer.param_groups[0]
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        _check_group(number, group, first, rule)
        held = _named(number, group, names)
        frozen = {names[id(parameter)]: parameter for parameter in group["params"] if not parameter.requires_grad}
        groups.append(Group(frozenset(held), live=group, trains=partial(_trains, held, frozen)))
    shared = {key: first[key] for key in rule.constants}
    if any(USES_MATRICES in group for group in optimizer.param_groups):
        others = (group for group in optimizer.param_groups if not group.get(USES_MATRICES))
        shared["exclude"] = [glob.escape(names[id(parameter)]) for group in others for parameter in group["params"]]
    return rule.make(lambda step: float(first["lr"]), clip=clip, groups=groups, **shared)


def _matrices(transform: Transform, model: nn.Module) -> set[int]:
    """Return the ids of the parameters that are updated as matrices."""
    embedded = embedding_ids(model)
    return {
        id(parameter)
        for name, parameter in model.named_parameters()
        if transform.takes_matrices(
            transform.group_of(name, tuple(parameter.shape), embedding=id(parameter) in embedded)
        )
    }


def _apart(of_matrices: tuple[ParamGroup, ParamGroup], matrices: set[int], group: ParamGroup) -> list[ParamGroup]:
    """Return a group as two, of matrices and of all other parameters, with the settings of each."""
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in group["params"]:
        parts[id(parameter) in matrices].append(parameter)
    own: dict[bool, ParamGroup] = dict(zip((True, False), of_matrices, strict=True))
    kept = {key: value for key, value in group.items() if key not in ("param_names", "lr")}
    return [own[uses] | kept | {"params": held, USES_MATRICES: uses} for uses, held in parts.items() if held]


def _check_group(number: int, group: ParamGroup, first: ParamGroup, rule: Rule) -> None:
    for key, value in rule.needs.items():
        if group.get(key, value) != value:
            raise ConfigError(f"optimizer group {number}: {key}={group[key]} is not supported. It must be {value}.")
    for key in rule.constants:
        if group[key] != first[key]:
            raise ConfigError(
                f"optimizer group {number}: {key}={group[key]}, group 0 has {first[key]}. Groups may differ in lr, "
                "weight_decay and betas."
            )


def trained(optimizer: Optimizer) -> set[int]:
    """Return the `id` of each parameter in the optimizer's groups."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def optimizer_settings(groups: Sequence[ParamGroup]) -> list[ParamGroup]:
    """Return the groups without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def restore(groups: Sequence[ParamGroup], saved: Sequence[ParamGroup]) -> None:
    """Write saved settings into the groups, one by one; there must be as many saved groups."""
    for group, settings in zip(groups, optimizer_settings(saved), strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})


def check_groups(groups: Sequence[ParamGroup], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise ConfigError unless each optimizer has the dicts `groups`, which every update reads."""
    expected = [id(group) for group in groups]
    for optimizer in optimizers:
        if [id(group) for group in optimizer.param_groups] != expected:
            raise ConfigError(
                "the optimizer has other groups than in zero.initialize (add_param_group, load_state_dict). Pass "
                "all groups to zero.initialize, edit them in place, and load with load_checkpoint."
            )


def check_group_count(groups: Sequence[ParamGroup], saved: Sequence[ParamGroup]) -> None:
    """Raise ConfigError unless `saved` has as many groups as `groups`."""
    if len(groups) != len(saved):
        raise ConfigError(f"the checkpoint has {len(saved)} optimizer groups, this optimizer has {len(groups)}")


def _named(number: int, group: ParamGroup, names: Mapping[int, str]) -> dict[str, Tensor]:
    for position, parameter in enumerate(group["params"]):
        if id(parameter) not in names:
            raise ConfigError(
                f"optimizer group {number}: parameter {position}, of shape {tuple(parameter.shape)}, is not in the "
                "model. Make the optimizer from model.parameters()."
            )
    return {names[id(parameter)]: parameter for parameter in group["params"] if parameter.requires_grad}


def _trains(held: Mapping[str, Tensor], frozen: Mapping[str, Tensor], step: int) -> bool:
    """Return whether any parameter of a group requires a gradient; the group's other parameters get zero gradients.

    Raises:
        ConfigError: a parameter that was frozen in `zero.initialize` requires a gradient.
    """
    thawed = next((name for name, parameter in frozen.items() if parameter.requires_grad), None)
    if thawed is not None:
        raise ConfigError(
            f"{thawed} was frozen in zero.initialize and has no optimizer state. Let it require a gradient there, and "
            "freeze it, in a group of its own, before the first step."
        )
    return any(parameter.requires_grad for parameter in held.values())


def optimizer_names(model: nn.Module) -> dict[int, str]:
    """Return a map from the `id` of each parameter to its full name; a tied parameter has its first name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}
