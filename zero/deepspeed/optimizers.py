"""Optimizers in torch's shape: a torch class names a transform, and its groups are settings that every update reads.

`Optimizer` is what `zero.initialize` returns. Schedulers write into its `param_groups`, and the next update reads what
they wrote. Made of a torch optimizer it shares that one's groups, so a scheduler that holds either writes for both.
DeepSpeed's own optimizer classes come last, as subclasses of torch's: the config says where an update is computed, so
the fused class and the CPU class are the same here.
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn

from zero.core import optim
from zero.core.optim import Transform
from zero.errors import ConfigError
from zero.settings import Settings
from zero.settings.build import build_optimizer

log = logging.getLogger("zero")

NO_STATE_DICT = (
    "the optimizer's state dict: moments are sharded over ranks. Call engine.save_checkpoint(folder) and "
    "engine.load_checkpoint(folder), which have the whole state."
)

ParamGroup = dict[str, Any]
"""One of `param_groups`."""


class _Kind(NamedTuple):
    """A class of `torch.optim` as a transform.

    `make` takes `keys` of the groups, which all groups must share. `needs` are settings that torch has and this library
    does not, each with the only value that means the same.
    """

    make: Callable[..., Transform]
    keys: tuple[str, ...]
    needs: Mapping[str, Any]


_PLAIN = {"maximize": False, "differentiable": False}
_ADAM = {**_PLAIN, "amsgrad": False}

KINDS = {
    "adamw": _Kind(optim.adamw, ("eps",), _ADAM),
    "adam": _Kind(optim.adam, ("eps",), {**_ADAM, "decoupled_weight_decay": False}),
    "sgd": _Kind(optim.sgd, ("nesterov",), {**_PLAIN, "dampening": 0}),
    "adagrad": _Kind(optim.adagrad, ("eps", "lr_decay"), {**_PLAIN, "initial_accumulator_value": 0}),
    "lion": _Kind(optim.lion, (), {}),
}
TORCH = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd", torch.optim.Adagrad: "adagrad"}


class OptimizerEngine(Protocol):
    """What an optimizer calls and reads of its engine."""

    @property
    def loss_scale(self) -> float: ...

    @property
    def overflow(self) -> bool: ...

    def update(self) -> None: ...

    def forget(self) -> None: ...


class Optimizer(torch.optim.Optimizer):
    """The parameter groups of a run, in torch's shape; `step` is the engine's update.

    Args:
        groups: parameters, or dicts as torch's optimizers take them.
        defaults: settings of a group that does not name them.
        kind: a name in `KINDS`.

    Attributes:
        engine: the engine that it belongs to; None before there is one.
    """

    def __init__(self, groups: Iterable[Any], defaults: Mapping[str, Any], kind: str) -> None:
        self.engine: OptimizerEngine | None = None
        super().__init__(groups, dict(defaults))
        self.kind, self.state = kind, ShardedState()

    @classmethod
    def of(cls, given: torch.optim.Optimizer) -> "Optimizer":
        """The same groups as `given`, whose dicts are shared.

        Raises:
            ConfigError: a class that has no counterpart here, a subclass with a `step` of its own, or an optimizer that
                has made steps.
        """
        theirs = type(given)
        name = f"torch.optim.{theirs.__name__}" if theirs.__module__.startswith("torch.") else theirs.__qualname__
        known_class: Any = next((base for base in theirs.__mro__ if base in TORCH), None)
        if known_class is None or inspect.unwrap(theirs.step) is not inspect.unwrap(known_class.step):
            known = ", ".join(sorted(f"torch.optim.{known.__name__}" for known in TORCH))
            raise ConfigError(f"optimizer={name} has no counterpart here; known are {known}, and Lion in the config")
        if any(float(state.get("step", 1)) for state in given.state.values()):  # Adagrad's is there from the start
            raise ConfigError(f"optimizer={name} has made steps already, and its moments would be lost; pass a new one")
        kind = TORCH[known_class]
        if kind == "adam" and all(group.get("decoupled_weight_decay") for group in given.param_groups):
            kind = "adamw"
        made = cls(given.param_groups, given.defaults, kind)
        made.param_groups = given.param_groups
        return made

    @classmethod
    def of_config(cls, config: Settings, parameters: Iterable[Any]) -> "Optimizer":
        """The optimizer that a config names, for parameters or groups of them."""
        chosen = config.optim
        defaults = chosen.model_dump(include={"lr", "weight_decay", "momentum", "nesterov", "eps"})
        if chosen.name == "adagrad":
            defaults["lr_decay"] = 0.0
        elif chosen.name != "sgd":
            defaults["betas"] = build_optimizer(config).groups[0](1).betas
        return cls(parameters, defaults, chosen.name)

    @classmethod
    def of_nothing(cls) -> "Optimizer":
        """The optimizer of an engine that does not train: one group without parameters."""
        return cls([{"params": []}], {"lr": 0.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}, "sgd")

    @torch._dynamo.disable
    def step(self, closure: None = None) -> None:
        """Update all parameters, as `engine.step` does at the end of an accumulation. Collective.

        Args:
            closure: must be None.

        Raises:
            ConfigError: a closure was passed, or the optimizer belongs to no engine.
        """
        if closure is not None:
            raise ConfigError("optimizer.step(closure): no optimizer here calls a closure; call engine.backward first")
        self._engine().update()

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss; 1 except in fp16."""
        return self._engine().loss_scale

    cur_scale = loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped because a gradient was not finite."""
        return self._engine().overflow

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group; only before `zero.initialize`, which decides once how parameters are sharded.

        Args:
            param_group: a dict as torch's optimizers take it.

        Raises:
            ConfigError: the optimizer belongs to an engine already.
        """
        if self.engine is not None:
            raise ConfigError(
                "add_param_group: training has begun; give every group to zero.initialize, which shards them"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the current step; after a step there are none.

        Args:
            set_to_none: for old calls; it has no effect.
        """
        if self.engine is not None:
            self.engine.forget()

    def state_dict(self) -> NoReturn:
        """Raise ConfigError: a rank has a shard of the moments, and its dict would load without the others."""
        raise ConfigError(NO_STATE_DICT)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> NoReturn:
        """Raise ConfigError: `engine.load_checkpoint` loads moments and the settings of the groups."""
        raise ConfigError(NO_STATE_DICT)

    def _engine(self) -> OptimizerEngine:
        if self.engine is None:
            raise ConfigError("this optimizer belongs to no engine; zero.initialize returns the one that does")
        return self.engine


class ShardedState(defaultdict[Tensor, Any]):
    """The `state` of an optimizer whose moments the engine keeps: empty, and reading a parameter's raises."""

    def __missing__(self, parameter: Tensor) -> NoReturn:
        raise ConfigError(
            "optimizer.state: moments are sharded over ranks. Read them with "
            "zero.utils.safe_get_full_optimizer_state(parameter, 'exp_avg')."
        )


class PassedOptimizer:
    """The torch optimizer that the script passed: its groups are used, and its own `step` and state dict raise.

    It holds no engine, so it keeps none alive.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self._is_ours, self._state = optimizer, False, optimizer.state
        optimizer.state = ShardedState()
        self._hooks = (
            optimizer.register_step_pre_hook(self._refuse),
            optimizer.register_state_dict_pre_hook(_refuse_state_dict),
            optimizer.register_load_state_dict_pre_hook(_refuse_state_dict),
        )

    def step(self) -> None:
        """Call its `step`, because torch's schedulers look for the call. No parameter has a gradient there."""
        self._is_ours = True
        self.optimizer.step()
        self._is_ours = False

    def release(self) -> None:
        """Remove the hooks and restore the state."""
        self.optimizer.state = self._state
        for hook in self._hooks:
            hook.remove()

    def _refuse(self, *_: Any) -> None:
        if not self._is_ours:
            raise ConfigError("this optimizer was taken over by zero.initialize: call engine.step() instead")


def _refuse_state_dict(*_: Any) -> NoReturn:
    raise ConfigError(NO_STATE_DICT)


def transform(optimizer: Optimizer, names: Mapping[int, str], clip: float | None) -> Transform:
    """A transform that reads its settings from the optimizer's groups at every step.

    Args:
        names: names of the model's parameters by `id`.
        clip: the largest gradient norm; None for none.

    Raises:
        ConfigError: a setting that is not supported, groups that differ where they cannot, or a parameter that is not
            the model's.
    """
    kind, first = KINDS[optimizer.kind], optimizer.param_groups[0]
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        for key, wanted in kind.needs.items():
            if group.get(key, wanted) != wanted:
                raise ConfigError(f"optimizer group {number}: {key}={group[key]} is not supported; it must be {wanted}")
        for key in kind.keys:
            if group[key] != first[key]:
                raise ConfigError(
                    f"optimizer group {number}: {key}={group[key]}, group 0 has {first[key]}; groups may differ in lr, "
                    "weight_decay and betas"
                )
        held = _named(number, group, names)
        frozen = {names[id(one)]: one for one in group["params"] if not one.requires_grad}
        groups.append(optim.Group(frozenset(held), live=group, trains=partial(_trains, held, frozen)))
    shared = {key: first[key] for key in kind.keys}
    return kind.make(lambda step: float(first["lr"]), clip=clip, groups=groups, **shared)


def trained(optimizer: Optimizer) -> set[int]:
    """The `id` of each parameter that the optimizer was given."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def settings_of(groups: Sequence[ParamGroup]) -> list[ParamGroup]:
    """The groups without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def restore(groups: Sequence[ParamGroup], saved: Sequence[ParamGroup]) -> None:
    """Put saved settings back into groups.

    Raises:
        ConfigError: there are more or fewer saved groups.
    """
    check_group_count(groups, saved)
    for group, settings in zip(groups, settings_of(saved), strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})


