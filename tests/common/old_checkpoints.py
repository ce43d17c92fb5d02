"""Small runs whose checkpoints are committed, so that every later version must load them to the same bits.

    python tests/common/old_checkpoints.py tests/checkpoint/fixtures/format-3

writes the checkpoints of the runs that this folder lacks, and prints the digest of each. First values and batches do
not depend on a random generator. The file uses only public names, so it also runs with `PYTHONPATH` at an older commit.
The checkpoints of format-3 were written by commit 59e56132.
"""

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero
from zero.testing import run_ranks

STEPS = 3


class Norm(nn.LayerNorm):
    """Layer normalization with a buffer that counts its forwards."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards.add_(1)
        return super().forward(x)


class Tiny(nn.Module):
    """Tokens (b,) to logits (b, 5), with a tied head, a parameter without dimensions and one that is never used."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.linear = nn.Linear(width, width)
        self.norm = Norm(width)
        self.gain = nn.Parameter(torch.empty(()))
        self.unused = nn.Parameter(torch.empty(3))
        self.head = nn.Linear(width, 5)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.norm(x + self.gain * self.linear(x)))


class Adapted(nn.Module):
    """A linear layer with an adapter of rank 2, under the names of peft."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def adapted() -> Tiny:
    """Return a frozen model of width 17, whose 289 values need two rows of int8, with an adapter that trains."""
    model = Tiny(17).requires_grad_(False)
    model.linear = Adapted(model.linear)  # type: ignore[assignment]
    model.linear.base_layer.requires_grad_(False)
    return model


class Run(NamedTuple):
    """The settings of a run that shape its checkpoint, and the number of ranks that write it."""

    optimizer: Callable[[], object]
    precision: Callable[[], zero.Precision] = zero.Precision
    model: Callable[[], Tiny] = Tiny
    ranks: int = 1


LR = 2.0**-6

RUNS = {
    "adamw": Run(lambda: zero.with_ema(zero.adamw(LR, weight_decay=0.1), 0.75), ranks=2),
    "adam": Run(
        lambda: zero.with_moments(
            zero.adam(LR, groups=[zero.Group("norm.*", trains=lambda step: step != 2)]), "8bit", seed=3
        )
    ),
    "sgd": Run(
        lambda: zero.sgd(LR, momentum=0.75),
        lambda: zero.Precision("fp16", scale=zero.LossScaling(initial=2.0**19, window=2, hysteresis=1)),
    ),
    "lion": Run(
        lambda: zero.with_moments(zero.lion(LR), "bf16", seed=3), lambda: zero.Precision("bf16", master="split")
    ),
    "adagrad": Run(lambda: zero.adagrad(LR)),
    "muon": Run(lambda: zero.with_ema(zero.muon(LR), 0.75)),
    "lora-int8": Run(lambda: zero.adamw(LR), lambda: zero.Precision("bf16", frozen="int8"), adapted),
    "lora-nf4": Run(lambda: zero.adamw(LR), lambda: zero.Precision("bf16", frozen="nf4"), adapted, ranks=2),
}
"""The runs by the names of their folders. A run whose checkpoint is committed is never changed or removed."""


def first_values(model: nn.Module, start: int) -> None:
    """Set the parameters of a model to fractions that depend on their order and `start` only."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters(), start):
            numbers = torch.arange(parameter.numel())
            parameter.copy_(((numbers * numbers + 5 * number) % 61 - 30).view(parameter.shape) / 64)


def batch(world: zero.World, number: int) -> Tensor:
    """Return this rank's rows of a step's 12: tokens and targets, (12 / ranks, 2)."""
    rows = torch.arange(12) + number
    return torch.stack((rows % 5, rows * rows % 5), dim=1)[world.rank :: world.size]


def loss(model: nn.Module, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return F.cross_entropy(model(rows[:, 0]).float(), rows[:, 1]), {}


@contextlib.contextmanager
def opened(
    world: zero.World, name: str, stage: int = 3, start: int = 0
) -> Iterator[tuple[zero.State, Callable[..., tuple[zero.State, zero.Metrics]]]]:
    """Yield the first state of a run and its step. Another `start` has other first values."""
    run = RUNS[name]
    model = run.model()
    first_values(model, start)
    plan = zero.Plan(model, optimizer=run.optimizer(), precision=run.precision(), world=world, stage=stage)
    with contextlib.closing(zero.open_store(plan)) as store:
        yield zero.init(plan, store), zero.make_step(plan, loss)
        store.drain()


def digest(state: zero.State) -> str:
    """Return the SHA-256 of a state's numbers, parameters, moments and buffers, by kind and name. Collective."""
    kinds = ("param", "compute", *state.plan.optimizer.moments)
    values = {f"{kind} {name}": value for kind in kinds for name, value in zero.full_state_dict(state, kind).items()}
    values |= {f"buffer {name}": value for name, value in state.model.named_buffers()}
    checksum = hashlib.sha256(repr((state.step, *state.scale)).encode())
    for key, value in sorted(values.items()):
        checksum.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        checksum.update(bytes(value.reshape(-1).view(torch.uint8).tolist()))
    return checksum.hexdigest()


def save_run(world: zero.World, name: str, folder: Path) -> str:
    """Train a run and save its checkpoint in `folder`; return the digest of its state."""
    with opened(world, name) as (state, step):
        for number in range(STEPS):
            state, _ = step(state, [batch(world, number)])
        torch.manual_seed(0)
        random.setstate((3, (*(n * n % 10 for n in range(624)), 624), None))  # 1.2 kB of the index instead of 7
        zero.save(state, folder, {"run": name})
        return digest(state)


if __name__ == "__main__":
    root = Path(sys.argv[1]).resolve()
    root.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name, run in RUNS.items():
        if not (root / name).exists():
            print(f'    "{root.name}/{name}": "{run_ranks(run.ranks, save_run, name, root / name)[0]}",')
