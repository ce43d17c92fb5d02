"""Rows, initial values, optimizers and a run of this library, for several parts."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import zero
from gpu_parts.devices import Gpu
from gpu_parts.sizes import Sizes
from zero.engine.model.split import split
from zero.trainer.models import GPT, GPTConfig, loss
from zero.trainer.planning.traces.tracing import Traced, trace

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0

TILE = 1_000_003
"""The number of random values before they repeat; a prime, so that no two rows of a matrix are equal."""


class Offloading(NamedTuple):
    """An offload preset, and the processor that updates offloaded pages: "device" or "host"."""

    preset: str
    compute: str = "device"

    def offload(self, disk: Path, page_bytes: int | None) -> zero.Offload:
        """Return the settings of the preset, with pages of this size; None: the library's default."""
        return zero.Offload(self.preset, path=str(disk), compute=self.compute, page_bytes=page_bytes)


NO_OFFLOAD = Offloading("none")


def tokens(config: GPTConfig, rows: int, gpu: Gpu, step: int = 0) -> Tensor:
    """Return random tokens (rows, seq + 1) on the GPU, the same for all systems."""
    draw = torch.Generator().manual_seed(step)
    return torch.randint(config.vocab, (rows, config.seq + 1), generator=draw).to(gpu.device)


def tokens_of_rank(config: GPTConfig, rows: int, gpu: Gpu, step: int = 0) -> Tensor:
    """Return this rank's part of the step's tokens: (rows, seq + 1)."""
    world = gpu.world
    return tokens(config, rows * world.size, gpu, step).chunk(world.size)[world.rank]


class Values:
    """Initial values from a parameter's name, the same for all systems. Random values repeat, because that is fast."""

    def __init__(self) -> None:
        self._tile = torch.randn(TILE, generator=torch.Generator().manual_seed(0)) * 0.02

    def __call__(self, name: str, parameter: Tensor) -> None:
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            return
        first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % TILE
        tile, flat = self._tile.roll(first).to(parameter.device), parameter.view(-1)
        whole = flat.numel() // TILE
        flat[: whole * TILE].view(whole, TILE).copy_(tile.expand(whole, TILE))
        flat[whole * TILE :].copy_(tile[: flat.numel() - whole * TILE])


def optimizer(clip: float | None = CLIP) -> Any:
    """Return this library's AdamW, with weight decay on matrices only."""
    return zero.adamw(LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY, clip=clip)


def torch_optimizer(parameters: list[Tensor]) -> torch.optim.AdamW:
    """Return torch's fused AdamW with the same settings."""
    matrices = {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": WEIGHT_DECAY}
    others = {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0}
    return torch.optim.AdamW([matrices, others], lr=LR, betas=BETAS, eps=EPS, fused=True)


def whole_model(config: GPTConfig, gpu: Gpu, values: Values, dtype: torch.dtype = torch.float32) -> GPT:
    """Return the unsharded model on the GPU."""
    with gpu.device:
        model = GPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values(name, parameter)
    return model.to(dtype)


def recomputing(model: GPT) -> None:
    """Keep only the input of each block for backward, as `activations="remat"` does."""
    from torch.utils.checkpoint import checkpoint

    def recompute(forward: Any) -> Any:
        return lambda x: checkpoint(forward, x, use_reentrant=False)

    for block in model.blocks:
        block.forward = recompute(block.forward)


def traced(config: GPTConfig, rows: int, dtype: torch.dtype, *, remat: bool) -> Traced:
    """Return the bytes and operations of a microbatch, as the library counts them."""
    with zero.empty():
        model = GPT(config)
    meta = torch.empty(rows, config.seq + 1, dtype=torch.int64, device="meta")
    return trace(
        model,
        split(model, world_size=1, class_names=None),
        loss,
        meta,
        compute=dtype,
        policies="remat" if remat else "keep",
    )


class Running:
    """A run of this library that keeps the newest state."""

    def __init__(self, plan: zero.Plan, values: Values | None, seed: int = 0) -> None:
        self.plan, self._store = plan, zero.open_store(plan)
        try:
            self.state = zero.init(plan, self._store, seed=seed, weights=values)
        except BaseException:
            self._store.close()
            raise
        self._step = zero.make_step(plan, loss)

    def step(self, rows: Tensor) -> zero.Metrics:
        self.state, metrics = self._step(self.state, [rows])
        return metrics

    def drain(self) -> None:
        """Wait until the threads of the store are idle."""
        self._store.drain()

    def drained_step(self, rows: Tensor) -> None:
        """Make a step and wait for the store's threads. torch's profiler of all threads crashes if it starts or stops
        while one of them works."""
        self.step(rows)
        self.drain()

    def close(self) -> None:
        self._store.close()


@contextlib.contextmanager
def running(
    config: GPTConfig,
    gpu: Gpu,
    sizes: Sizes,
    disk: Path,
    *,
    offloading: Offloading = NO_OFFLOAD,
    clip: float | None = CLIP,
    values: Values | None = None,
    page_bytes: int | None = None,
    **plan: Any,
) -> Iterator[Running]:
    """Yield a run that is closed at the end of the block. `plan` are further arguments of `zero.Plan`."""
    with zero.empty():
        model = GPT(config)
    offload = offloading.offload(disk, page_bytes or sizes.page_bytes)
    made = Running(zero.Plan(model, optimizer=optimizer(clip), world=gpu.world, offload=offload, **plan), values)
    try:
        yield made
    finally:
        made.close()
