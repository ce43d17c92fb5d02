"""A model of plain PyTorch, trained with ZeRO stage 3 in a loop of your own.

    python examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py

The blocks of the model are sharded and gathered one by one. The model itself knows nothing of it.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero


class Block(nn.Module):
    """Causal attention and two linear layers: (rows, length, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)  # 4 heads
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross entropy of each next byte, in nats: (rows, length + 1) int64 to a scalar."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def main(steps: int = 50, rows: int = 8, length: int = 64, width: int = 64) -> None:
    world = zero.open_world()  # the ranks that torchrun started, or this process alone
    with zero.empty():  # parameters take no memory yet
        model = nn.Sequential(nn.Embedding(256, width), *(Block(width) for _ in range(4)), nn.Linear(width, 256))
    plan = zero.Plan(model, optimizer=zero.adamw(lr=3e-3, clip=1.0), stage=3, precision="bf16", world=world)
    store = zero.open_store(plan)
    state = zero.init(plan, store, seed=0)  # each rank makes its shard of the parameters
    step = zero.make_step(plan, loss_fn)

    text = torch.tensor(list(Path(F.__file__).read_bytes()))  # the source of torch.nn.functional
    draw = torch.Generator().manual_seed(world.rank)  # each rank has its own rows
    for number in range(1, steps + 1):
        starts = torch.randint(len(text) - length, (rows, 1), generator=draw)
        batch = text[starts + torch.arange(length + 1)].to(world.device)
        state, metrics = step(state, [batch])  # forward, backward, clipping, update
        if world.rank == 0 and number % 10 == 0:
            print(f"step {number}  loss {metrics.loss:.3f}  gradient norm {metrics.grad_norm:.3f}")
    store.close()


if __name__ == "__main__":
    main()
