"""A script for DeepSpeed, run by this library. The line that differs is marked.

    python examples/initialize.py
    torchrun --nproc-per-node 2 examples/initialize.py --steps 100 --save checkpoints

The settings are in ds_config.json: stage 3 in bf16, with the optimizer's state in a file.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero.deepspeed as deepspeed  # was: import deepspeed


class Model(nn.Module):
    """A model that scores the next byte: (rows, length) int64 to (rows, length, 256)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", default=Path(__file__).with_name("ds_config.json"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save", help="folder for a checkpoint")
    args = parser.parse_args()
    torch.manual_seed(0)
    text = torch.tensor(list(Path(F.__file__).read_bytes()))  # the source of torch.nn.functional
    windows = text.unfold(0, 65, 16)[torch.randperm(len(text) // 16 - 4)]  # (n, 65), in random order
    engine, _, loader, _ = deepspeed.initialize(args=args, model=Model(), training_data=windows)
    for batch in loader:
        batch = batch.to(engine.device)
        loss = F.cross_entropy(engine(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        engine.backward(loss)
        engine.step()  # an update after every gradient_accumulation_steps calls
        if engine.was_step_applied() and engine.global_steps % 10 == 0 and engine.global_rank == 0:
            print(f"step {engine.global_steps}  loss {loss.item():.3f}  lr {engine.get_lr()[0]:.1e}")
        if engine.global_steps == args.steps:
            break
    if args.save:
        engine.save_checkpoint(args.save, client_state={"steps": args.steps})
    engine.destroy()


if __name__ == "__main__":
    main()
