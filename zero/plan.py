"""The static description of a run: units, stage, dtypes, and how many bytes each rank will hold where.

A `Plan` holds no tensors. The sizes it prints come from the same properties that `init` allocates by, so the table is
true by construction.
"""

import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from zero.errors import PlanError
from zero.layout import Layout, pages
from zero.optim import Transform
from zero.placement import Offload
from zero.precision import Precision
from zero.stage import Stage
from zero.store import Page
from zero.unit import UnitSpec, split
from zero.world import World

Activations = Literal["keep", "remat"]
Update = Literal["lazy", "serial", "eager"]

KiB, MiB, GiB = 1024, 1024**2, 1024**3


class Plan:
    """What will be held where, and when it moves.

    Args:
        model: on any device; best built under `zero.empty()`. It is copied, never changed.
        optimizer: from `zero.adamw` and its family.
        units: classes, or their names, whose instances are units; None for the default policy (see `unit.py`).
        prefetch: units gathered ahead, in both directions.
        activations: "keep", or "remat" to recompute each unit's in backward.
        update: "lazy" hides each unit's update before its next gather, "serial" does all right after backward (same
            bits), "eager" during backward, without clipping or loss scaling only.
        accumulate: microbatches per step.
        page_bytes: bytes of one fp32 page of master or moments.

    Raises:
        PlanError: a setting that does not exist or does not go together with another.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Transform,
        world: World,
        stage: Stage | int = 3,
        precision: Precision | str = "fp32",
        offload: Offload | None = None,
        units: Sequence[str | type[nn.Module]] | None = None,
        prefetch: int = 1,
        activations: Activations = "keep",
        update: Update = "lazy",
        accumulate: int = 1,
        page_bytes: int = 8 * MiB,
    ) -> None:
        if prefetch < 0:
            raise PlanError(f"zero.prefetch={prefetch}: it is a number of units, 0 or more")
        if accumulate < 1:
            raise PlanError(f"batch.accumulate={accumulate}: it is a number of microbatches, 1 or more")
        for key, value, known in (("activations", activations, Activations), ("update", update, Update)):
            if value not in get_args(known):
                raise PlanError(f"zero.{key}={value}: it is one of {', '.join(get_args(known))}")
        self.model, self.optimizer, self.world = model, optimizer, world
        self.stage = stage if isinstance(stage, Stage) else Stage(stage)
        self.precision = precision if isinstance(precision, Precision) else Precision(precision)
        self.offload = offload or Offload()
        self.prefetch, self.activations, self.update, self.accumulate = prefetch, activations, update, accumulate
        self.page_numel = page_bytes // 4
        pages(0, self.page_numel)  # refuses a page that is not whole blocks
        if update == "eager" and (optimizer.clip is not None or self.precision.scale.static != 1.0):
            what = "optim.clip" if optimizer.clip is not None else "loss scaling"
            raise PlanError(
                f"zero.update=eager updates before the global norm is known, so it cannot go with {what}; "
                "use zero.update=lazy, or optim.clip=null in fp32 or bf16"
            )
        self.splitting = split(
            model,
            world_size=world.size,
            class_names=_names(units),
            group=lambda name, shape: int(optimizer.decay(name, shape)),
        )
        if not any(unit.trainable.slots for unit in self.units):
            raise PlanError("the model has no trainable parameter")

    # -- what is held --------------------------------------------------------------------------------------------------

    @property
    def units(self) -> tuple[UnitSpec, ...]:
        return self.splitting.units

    @property
    def resident(self) -> bool:
        """Full parameters stay between uses: below stage 3, and where the shard is the whole."""
        return not self.stage.parameters or self.world.size == 1

    @property
    def whole_update(self) -> bool:
        """Each rank updates whole flats: moments are not sharded, or there is nobody to share with."""
        return not self.stage.moments or self.world.size == 1

    @property
    def local_sum(self) -> bool:
        """Microbatches are added up before ranks are."""
        return self.world.size == 1 or (not self.stage.gradients and self.accumulate > 1)

    @property
    def grad_dtype(self) -> torch.dtype:
        """fp32, except that a single gradient loses nothing in the dtype in which autograd made it."""
        return self.precision.compute if self.world.size * self.accumulate == 1 else torch.float32

    @property
    def flat_dtype(self) -> torch.dtype:
        """What gradients travel in: as they are, unless something narrower was asked for; they are added in fp32."""
        sent = self.grad_dtype if self.local_sum else self.precision.compute
        return min(self.precision.reduce, sent, key=lambda dtype: dtype.itemsize)

    def grad_numel(self, unit: UnitSpec) -> int:
        """Elements of the gradient that a rank keeps for the update."""
        return unit.trainable.P if self.local_sum or self.whole_update else unit.trainable.S

    def update_numel(self, unit: UnitSpec) -> int:
        """Elements of master and of each moment on a rank."""
        return unit.trainable.P if self.whole_update else unit.trainable.S

    def buffer_counts(self) -> dict[int, int]:
        """Gathered buffers: elements of one to how many. The unit in use, those ahead, and one per level of nesting."""
        if self.resident:
            return {}
        sizes = Counter(unit.trainable.P + unit.frozen.P for unit in self.units)
        return {numel: min(n, 1 + self.prefetch + self.splitting.depth) for numel, n in sizes.items()}

    def flat_counts(self) -> dict[int, int]:
        """Gradient flats: elements of one to how many; two for each of two reductions under way."""
        if self.world.size == 1:
            return {}
        sizes = Counter(unit.trainable.P for unit in self.units if unit.trainable.slots)
        return {numel: min(n, 2) * 2 for numel, n in sizes.items()}

    def kinds(self) -> tuple[str, ...]:
        """What the store holds for each unit."""
        return ("master", *self.optimizer.moments) if self.precision.has_master else self.optimizer.moments

    def store_pages(self) -> dict[Page, int]:
        """Every page of this rank and its elements, fp32."""
        return {
            Page(unit.index, kind, number): stop - start
            for unit in self.units
            for kind in self.kinds()
            for number, (start, stop) in enumerate(pages(self.update_numel(unit), self.page_numel))
        }

    # -- how it is told ------------------------------------------------------------------------------------------------

    @property
    def numel(self) -> int:
        """Parameters of the whole model, each tied one counted once."""
        return sum(unit.trainable.numel + unit.frozen.numel for unit in self.units)

    @property
    def bytes(self) -> dict[str, dict[str, int]]:
        """Bytes on this rank: tier to kind to bytes. Activations and temporaries of a few MiB are not in it."""
        compute = torch.empty((), dtype=self.precision.compute).element_size()
        flat = torch.empty((), dtype=self.flat_dtype).element_size()
        grad = torch.empty((), dtype=self.grad_dtype).element_size()

        def held(layout: Layout) -> int:
            return layout.P if self.resident else layout.S

        pages_bytes: Counter[str] = Counter()
        for page, numel in self.store_pages().items():
            pages_bytes["master" if page.kind == "master" else "moments"] += 4 * numel
        device = {
            "parameters": compute * sum(held(unit.trainable) + held(unit.frozen) for unit in self.units),
            "gathered units": compute * sum(numel * n for numel, n in self.buffer_counts().items()),
            "gradients": grad * sum(self.grad_numel(unit) for unit in self.units),
            "gradient flats": flat * sum(numel * n for numel, n in self.flat_counts().items()),
            "master": pages_bytes["master"],
            "moments": pages_bytes["moments"],
            "buffers": sum(buffer.nbytes for buffer in self.model.buffers()),
        }
        return {"device": device}

    def fields(self) -> dict[str, str]:
        """What all ranks must agree on before they start, for the handshake."""
        told = {
            "zero.stage": str(self.stage.level),
            "zero.prefetch": str(self.prefetch),
            "zero.activations": self.activations,
            "zero.update": self.update,
            "batch.accumulate": str(self.accumulate),
            "precision": str(self.precision),
            "offload": str(self.offload),
            "optim": f"{self.optimizer.name} clip={self.optimizer.clip} weight_decay={self.optimizer.weight_decay}",
            "optim settings": str([one for one in _arguments(self.optimizer.update) if isinstance(one, float | int)]),
            "optim.lr": str(self.optimizer.lr_at(1)),
            "offload.page": str(self.page_numel),
            "version of torch": torch.__version__,
            "version of python": platform.python_version(),
        }
        for unit in self.units:
            slots = repr((unit.trainable.slots, unit.frozen.slots)).encode()
            told[f"unit {unit.index} {unit.name}"] = hashlib.sha256(slots).hexdigest()[:16]
        return told

    def __str__(self) -> str:
        lines = [
            f"stage {self.stage.level}, {self.world.size} ranks, "
            f"{str(self.precision.compute).removeprefix('torch.')} compute, update {self.update}, "
            f"{self.numel:,} parameters in {len(self.units)} units",
            f"{'per rank':<16} " + " ".join(f"{tier:>12}" for tier in self.bytes),
        ]
        kinds = dict.fromkeys(kind for tier in self.bytes.values() for kind in tier)
        for kind in kinds:
            lines.append(f"{kind:<16} " + " ".join(f"{_size(tier.get(kind, 0)):>12}" for tier in self.bytes.values()))
        totals = " ".join(f"{_size(sum(tier.values())):>12}" for tier in self.bytes.values())
        return "\n".join([*lines, f"{'total':<16} {totals}"])


def _names(units: Sequence[str | type[nn.Module]] | None) -> list[str] | None:
    if isinstance(units, str):
        raise PlanError(f"zero.units={units!r} is one string; pass a list: [{units!r}]")
    return None if units is None else [unit if isinstance(unit, str) else unit.__name__ for unit in units]


def _arguments(update: Callable[..., None]) -> tuple[Any, ...]:
    """What an optimizer's update was made with."""
    return update.args if isinstance(update, partial) else ()


def _size(count: int) -> str:
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"
