"""A small model with everything that makes sharding hard, and a way to train it in any setting.

Its sizes have no common divisors. It has a tied weight (one slot, two sites), a block that is used twice in a forward,
frozen parameters beside trained ones, an unused parameter, one without elements, one without dimensions, and running
statistics.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero
from zero.engine.whole.read import digest

KiB = 1024


class Norm(nn.BatchNorm1d):
    """Batch normalization in fp32 for any dtype of the parameters, because its statistics are fp32."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        if self.training:
            self.num_batches_tracked.add_(1)
        weight, bias = self.weight.float(), self.bias.float()
        y = F.batch_norm(x.float(), self.running_mean, self.running_var, weight, bias, self.training, 0.1, self.eps)
        return y.to(x.dtype)


class Block(nn.Module):
    """x + gain * gelu(norm(linear(x)))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = Norm(width)
        self.gain = nn.Parameter(torch.empty(()))
        self.unused = nn.Parameter(torch.empty(5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        nn.init.ones_(self.unused)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * F.gelu(self.norm(self.linear(x)))


class Small(nn.Module):
    """Tokens (b,) to logits (b, vocab)."""

    def __init__(self, vocab: int = 11, width: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)
        self.head.weight = self.embed.weight
        self.blocks[0].linear.bias.requires_grad_(False)
        for parameter in self.blocks[2].parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return self.head(self.norm(x))


def small_loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """batch: (b, 2) tokens and targets."""
    logits = model(batch[:, 0]).float()
    right = (logits.argmax(dim=-1) == batch[:, 1]).float().mean()
    return F.cross_entropy(logits, batch[:, 1]), {"right": right}


def small_batch(step: int, numel: int) -> Tensor:
    return torch.randint(0, 11, (numel, 2), generator=torch.Generator().manual_seed(1000 + step))


def in_bf16(values: Tensor) -> Tensor:
    """fp32 values as a bf16 model computes with them, by integers: to the nearest, halves up in magnitude."""
    upper = (values.float().contiguous().view(torch.int32) + 0x8000) >> 16
    return (upper << 16).view(torch.float32)


def slice_of(batch: Tensor, world: zero.World, accumulate: int) -> list[Tensor]:
    """This rank's microbatches: microbatch m of rank r is slice m * ranks + r of the global batch."""
    parts = batch.chunk(world.size * accumulate)
    assert len(parts) == world.size * accumulate
    return [parts[m * world.size + world.rank] for m in range(accumulate)]


def adamw_in_8bit(lr: Any, **how: Any) -> zero.core.optim.Transform:
    """AdamW whose moments are kept in 8 bits."""
    return zero.with_moments(zero.adamw(lr, **how), "8bit", seed=3)


def adamw_in_bf16(lr: Any, **how: Any) -> zero.core.optim.Transform:
    """AdamW whose moments are kept in bf16."""
    return zero.with_moments(zero.adamw(lr, **how), seed=3)


@dataclass(frozen=True)
class Setting:
    """All arguments of a plan except the model and the world."""

    stage: int = 3
    precision: str = "fp32"
    reduce: str = "fp32"
    master: str = "auto"
    optimizer: Callable[..., zero.core.optim.Transform] = zero.adamw
    lr: Any = 1e-2
    clip: float | None = None
    weight_decay: float = 0.1
    accumulate: int = 1
    bucket: int | str = 0
    prefetch: int = 1
    keep: tuple[str, ...] = ()
    activations: str = "keep"
    update: str = "lazy"
    page_bytes: int = 8 * KiB
    offload: tuple[tuple[str, str], ...] = ()
    threads: int = 2
    ahead: int | None = None
    units: tuple[str, ...] | None = None
    between: tuple[str, str] = ("world", "exact")
    """Gathers and sums between nodes."""
    shard: str = "world"
    seed: int = 0
    frozen: str = "compute"

    def but(self, **changes: Any) -> "Setting":
        return replace(self, **changes)

    def plan(self, world: zero.World, build: Callable[[], nn.Module] = Small) -> zero.Plan:
        # grows within a few steps, and is too small to overflow, so that no fp16 step is skipped
        scale = zero.LossScaling(initial=2.0**4, window=2) if self.precision == "fp16" else None
        with world.exclusive(), zero.empty():
            model = build()
        return zero.Plan(
            model,
            optimizer=self.optimizer(self.lr, clip=self.clip, weight_decay=self.weight_decay),
            world=world,
            stage=zero.Stage(self.stage),
            precision=zero.Precision(
                self.precision,
                reduce=self.reduce,
                scale=scale,
                master=self.master,  # type: ignore[arg-type]
                frozen=self.frozen,  # type: ignore[arg-type]
            ),
            units=self.units,
            gather=self.between[0],  # type: ignore[arg-type]
            reduce=self.between[1],  # type: ignore[arg-type]
            shard=self.shard,  # type: ignore[arg-type]
            bucket=self.bucket,  # type: ignore[arg-type]
            prefetch=self.prefetch,
            keep=self.keep,
            activations=self.activations,  # type: ignore[arg-type]
            update=self.update,  # type: ignore[arg-type]
            accumulate=self.accumulate,
            offload=zero.Offload(
                **dict(self.offload),  # type: ignore[arg-type]
                path=tempfile.gettempdir(),
                page_bytes=self.page_bytes,
                threads=self.threads,
                ahead=self.ahead,
            ),
        )

    def start(
        self, world: zero.World, build: Callable[[], nn.Module] = Small, loss: Callable[..., Any] = small_loss
    ) -> tuple[zero.State, Callable[[zero.State, Sequence[Any]], tuple[zero.State, zero.Metrics]]]:
        """The first state and the step."""
        plan = self.plan(world, build)
        return zero.init(plan, zero.open_store(plan), seed=self.seed), zero.make_step(plan, loss)


@contextlib.contextmanager
def opened(
    world: zero.World, setting: Setting, build: Callable[[], nn.Module] = Small
) -> Iterator[tuple[zero.State, Callable[..., Any]]]:
    """The first state and the step, on a store that is closed afterwards."""
    plan = setting.plan(world, build)
    with contextlib.closing(zero.open_store(plan)) as store:
        yield zero.init(plan, store, seed=setting.seed), zero.make_step(plan, small_loss)
        store.drain()


def wide() -> Small:
    """A model whose units have many pages of 4 KiB, the last one shorter."""
    return Small(width=83)


def train_small(
    world: zero.World, setting: Setting, steps: int = 3, build: Callable[[], nn.Module] = Small
) -> tuple[str, list[zero.Metrics]]:
    """(digest of the state, metrics of each step) after training with 6 rows per microbatch."""
    state, step = setting.start(world, build)
    every = []
    for number in range(steps):
        batch = small_batch(number, 6 * world.size * setting.accumulate)
        state, metrics = step(state, slice_of(batch, world, setting.accumulate))
        every.append(metrics)
    assert state.step == steps, "a skipped step proves nothing"
    return digest(state), every


@contextlib.contextmanager
def deterministic(*, warn_only: bool = False) -> Iterator[None]:
    """Have torch choose kernels that compute the same bits each time, as a step that is made twice on a GPU needs."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
