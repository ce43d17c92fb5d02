"""Choose the size of pages and the numbers of slots, and check that the state fits.

`core.placement.place` chooses the tier of each page.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from zero.core.offload import Offload
from zero.core.placement import Placement, Room, Tier, budget_bytes, place
from zero.core.sizes import MiB
from zero.engine.facts import Facts
from zero.engine.page_table import PageTable
from zero.errors import ConfigError

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
"""Fewest slots of `zero.engine.staging`: a group that arrives, one that is updated, and one that leaves."""


class Placed(NamedTuple):
    """The placement of all state, and the numbers of slots for pages on their way."""

    arena_slots: int
    staging_slots: int
    placement: Placement


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


def has_many_pages(facts: Facts, offload: Offload, page_bytes: int = LEAST_PAGE_BYTES) -> bool:
    """Return whether master pages of this size would number more than `MANY_PAGES`; False if the size was given."""
    numel = sum(facts.update_numel(unit) for unit in facts.units)
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


def place_pages(
    table: PageTable,
    offload: Offload,
    room: Room,
    *,
    buffer_bytes: int,
    activation_bytes: int,
    host_activation_bytes: int,
) -> Placed:
    """Return the placement of all state on tiers, and the numbers of slots.

    Args:
        table: the page table for the slowest tiers, see `lowest_tiers`.
        buffer_bytes: bytes of the model's own buffers.
        activation_bytes, host_activation_bytes: bytes that forward and backward need for activations, on the device and
            in host memory.

    Raises:
        DoesNotFit: the state does not fit even with the fewest slots.
    """
    optimizer_tier = lowest_tiers(offload)[0]
    groups = [
        (unit.index, number) for unit in table.units for number, _ in enumerate(table.cut(table.update_numel(unit)))
    ]
    sizes: Counter[tuple[int, int]] = Counter()
    for page, spec in table.store_pages().items():
        if table.is_updated(page):
            sizes[page.unit, page.number] += table.bytes_on(spec, optimizer_tier)
    lowest = {optimizer_tier, table.param_tier, table.grad_tier}
    full = min(_arena_slots(table, offload, room), max(len(groups), table.copied_pages())) if "nvme" in lowest else 0
    fewest = min(offload.threads or THREADS, full) if offload.ahead is None else full
    stages = offload.compute == "device" and not table.device_is_host and offload.optimizer != "nvme"
    parts = sum(-(-table.updated_pages(unit) // table.staged_pages) for unit in table.units)
    staged = (
        min(STAGED + (offload.ahead or 0) // table.staging_slot_bytes, parts) if stages and lowest != {"device"} else 0
    )
    device_bytes = budget_bytes(offload.device_budget, room.device)

    def placed(arena_slots: int, staging_slots: int) -> Placement:
        return place(
            offload,
            [(*group, sizes[group]) for group in groups],
            param_bytes=table.param_bytes(),
            grad_bytes=table.most_grad_bytes(),
            activation_bytes=activation_bytes,
            resorts=_resorts(table),
            parameters_sharded=table.stage.parameters,
            device_fixed_bytes=sum(table.buffer_bytes().values())
            + (staging_slots and staging_slots * table.staging_slot_bytes)
            + table.secondary_bytes("device")
            + buffer_bytes,
            host_fixed_bytes=(arena_slots and arena_slots * table.slot_bytes)
            + table.secondary_bytes("host")
            + host_activation_bytes,
            device_bytes=device_bytes,
            host_bytes=budget_bytes(offload.host_budget, room.host),
            disk_bytes=room.disk,
            device_is_host=table.device_is_host,
        )

    for slots in (full, fewest):
        try:
            placement = placed(slots, 0)
            if not staged or "host" not in (placement.grad, placement.param, *placement.optimizer.values()):
                return Placed(slots, 0, placement)
            placement = placed(slots, staged)
        except ConfigError:
            if slots == fewest:
                raise
            continue
        if offload.ahead is None and activation_bytes:
            free_bytes = device_bytes - placement.bytes["device"]
            staged = min(staged + free_bytes // table.staging_slot_bytes, parts)
        return Placed(slots, staged, placement)
    raise AssertionError


def _least_slots(offload: Offload) -> int:
    return thread_count(offload) + READ_AHEAD


def _arena_slots(table: PageTable, offload: Offload, room: Room) -> int:
    if offload.ahead is not None:
        return thread_count(offload) + offload.ahead // table.slot_bytes
    if table.device_is_host:  # host memory is what offloading to a disk saves
        return _least_slots(offload)
    return max(
        _least_slots(offload), int(ARENA_SHARE * budget_bytes(offload.host_budget, room.host)) // table.slot_bytes
    )


def _resorts(table: PageTable) -> tuple[str, ...]:
    """Return advice, for an error message, that reduces the bytes on each rank."""
    if table.stage.parameters:
        return (*("set zero.gather=auto",) * table.keeps_secondary, "use more ranks")
    if table.world.size == 1:
        return ("use more ranks with zero.stage=3",)
    return ("set zero.stage=3", "use more ranks") if table.stage.moments else ("set zero.stage=3",)
