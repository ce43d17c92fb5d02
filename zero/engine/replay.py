"""A step that is made twice from the same state and compared to the bit, to find silent corruption.

Forward, backward and the reduction of gradients run twice from the same parameters, buffers and random generators. Each
run records checksums in the order of the program: of a unit's gathered buffer at both ends of each use, of the outputs
of each site, of the gradient that this rank sends; and at its end, of buffers and summed gradients. Between the two
runs all gathered copies become stale, so the second run gathers every unit again. Then each unit is updated twice from
a copy of its state in host memory, through the same threads, streams and tiers.

State must not change while no update runs: parameters and pages in memory get checksums before the first run, after the
second, when they are copied for the update, and after all updates. Frozen parameters in memory are also compared with
the last step that was made twice. Pages on a disk have checksums of their own, see `NvmeStore`.

The first difference in the order of the program is the cause of the others, so the ranks exchange their first ones, and
all raise the same error. A change of state at rest comes before all others, because gathers carry it to every rank. A
rank's own part of a sum comes before the whole sum, which is gathered from these parts.

A fault that changes both runs alike is not found.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from zero.core.optim import Hyper
from zero.distributed.world import World
from zero.engine.beginning import Beginning
from zero.engine.checksums import ChecksumEntry, Checksums, on_host
from zero.engine.full_flat import summed_gradient
from zero.engine.runtime import Runtime
from zero.engine.unit_state import UnitState
from zero.errors import ConfigError, MachineError
from zero.platform.modes import unobserved
from zero.store import Page, PageKind

AGAIN = "other bits when the step was made again"
SUMMED = "summed gradient"
PARTS = {PageKind.PARAM: "parameters", PageKind.FROZEN: "frozen parameters", PageKind.PACKED: "codes"}
AT_REST = "bits changed while nothing wrote to it"


class _Held(NamedTuple):
    """A part of a unit's state on this rank: a tensor in memory, or a page."""

    what: str
    memory: Tensor | None
    """The part itself; None for a page on a disk."""
    page: Page | None = None


_Sums = dict[tuple[int, int, str], int]
"""Checksums by (0 or 1, unit index, part), see `Replay._sums`."""