def check_group_count(groups: Sequence[ParamGroup], saved: Sequence[ParamGroup]) -> None:
    """Refuse saved groups if there are more or fewer of them.

    Raises:
        ConfigError: there are.
    """
    if len(groups) != len(saved):
        raise ConfigError(f"the checkpoint has {len(saved)} optimizer groups, this optimizer has {len(groups)}")


def _named(number: int, group: ParamGroup, names: Mapping[int, str]) -> dict[str, Tensor]:
    """A group's parameters by name, without those that are frozen from the start."""
    for position, parameter in enumerate(group["params"]):
        if id(parameter) not in names:
            raise ConfigError(
                f"optimizer group {number} holds a parameter of shape {tuple(parameter.shape)} (number {position}) "
                "that the model does not have; make the optimizer from model.parameters()"
            )
    return {names[id(one)]: one for one in group["params"] if one.requires_grad}


def _trains(held: Mapping[str, Tensor], frozen: Mapping[str, Tensor], step: int) -> bool:
    """Whether a group is updated: if any of its parameters requires a gradient. One frozen alone gets a zero."""
    thawed = next((name for name, parameter in frozen.items() if parameter.requires_grad), None)
    if thawed is not None:
        raise ConfigError(
            f"{thawed} was frozen in zero.initialize and has no optimizer state; to thaw it later, let it require a "
            "gradient there, and freeze it, in a group of its own, before the first step"
        )
    moving = [name for name, parameter in held.items() if parameter.requires_grad]
    if moving:
        for name in held.keys() - set(moving):
            _warn_frozen(name)
    return bool(moving)


