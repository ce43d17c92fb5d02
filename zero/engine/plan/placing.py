"""Choose the size of pages and the numbers of slots, and check that the state fits.

`core.placement.place` chooses the tier of each page.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from functools import partial
from itertools import product
from typing import NamedTuple

from zero.core.offload import Offload
from zero.core.placement import Placement, Room, Tier, budget_bytes, place, usable_bytes, usable_host_bytes
from zero.core.sizes import MiB, round_up
from zero.engine.plan.facts import Facts
from zero.engine.plan.page_table import PageTable
from zero.engine.plan.sizes import Sizes
from zero.errors import ConfigError
from zero.platform.host_memory import free_host_bytes
from zero.store import PageKind

LEAST_PAGE_BYTES, MOST_PAGE_BYTES, MANY_PAGES = 4 * MiB, 64 * MiB, 1024
"""Limits for page sizes that are chosen automatically: least and largest size, and the largest number of pages.

1,024 pages of 64 MiB are 64 GiB of fp32 master, a model of 17 billion parameters.
"""

ARENA_SHARE = 1 / 8
"""The largest share of a rank's host memory that arena slots take when their size and number are automatic."""

THREADS, READ_AHEAD = 4, 2
"""Defaults of the store: number of threads for each folder (groups of pages in work at once), and of groups that are
read ahead. A thread moves a page at a time, and reaches a part of a fast drive's rate."""

STAGED = 3
"""Slots of `update.staging` without reading ahead: for a part that arrives, one in work, and one that leaves."""

STAGED_BYTES = 128 * MiB
"""Most bytes of such a slot, unless one group of pages takes more.

PCIe moves them in several ms, so launches take little of that time.
"""

AHEAD_SHARE = 0.9
"""The share of a GPU's free memory for reading ahead; the rest is for fragments of torch's allocator."""


class Slots(NamedTuple):
    """The memory for pages on their way: slots of the arena on the host, and slots of staging on a GPU."""

    nbytes: int
    """Bytes of a slot of the arena, which has room for one page of each kind."""
    arena: int
    """The number of slots of the arena, through which pages of a disk are read and written."""
    read_ahead: int
    """The number of arena slots for groups that are read before their update is submitted."""
    bounce_bytes: int
    """Bytes of each bounce buffer, pinned memory through which a thread that updates copies to and from a GPU."""
    bounces: int
    """The number of bounce buffers."""
    staging: int
    """The number of slots on a GPU through which pages in host memory are updated."""
    staged_pages: int
    """The number of pages of each kind for which a slot of staging has room."""
    keeps_staged: bool
    """Whether there is a slot of staging for each part, so that only gradients are copied in; False with a disk."""
    by_host: Set[tuple[int, int]]
    """The (unit, number) of each group that the host updates beside a GPU, so that it needs no slot of staging."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena, with the bounce buffers."""
        return self.arena * self.nbytes + self.bounces * self.bounce_bytes

    @property
    def staging_slot_bytes(self) -> int:
        return self.staged_pages * self.nbytes

    @property
    def staging_bytes(self) -> int:
        return self.staging * self.staging_slot_bytes


_LOWEST: Mapping[str, Tier] = {"none": "device", "cpu": "host", "nvme": "nvme", "auto": "nvme"}


def lowest_tiers(offload: Offload) -> tuple[Tier, Tier, Tier]:
    """Return the slowest tier that (optimizer state, parameters, gradients) may get.

    Buffers are counted for these tiers, because slower tiers need more buffers.
    """
    optimizer, param, grad = (_LOWEST[str(tier)] for tier in offload.kinds)
    return optimizer, param, grad


def thread_count(offload: Offload) -> int:
    """Return the number of the store's threads: a number in the settings, or `THREADS` for each folder that is used."""
    uses_disk = {"nvme", "auto"} & {*offload.kinds}
    return offload.threads or THREADS * (len(offload.paths) if uses_disk else 1)


def bounce_bytes(table: PageTable, offload: Offload) -> int:
    """Return the bytes of a bounce buffer: tensors of one page's elements that may be on a GPU while the host updates.

    0 if none is needed. Each of the store's threads has one.
    """
    on_gpu = {"none", "auto"}
    if not offload.host_share or table.facts.device_is_host or {*offload.kinds} == {"none"}:
        return 0
    numel = min(table.page_numel, max(map(table.sizes.update_numel, table.facts.units), default=0))
    optimizer, param, grad = offload.kinds
    directions = any(unit.matrices for unit in table.facts.units)  # in place of gradients and of parameters
    sizes = [4 * numel] * (directions or grad in on_gpu)
    sizes += [table.facts.precision.compute.itemsize * numel] * (directions or param in on_gpu)
    if optimizer in on_gpu:
        sizes += [
            dtype.itemsize * table.passes.kept.numel(kind, numel) for kind, dtype in table.passes.kept.dtypes.items()
        ]
    return sum(map(round_up, sizes))


def has_many_pages(facts: Facts, offload: Offload, page_bytes: int = LEAST_PAGE_BYTES) -> bool:
    """Return whether master pages of this size would number more than `MANY_PAGES`; False if the size was given."""
    numel = sum(Sizes(facts).update_numel(unit) for unit in facts.units)
    return offload.page_bytes is None and 4 * numel > MANY_PAGES * page_bytes


