"""The static description of a run: units, stage, dtypes, and how many bytes each rank will hold where.

A `Plan` holds no tensors. The sizes it prints come from the same properties that `init` allocates by, so the table is
true by construction.
"""

import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from zero.core.layout import pages
from zero.core.optim import Transform
from zero.core.placement import (
    Offload,
    Placement,
    Room,
    Tier,
    budget_bytes,
    place,
    size_text,
    usable_bytes,
    usable_host_bytes,
)
from zero.core.precision import Precision
from zero.core.stage import Stage
from zero.distributed.world import World
from zero.engine.compile import Backend
from zero.engine.module_copy import detached_copy
from zero.engine.placeholder import ParameterPlaceholder
from zero.engine.unit import UnitSpec, split
from zero.errors import ConfigError, PlanError
from zero.platform.device import ALIGNMENT, free_host_bytes, round_up
from zero.store import Page

Activations = Literal["keep", "remat", "offload"]
Update = Literal["lazy", "serial", "eager"]

KiB, MiB, GiB = 1024, 1024**2, 1024**3

LEAST_PAGE_BYTES, MOST_PAGE_BYTES, MANY_PAGES = 4 * MiB, 64 * MiB, 1024
"""Of pages whose size is not given: 1,024 of up to 64 MiB are 64 GiB of master, a model of 17 billion parameters."""

ARENA_SHARE = 1 / 8
"""Of the host memory that a rank may take, what slots for such pages may be at most."""

THREADS, READ_AHEAD = 4, 2
"""Of the store, where neither was given: pages in work at once, and pages that may lie ready beside them."""

KINDS = (
    *("parameters", "gathered units", "gradients", "gradient flats", "gradient buffers"),
    *("master", "moments", "buffers", "activations", "arena"),
)
SOMETIMES = ("gradient buffers", "activations", "arena")
"""What the table has rows for; the last ones only where something is offloaded, or activations were estimated. Where
nothing is trained it has what there is."""


