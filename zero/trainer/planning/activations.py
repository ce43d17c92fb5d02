"""Peak activation bytes of a run's microbatches, for the plan."""

from collections.abc import Mapping
from copy import copy
from functools import partial
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
"""By `zero.activations`: how much the heap of a process grows for a byte of activations on a CPU, because freed tensors
leave holes that others do not fit in. Measured with `benchmarks/plan_memory.py`, glibc 2.36, `launch.malloc=raised`:
1.4 to 1.7 and 2.5 to 3.4, the higher the smaller the model. With `lean`, which maps large tensors apart, it is 1."""


_Units = frozenset[int]


class Taken(TypedDict):
    """What a `Plan` is told of a microbatch."""

    activation_bytes: int
    host_activation_bytes: int


class Activations:
    """What microbatches of a run take, each number of rows counted once.

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
        self._traced: dict[tuple[int, int, _Units, _Units], Traced] = {}
        self._evaluated: dict[tuple[int, int], Traced] = {}

    def resolved(self, config: Config) -> "Activations":
        """Of the same run, with what was auto as `config` has it; what was counted is not counted again."""
        found = copy(self)
        found._config = config
        return found

    def lighter(self, rows: int, device: str) -> dict[str, int]:
        """Settings that make a microbatch of `rows` rows take less, and the bytes to plan with then."""
        settings, found = self._config.zero, {}
        if settings.activations != "remat":
            found["set zero.activations=remat"] = self.bytes(rows, device, remat=True)
        if rows > 1:
            found["use a smaller batch.micro"] = self.bytes(1, device)
        if self._config.model.seq > 1:
            found["use a smaller model.seq"] = self.bytes(rows, device, seq=self._config.model.seq // 2)
        return found

    def of(self, rows: int, device: str, *, remat: bool | None = None, seq: int | None = None) -> Traced:
        """A microbatch of `rows` rows; a run validates as well, which counts if that takes more.

        Of a model without a trainable parameter only the validation is counted: it is not trained.

        Args:
            device: "cpu", where offload is keep, or "cuda".
            remat: whether activations are computed again; None: as the run has it.
            seq: tokens of a row; None: as the run has it.
        """
        again, away = self._units_with("remat", remat), self._units_with("offload", remat)
        key = rows, seq or self._config.model.seq, again, frozenset() if device == "cpu" else away
        if key not in self._traced:
            self._traced[key] = self._count(*key)
        return self._traced[key]

    def bytes(self, rows: int, device: str, *, remat: bool | None = None, seq: int | None = None) -> int:
        """What to plan with for a microbatch of `rows` rows on a device type: on a CPU also what the heap wastes.

        Recomputing wastes more of less, but takes no more in all than keeping does.
        """
        again = self._units_with("remat", remat)
        taken_bytes = self.of(rows, device, remat=remat, seq=seq).peak_bytes
        if device != "cpu" or self._config.launch.malloc == "lean":
            return taken_bytes
        kept_bytes = int(self.of(rows, device, remat=False, seq=seq).peak_bytes * HEAP["keep"])
        return min(kept_bytes, int(taken_bytes * HEAP["remat"])) if again else kept_bytes

    def planned(self, rows: int, device: str) -> Taken:
        """What a `Plan` is told of a microbatch of `rows` rows."""
        return {
            "activation_bytes": self.bytes(rows, device),
            "host_activation_bytes": self.of(rows, device).host_bytes,
        }

    def _units_with(self, word: str, remat: bool | None) -> _Units:
        """The units whose activations are treated so; without backward none is."""
        if not self._splitting.trains or remat is False:
            return frozenset()
        by_pattern: dict[str, Any] = {"*": "remat"} if remat else self._config.zero.activations_by_pattern
        policies = activations_of(self._splitting, by_pattern)
        return frozenset(index for index, policy in enumerate(policies) if policy == word)

    def _count(self, rows: int, seq: int, remat: _Units, offload: _Units) -> Traced:
        chunk = max(1, CHUNK_TOKENS // seq)  # rows that a rank evaluates at a time
        if not self._splitting.trains:
            return self._evaluation(chunk, seq)
        traced = self._trace(rows, seq, remat, offload, backward=True)
        if rows >= chunk:
            return traced
        evaluated = self._evaluation(chunk, seq)
        return traced._replace(peak_bytes=max(traced.peak_bytes, evaluated.peak_bytes))

    def _evaluation(self, rows: int, seq: int) -> Traced:
        """Without backward nothing is kept, whatever becomes of the units' activations in training."""
        if (rows, seq) not in self._evaluated:
            self._evaluated[rows, seq] = self._trace(rows, seq, frozenset(), frozenset(), backward=False)
        return self._evaluated[rows, seq]

    def _trace(self, rows: int, seq: int, remat: _Units, offload: _Units, *, backward: bool) -> Traced:
        tokens = torch.empty(rows, seq + 1, dtype=torch.int64, device=META)
        count = partial(trace, self._model, self._splitting, loss_of(self._config, self._model), tokens)
        return count(compute=self._compute, remat=remat, offload=offload, backward=backward)
