"""A script for FSDP2, moved to this library. Comments show the lines that it had.

python examples/fsdp2.py
torchrun --nproc-per-node 2 examples/fsdp2.py
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero  # was: from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    """A convolution over the last eight positions: (rows, length, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv, self.out = nn.LayerNorm(width), nn.Conv1d(width, width, 8), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        last = F.pad(self.norm(x).transpose(1, 2), (7, 0))
        return x + self.out(F.gelu(self.conv(last).transpose(1, 2)))


def make_model(width: int = 64) -> nn.Sequential:
    """Return a model that scores the next byte: (rows, length) int64 to (rows, length, 256)."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, width), *(Block(width) for _ in range(3)), nn.Linear(width, 256))


def batches(rank: int, ranks: int, rows: int = 8) -> list[Tensor]:
    """Return batches (rows, 65) of the source of torch.nn.functional in random order; each rank has its own rows."""
    text = torch.tensor(list(Path(F.__file__).read_bytes()))
    order = torch.randperm(len(text) // 64 - 1, generator=torch.Generator().manual_seed(0))
    return [batch[rank::ranks] for batch in text.unfold(0, 65, 64)[order].split(rows * ranks)[:60]]


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def main() -> None:
    world = zero.open_world()  # was: init_process_group, and a mesh
    optimizer = zero.adamw(lr=3e-3, clip=1.0)  # was: torch.optim.AdamW(model.parameters(), lr=3e-3)
    plan = zero.Plan(make_model(), optimizer=optimizer, stage=3, precision="bf16", world=world)  # was: fully_shard
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, loss_fn)
    for number, batch in enumerate(batches(world.rank, world.size), 1):
        state, metrics = step(state, [batch.to(world.device)])  # was: backward, clip_grad_norm_, step and zero_grad
        if world.rank == 0 and number % 10 == 0:
            print(f"step {number}  loss {metrics.loss:.3f}  gradient norm {metrics.grad_norm:.3f}")


if __name__ == "__main__":
    main()