class PageSpec(NamedTuple):
    """One page of the store."""

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Plan:
    """What will be held where, and when it moves.

    Args:
        model: on any device; best built under `zero.empty()`. It is copied, never changed, but with `in_place`. One
            without a trainable parameter can be run and not trained, such as the teacher of another model.
        in_place: `zero.init` takes the model over instead of copying it: it is the one that trains, and its parameters
            are in shards. For models that cannot be copied, and scripts that go on using theirs.
        optimizer: from `zero.adamw` and its family.
        units: classes, or their names, whose instances are units; None for the default policy (see `unit.py`).
        prefetch: units gathered ahead, in both directions.
        activations: "keep", "remat" to recompute each unit's in backward, or "offload" to keep them in host memory.
        compile: run what each unit computes through `torch.compile`: True, or a backend's name.
        update: "lazy" hides each unit's update before its next gather, "serial" does all right after backward (same
            bits), "eager" during backward, without clipping or loss scaling only.
        accumulate: microbatches per step.
        offload: what sleeps off the device, and where, or the name of a preset such as "nvme"; None: nothing.
        room: what this rank may take; None: what is free here and now.
        activation_bytes: what forward and backward need beside everything else, at most; counted, not allocated.
        lighter: what would make that less, in words, and what it would be then; asked only where a plan does not fit.

    Raises:
        PlanError: a setting that does not exist or does not go together with another.
        ConfigError: what has to be in a memory does not fit there.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Transform,
        world: World,
        stage: Stage | int = 3,
        precision: Precision | str = "fp32",
        offload: Offload | str | None = None,
        units: Sequence[str | type[nn.Module]] | None = None,
        prefetch: int = 1,
        activations: Activations = "keep",
        compile: Backend = False,
        update: Update = "lazy",
        accumulate: int = 1,
        in_place: bool = False,
        room: Room | None = None,
        activation_bytes: int = 0,
        lighter: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        _refuse_strangers(model, optimizer, world)
        _refuse_compiled(model)
        if type(prefetch) is not int or prefetch < 0:
            raise PlanError(f"zero.prefetch={prefetch!r}: it is a number of units, 0 or more")
        if type(accumulate) is not int or accumulate < 1:
            raise PlanError(f"batch.accumulate={accumulate!r}: it is a number of microbatches, 1 or more")
        for key, value, known in (("activations", activations, Activations), ("update", update, Update)):
            if value not in get_args(known):
                raise PlanError(f"zero.{key}={value}: it is one of {', '.join(get_args(known))}")
        self.model, self.optimizer, self.world = model, optimizer, world
        self.stage = stage if isinstance(stage, Stage) else Stage(stage)
        self.precision = precision if isinstance(precision, Precision) else Precision(precision)
        asked = offload if isinstance(offload, Offload) else Offload(offload or "none")
        self.offload = asked.at(parameters_sharded=self.stage.parameters)
        self.prefetch, self.activations, self.update, self.accumulate = prefetch, activations, update, accumulate
        self.compile = compile
        self.room, self.activation_bytes, self._lighter = room, activation_bytes, lighter
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
            group=optimizer.group,
        )
        self.in_place = in_place
        if not in_place:
            detached_copy(model, self.splitting, self.precision.compute, torch.device("meta"))  # refuses what cannot be
        slots = (slot for unit in self.units for one in (unit.trainable, unit.frozen) for slot in one.slots)
        optimizer.check_groups({slot.name: slot.shape for slot in slots})
        self._pages: dict[tuple[bool, bool], dict[Page, PageSpec]] = {}  # tens of thousands, asked for many times
        room = self._room()
        page_bytes = self.offload.page_bytes or self._auto_page_bytes(room)
        self.offload = self.offload.model_copy(update={"page_bytes": page_bytes})
        self.page_numel = page_bytes // 4
        self.arena_slots, self.placement = self._placed(room)

    # -- what is held --------------------------------------------------------------------------------------------------

    @property
    def units(self) -> tuple[UnitSpec, ...]:
        return self.splitting.units

    @property
    def params_offloaded(self) -> bool:
        """Parameters sleep where no kernel of the device reads them."""
        return self._is_away(self.placement.param)

    @property
    def params_on_host(self) -> bool:
        """They sleep in host memory, which the device copies from by itself: on all ranks, as every tier."""
        return self.params_offloaded and self.placement.param == "host"

    @property
    def grads_offloaded(self) -> bool:
        """Gradients wait for the update where no kernel of the device reads them."""
        return self._is_away(self.placement.grad)

    @property
    def resident(self) -> bool:
        """Full parameters stay between uses: below stage 3, and where the shard is the whole and on the device."""
        return not self.params_offloaded and (not self.stage.parameters or self.world.size == 1)

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

    @property
    def trains(self) -> bool:
        """There is something to train."""
        return self.splitting.trains

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

    def grad_buffer_counts(self) -> dict[int, int]:
        """Where gradients sleep in the store, buffers that they arrive in: elements of one to how many."""
        if not self.grads_offloaded:
            return {}
        sizes = Counter(self.grad_numel(unit) for unit in self.units if unit.trainable.slots)
        # two reductions may be under way; a lone CPU has long written one gradient when the next unit's arrives
        most = 1 if self.world.size == 1 and self._device_is_host else 2
        return {numel: min(n, most) for numel, n in sizes.items()}

    # -- pages of the store --------------------------------------------------------------------------------------------

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """What the update reads and writes in the store, number by number."""
        if self.precision.has_master:
            return ("master", *self.optimizer.moments)
        return ("param", *self.optimizer.moments) if self.params_offloaded else self.optimizer.moments

    def grad_ranges(self, unit: UnitSpec) -> tuple[tuple[int, int], ...]:
        """The pages of a gradient as (start, stop) of it; the first ones are those that this rank updates."""
        extents = self._grad_extents(unit, self.world.rank)
        return tuple((a + first, b + first) for first, last in extents for a, b in self._cut(last - first))

    def _grad_extents(self, unit: UnitSpec, rank: int) -> tuple[tuple[int, int], ...]:
        """What is cut into pages: the range that a rank updates, and what is before and after it."""
        numel = self.grad_numel(unit)
        if numel == self.update_numel(unit):
            return ((0, numel),)
        own = unit.trainable.shard(rank)
        return own, (0, own[0]), (own[1], numel)

    def store_pages(self) -> dict[Page, PageSpec]:
        """Every page of this rank, unit by unit in the order of forward."""
        away = self.params_offloaded, self.grads_offloaded  # what they depend on and placement may change
        if away not in self._pages:
            self._pages[away] = {page: spec for unit in self.units for page, spec in self._pages_of(unit)}
        return self._pages[away]

    def tier(self, page: Page) -> Tier:
        """Where a page sleeps."""
        if page.kind in ("param", "frozen"):
            return self.placement.param
        return self.placement.grad if page.kind == "grad" else self.placement.optimizer[page.unit, page.number]

    @property
    def slot_bytes(self) -> int:
        """A slot of the arena: everything that the update of one page number needs, each page on its own blocks."""
        numel = min(self.page_numel, max(self.update_numel(unit) for unit in self.units))
        sizes = {"grad": self.grad_dtype.itemsize, "param": self.precision.compute.itemsize}
        beside = ("grad",) * self.grads_offloaded + ("param",) * (self.params_offloaded and self.precision.has_master)
        group = sum(round_up(sizes.get(kind, 4) * numel, ALIGNMENT) for kind in (*self.state_kinds, *beside))
        return max([group, *(round_up(spec.nbytes, ALIGNMENT) for spec in self.store_pages().values())])

    @property
    def arena_bytes(self) -> int:
        """Host memory that pages pass through."""
        return self.arena_slots and self.arena_slots * self.slot_bytes

    def _pages_of(self, unit: UnitSpec) -> Iterator[tuple[Page, PageSpec]]:
        numels = {kind: self._cut(self.update_numel(unit)) for kind in self.state_kinds}
        dtypes = dict.fromkeys(self.state_kinds, torch.float32)
        if self.grads_offloaded and unit.trainable.slots:
            numels["grad"], dtypes["grad"] = self.grad_ranges(unit), self.grad_dtype
        if self.params_offloaded:
            numels |= {"param": self._cut(unit.trainable.S), "frozen": self._cut(unit.frozen.S)}
            dtypes |= {"param": self.precision.compute, "frozen": self.precision.compute}
        for kind, ranges in numels.items():
            for number, (start, stop) in enumerate(ranges):
                yield Page(unit.index, kind, number), PageSpec(stop - start, dtypes[kind])

    def _cut(self, numel: int) -> tuple[tuple[int, int], ...]:
        return pages(numel, self.page_numel)

    # -- where it sleeps -----------------------------------------------------------------------------------------------

    @property
    def _device_is_host(self) -> bool:
        return self.world.compute.shares_memory

    def _is_away(self, tier: Tier) -> bool:
        return tier == "nvme" or (tier == "host" and not self._device_is_host)

    def _placed(self, room: Room) -> tuple[int, Placement]:
        """How many slots the arena has, and where everything sleeps.

        Raises:
            ConfigError: it does not fit, even with the fewest slots.
        """
        # what may be offloaded is taken for offloaded while the buffers are counted, so they are never too few
        worst: dict[str, Tier] = {"none": "device", "cpu": "host", "nvme": "nvme", "auto": "nvme"}
        asked = {kind: worst[str(getattr(self.offload, kind))] for kind in ("param", "grad", "optimizer")}
        groups = [
            (unit.index, number) for unit in self.units for number, _ in enumerate(self._cut(self.update_numel(unit)))
        ]
        self.placement = Placement(
            asked["param"],
            asked["grad"],
            dict.fromkeys(groups, asked["optimizer"]),
            {"device": 0, "host": 0, "nvme": 0},
        )
        sizes: Counter[tuple[int, int]] = Counter()
        for page, spec in self.store_pages().items():
            if page.kind in ("master", *self.optimizer.moments):
                sizes[page.unit, page.number] += self._sleeping_bytes(spec, asked["optimizer"])
        threads = self.offload.threads or THREADS
        ahead = READ_AHEAD if self.offload.read_ahead is None else self.offload.read_ahead
        streams = any(self._is_away(tier) for tier in asked.values())
        most = min(threads + ahead, max(len(groups), self._copied_pages(asked["param"]))) if streams else 0
        fewest = min(threads, most) if self.offload.read_ahead is None else most
        for slots in (most, fewest):
            try:
                return slots, self._place(slots, [(*group, sizes[group]) for group in groups], room)
            except ConfigError:
                if slots == fewest:
                    raise
        raise AssertionError

    def _copied_pages(self, tier: Tier) -> int:
        """Pages of frozen parameters that pass through slots of the arena, on their way from a file to a GPU."""
        if tier != "nvme" or self._device_is_host:
            return 0
        return sum(len(self._cut(unit.frozen.S)) for unit in self.units)

    def _place(self, slots: int, groups: Sequence[tuple[int, int, int]], room: Room) -> Placement:
        held = self._device_bytes()
        del held["gradients"]
        return place(
            self.offload,
            groups,
            param_bytes=held.pop("parameters"),
            grad_bytes=self._most_grads_bytes() if self.grads_offloaded else self._grads_bytes,
            activation_bytes=held.pop("activations"),
            lighter=self._lighter,
            resorts=self._resorts,
            parameters_sharded=self.stage.parameters,
            device_fixed_bytes=sum(held.values()),
            host_fixed_bytes=slots and slots * self.slot_bytes,
            device_bytes=budget_bytes(self.offload.device_budget, room.device),
            host_bytes=budget_bytes(self.offload.host_budget, room.host),
            disk_bytes=room.disk,
            device_is_host=self._device_is_host,
        )

    @property
    def _resorts(self) -> tuple[str, ...]:
        """What leaves less on a rank, whatever it is that takes most."""
        if self.stage.parameters:
            return ("use more ranks",)
        if self.world.size == 1:
            return ("use more ranks with zero.stage=3",)
        return ("set zero.stage=3", "use more ranks") if self.stage.moments else ("set zero.stage=3",)

    def _room(self) -> Room:
        """What this rank may take. Where it decides about tiers, all ranks go by rank 0's readings."""
        if self.room is not None:
            return self.room
        device = self.world.compute
        device_bytes = usable_bytes(self.offload, device.free_bytes(), device.total_bytes())
        host_bytes = usable_host_bytes(self.offload, free_host_bytes(), device_is_host=self._device_is_host)
        mine = f"{device_bytes} {host_bytes // self.world.local_size}"
        if "auto" in self.offload.kinds or self._has_many_pages(LEAST_PAGE_BYTES):
            mine = self.world.share(mine)
        return Room(*map(int, mine.split()))

    def _has_many_pages(self, page_bytes: int) -> bool:
        """Pages of master of this size would be more than a store's threads should have to do with."""
        numel = sum(self.update_numel(unit) for unit in self.units)
        return self.offload.page_bytes is None and 4 * numel > MANY_PAGES * page_bytes

    def _auto_page_bytes(self, room: Room) -> int:
        """As large as keeps them few, while all slots of the arena together stay a small part of host memory."""
        threads, ahead = self.offload.threads or THREADS, self.offload.read_ahead
        kinds = ("master", *self.optimizer.moments, "grad", "param")
        slots = threads + (READ_AHEAD if ahead is None else ahead)
        most_bytes = int(ARENA_SHARE * budget_bytes(self.offload.host_budget, room.host)) // (slots * len(kinds))
        page_bytes = LEAST_PAGE_BYTES
        while self._has_many_pages(page_bytes) and 2 * page_bytes <= min(MOST_PAGE_BYTES, most_bytes):
            page_bytes *= 2
        return page_bytes

    def _device_bytes(self) -> dict[str, int]:
        """What this rank keeps in the compute dtype and for gradients, wherever that sleeps, and its buffers."""
        compute = self.precision.compute.itemsize
        flats = {numel: n * self.flat_dtype.itemsize for numel, n in self.flat_counts().items()}
        grads = {numel: n * self.grad_dtype.itemsize for numel, n in self.grad_buffer_counts().items()}
        whole = self.resident
        return {
            "parameters": self._paged_bytes("param", "frozen")
            if self.params_offloaded
            else compute
            * sum(one.P if whole else one.S for unit in self.units for one in (unit.trainable, unit.frozen)),
            "gathered units": compute * sum(numel * n for numel, n in self.buffer_counts().items()),
            "gradients": self._paged_bytes("grad") if self.grads_offloaded else self._grads_bytes,
            "gradient flats": sum(numel * size for numel, size in flats.items()),
            "gradient buffers": sum(numel * size for numel, size in grads.items()),
            "buffers": sum(_nbytes(buffer) for buffer in self.model.buffers()),
            "activations": self.activation_bytes,
        }

    @property
    def _grads_bytes(self) -> int:
        return self.grad_dtype.itemsize * sum(self.grad_numel(unit) for unit in self.units)

    def _most_grads_bytes(self) -> int:
        """In the store, on the rank where they take most: whole blocks differ by rank, and all have to decide alike."""
        size = self.grad_dtype.itemsize

        def taken(numel: int) -> int:
            whole, rest = divmod(numel, self.page_numel)
            return whole * round_up(self.page_numel * size, ALIGNMENT) + round_up(rest * size, ALIGNMENT)

        units = [unit for unit in self.units if unit.trainable.slots]
        return max(
            sum(taken(last - first) for unit in units for first, last in self._grad_extents(unit, rank))
            for rank in range(self.world.size)
        )

    def _paged_bytes(self, *kinds: str) -> int:
        """What pages of these kinds take in the store, each on its own blocks."""
        return sum(round_up(spec.nbytes, ALIGNMENT) for page, spec in self.store_pages().items() if page.kind in kinds)

    def _sleeping_bytes(self, spec: PageSpec, tier: Tier) -> int:
        return round_up(spec.nbytes, ALIGNMENT) if self._is_away(tier) else spec.nbytes

    # -- how it is told ------------------------------------------------------------------------------------------------

    @property
    def numel(self) -> int:
        """Parameters of the whole model, each tied one counted once."""
        return sum(unit.trainable.numel + unit.frozen.numel for unit in self.units)

    @property
    def bytes(self) -> dict[str, dict[str, int]]:
        """Bytes on this rank: tier to kind to bytes. Temporaries of a few MiB are not in it."""
        held = self._device_bytes()
        told: dict[str, Counter[str]] = {"device": Counter(), "host": Counter(), "nvme": Counter()}
        told[self.placement.param]["parameters"] = held.pop("parameters")
        told[self.placement.grad]["gradients"] = held.pop("gradients")
        told["device"] += Counter(held)
        for page, spec in self.store_pages().items():
            if page.kind in ("master", *self.optimizer.moments):
                kind, tier = "master" if page.kind == "master" else "moments", self.tier(page)
                told[tier][kind] += self._sleeping_bytes(spec, tier)
        told["host"]["arena"] = self.arena_bytes
        always = [kind for kind in KINDS if kind not in SOMETIMES] if self.trains else []
        return {
            tier: {kind: kinds[kind] for kind in KINDS if kinds[kind] or (tier == "device" and kind in always)}
            for tier, kinds in told.items()
            if tier == "device" or any(kinds.values())
        }

    def fields(self) -> dict[str, str]:
        """What all ranks must agree on before they start, for the handshake."""
        told = {
            "zero.stage": str(self.stage.level),
            "zero.prefetch": str(self.prefetch),
            "zero.activations": self.activations,
            "zero.compile": str(bool(self.compile)),
            "zero.update": self.update,
            "batch.accumulate": str(self.accumulate),
            "precision": str(self.precision),
            "offload": str(self.offload),
            **self.optimizer.fields(),
            "version of torch": torch.__version__,
            "version of python": platform.python_version(),
        }
        if "auto" in self.offload.kinds:
            told["tiers of offload=auto"] = hashlib.sha256(repr(self.placement).encode()).hexdigest()[:16]
        for unit in self.units:
            slots = repr((unit.trainable.slots, unit.frozen.slots)).encode()
            told[f"unit {unit.index} {unit.name}"] = hashlib.sha256(slots).hexdigest()[:16]
        return told

    def __str__(self) -> str:
        lines = [
            f"stage {self.stage.level}, {self.world.size} rank{'s' * (self.world.size > 1)}, "
            f"{str(self.precision.compute).removeprefix('torch.')} compute, "
            f"{f'update {self.update}' if self.trains else 'nothing to train'}, "
            f"{self.numel:,} parameters in {len(self.units)} units",
            f"{'per rank':<16} " + " ".join(f"{tier:>12}" for tier in self.bytes),
        ]
        kinds = dict.fromkeys(kind for tier in self.bytes.values() for kind in tier)
        for kind in kinds:
            lines.append(
                f"{kind:<16} " + " ".join(f"{size_text(tier.get(kind, 0)):>12}" for tier in self.bytes.values())
            )
        totals = " ".join(f"{size_text(sum(tier.values())):>12}" for tier in self.bytes.values())
        return "\n".join([*lines, f"{'total':<16} {totals}"])


