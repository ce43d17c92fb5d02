"""The TensorBoard view, which writes the rows of metrics.jsonl as scalars. The only file that imports tensorboard.

`tensorboard --logdir runs` shows all runs below a folder. A run that resumes from a checkpoint hides the earlier rows
of steps that it repeats.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from zero.core.schema import flat_fields
from zero.platform.installed import install
from zero.tracker.views.view import Charts, Row, View

TENSORBOARD_FLUSH_S = 2
"""Seconds until a row is written to the file, so that a killed run loses few rows."""

COMPARED_METRICS = ("train/loss", "val/loss")
"""Metrics in TensorBoard's table of hyperparameters, by which runs are compared."""


class TensorBoardRun(View):
    """A view that writes TensorBoard's event file to the folder `tensorboard` of a run.

    Args:
        config: plain settings, written as text and as hyperparameters.
        folder: the run folder.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
            from torch.utils.tensorboard.summary import hparams
        except ImportError as error:
            raise ImportError(f"it is not installed: {install('tensorboard')}") from error
        self._open, self._hparams = SummaryWriter, hparams
        self._config, self._folder, self._charts = config, folder / "tensorboard", Charts()
        self._writer: Any = None

    def log(self, row: Row) -> None:
        """Write a row. The first row opens the file and hides rows of an earlier start from its step on."""
        step = int(row["step"] or 0)
        if self._writer is None:
            self._writer = self._open(str(self._folder), purge_step=step, flush_secs=TENSORBOARD_FLUSH_S)
            self._write_settings()
        for key, value in self._charts.of(row).items():
            if key != "step":
                self._writer.add_scalar(key, value, step)

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write_settings(self) -> None:
        text = yaml.safe_dump(dict(self._config), sort_keys=False)
        self._writer.add_text("settings", "\n".join(f"    {line}" for line in text.splitlines()))
        values = flat_fields(self._config).items()  # hyperparameters are numbers, booleans or text
        settings = {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in values}
        for part in self._hparams(settings, dict.fromkeys(COMPARED_METRICS, 0.0)):
            self._writer.file_writer.add_summary(part)
