"""Column and row parallel layers by hand beside ZeRO: matrices are split over "tp", the state of each part over "dp".

torchrun --nproc-per-node 4 examples/split_mlp.py
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zero

EQUAL = ["0.*", "4.*", "*.norm.*", "*.shift"]  # parameters that are equal on all ranks of "tp"


class Total(torch.autograd.Function):
    """Add over the ranks of a group: the values in forward, or the gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, of_values: bool) -> Tensor:
        ctx.group, ctx.of_values = group, of_values
        return total(x, group) if of_values else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.of_values else total(grad, ctx.group), None, None


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class Block(nn.Module):
    """x + mlp(norm(x)), with a part of the hidden units on each rank of a group: (rows, width) to the same."""

    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)  # equal on all ranks, and then cut
        part, parts = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.norm, self.shift = group, nn.LayerNorm(width), down.bias
        self.up = nn.Parameter(up.weight.detach().chunk(parts)[part].clone())
        self.start = nn.Parameter(up.bias.detach().chunk(parts)[part].clone())
        self.down = nn.Parameter(down.weight.detach().chunk(parts, dim=1)[part].clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(Total.apply(self.norm(x), self.group, False), self.up, self.start))
        return x + Total.apply(F.linear(hidden, self.down), self.group, True) + self.shift


def build(group: dist.ProcessGroup, width: int = 32) -> nn.Module:
    torch.manual_seed(0)  # all ranks draw the same values
    return nn.Sequential(nn.Linear(8, width), *(Block(width, group) for _ in range(3)), nn.Linear(width, 1))


def loss_fn(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean squared error of the product of the first two numbers: (rows, 8) to a scalar."""
    return F.mse_loss(model(rows).squeeze(-1), rows[:, 0] * rows[:, 1])


def main(steps: int = 50) -> None:
    device, ranks = "cuda" if torch.cuda.is_available() else "cpu", int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(device, (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh.get_group("tp")
    with zero.World.from_mesh(mesh, "dp") as world:
        optimizer = zero.adamw(lr=3e-3, clip=1.0)
        plan = zero.Plan(build(tp), optimizer=optimizer, world=world, norm_groups=[tp], replicated=EQUAL)
        state = zero.init(plan, zero.open_store(plan))
        step = zero.make_step(plan, loss_fn)
        draw = torch.Generator().manual_seed(world.rank)  # ranks of "tp" have the same rows
        for number in range(1, steps + 1):
            rows = torch.randn(64, 8, generator=draw).to(world.device)
            state, metrics = step(state, [rows])
            if mesh.get_rank() == 0 and number % 10 == 0:
                print(f"step {number}  loss {metrics.loss:.3f}  gradient norm {metrics.grad_norm:.3f}")
        state.close()


if __name__ == "__main__":
    main()