class Replay:
    """One step that is made twice.

    Creating it applies all deferred updates and sums the state. Collective.

    Args:
        number: the number of the step, for messages.
    """

    @unobserved()
    def __init__(self, runtime: Runtime, number: int) -> None:
        self._runtime, self._plan, self._store = runtime, runtime.plan, runtime.store
        self._device, self._number = runtime.plan.world.compute, number
        runtime.settle()
        self._pages: dict[int, list[Page]] = {unit.index: [] for unit in runtime.units}
        for page in self._plan.pages.store_pages():
            self._pages[page.unit].append(page)
        self._at_rest = _Sums()
        self._changed_before = list[tuple[UnitState, str]]()
        for unit in runtime.units:
            self._at_rest |= self._sums(unit)
            self._remember_frozen(unit)
        self._beginning = Beginning(self._plan.model)
        self._runs: list[
            tuple[list[ChecksumEntry], list[ChecksumEntry]]
        ] = []  # (of the program, of its results), of each run
        self._gradients: dict[str, int] = {}  # by unit name
        self._first: tuple[list[int], str] | None = None  # the first difference: (its place in the program, text)

    def _remember_frozen(self, unit: UnitState) -> None:
        """Compare frozen parameters in memory with the last step that was made twice."""
        remembered = self._runtime.checksums.frozen
        for part in [PARTS[flat.kind] for flat in unit.spec.flats[1:]]:
            if (now := self._at_rest.get((0, unit.index, part))) is not None:
                version, before = remembered.get((unit.index, part), (-1, 0))
                if version == unit.frozen_version and before != now:
                    self._changed_before.append((unit, part))
                remembered[unit.index, part] = unit.frozen_version, now

    # -- forward and backward ------------------------------------------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager for one run, from the first forward to the final gradients; both begin alike."""
        if self._runs:
            self._beginning.restore()
            self._runtime.residency.gathers.invalidate()
        record = self._runtime.checksums
        record.begin()
        try:
            yield
        finally:
            program = record.end()
        record.begin()
        try:
            self._note_results(record)
        finally:
            self._runs.append((program, record.end()))
        self._device.join()  # the next step frees tensors of other streams that the checksums read

    @unobserved()
    def _note_results(self, record: Checksums) -> None:
        """Record what a run leaves, in an order that all ranks share: buffers and summed gradients."""
        for name, buffer in self._plan.model.named_buffers():
            record.note(name, "buffer", [buffer])
        for unit in reversed(self._runtime.units):
            if unit.step.squares is not None:
                summed = summed_gradient(self._runtime, unit)
                own_S = unit.spec.trainable.own_S(summed, self._plan.rank)
                record.note(unit.spec.name, "part of the summed gradient", [own_S])
                record.note(unit.spec.name, SUMMED, [summed])
                record.note(unit.spec.name, "sum of squares", [unit.step.squares])

    @unobserved()
    def compare(self) -> None:
        """Compare the two runs, and the state with that before them. Collective.

        Raises:
            MachineError: something differs, on any rank; the message names the first unit and its rank.
        """
        for unit, part in self._changed_before:
            self._differ([0, 0, unit.index], unit.spec.name, part, AT_REST)
        for unit in self._runtime.units:
            self._compare_at_rest(unit, 0)
        for phase, runs in enumerate(zip(*self._runs, strict=True), start=1):
            first, second = (_numbered(run, on_host(run, self._device)) for run in runs)
            for place, key in enumerate({**second, **first}):
                if first.get(key) != second.get(key):
                    self._differ([phase, place], *key[:2], AGAIN)
            self._gradients |= {unit: value for (unit, what, _), value in second.items() if what == SUMMED}
        self._check()

    def _check(self) -> None:
        """Raise the first difference of all ranks. Collective.

        Raises:
            MachineError: there is one.
        """
        texts = self._plan.world.gather_texts(json.dumps(self._first), "differences between two runs of a step")
        if differences := [(*first, rank) for rank, text in enumerate(texts) if (first := json.loads(text))]:
            *first, _ = min(differences)
            ranks = [str(rank) for *difference, rank in differences if difference == first]
            raise MachineError(
                f"debug.replay: step {self._number}, rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}, {first[1]}. "
                "Resume from the last checkpoint without this machine, unless loss_fn depends on more than its "
                "arguments and the random generators of torch and Python."
            )

    def _differ(self, place: list[int], unit: str, what: str, how: str) -> None:
        if self._first is None or place < self._first[0]:
            self._first = place, f"{unit}, {what}: {how}"

    # -- update --------------------------------------------------------------------------------------------------------

    @unobserved()
    @torch.no_grad()
    def update(self, unit: UnitState, hyper: Hyper) -> None:
        """Update `unit` twice from the same state. Collective if it has matrices."""
        index, name, updater = unit.index, unit.spec.name, self._runtime.updater
        if name in self._gradients and self._sum(summed_gradient(self._runtime, unit)) != self._gradients[name]:
            self._differ([3, 0, index], name, SUMMED, AT_REST)
        self._compare_at_rest(unit, 3)
        changing = [held for held in self._held(unit) if self._is_updated(held)]
        copies = [self._copy(held) for held in changing]
        gradient = [(held, self._copy(held)) for held in self._gradient(unit)]
        results: list[_Sums] = []
        for again in (False, True):
            for held, copy in [*zip(changing, copies, strict=True), *gradient] if again else ():
                self._write(held, copy)
            updater.schedule_update(unit, hyper)
            updater.apply_deferred(unit)
            results.append(self._sums(unit, disks=True))
        for place, now in results[1].items():
            if results[0][place] != now:
                self._differ([3, 0, index], name, f"{place[2]} after the update", AGAIN)
        written = {held.what for held in changing}
        self._at_rest |= {place: now for place, now in results[1].items() if place[2] in written}

    @unobserved()
    def end(self) -> None:
        """Compare the state with that after each unit's update. Collective.

        Raises:
            MachineError: something differs, on any rank, or an update did; the message names the first unit and its
                rank.
        """
        for unit in self._runtime.units:
            self._compare_at_rest(unit, 4)
        self._check()

    # -- state ---------------------------------------------------------------------------------------------------------

    def _held(self, unit: UnitState) -> Iterator[_Held]:
        """Yield the parts of a unit's state on this rank, without gradients and copies of other ranks' shards."""
        memories = unit.own_params(full_update=self._plan.facts.full_update), *unit.shards[1:]
        for flat, memory in zip(unit.spec.flats, memories, strict=True):
            if memory is not None:
                yield _Held(PARTS[flat.kind], memory)
        for page in self._pages[unit.index]:
            if page.kind not in (PageKind.GRAD, PageKind.FIRST_GRAD, PageKind.SECONDARY):
                yield self._in_page(page)

    def _in_page(self, page: Page) -> _Held:
        return _Held(f"page {page.kind} {page.number}", self._store.in_place(page), page)

    def _gradient(self, unit: UnitState) -> Iterator[_Held]:
        """Yield the parts of a unit's gradient that its update reads, and may overwrite."""
        if unit.grad is not None:
            yield _Held("gradient", unit.grad)
            return
        for number in range(self._plan.pages.updated_pages(unit.spec)):
            yield self._in_page(Page(unit.index, PageKind.GRAD, number))

    def _is_updated(self, held: _Held) -> bool:
        if held.page is None:
            return held.what == PARTS[PageKind.PARAM]
        return held.page.kind == PageKind.PARAM or self._plan.pages.is_updated(held.page)

    def _sums(self, unit: UnitState, *, disks: bool = False) -> _Sums:
        """Return the checksums of a unit's state in memory; with `disks` also of pages on disks that updates write.

        Parameters that every rank updates have two checksums: 0 of the shard that others gather from this rank, and 1
            of all parameters, which have changed on every rank when that shard has.
        """
        self._device.join()  # pages in host memory are copied by streams of their own
        index, sums = unit.index, _Sums()
        for held in self._held(unit):
            if held.memory is not None:
                sums[0, index, held.what] = self._sum(held.memory)
            elif disks and self._is_updated(held):
                sums[0, index, held.what] = self._sum(self._copy(held))
        params, layout = unit.own_params(full_update=self._plan.facts.full_update), unit.spec.trainable
        if params is not None and params.numel() > layout.S:
            sums[1, index, PARTS[PageKind.PARAM]] = sums[0, index, PARTS[PageKind.PARAM]]
            sums[0, index, PARTS[PageKind.PARAM]] = self._sum(layout.own_S(params, self._plan.rank))
        return sums

    def _sum(self, tensor: Tensor) -> int:
        return int(self._runtime.checksums.of(tensor))

    def _compare_at_rest(self, unit: UnitState, phase: int) -> None:
        for place, now in self._sums(unit).items():
            if now != self._at_rest[place]:
                gathered, index, what = place
                self._differ([phase, gathered, index], unit.spec.name, what, AT_REST)

    def _copy(self, held: _Held) -> Tensor:
        """Return a copy of a part in host memory."""
        if held.memory is not None:
            return self._device.host.zeros(held.memory.numel(), held.memory.dtype).copy_(held.memory)
        assert held.page is not None
        spec = self._plan.pages.store_pages()[held.page]
        copy = self._device.host.zeros(spec.numel, spec.dtype)
        self._store.read(held.page, copy).wait()
        return copy

    def _write(self, held: _Held, copy: Tensor) -> None:
        if held.page is not None:
            self._store.write(held.page, copy)  # before the update that follows, see `PrefetchStore`
        elif held.memory is not None:
            held.memory.copy_(copy)


def _numbered(entries: Sequence[ChecksumEntry], values: Sequence[int]) -> dict[tuple[str, str, int], int]:
    """Return the checksums by unit, what the tensor is, and how many of these came before, in the order of the run.

    The place in the whole run is no key, because the first run may change the order of reductions.
    """
    before = Counter[tuple[str, str]]()
    numbered = {}
    for entry, value in zip(entries, values, strict=True):
        numbered[(*entry[:2], before[entry[:2]])] = value
        before[entry[:2]] += 1
    return numbered


def check_replay(replay: int, world: World, key: str = "replay") -> None:
    """Raise ConfigError unless steps can be made twice in `world`, every `replay` steps.

    Args:
        key: the name of the setting, for messages.
    """
    if not isinstance(replay, int) or replay < 0:
        raise ConfigError(f"{key}={replay!r}: must be the number of steps between two replays, or 0.")
    exact = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if replay and not world.compute.shares_memory and not exact:
        raise ConfigError(
            f"{key}={replay}: a GPU may compute other bits each time. Set deterministic=true, in Python "
            "torch.use_deterministic_algorithms(True)."
        )