def auto_page_bytes(facts: Facts, offload: Offload, room: Room) -> int:
    """Return the page size in bytes if none is given.

    It is doubled until there are at most `MANY_PAGES` pages, but not if the arena would then exceed `ARENA_SHARE` of
    the rank's host memory, or a page `MOST_PAGE_BYTES`.
    """
    kinds = ("master", *facts.optimizer.moments, "grad", "param")
    most_bytes = int(ARENA_SHARE * budget_bytes(offload.host_budget, room.host)) // (_least_slots(offload) * len(kinds))
    page_bytes = LEAST_PAGE_BYTES
    while has_many_pages(facts, offload, page_bytes) and 2 * page_bytes <= min(MOST_PAGE_BYTES, most_bytes):
        page_bytes *= 2
    return page_bytes


def free_room(facts: Facts, offload: Offload, held: Mapping[str, int], *, shared: bool) -> Room:
    """Return the bytes that this rank may use on each tier, from the free memory now and the bytes that it holds.

    All ranks use the readings of rank 0 if tiers or page sizes depend on them, or if `shared`.
    """
    world, device = facts.world, facts.world.compute
    on_device, on_host = held.get("device", 0), held.get("host", 0)
    if facts.device_is_host:
        on_device, on_host = 0, on_device + on_host
    device_bytes = usable_bytes(offload, device.free_bytes(), device.total_bytes()) + on_device
    host_bytes = usable_host_bytes(offload, free_host_bytes(), device_is_host=facts.device_is_host)
    mine = f"{device_bytes} {host_bytes // world.whole.local_size + on_host}"
    if shared or "auto" in offload.kinds or has_many_pages(facts, offload):
        mine = world.share(mine)
    return Room(*map(int, mine.split()))


