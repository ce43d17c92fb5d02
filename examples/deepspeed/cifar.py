#!/usr/bin/env python
"""DeepSpeed's CIFAR tutorial in its own shape, on drawn pictures: a small network, then its accuracy by `net(x)`.

    examples/deepspeed/cifar.py --deepspeed_config examples/deepspeed/cifar.json

It runs under DeepSpeed too: `import deepspeed` in place of the line that is marked.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

import zero.deepspeed as deepspeed  # the only change

CLASSES, SIZE = 4, 12


def pictures(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (count, 1, SIZE, SIZE) with a bar in one of four places, under noise, and the places (count,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = 0.5 * torch.randn(count, 1, SIZE, SIZE, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, label * 3 : label * 3 + 2] += 1.0
    return images, labels


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 8, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2 = nn.Linear(8 * 4 * 4, 32), nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.pool(x), 1)
        return self.fc2(F.relu(self.fc1(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small network on drawn pictures.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--local_rank", type=int, default=-1)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    engine, _optimizer, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=parameters)
    criterion = nn.CrossEntropyLoss()
    losses = []
    for step in range(args.steps):
        images, labels = pictures(16, seed=step)
        outputs = engine(images.to(engine.local_rank if torch.cuda.is_available() else "cpu"))
        loss = criterion(outputs, labels.to(outputs.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())

    net.eval()
    images, labels = pictures(200, seed=10_000)
    with torch.no_grad():
        right = (net(images.to(next(net.parameters()).device)).argmax(1).cpu() == labels).float().mean().item()
    print(json.dumps({"losses": losses, "accuracy": right}))


if __name__ == "__main__":
    main()
