"""A small model in the loop of a DeepSpeed user, and the same loop in plain torch."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import zero
from zero.testing import run_ranks

ROWS, WIDTH = 8, 12
SGD = {"type": "SGD", "params": {"lr": 0.1}}


class Net(nn.Module):
    """(b, WIDTH) to a loss: three linear layers, the middle ones in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(batch).tanh()
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x).square().mean()


def net(seed: int = 0, kind: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(seed)
    return kind()


def half_frozen(layer: str) -> nn.Module:
    """Make the net with one of its layers frozen."""
    model = net()
    getattr(model, layer).requires_grad_(False)
    return model


def rows(step: int, world: zero.World | None = None, count: int = ROWS) -> Tensor:
    """This rank's rows of a global batch of `count`; all of them without a world."""
    whole = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(step))
    return whole if world is None else whole.chunk(world.size)[world.rank]


def config(stage: int = 3, **more: Any) -> dict[str, Any]:
    """AdamW without clipping; None takes a key away."""
    settings = {
        "train_batch_size": ROWS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        **more,
    }
    return {key: value for key, value in settings.items() if value is not None}


def no_arguments(model: nn.Module) -> dict[str, Any]:
    return {}


@contextlib.contextmanager
def engine_of(
    model: nn.Module | Callable[[], nn.Module] = net,
    world: zero.World | None = None,
    *,
    prepare: Callable[[Any], dict[str, Any]] = no_arguments,
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[zero.Engine]:
    """An engine, destroyed at the end.

    Args:
        model: or a function that makes it.
        prepare: makes arguments of `initialize` from the model.
        arguments: of `initialize`.
        **settings: of `config`.
    """
    world = zero.open_world() if world is None else world
    with world.exclusive():
        made = model if isinstance(model, nn.Module) else model()
        arguments = (arguments or {}) | prepare(made)
    engine, *_ = zero.initialize(**{"model": made, "config": config(**settings), "world": world} | arguments)
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: zero.Engine, *steps: int, accumulate: int = 1, loop: Any = None) -> list[float]:
    """Run a DeepSpeed user's loop over these batches, with `loop(engine, part)` for each microbatch; returns losses."""
    losses = []
    for step in steps:
        for part in rows(step, engine.plan.world).chunk(accumulate):
            if loop is None:
                engine.backward(engine(part))
            else:
                loop(engine, part)
            engine.step()
        losses.append(engine.metrics.loss if engine.metrics is not None else float("nan"))
    return losses


def trained(
    world: zero.World, steps: int = 3, *, accumulate: int = 1, loop: Any = None, **how: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and full parameters after `steps`. Rank 0's first values count."""
    how = {"model": lambda: net(seed=world.rank)} | how
    with engine_of(world=world, gradient_accumulation_steps=accumulate, **how) as engine:
        return train(engine, *range(steps), accumulate=accumulate, loop=loop), zero.full_state_dict(engine)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def one_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def plain(
    *steps: int,
    model: nn.Module | None = None,
    make: Callable[[Any], torch.optim.Optimizer] = adamw,
    loss: Callable[[Any, Tensor], Tensor] = one_loss,
    scheduler: Any = None,
    change: Callable[[Any], None] | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Plain torch on whole batches; `change` is called between backward and step. Losses and parameters."""
    model = net() if model is None else model
    optimizer = make(model)
    schedule = scheduler(optimizer) if scheduler else None
    losses = []
    for step in steps:
        optimizer.zero_grad()
        value = loss(model, rows(step))
        value.backward()
        losses.append(value.item())
        if change is not None:
            change(model)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def alike(actual: Any, expected: Any, tolerance: float = 2e-6) -> None:
    """Losses and parameters are close."""
    torch.testing.assert_close(torch.tensor(actual[0]), torch.tensor(expected[0]), rtol=tolerance, atol=tolerance)
    close(actual[1], expected[1], tolerance * 10)


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(dict(actual), dict(expected), rtol=tolerance, atol=tolerance)


def same(actual: Any, expected: Any) -> None:
    """Every bit is equal."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def on_ranks(counts: Iterable[int], run: Callable[[zero.World], Any]) -> Iterator[Any]:
    """The results of every rank of every number of ranks."""
    for count in counts:
        yield from run_ranks(count, run)
