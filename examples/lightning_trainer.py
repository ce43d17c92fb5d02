"""The Trainer of Lightning, with ZeRO stage 3 and the optimizer's state in a file.

python examples/lightning_trainer.py
torchrun --nproc-per-node 2 examples/lightning_trainer.py
"""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zero.integrations.lightning import ZeroStrategy  # new


class NextByte(pl.LightningModule):
    """A model that predicts a byte from the eight before it."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width // 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(width, 256)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.embed(rows).flatten(1)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0][:, :-1]), batch[0][:, -1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch} loss {self.trainer.callback_metrics['loss']:.3f}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def main() -> None:
    pl.seed_everything(0)
    text = torch.tensor(list(Path(torch.nn.functional.__file__).read_bytes()))
    batches = DataLoader(TensorDataset(text.unfold(0, 9, 9)), batch_size=256, shuffle=True)
    places = {"devices": int(os.environ.get("WORLD_SIZE", 1)), "default_root_dir": "runs/lightning"}
    options = {"max_epochs": 2, "precision": "bf16-mixed", "gradient_clip_val": 1.0, "enable_progress_bar": False}
    trainer = pl.Trainer(strategy=ZeroStrategy(stage=3, offload="nvme"), logger=False, **places, **options)  # new
    trainer.fit(NextByte(), batches)  # or fit(..., ckpt_path="runs/lightning/checkpoints/NAME.ckpt")
    trainer.save_checkpoint("runs/lightning/weights.ckpt", weights_only=True)  # a file, for load_from_checkpoint


if __name__ == "__main__":
    main()
