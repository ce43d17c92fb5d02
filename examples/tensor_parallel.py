"""torch's tensor parallelism beside ZeRO: matrices are split over "tp", and the state of each part over "dp".

torchrun --nproc-per-node 4 examples/tensor_parallel.py
"""

import os

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import zero


class Block(nn.Module):
    """x + mlp(norm(x)): (rows, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build(width: int = 32, tp: DeviceMesh | None = None) -> nn.Module:
    torch.manual_seed(0)  # all ranks build the same model
    model = nn.Sequential(nn.Linear(8, width), *(Block(width) for _ in range(3)), nn.Linear(width, 1))
    for block in model[1:-1] if tp is not None else ():
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def loss_fn(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean squared error of the product of the first two numbers: (rows, 8) to a scalar."""
    return F.mse_loss(model(rows).squeeze(-1), rows[:, 0] * rows[:, 1])


def main(steps: int = 50) -> None:
    device, ranks = "cuda" if torch.cuda.is_available() else "cpu", int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(device, (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    with zero.World.from_mesh(mesh, "dp") as world:
        model = build(tp=mesh["tp"])
        plan = zero.Plan(model, optimizer=zero.adamw(lr=3e-3, clip=1.0), world=world, norm_groups=[mesh["tp"]])
        state = zero.init(plan, zero.open_store(plan))
        step = zero.make_step(plan, loss_fn)
        draw = torch.Generator().manual_seed(world.rank)  # ranks of "tp" have the same rows
        for number in range(1, steps + 1):
            rows = torch.randn(64, 8, generator=draw).to(world.device)
            state, metrics = step(state, [rows])
            if mesh.get_rank() == 0 and number % 10 == 0:
                print(f"step {number}  loss {metrics.loss:.3f}  gradient norm {metrics.grad_norm:.3f}")
        state.close()  # the parameters are DTensors again


if __name__ == "__main__":
    main()
