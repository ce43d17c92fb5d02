"""Allocate the pages of a plan: device memory, host memory and files, and the store's slots and threads."""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from zero.core.sizes import GiB, round_up, size_text
from zero.engine.arguments import check_type
from zero.engine.plan import Plan, thread_count
from zero.errors import StoreError, if_it_fails
from zero.platform.arena import Arena
from zero.platform.modes import unobserved
from zero.platform.run_files import folders_of, free_by_file_system, in_memory
from zero.progress import Progress, silent
from zero.store import (
    REQUEST_BYTES,
    MemoryBlock,
    MemoryStore,
    NvmeStore,
    Page,
    PrefetchStore,
    Store,
    Tiers,
    probe,
    spread,
)

PROBED_BYTES = GiB
"""If a rank puts at least this many bytes in several folders, their disks are measured first (up to 3 seconds)."""

MOST_UNEQUAL = 1 / 64
"""The least rate that a disk is assumed to have, as a share of the fastest disk's rate."""

LEAST_PROBED_BYTES = 2 * REQUEST_BYTES
"""Folders with less room are not measured: the measurement needs this much, and such folders get few pages anyway."""

ROOM_SHARE = 15 / 16
"""The share of several folders' free bytes that is used, if that is enough; the file system needs the rest."""


def open_store(plan: Plan, *, disk: Store | None = None, progress: Progress = silent) -> PrefetchStore:
    """Open the store of this rank and allocate every page, filled with zeros.

    Args:
        plan: defines the pages and the tier of each.
        disk: a store to use for the nvme tier instead of a file in `offload.path`. It must pass
            `zero.testing.StoreContract`.
        progress: called with the progress of measuring disks. They are measured only if there are several and the files
            are large.

    Returns:
        The store. Its `close()` frees its host memory and disk space.

    Raises:
        StoreError: `offload.path` cannot be used, or has too little space. Nothing is allocated then.
    """
    check_type(plan, Plan, "zero.open_store", "store = zero.open_store(plan)")
    specs, device = plan.pages.store_pages(), plan.world.compute
    on_host = partial(host_block, plan)  # a CPU's memory is the host's
    with ExitStack() as undo, unobserved():  # closes what was opened if a later line raises
        stores: dict[str, Store] = {
            "device": MemoryStore(device.device, on_host if device.shares_memory else None),
            "host": MemoryStore(torch.device("cpu"), on_host, copy=device.copy),
        }
        on_disk = [page for page in specs if plan.tier(page) == "nvme"]
        lent = frozenset({"nvme"} if disk is not None else ())
        if on_disk and disk is None:
            disk = open_disks(plan, on_disk, progress)
        if disk is not None:
            stores["nvme"] = disk
            undo.callback(disk.close)
        store = PrefetchStore(
            Tiers(stores, plan.tier, lent),
            timeout_s=plan.world.timeout_s,
            prepare=device.prepare_thread,
            threads=thread_count(plan.offload),
        )
        undo.pop_all()
        undo.callback(store.close)
        allocate(plan, store, specs)
        give_slots(plan, store)
        undo.pop_all()
    return store


def allocate(plan: Plan, store: Store, pages: Iterable[Page]) -> None:
    """Allocate pages of the plan on their tiers.

    In memory, pages of one unit and kind are adjacent, so one kernel can update them.
    """
    specs = plan.pages.store_pages()
    for _, together in groupby(pages, key=lambda page: (page.unit, page.kind)):
        store.allocate_all({page: (specs[page].numel, specs[page].dtype) for page in together})


def give_slots(plan: Plan, store: PrefetchStore) -> None:
    """Give a store the slots, bounce buffers and threads of the plan."""
    arena = Arena(plan.arena_bytes, plan.world.compute, pin=plan.offload.pin)
    with if_it_fails(arena.close):
        store.refit(
            [arena.take(plan.slots.nbytes) for _ in range(plan.slots.arena)],
            [arena.take(plan.slots.bounce_bytes) for _ in range(plan.slots.bounces)],
            threads=thread_count(plan.offload),
            read_ahead=plan.slots.read_ahead,
            release=arena.close,
        )


def tiers_of(store: PrefetchStore) -> Tiers:
    """Return the tiers of a store that `open_store` has opened."""
    assert isinstance(store.inner, Tiers)
    return store.inner


def host_block(plan: Plan, sizes: list[int]) -> MemoryBlock:
    """Return host memory for pages with these numbers of bytes."""
    return Arena(sum(map(round_up, sizes)), plan.world.compute, pin=plan.offload.pin)


def open_disks(plan: Plan, pages: Iterable[Page], progress: Progress = silent) -> Store:
    """Open files of this rank for `pages`, one in each folder of `offload.path`, and spread the pages over them."""
    specs = plan.pages.store_pages()
    sizes = {page: specs[page].block_bytes for page in pages}
    folders, nbytes = folders_of(plan.offload.paths), sum(sizes.values())
    if plan.world.rank == 0 and (warning := in_memory(folders)):
        warnings.warn(warning, stacklevel=3)
    rooms = [nbytes]
    if len(folders) > 1:
        for folder in folders:  # raises an error with the folder's name if it is missing or not writable
            NvmeStore(folder).close()
        rooms = _rooms(folders, nbytes, plan.world.whole.local_size)
    rates = [1.0 for _ in folders]
    if nbytes >= PROBED_BYTES and len(folders) > 1:
        rates = [
            probe(folder, size_bytes=min(nbytes // len(folders), room), progress=progress)
            if room >= LEAST_PROBED_BYTES
            else 0.0
            for folder, room in zip(folders, rooms, strict=True)
        ]
    least = MOST_UNEQUAL * (max(rates) or 1.0)  # all rates are 0 if no measurement ended in time
    where = spread(sizes, [max(rate, least) for rate in rates], rooms)
    with ExitStack() as undo:
        disks: dict[str, Store] = {}
        for number, folder in enumerate(folders):
            own_bytes = sum(nbytes for page, nbytes in sizes.items() if where[page] == str(number))
            disks[str(number)] = NvmeStore(folder, capacity_bytes=own_bytes, verify=plan.offload.verify)
            undo.callback(disks[str(number)].close)
        undo.pop_all()
    return disks["0"] if len(disks) == 1 else Tiers(disks, where.__getitem__)


def _rooms(folders: Sequence[Path], nbytes: int, ranks: int) -> list[int]:
    """Return the bytes that this rank may put in each of several folders.

    That is an equal share for each rank of the node, because all ranks allocate at the same time. If that share is too
    small, all free bytes are returned: the other ranks may have allocated theirs already.

    Args:
        nbytes: bytes that this rank needs.
        ranks: number of ranks of the node.

    Raises:
        StoreError: the folders together have fewer than `nbytes` free bytes.
    """
    free = free_by_file_system(folders)
    rooms = {folder: free_bytes // len(those) for those, free_bytes in free for folder in those}
    if sum(rooms[folder] for folder in folders) < nbytes:  # also right if two names mean the same folder
        has = ", ".join(f"{size_text(free_bytes)} in {' and '.join(map(str, those))}" for those, free_bytes in free)
        raise StoreError(
            f"the state store needs {size_text(nbytes)}, but only {has} are free. Set offload.path to folders with "
            "more space, or keep less there."
        )
    shares = {folder: int(ROOM_SHARE * room) // ranks for folder, room in rooms.items()}
    enough = sum(shares[folder] for folder in folders) >= nbytes
    return [(shares if enough else rooms)[folder] for folder in folders]
