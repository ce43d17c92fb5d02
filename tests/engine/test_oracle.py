"""The exact oracle: where every gradient is a small integer, no order of addition can round.

The loss is a sum of w * x with small integers x, so the gradient of w is a sum of x. Each microbatch's loss is
multiplied by ranks x accumulate, which the one division takes out again without rounding. What is left must be the same
bits for every world, stage, accumulation, page size and precision: whatever differs is a mistake in bookkeeping.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.common.small import Setting, adamw_in_8bit, adamw_in_bf16, slice_of
from zero.engine.whole.read import digest, full_state_dict
from zero.testing import run_ranks

KiB = 1024
SHAPES = ((), (7,), (5, 13), (0, 3), (200,), (64,), (2, 1, 1100))
ROWS, STEPS, LR, MOMENTUM = 24, 3, 2.0**-6, 0.5
WORLDS = {1: (1, 2, 3), 2: (1, 3), 3: (1, 2), 4: (1, 2), 8: (1, 3)}
"""Ranks to accumulations, so that their product divides the rows. A gradient stays below 256: exact in bf16."""


class Term(nn.Module):
    """(rows, elements) -> sum of w * x, with integers for first values."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(shape))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.w.copy_(torch.randint(-8, 9, self.w.shape))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x.view(len(x), *self.w.shape).to(self.w.dtype)).sum()


class Terms(nn.Module):
    """The second term is used twice, so its gradient is thrice its x."""

    def __init__(self) -> None:
        super().__init__()
        self.terms = nn.ModuleList(Term(shape) for shape in SHAPES)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split([math.prod(shape) for shape in SHAPES], dim=1)
        total = sum(term(part) for term, part in zip(self.terms, parts, strict=True))
        return total + self.terms[1](2 * parts[1])


def rows() -> Tensor:
    """The global batch, the same at every step: (24, elements), integers from -3 to 3."""
    count = sum(math.prod(shape) for shape in SHAPES)
    return torch.randint(-3, 4, (ROWS, count), generator=torch.Generator().manual_seed(3))


def gradients() -> dict[str, Tensor]:
    """Each parameter's gradient, summed over the rows in integers."""
    parts = rows().sum(dim=0).split([math.prod(shape) for shape in SHAPES])
    times = [3 if number == 1 else 1 for number in range(len(SHAPES))]
    return {
        f"terms.{number}.w": (times[number] * part).view(shape)
        for number, (part, shape) in enumerate(zip(parts, SHAPES, strict=True))
    }


def norm() -> float:
    """The norm of all gradients, rounded once to fp32."""
    return float(torch.tensor(math.sqrt(sum(int((g * g).sum()) for g in gradients().values())), dtype=torch.float32))


def momentum_sgd(lr, clip, weight_decay):
    return zero.sgd(lr, momentum=MOMENTUM, clip=clip, weight_decay=weight_decay)


def run(world: zero.World, setting: Setting) -> tuple[str, list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Digest, norms, first and last parameters."""
    share = world.size * setting.accumulate
    state, step = setting.start(world, Terms, lambda model, x: model(x).float() * share)
    before = full_state_dict(state)
    norms = []
    for _ in range(STEPS):
        state, metrics = step(state, slice_of(rows(), world, setting.accumulate))
        norms.append(metrics.grad_norm)
    assert state.step == STEPS
    return digest(state), norms, before, full_state_dict(state)


def settings(size: int, **same) -> Sequence[Setting]:
    """Every other of all stages and accumulations of `WORLDS`, the others for the next number of ranks."""
    every = [
        Setting(
            stage=stage,
            accumulate=accumulate,
            page_bytes=(8 * KiB, 24 * KiB, 1024 * KiB)[(stage + accumulate) % 3],
            bucket=(0, 4 * KiB, 1024 * KiB)[(stage + 2 * accumulate) % 3],
            prefetch=stage ^ accumulate,
            update=("lazy", "serial")[stage % 2],
            activations=("keep", "remat")[(stage // 2 + accumulate) % 2],
            **same,
        )
        for stage in range(4)
        for accumulate in WORLDS[size]
    ]
    return every[list(WORLDS).index(size) % 2 :: 2]


@pytest.mark.parametrize(
    ("size", "precision", "clip"),
    [(size, *(("fp32", 0.5), ("bf16", None))[number // 2 % 2]) for number, size in enumerate(WORLDS)],
)
def test_momentum_sgd_does_what_integers_do(size, clip, precision):
    """Parameters against a loop over exact numbers. Clipping at half the norm halves the gradient, exactly."""
    limit = None if clip is None else clip * (norm() + 1e-6)  # what `clip_grad_norm_` adds to the norm
    for setting in settings(size, optimizer=momentum_sgd, lr=LR, weight_decay=0.0, clip=limit, precision=precision):
        for _, norms, before, after in run_ranks(size, run, setting):
            assert norms == [norm()] * STEPS
            for name, gradient in gradients().items():
                expected, mu = before[name].double(), torch.zeros(gradient.shape, dtype=torch.float64)
                for _ in range(STEPS):
                    mu = MOMENTUM * mu + (clip or 1.0) * gradient
                    expected = expected - LR * mu
                assert torch.equal(after[name].double(), expected), (setting, name)


@pytest.mark.parametrize(
    ("precision", "clip", "optimizer"),
    [
        ("fp32", None, zero.adamw),
        ("bf16", 0.5, zero.adamw),
        ("bf16", None, adamw_in_bf16),
        ("fp32", None, adamw_in_8bit),
    ],
)
def test_adamw_has_one_digest_for_every_world_stage_and_accumulation(precision, clip, optimizer):
    """Adam rounds, but every element alike, wherever it lies: parameters and moments agree to the bit."""
    limit = None if clip is None else clip * (norm() + 1e-6)
    digests = {
        told
        for size in WORLDS
        for setting in settings(size, clip=limit, precision=precision, optimizer=optimizer)
        for told, *_ in run_ranks(size, run, setting)
    }
    assert len(digests) == 1
