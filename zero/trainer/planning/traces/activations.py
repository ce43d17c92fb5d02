"""Peak activation bytes of a run's microbatches, for the plan."""

from copy import copy
from functools import partial
from typing import TypedDict

import torch
from torch import nn

from zero.core.activations import ACTIVATIONS, REMAT
from zero.core.activations.rows import ALL_ROWS
from zero.distributed.world import World
from zero.engine.model import Splitting, split
from zero.engine.plan import activations_of
from zero.sequence import SharedRows
from zero.settings.build import build_precision, build_splitting
from zero.trainer.config import Config
from zero.trainer.models.hf_config import HFConfig
from zero.trainer.planning.machine import PaperGroup
from zero.trainer.planning.traces.tracing import META_DEVICE, Traced, trace
from zero.trainer.run.evaluate import CHUNK_TOKENS
from zero.trainer.run.task import build_task, loss_of

HEAP, RECOMPUTED_HEAP = 1.5, 2.5
"""Growth of a process's heap on a CPU per byte of activations, kept or recomputed. It is above 1, because freed
tensors leave holes that other tensors do not fit in. Measured with `benchmarks/plan_memory.py` (glibc 2.36,
`launch.malloc=raised`): 1.4 to 1.7 for keep and 2.5 to 3.4 for remat, the higher the smaller the model. With
`launch.malloc=lean`, which maps large tensors separately, it is 1."""

CHUNKED_HEAP = 4.5
"""The same for recomputation in chunks of rows (`zero.rows`), also with `launch.malloc=lean`, because a chunk's tensors
are often smaller than those that it maps. Measured with `benchmarks/activations.py --chunks 1,2`: 3.8 to 4.5."""


_Policies = tuple[tuple[str, str], ...]


class PlanArguments(TypedDict):
    """Arguments of `Plan` for the activations of a microbatch."""

    activation_bytes: int
    host_activation_bytes: int