@cache
def _warn_frozen(name: str) -> None:
    log.warning(
        "%s was frozen, and others of its optimizer group were not: its gradient is zero, weight decay and momentum "
        "still change it, as in DeepSpeed; put it into a group of its own to keep its value",
        name,
    )


def names_of(model: nn.Module) -> dict[int, str]:
    """Full names of parameters by `id`; a tied parameter has its first name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


# DeepSpeed's classes


class _Adam(torch.optim.Adam):
    """Adam by DeepSpeed's arguments; with `decoupled` decay it is AdamW."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        bias_correction: bool,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        amsgrad: bool,
        decoupled: bool,
    ) -> None:
        if not bias_correction:
            raise ConfigError("bias_correction=False: Adam corrects its first steps here; leave it out")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=decoupled)


class FusedAdam(_Adam):
    """Torch's AdamW, or its Adam with `adam_w_mode=False`.

    Args:
        params: parameters or groups of them.
        lr, betas, eps, weight_decay, amsgrad: as torch's.
        bias_correction: must be true.
        adam_w_mode: whether weight decay is decoupled from the gradient.
        set_grad_none: for old calls; it has no effect.

    Raises:
        ConfigError: `bias_correction=False`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


class DeepSpeedCPUAdam(_Adam):
    """`FusedAdam`, with its arguments in another order.

    Args:
        model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode: as `FusedAdam`'s.
        fp32_optimizer_states: must be true: moments are fp32.

    Raises:
        ConfigError: `bias_correction=False` or `fp32_optimizer_states=False`.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise ConfigError("DeepSpeedCPUAdam(fp32_optimizer_states=False): moments are kept in fp32; leave it out")
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Torch's Adagrad.

    Args:
        model_params: parameters or groups of them.
        lr, eps, weight_decay: as torch's.
        amsgrad, fp32_optimizer_states: for old calls; they have no effect.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class FusedLion(Optimizer):
    """Lion, which torch does not have.

    Args:
        params: parameters or groups of them.
        lr, betas, weight_decay: as the Lion paper's (Chen et al. 2023); the defaults are DeepSpeed's.
        set_grad_none: for old calls; it has no effect.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, "lion")


class DeepSpeedCPULion(Optimizer):
    """`FusedLion`, without its last argument.

    Args:
        model_params, lr, betas, weight_decay: as `FusedLion`'s.
        fp32_optimizer_states: for old calls; it has no effect.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, "lion")
