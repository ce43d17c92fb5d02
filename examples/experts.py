"""Experts by rank beside ZeRO: each rank of "ep" has other experts and rows; the state is sharded over "dp".

torchrun --nproc-per-node 4 examples/experts.py
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zero

EQUAL = ["0.*", "4.*", "*.norm.*", "*.gate.*"]  # parameters that are equal on all ranks of "ep"


class Exchange(torch.autograd.Function):
    """Send the next `sent[r]` rows to each rank r of a group, and receive `received[r]` from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = received, sent, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return Exchange.apply(grad, *ctx.back), None, None, None


class Experts(nn.Module):
    """x + p * expert(norm(x)), each row by its best of `count` experts: (rows, width) to the same."""

    def __init__(self, width: int, count: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.count, self.norm, self.gate = group, count, nn.LayerNorm(width), nn.Linear(width, count)
        every = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(count)]
        part = count // dist.get_world_size(group)
        self.experts = nn.ModuleList(every[dist.get_rank(group) * part :][:part])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        p, chosen = self.gate(y).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.count).view(-1, len(self.experts))  # for each expert of each rank
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
        rows = Exchange.apply(y[order], sent, received, self.group)
        own = torch.arange(len(self.experts), device=x.device).repeat(len(sent)).repeat_interleave(arriving.flatten())
        done = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            done[own == number] = expert(rows[own == number])
        return x + p.unsqueeze(-1) * Exchange.apply(done, received, sent, self.group)[order.argsort()]


def build(group: dist.ProcessGroup, width: int = 32) -> nn.Module:
    torch.manual_seed(0)  # all ranks draw the same values
    model = nn.Sequential(nn.Linear(8, width), *(Experts(width, 4, group) for _ in range(3)), nn.Linear(width, 1))
    ranks = dist.get_world_size(group)

    def mean(grad: Tensor) -> Tensor:
        """Average over "ep" the gradient of a parameter that all its ranks have, because each has other rows."""
        dist.all_reduce(grad := grad / ranks, group=group)
        return grad

    for name, parameter in model.named_parameters():  # rows of all ranks of "ep" have reached an expert
        parameter.register_hook((lambda grad: grad / ranks) if ".experts." in name else mean)
    return model


def loss_fn(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean squared error of the product of the first two numbers: (rows, 8) to a scalar."""
    return F.mse_loss(model(rows).squeeze(-1), rows[:, 0] * rows[:, 1])


def main(steps: int = 50) -> None:
    device, ranks = "cuda" if torch.cuda.is_available() else "cpu", int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(device, (ranks // 2, 2), mesh_dim_names=("dp", "ep"))
    ep = mesh.get_group("ep")
    with zero.World.from_mesh(mesh, "dp") as world:
        optimizer = zero.adamw(lr=3e-3, clip=1.0)
        plan = zero.Plan(build(ep), optimizer=optimizer, world=world, norm_groups=[ep], replicated=EQUAL)
        state = zero.init(plan, zero.open_store(plan))
        step = zero.make_step(plan, loss_fn)
        draw = torch.Generator().manual_seed(mesh.get_rank())  # each rank has its own rows
        for number in range(1, steps + 1):
            rows = torch.randn(64, 8, generator=draw).to(world.device)
            state, metrics = step(state, [rows])
            if mesh.get_rank() == 0 and number % 10 == 0:
                print(f"step {number}  loss {metrics.loss:.3f}  gradient norm {metrics.grad_norm:.3f}")
        state.close()


if __name__ == "__main__":
    main()
