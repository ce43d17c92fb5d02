"""Peak activation bytes of a run's microbatches, for the plan."""

from collections.abc import Mapping
from copy import copy
from typing import Any, TypedDict

import torch
from torch import nn

from zero.engine.plan import activations_of
from zero.engine.unit import split
from zero.settings.build import build_precision
from zero.trainer.config import Config
from zero.trainer.evaluate import CHUNK_TOKENS
from zero.trainer.planning.tracing import META, Traced, trace
from zero.trainer.task import loss_of

HEAP: Mapping[str, float] = {"keep": 1.5, "remat": 2.5}
"""Growth of a process's heap for a byte of activations on a CPU, by `zero.activations`: freed tensors leave holes that
others do not fit in. Measured with `benchmarks/plan_memory.py` (glibc 2.36, `launch.malloc=raised`): 1.4 to 1.7 and
2.5 to 3.4, the higher the smaller the model. With `lean`, which maps large tensors apart, it is 1."""


_Units = frozenset[int]


class PlanArguments(TypedDict):
    """Arguments of `Plan` about a microbatch."""

    activation_bytes: int
    host_activation_bytes: int


class Activations:
    """Bytes and work of microbatches of a run; each shape is traced once.

    Args:
        config: its batch may still be auto.
        model: built under `zero.empty()`, or on any device.

    Attributes:
        unit_names: of the model's units, in the order of forward.
    """

    def __init__(self, config: Config, model: nn.Module) -> None:
        self._config, self._model = config, model
        names = None if config.zero.units == "auto" else config.zero.units
        self._splitting = split(model, world_size=1, class_names=names)
        self.unit_names = [unit.name for unit in self._splitting.units]
        self._compute = build_precision(config).compute
        self._traced: dict[tuple[int, int, _Units, _Units, bool], Traced] = {}

    def resolved(self, config: Config) -> "Activations":
        """Return those of the same run with other settings of activations; traces are shared."""
        other = copy(self)
        other._config = config
        return other

    def lighter(self, rows: int, device: str) -> dict[str, int]:
        """Map settings that lower the bytes of a microbatch of `rows` rows, in words, to the bytes with them."""
        settings: dict[str, int] = {}
        if self._config.zero.activations != "remat":
            settings["set zero.activations=remat"] = self.bytes(rows, device, remat=True)
        if rows > 1:
            settings["use a smaller batch.micro"] = self.bytes(1, device)
        if self._config.model.seq > 1:
            settings["use a smaller model.seq"] = self.bytes(rows, device, seq=self._config.model.seq // 2)
        return settings

    def of(self, rows: int, device: str, *, remat: bool | None = None, seq: int | None = None) -> Traced:
        """Trace a microbatch of `rows` rows; its peak is at least that of a validation.

        A model without a trainable parameter is only validated.

        Args:
            device: "cpu", where offload is keep, or "cuda".
            remat: whether activations are computed again; None: as the run has it.
            seq: tokens of a row; None: as the run has it.
        """
        seq = seq or self._config.model.seq
        chunk = max(1, CHUNK_TOKENS // seq)  # rows that a rank evaluates at a time
        none = frozenset[int]()
        if not self._splitting.trains:
            return self._trace(chunk, seq, none, none, backward=False)
        again = self._units_with("remat", remat)
        away = none if device == "cpu" else self._units_with("offload", remat)
        traced = self._trace(rows, seq, again, away, backward=True)
        if rows >= chunk:
            return traced
        evaluated = self._trace(chunk, seq, none, none, backward=False)
        return traced._replace(peak_bytes=max(traced.peak_bytes, evaluated.peak_bytes))

    def bytes(self, rows: int, device: str, *, remat: bool | None = None, seq: int | None = None) -> int:
        """Count the bytes to plan with for a microbatch of `rows` rows, on a CPU with the holes of its heap.

        Recomputing leaves more holes, but takes no more in all than keeping does.
        """
        traced_bytes = self.of(rows, device, remat=remat, seq=seq).peak_bytes
        if device != "cpu" or self._config.launch.malloc == "lean":
            return traced_bytes
        kept_bytes = int(self.of(rows, device, remat=False, seq=seq).peak_bytes * HEAP["keep"])
        recomputes = self._units_with("remat", remat)
        return min(kept_bytes, int(traced_bytes * HEAP["remat"])) if recomputes else kept_bytes

    def planned(self, rows: int, device: str) -> PlanArguments:
        """Return the arguments of `Plan` for a microbatch of `rows` rows."""
        return {
            "activation_bytes": self.bytes(rows, device),
            "host_activation_bytes": self.of(rows, device).host_bytes,
        }

    def _units_with(self, word: str, remat: bool | None) -> _Units:
        """Return the units whose activations are treated so; without backward there are none."""
        if not self._splitting.trains or remat is False:
            return frozenset()
        by_pattern: dict[str, Any] = {"*": "remat"} if remat else self._config.zero.activations_by_pattern
        policies = activations_of(self._splitting, by_pattern)
        return frozenset(index for index, policy in enumerate(policies) if policy == word)

    def _trace(self, rows: int, seq: int, remat: _Units, offload: _Units, *, backward: bool) -> Traced:
        key = rows, seq, remat, offload, backward
        if key not in self._traced:
            self._traced[key] = trace(
                self._model,
                self._splitting,
                loss_of(self._config, self._model),
                torch.empty(rows, seq + 1, dtype=torch.int64, device=META),
                compute=self._compute,
                remat=remat,
                offload=offload,
                backward=backward,
            )
        return self._traced[key]