def place_pages(
    table: PageTable,
    offload: Offload,
    room: Room,
    *,
    buffer_bytes: int,
    activation_bytes: int,
    host_activation_bytes: int,
) -> tuple[Placement, Slots]:
    """Return the placement of all state on tiers, and the memory for pages on their way.

    Args:
        table: the page table for the slowest tiers, see `lowest_tiers`.
        buffer_bytes: bytes of the model's own buffers.
        activation_bytes, host_activation_bytes: bytes that forward and backward need for activations, on the device and
            in host memory.

    Raises:
        DoesNotFit: the state does not fit even with the fewest slots.
    """
    groups = _group_bytes(table, offload)
    device_bytes = budget_bytes(offload.device_budget, room.device)
    pages_each = max(map(table.updated_pages, table.facts.units), default=0)
    staged_pages = max(1, min(STAGED_BYTES // max(table.slot_bytes, 1), pages_each))
    staged_bytes = max(staged_pages * table.slot_bytes, 1)
    placed = partial(
        place,
        offload,
        groups,
        param_bytes=table.param_bytes(),
        grad_bytes=table.most_grad_bytes(),
        activation_bytes=activation_bytes,
        resorts=_resorts(table),
        parameters_sharded=table.facts.stage.parameters,
        device_bytes=device_bytes,
        host_bytes=budget_bytes(offload.host_budget, room.host),
        disk_bytes=room.disk,
        device_is_host=table.facts.device_is_host,
    )
    on_device = sum(table.sizes.buffer_bytes().values()) + table.secondary_bytes("device") + buffer_bytes
    bounce = bounce_bytes(table, offload)
    on_host = table.secondary_bytes("host") + host_activation_bytes + thread_count(offload) * bounce
    error: ConfigError | None = None
    for slots, staging_slots in _choices(table, offload, room, (offload.ahead or 0) // staged_bytes):
        try:
            placement = placed(
                device_fixed_bytes=on_device + (staging_slots and staging_slots * staged_bytes),
                host_fixed_bytes=on_host + (slots and slots * table.slot_bytes),
            )
        except ConfigError as too_small:
            error = too_small
            continue
        parts = _staged_parts(table, placement, by_host := _host_groups(table, offload, placement), staged_pages)
        on_disk = "nvme" in (placement.param, placement.grad, *placement.optimizer.values())
        if (on_disk and not slots and (groups or table.copied_pages())) or (parts and not staging_slots):
            continue  # a slower tier than was hoped for, which needs slots
        if parts and offload.ahead is None and activation_bytes:
            staging_slots += _bytes_ahead(table, device_bytes - placement.bytes["device"]) // staged_bytes
        return placement, Slots(
            nbytes=table.slot_bytes,
            arena=slots,
            read_ahead=max(slots - thread_count(offload), 0),
            bounce_bytes=bounce,
            bounces=thread_count(offload) if bounce else 0,
            staging=min(staging_slots, parts),
            staged_pages=staged_pages,
            keeps_staged=0 < parts <= staging_slots and "nvme" not in placement.optimizer.values(),
            by_host=by_host,
        )
    assert error is not None
    raise error


def _bytes_ahead(table: PageTable, free_bytes: int) -> int:
    """Return how many of a GPU's free bytes are for reading ahead."""
    spare_bytes = 3 * 4 * max(unit.trainable.P for unit in table.facts.units)  # to read a whole unit in fp32
    return max(int(AHEAD_SHARE * free_bytes) - spare_bytes, 0)


def _group_bytes(table: PageTable, offload: Offload) -> list[tuple[int, int, int]]:
    """Return the unit, the number and the bytes of each group of pages of the optimizer's state."""
    tier = lowest_tiers(offload)[0]
    by_unit: dict[int, list[int]] = {}
    for pages, units in table.equal_units:
        sizes = [0] * table.updated_pages(units[0])
        for page in filter(table.is_updated, pages):
            sizes[page.number] += table.bytes_on(page.spec, tier)
        by_unit |= dict.fromkeys((unit.index for unit in units), sizes)
    return [(unit, number, size) for unit, sizes in sorted(by_unit.items()) for number, size in enumerate(sizes)]


def _choices(table: PageTable, offload: Offload, room: Room, ahead: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of slots (of the arena, of staging) to try, the best first.

    Args:
        ahead: the number of slots of staging for `offload.ahead`.
    """
    arena, staging = [0], [0]
    if "nvme" in lowest_tiers(offload):
        full = min(_arena_slots(table, offload, room), max(_group_count(table), table.copied_pages()))
        arena += [full, min(offload.threads or THREADS, full) if offload.ahead is None else full]
    if offload.host_share < 1 and not table.facts.device_is_host and _may_stage(table, offload):
        staging += [STAGED + ahead, 1]
    yield from product(dict.fromkeys(arena), staging)


def _may_stage(table: PageTable, offload: Offload) -> bool:
    """Return whether an update may have all its pages in memory, and some of them in host memory."""
    optimizer, param, grad = offload.kinds
    words: dict[str, str] = {PageKind.PARAM: param, PageKind.GRAD: grad}
    return any(
        "nvme" not in there and {"cpu", "auto"} & there
        for unit in table.facts.units
        for now in table.passes.of(unit)
        for there in [{words.get(kind, optimizer) for kind in table.passes.kinds_of(now)}]
    )


def _group_count(table: PageTable) -> int:
    return sum(table.updated_pages(unit) * len(table.passes.of(unit)) for unit in table.facts.units)


def _staged_parts(table: PageTable, placement: Placement, by_host: Set[tuple[int, int]], staged_pages: int) -> int:
    """Return the number of parts that a GPU updates and that have pages in host memory, and none on a disk."""
    if table.facts.device_is_host:
        return 0
    return len({
        (unit, turn, number // staged_pages)
        for unit, number in placement.optimizer.keys() - by_host
        for turn, tiers in enumerate(_tiers_of_passes(table, placement, unit, number))
        if "host" in tiers and "nvme" not in tiers
    })  # fmt: skip


def _host_groups(table: PageTable, offload: Offload, placement: Placement) -> frozenset[tuple[int, int]]:
    """Return the (unit, number) of each group of pages that the host updates beside a GPU.

    They are the last of each unit's groups that are not whole on the device, so that host and device share the work on
    every unit.
    """
    if not offload.host_share or table.facts.device_is_host:
        return frozenset()
    offloaded: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for unit, number in placement.optimizer:
        if any(tiers != {"device"} for tiers in _tiers_of_passes(table, placement, unit, number)):
            offloaded[unit].append((unit, number))
    share = offload.host_share
    return frozenset(
        group for groups in offloaded.values() for group in sorted(groups)[len(groups) - round(share * len(groups)) :]
    )


def _tiers_of_passes(table: PageTable, placement: Placement, unit: int, number: int) -> list[set[Tier]]:
    """Return the tiers of the pages that each pass of an update needs of a group."""
    tier = placement.optimizer[unit, number]
    tiers: dict[str, Tier] = {PageKind.PARAM: placement.param, PageKind.GRAD: placement.grad}
    passes = table.passes.of(table.facts.units[unit])
    return [{tiers.get(kind, tier) for kind in table.passes.kinds_of(now)} for now in passes]


def _least_slots(offload: Offload) -> int:
    return thread_count(offload) + READ_AHEAD


def _arena_slots(table: PageTable, offload: Offload, room: Room) -> int:
    if offload.ahead is not None:
        return thread_count(offload) + offload.ahead // max(table.slot_bytes, 1)
    if table.facts.device_is_host:  # host memory is what offloading to a disk saves
        return _least_slots(offload)
    return max(
        _least_slots(offload),
        int(ARENA_SHARE * budget_bytes(offload.host_budget, room.host)) // max(table.slot_bytes, 1),
    )


def _resorts(table: PageTable) -> tuple[str, ...]:
    """Return advice, for an error message, that reduces the bytes on each rank."""
    if table.facts.stage.parameters:
        return (*("set zero.gather=auto",) * table.facts.keeps_secondary, "use more ranks")
    if table.facts.world.size == 1:
        return ("use more ranks with zero.stage=3",)
    return ("set zero.stage=3", "use more ranks") if table.facts.stage.moments else ("set zero.stage=3",)
