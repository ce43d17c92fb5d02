#!/usr/bin/env python
"""A GAN as DeepSpeed's users write it: two engines, a loss through both, and a discriminator that rests meanwhile.

    examples/deepspeed/gan.py --deepspeed_config examples/deepspeed/gan.json

It runs under DeepSpeed too: `import deepspeed` in place of the line that is marked.
"""

import argparse
import json

import torch
from torch import nn

import zero.deepspeed as deepspeed  # the only change

NOISE, WIDTH = 8, 32


def real(count: int, seed: int) -> torch.Tensor:
    """Return points on a circle: (count, 2)."""
    angle = 6.2832 * torch.rand(count, generator=torch.Generator().manual_seed(seed))
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a generator of points on a circle.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    discriminator = nn.Sequential(nn.Linear(2, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))
    model_g, _optimizer_g, _, _ = deepspeed.initialize(
        args=args, model=generator, model_parameters=generator.parameters()
    )
    model_d, _optimizer_d, _, _ = deepspeed.initialize(
        args=args, model=discriminator, model_parameters=discriminator.parameters()
    )
    criterion = nn.BCEWithLogitsLoss()
    device = next(generator.parameters()).device
    losses: dict[str, list[float]] = {"discriminator": [], "generator": []}
    for step in range(args.steps):
        points = real(16, seed=step).to(device)
        noise = torch.randn(16, NOISE, generator=torch.Generator().manual_seed(1000 + step)).to(device)
        ones, zeros = torch.ones(16, 1, device=device), torch.zeros(16, 1, device=device)

        fake = model_g(noise)
        loss_d = criterion(model_d(points), ones) + criterion(model_d(fake.detach()), zeros)
        model_d.backward(loss_d)
        model_d.step()

        discriminator.requires_grad_(False)
        loss_g = criterion(model_d(fake), ones)
        model_g.backward(loss_g)
        model_g.step()
        discriminator.requires_grad_(True)
        losses["discriminator"].append(loss_d.item())
        losses["generator"].append(loss_g.item())
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