class ActivationTraces:
    """Activation bytes and work of a run's microbatches. Each shape is traced once and cached.

    Args:
        config: settings of the run; the batch may still be auto.
        model: built under `zero.empty()`, or on any device.

    Attributes:
        model: the model that is traced.
        site_names: names of the model's sites, in the order of forward.
    """

    def __init__(self, config: Config, model: nn.Module) -> None:
        self._config, self.model = config, model
        names = None if config.zero.units == "auto" else config.zero.units
        self._splitting = split(model, world_size=1, class_names=names)
        self.site_names = [site.name for site in self._splitting.sites]
        self._compute = build_precision(config).compute
        sequence = config.zero.sequence
        self._group = World(PaperGroup(sequence, local_size=sequence, device="cpu"))
        self._shared_rows = SharedRows(self._group) if sequence > 1 else None
        self._traced: dict[tuple[int, int, _Policies, int, bool], Traced] = {}
        self._splittings: dict[tuple[object, ...], Splitting] = {}

    def resolved(self, config: Config) -> "ActivationTraces":
        """Return a copy for the same run with other settings, such as other activations; both share their traces."""
        other = copy(self)
        other._config = config
        return other

    def at(self, tokens: int, world: World) -> "ActivationTraces":
        """Return the traces of the same run with rows of another length. A model of transformers is made for all."""
        config = self._config.changed("model", seq=tokens)
        if isinstance(config.model, HFConfig):
            return self.resolved(config)
        return ActivationTraces(config, build_task(config, world).model)

    def splitting(self, config: Config, world: World) -> Splitting:
        """Return the units of the plan of `config`; plans that differ in other settings share them."""
        key = config.optim, config.schedule, config.precision, config.zero.units, config.zero.bucket, config.zero.shard
        known = world.size, world.local_size, *map(repr, key)
        if known not in self._splittings:
            self._splittings[known] = build_splitting(config, self.model, world)
        return self._splittings[known]

    def lighter(self, rows: int, device: str) -> dict[str, int]:
        """Return settings that may lower the bytes of a microbatch of `rows` rows: advice -> bytes with that advice."""
        settings = {f"set zero.activations={REMAT.name}": self.bytes(rows, device, remat=True)}
        if rows > 1 and self._config.zero.rows != 1 and _recomputes(self._policies(device, None)):
            settings["set zero.rows=1"] = self.resolved(self._config.changed("zero", rows=1)).bytes(rows, device)
        if rows > 1:
            settings["use a smaller batch.micro"] = self.bytes(1, device)
        if self._config.model.seq > 1:
            settings["use a smaller model.seq or a larger zero.sequence"] = self.bytes(
                rows, device, seq=self._config.model.seq // 2
            )
        return settings

    def of(self, rows: int, device: str, *, remat: bool | None = None, seq: int | None = None) -> Traced:
        """Return the trace of a microbatch of `rows` rows. Its peak is at least that of a validation.

        For a model without trainable parameters only a validation is traced.

        Args:
            device: "cuda" or "cpu". On a CPU the policy offload is the same as keep.
            remat: True: recompute the activations of every unit; False: of none; None: as in the settings.
            seq: tokens of a row; None: as in the settings.
        """
        seq = seq or self._config.model.seq
        chunk = max(1, CHUNK_TOKENS // seq)  # rows that a rank evaluates at a time
        evaluated = partial(self._trace, chunk, seq, (), ALL_ROWS, backward=False)
        if not self._splitting.trains:
            return evaluated()
        policies = self._policies(device, remat)
        traced = self._trace(rows, seq, policies, self._chunk_rows(rows, policies), backward=True)
        if rows >= chunk:
            return traced
        return traced._replace(peak_bytes=max(traced.peak_bytes, evaluated().peak_bytes))

    def bytes(self, rows: int, device: str, *, remat: bool | None = None, seq: int | None = None) -> int:
        """Return the bytes to plan for a microbatch of `rows` rows; on a CPU with the growth of its heap, see `HEAP`.

        Recomputation leaves more holes in the heap, but never takes more bytes in all than keeping activations does.
        """
        traced_bytes, policies = self.of(rows, device, remat=remat, seq=seq).peak_bytes, self._policies(device, remat)
        in_chunks = self._chunk_rows(rows, policies) != ALL_ROWS
        if device != "cpu" or (self._config.launch.malloc == "lean" and not in_chunks):
            return traced_bytes
        kept_bytes = int(self.of(rows, device, remat=False, seq=seq).peak_bytes * HEAP)
        growth = CHUNKED_HEAP if in_chunks else RECOMPUTED_HEAP
        return min(kept_bytes, int(traced_bytes * growth)) if _recomputes(policies) else kept_bytes

    def planned(self, rows: int, device: str) -> PlanArguments:
        """Return the arguments of `Plan` for a microbatch of `rows` rows."""
        return {
            "activation_bytes": self.bytes(rows, device),
            "host_activation_bytes": self.of(rows, device).host_bytes,
        }

    def _policies(self, device: str, remat: bool | None) -> _Policies:
        """Return (name, activation policy) of the sites that do not keep their activations; none without backward."""
        if not self._splitting.trains or remat is False:
            return ()
        policies = activations_of(
            self._splitting, {"*": REMAT.name} if remat else self._config.zero.activations_by_pattern
        )
        moving = {
            policy.name for policy in ACTIVATIONS.values() if policy.recomputes or (policy.offloads and device != "cpu")
        }
        return tuple((name, policy) for name, policy in policies.items() if policy in moving)

    def _chunk_rows(self, rows: int, policies: _Policies) -> int:
        """Return the rows of a chunk of recomputed blocks; 0 for all `rows` rows, and while `zero.rows` is auto."""
        chunk = self._config.zero.rows
        return chunk if chunk != "auto" and chunk < rows and _recomputes(policies) else ALL_ROWS

    def _trace(self, rows: int, seq: int, policies: _Policies, chunk: int, *, backward: bool) -> Traced:
        key = rows, seq, policies, chunk, backward
        if key not in self._traced:
            self._traced[key] = trace(
                self.model,
                self._splitting,
                loss_of(self._config, self.model, self._shared_rows),
                torch.empty(rows, seq // self._config.zero.sequence + 1, dtype=torch.int64, device=META_DEVICE),
                compute=self._compute,
                policies=activations_of(self._splitting, dict(policies)),
                rows=chunk,
                backward=backward,
                exchanged=lambda: self._group.traffic.reduce_bytes,
            )
        return self._traced[key]


def _recomputes(policies: _Policies) -> bool:
    return any(ACTIVATIONS[policy].recomputes for _, policy in policies)
