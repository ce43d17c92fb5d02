"""Modes of torch that a user has entered see the operators of the model, and none of the engine's, in every method."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import zero
from tests.deepspeed.harness import WIDTH, config, rows
from zero.testing import run_ranks
from zero.user_loop.engine import Engine


class Seen(TorchDispatchMode):
    """The operators that a mode of the user sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.add(func)
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """The functions that compute and that a mode of the user sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(result := func(*args, **(kwargs or {})), torch.Tensor) and func.__name__ != "__get__":
            self.operators.add(func)
        return result


class Net(nn.Module):
    """(b, WIDTH) to a loss, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("offset", torch.ones(WIDTH, dtype=torch.bfloat16))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch).tanh() + self.offset
        return batch.square().mean()


class Loop(NamedTuple):
    """An engine after a backward, with what its methods take."""

    engine: Engine
    batch: torch.Tensor
    loss: torch.Tensor
    values: dict[str, torch.Tensor]
    folder: Any


def in_no_sync(loop: Loop) -> None:
    with loop.engine.no_sync():
        pass


def after_a_step(loop: Loop) -> Engine:
    """End the step, because a state moves between two steps."""
    loop.engine.backward(loop.loss)
    loop.engine.step()
    return loop.engine


METHODS: dict[str, Callable[[Loop], Any]] = {
    "forward": lambda loop: loop.engine(loop.batch),
    "backward": lambda loop: loop.engine.backward(loop.loss, scale_wrt_gas=False),
    "scale": lambda loop: loop.engine.scale(loop.loss).backward(),
    "step": lambda loop: loop.engine.step(),
    "update": lambda loop: loop.engine.optimizer.step(),
    "zero_grad": lambda loop: loop.engine.zero_grad(),
    "forget": lambda loop: loop.engine.optimizer.zero_grad(),
    "gradient_of": lambda loop: (
        loop.engine.zero_optimization_stage() < 2 and loop.engine.gradient_of("blocks.0.weight")
    ),
    "no_sync": in_no_sync,
    "is_gradient_accumulation_boundary": lambda loop: loop.engine.is_gradient_accumulation_boundary(),
    "set_gradient_accumulation_boundary": lambda loop: loop.engine.set_gradient_accumulation_boundary(True),
    "clip": lambda loop: loop.engine.clip(0.5),
    "abandon": lambda loop: loop.engine.abandon(),
    "follow": lambda loop: loop.engine.follow(loop.engine.state),
    "was_step_applied": lambda loop: loop.engine.was_step_applied(),
    "save_checkpoint": lambda loop: loop.engine.save_checkpoint(loop.folder, client_state={"seen": loop.batch}),
    "load_checkpoint": lambda loop: loop.engine.load_checkpoint(loop.folder),
    "load_checkpoint, the model": lambda loop: loop.engine.load_checkpoint(loop.folder, load_module_only=True),
    "load_checkpoint, no moments": lambda loop: loop.engine.load_checkpoint(loop.folder, load_optimizer_states=False),
    "module_state_dict": lambda loop: loop.engine.module_state_dict(),
    "state_dict": lambda loop: loop.engine.state_dict(),
    "load_module_state_dict": lambda loop: loop.engine.load_module_state_dict(loop.values),
    "load_state_dict": lambda loop: loop.engine.load_state_dict(loop.values),
    "save_16bit_model": lambda loop: loop.engine.save_16bit_model(loop.folder),
    "state_dict_on_rank_0": lambda loop: loop.engine.state_dict_on_rank_0(),
    "move": lambda loop: after_a_step(loop).move(offload="cpu"),
    "offload_states": lambda loop: after_a_step(loop).offload_states(),
    "reload_states": lambda loop: after_a_step(loop).reload_states(),
    "destroy": lambda loop: loop.engine.destroy(),
}
OF_THE_MODEL = {"save_pretrained"}
"""Methods that run the code of the model."""


def operators_seen(world: zero.World, mode: Any, stage: int, name: str, folder: Any) -> set[Any]:
    """The operators that `mode` sees in a method of an engine."""
    with world.exclusive():
        torch.manual_seed(0)
        model = Net()
    engine, *_ = zero.initialize(model=model, config=config(stage, bf16={"enabled": True}), world=world)
    engine.backward(engine(rows(0, world)))
    engine.step()
    values = {key: value + 1 for key, value in engine.module_state_dict().items()}
    engine.save_checkpoint(folder)
    batch = rows(1, world)
    loss = engine(batch)
    if name in ("step", "update", "zero_grad", "forget", "gradient_of"):
        engine.backward(loss)
    if name == "step" and stage < 2:
        with torch.no_grad():
            engine.module.blocks[0].weight.grad.add_(1)
    with mode() as seen:
        METHODS[name](Loop(engine, batch, loss, values, folder))
    return seen.operators


def allowed(mode: Any) -> set[Any]:
    """The operators of a forward, a backward, a state dict, and the step of an optimizer in plain torch."""
    model = Net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with mode() as seen:
        model(torch.ones(2, WIDTH).bfloat16()).backward()
        model.state_dict()
        torch.optim.Optimizer.profile_hook_step(lambda optimizer: None)(optimizer)
    return seen.operators


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("mode", [Seen, Called])
@pytest.mark.parametrize("name", METHODS)
def test_a_mode_of_the_user_sees_no_operator_of_an_engines_method(name, mode, stage, tmp_path):
    for operators in run_ranks(2, operators_seen, mode, stage, name, tmp_path):
        assert operators - allowed(mode) == set()


def test_every_method_of_an_engine_is_tried_under_a_mode():
    classes = [cls for cls in Engine.__mro__ if cls.__module__.startswith("zero.")]
    public = {
        name for cls in classes for name, value in vars(cls).items() if inspect.isfunction(value) and name[0] != "_"
    }
    reports = {
        name for name, value in vars(zero.user_loop.settings.EngineSettings).items() if inspect.isfunction(value)
    }
    tried = {name.split(",")[0] for name in METHODS}
    answers = {"get_global_grad_norm", "zero_gather_16bit_weights_on_model_save"}
    assert public - reports - answers - OF_THE_MODEL == tried