def _refuse_strangers(model: object, optimizer: object, world: object) -> None:
    """What a plan is made of, each with where it comes from."""
    for key, value, kind, instead in (
        ("model", model, nn.Module, "pass a torch.nn.Module"),
        ("optimizer", optimizer, Transform, "make one with zero.adamw(lr); torch's own is for zero.initialize"),
        ("world", world, World, "make one with zero.World.from_env()"),
    ):
        if not isinstance(value, kind):
            seen = f"the class {value.__qualname__}" if isinstance(value, type) else f"of {type(value).__qualname__}"
            raise PlanError(f"{key} is {seen}; {instead}")
    assert isinstance(model, nn.Module)
    absent = next((name for name, one in model.named_parameters() if isinstance(one, ParameterPlaceholder)), None)
    if absent is not None:
        raise PlanError(
            f"{absent} was taken over by an earlier zero.initialize, or is of a state's own model; build it again"
        )


def _refuse_compiled(model: nn.Module) -> None:
    """Told by its name: torch's compiler is not imported to be asked."""
    if type(model).__name__ == "OptimizedModule":
        raise PlanError(
            "model is what torch.compile made of one: pass the model itself; zero.Plan(compile=True) compiles what "
            "each unit computes"
        )


def _names(units: Sequence[str | type[nn.Module]] | None) -> list[str] | None:
    if isinstance(units, str):
        raise PlanError(f"zero.units={units!r} is one string; pass a list: [{units!r}]")
    if isinstance(units, type):
        raise PlanError(f"zero.units={units.__name__} is one class; pass a list: [{units.__name__}]")
    return None if units is None else [unit if isinstance(unit, str) else unit.__name__ for unit in units]


def _nbytes(tensor: Tensor) -> int:
    """Of a sparse tensor: its values and their indices."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return tensor._nnz() * (tensor.element_size() + 8 * tensor.ndim)
