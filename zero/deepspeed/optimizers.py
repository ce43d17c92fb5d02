"""What a torch optimizer means here: its class names a transform, its groups are settings that are read at every step.

`Optimizer` is what `zero.initialize` returns: torch's schedulers write into its `param_groups`, and the next update
reads what they wrote. Given a torch optimizer it shares that one's groups, so a scheduler that holds the first writes
for both.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zero.core import optim
from zero.core.optim import Transform
from zero.errors import ConfigError

log = logging.getLogger("zero")

ParamGroup = dict[str, Any]
"""One of `param_groups`."""


class _Kind(NamedTuple):
    """A class of `torch.optim` in our words.

    `make` takes `keys` of the groups, which all must share. `needs` are settings that have a meaning there and none
    here, with the only value that is the same thing.
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


class Updating(Protocol):
    """What an engine does for its optimizer, and tells it."""

    @property
    def loss_scale(self) -> float: ...

    @property
    def overflow(self) -> bool: ...

    def update(self) -> None: ...

    def forget(self) -> None: ...


class Optimizer(torch.optim.Optimizer):
    """The groups of a run, in torch's shape; `step` is the engine's update.

    Args:
        groups: parameters, or dicts as torch's optimizers take them.
        defaults: of what a group does not say.
        kind: a name in `KINDS`.

    Attributes:
        engine: that it belongs to; None before.
    """

    def __init__(self, groups: Iterable[Any], defaults: Mapping[str, Any], kind: str) -> None:
        self.engine: Updating | None = None
        super().__init__(groups, dict(defaults))
        self.kind = kind

    @classmethod
    def of(cls, given: torch.optim.Optimizer) -> "Optimizer":
        """The same groups, whose dicts stay the given optimizer's.

        Raises:
            ConfigError: a class that has no counterpart here, or an optimizer that has made steps.
        """
        name = (
            f"torch.optim.{type(given).__name__}" if given.__module__.startswith("torch.") else type(given).__qualname__
        )
        if type(given) not in TORCH:
            known = ", ".join(sorted(f"torch.optim.{known.__name__}" for known in TORCH))
            raise ConfigError(f"optimizer={name} has no counterpart here; known are {known}, and Lion in the config")
        if any(float(state.get("step", 1)) for state in given.state.values()):  # Adagrad's is there from the start
            raise ConfigError(f"optimizer={name} has made steps already, and its moments would be lost; pass a new one")
        kind = TORCH[type(given)]
        if kind == "adam" and all(group.get("decoupled_weight_decay") for group in given.param_groups):
            kind = "adamw"
        made = cls(given.param_groups, given.defaults, kind)
        made.param_groups = given.param_groups
        return made

    @classmethod
    def of_nothing(cls) -> "Optimizer":
        """Of an engine that does not train."""
        return cls([{"params": []}], {"lr": 0.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}, "sgd")

    @torch._dynamo.disable
    def step(self, closure: None = None) -> None:
        """The update of all parameters, as `engine.step` makes it at the end of an accumulation."""
        if closure is not None:
            raise ConfigError("optimizer.step(closure): no optimizer here calls a closure; call engine.backward before")
        self._of().update()

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by; 1 but in fp16."""
        return self._of().loss_scale

    cur_scale = loss_scale

    @property
    def overflow(self) -> bool:
        """The last update was skipped, because a gradient was not finite."""
        return self._of().overflow

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Only before training: what is sharded is decided once."""
        if self.engine is not None:
            raise ConfigError("add_param_group: give every group to zero.initialize, which shards them; it has begun")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the step under way; after a step there are none."""
        if self.engine is not None:
            self.engine.forget()

    def state_dict(self) -> dict[str, Any]:
        """Settings of the groups; the moments are in the engine's checkpoints."""
        return {"param_groups": settings_of(self.param_groups)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Settings of the groups, as `state_dict` gave them.

        Raises:
            ConfigError: there are moments in it, as in a torch optimizer's.
        """
        if state_dict.get("state"):
            raise ConfigError("optimizer.load_state_dict: moments are sharded; engine.load_checkpoint brings them back")
        restore(self.param_groups, state_dict["param_groups"])

    def _of(self) -> Updating:
        if self.engine is None:
            raise ConfigError("this optimizer belongs to no engine; zero.initialize returns the one that does")
        return self.engine


class Taken:
    """The optimizer of torch that was passed: its groups are in use, and it has nothing to update any more.

    Who steps it would train nothing, and is told so. It knows no engine, so that it keeps none alive.
    """

    def __init__(self, given: torch.optim.Optimizer) -> None:
        self.given, self._is_ours = given, False
        self._hook = given.register_step_pre_hook(self._refuse)

    def step(self) -> None:
        """No parameter has a gradient there: torch's schedulers look for the call."""
        self._is_ours = True
        self.given.step()
        self._is_ours = False

    def release(self) -> None:
        """It may do as it likes."""
        self._hook.remove()

    def _refuse(self, *_: Any) -> None:
        if not self._is_ours:
            raise ConfigError("this optimizer was taken over by zero.initialize: call engine.step() in its place")


def transform(optimizer: Optimizer, names: Mapping[int, str], clip: float | None) -> Transform:
    """A transform whose settings are read from the optimizer's groups whenever a step is made.

    Args:
        names: of the model's parameters, by identity.

    Raises:
        ConfigError: a setting without a meaning here, groups that differ where they cannot, a stranger's parameter.
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
    """Identities of the parameters that the optimizer was given."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def settings_of(groups: Sequence[ParamGroup]) -> list[ParamGroup]:
    """The numbers of the groups, without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def restore(groups: Sequence[ParamGroup], saved: Sequence[Mapping[str, Any]]) -> None:
    """Put saved numbers back into groups."""
    same_groups(groups, saved)
    for group, told in zip(groups, saved, strict=True):
        numbers = {key: value for key, value in told.items() if key != "params"}
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in numbers.items()})


def same_groups(groups: Sequence[ParamGroup], saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse saved groups that are not as many."""
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
    """A group rests while none of its parameters requires a gradient; one that is frozen alone has a zero for it."""
    thawed = next((name for name, parameter in frozen.items() if parameter.requires_grad), None)
    if thawed is not None:
        raise ConfigError(
            f"{thawed} was frozen in zero.initialize and has no optimizer state; to thaw it later, let it require a "
            "gradient there, and freeze it, in a group of its own, before the first step"
        )
    moving = [name for name, parameter in held.items() if parameter.requires_grad]
    if moving:
        for name in held.keys() - set(moving):
            _say_frozen(name)
    return bool(moving)


@cache
def _say_frozen(name: str) -> None:
    log.warning(
        "%s was frozen, and others of its optimizer group were not: its gradient is zero, weight decay and momentum "
        "go on, as in DeepSpeed; what is to rest needs a group of its own",
        name,
    )


def names_of(model: nn.Module) -> dict[int, str]:
    """Full names by identity; a tied parameter has its first one."""
    return {id(parameter): name for name, parameter in model.named_parameters()}
