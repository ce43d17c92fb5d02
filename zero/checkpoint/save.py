"""Save a state: every rank writes its file, page by page, and its index, and rank 0 publishes them together.

Waiting updates are made first, so a checkpoint holds what the next forward would see. Pages are read ahead of the
writer, a few at a time: a state larger than memory passes through a few buffers. What is hashed is what was in memory
on its way to the disk.

Or the state is copied first, and a thread writes the copy behind the steps that follow.

Before the first byte is written, each file's header and the manifest are made, and a size over its limit is an error.
Ranks exchange their results, a hash for each, before any of them returns: a save is acknowledged on all ranks or fails
on all of them, and what failed is removed.

Source: Mohan et al. 2021, "CheckFreq", for what belongs to a state.
"""

import itertools
import json
import math
import platform
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero.checkpoint.contents import BUFFER, FROZEN, PARAMETER, check, flats
from zero.checkpoint.disk import naming
from zero.checkpoint.manifest import FORMAT, UNWRITTEN, File, Flat, Held, Index, Manifest, file_name, held, to_text
from zero.checkpoint.publish import Root
from zero.checkpoint.shard import ShardWriter
from zero.core.layout import Layout, pages
from zero.core.loss_scale import LossScale
from zero.core.suggest import own_arguments
from zero.distributed.failure import first_line, some_ranks
from zero.distributed.world import World
from zero.engine.arguments import check_folder, check_state
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.engine.takeover import buffers_of
from zero.errors import CheckpointError, StoreError, if_it_fails
from zero.platform.device import work_alone
from zero.platform.files import memory_of
from zero.platform.safetensors_files import header
from zero.platform.threads import Beside
from zero.progress import Progress, silent
from zero.store import Page, Ticket

AHEAD = 8
"""Pages of the store that are read before the writer needs them."""

MEET_S = 1.0
"""How long ranks whose threads are at work stay apart."""


@own_arguments({"root": "zero.save(state, folder)"})
def save(
    state: State, root: Root | str | Path, facts: Mapping[str, Any] | None = None, progress: Progress = silent
) -> Path:
    """Write `state` to a new folder under `root` and publish it. Collective; when it returns, no crash takes it back.

    Args:
        state: any state of any stage and tier. It can be used afterwards; its deferred updates are applied first.
        root: the folder that holds a run's checkpoints, on a disk that all ranks share; made if its parent exists.
        facts: JSON values to find again in `Checkpoint.facts`: the config, where the data is, and the like.
        progress: called with the bytes that this rank has written.

    Returns:
        The published folder: `step-` and the number of steps tried so far, skipped ones included.

    Raises:
        CheckpointError: on every rank, with the first failure; nothing was published, and older ones are untouched.
    """
    return begin(state, root, facts, progress=progress).finish()


def begin(
    state: State,
    root: Root | str | Path,
    facts: Mapping[str, Any] | None = None,
    *,
    behind: bool = False,
    progress: Progress = silent,
) -> "Saving":
    """The beginning of a save; `finish` is its end. Collective.

    Args:
        behind: copy this rank's part in host memory and let a thread write the copy, so that the state may move on.

    Raises:
        CheckpointError: no folder could be made.
    """
    check_state(state, "zero.save", "zero.save(state, folder)")
    if not isinstance(root, Root):
        check_folder(root, "zero.save", "zero.save(state, folder)")
        root = Root(Path(root))
    return Saving(state, root, facts or {}, behind=behind, progress=progress)


def facts_of(
    step: int, scale: LossScale, *, dynamic: bool, ties: Mapping[str, str], rested: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """What a manifest says of a state beside tensors and files, as `load` reads it.

    The caller adds `given`.

    Args:
        step: updates made.
        dynamic: whether the scale moves.
        rested: parameters to steps in which they did not train, for those that have any.
    """
    numbers = {"step": step, "scale": list(scale), "dynamic": dynamic} | ({"rested": dict(rested)} if rested else {})
    return {"state": numbers, "ties": dict(ties), "versions": versions()}


def versions() -> dict[str, str | None]:
    """Of this library, torch and Python; None for this one where it runs from its sources without being installed."""
    return {"zero": version(), "torch": str(torch.__version__), "python": platform.python_version()}


def version() -> str | None:
    """Of this library; None where it runs from its sources without being installed."""
    return next((one.version for one in metadata.distributions(name="functional-zero")), None)


def snapshot_bytes(plan: Plan) -> int:
    """Host memory that a copy of this rank's part takes."""
    return sum(piece.part.nbytes for piece in held(flats(plan, buffers_of(plan.model)), plan.world.rank))


class Saving:
    """A save under way: this rank's file is written at once, or by a thread. Its arguments are those of `begin`."""

    def __init__(self, state: State, root: Root, facts: Mapping[str, Any], *, behind: bool, progress: Progress) -> None:
        state.runtime.tree.check()
        state.runtime.settle()
        plan, buffers = state.plan, buffers_of(state.model)
        self._world, self._root = plan.world, root
        self._threads: list[threading.Thread] = []
        self._report: dict[str, Any] = {"error": "the thread that writes its file died"}
        self._world.at(f"step {state.tried}, save")
        dynamic, ties = plan.precision.scale.static is None, tied_names(plan.model)
        numbers = facts_of(state.step, state.scale, dynamic=dynamic, ties=ties, rested=state.runtime.updater.rested)
        self._manifest = Manifest(
            format=FORMAT,
            step=state.tried,
            world=plan.world.size,
            flats=flats(plan, buffers),
            files=(UNWRITTEN,) * plan.world.size,
            finite=False,
            facts={**numbers, "given": dict(facts)},
        )
        self._held = held(self._manifest.flats, plan.world.rank)
        gather_reports(self._world, partial(self._check, buffers))
        self._folder = Path(by_rank_0(self._world, lambda: str(root.begin(state.tried))))
        with if_it_fails(self.abandon):
            self._random = random_state()
            values = _all_values(state, buffers, self._manifest.flats, self._held)
            if behind:
                with self._reporting():
                    copies = [tensor.clone() for tensor in values]
                    # No `stop`: the writer's pool takes no more blocks once the script is over.
                    self._threads = [Beside(partial(self._write_behind, copies), name="saving")]
                    self._threads[0].start()
            else:
                self._write(values, progress)

    @property
    def is_written(self) -> bool:
        """This rank's file is on the disk, or failed to get there: `finish` will not wait for this rank."""
        return not any(thread.is_alive() for thread in self._threads)

    def finish(self) -> Path:
        """Wait until every rank's file is written, and publish. Collective.

        Raises:
            CheckpointError: on every rank, with the first failure.
        """
        with if_it_fails(self.abandon):
            join(self._world, self._threads)
            reports = gather_reports(self._world, lambda: self._report)
            return Path(by_rank_0(self._world, lambda: str(self._publish(reports))))

    def abandon(self) -> None:
        """Remove what was written, as far as that is possible."""
        if self._world.rank == 0:
            self._root.abandon(self._folder)

    def _publish(self, reports: list[dict[str, Any]]) -> Path:
        files = tuple(File(*report["file"]) for report in reports)
        manifest = self._manifest._replace(files=files, finite=all(report["finite"] for report in reports))
        return self._root.publish(self._folder, manifest.step, to_text(manifest))

    def _check(self, buffers: Mapping[str, Tensor]) -> dict[str, Any]:
        """Raise the errors of a save that depend on no value, before a folder is made."""
        check(buffers)
        header([piece.part for piece in self._held])
        if self._world.rank == 0:
            to_text(self._manifest)
        return {}

    def _write_behind(self, copies: list[Tensor]) -> None:
        work_alone()
        self._write(copies, silent)

    def _write(self, values: Iterable[Tensor], progress: Progress) -> None:
        rank, world = self._world.rank, self._world.size
        parts = [piece.part for piece in self._held]
        finite, done, total = True, 0, sum(part.nbytes for part in parts)
        with self._reporting(), ShardWriter(self._root.disk, self._folder / file_name(rank, world), parts) as writer:
            for tensor in values:
                finite = finite and _is_finite(tensor)
                writer.write(memory_of(tensor))
                done += tensor.nbytes
                progress("saving", done, total)
            index = Index(writer.finish(), self._random)
            file = self._root.write_index(self._folder, rank, world, index)
            self._report = {"file": file, "finite": finite}

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """An error on one rank, whatever it is, is raised by all ranks in `finish`: they must not part ways here."""
        try:
            yield
        except (CheckpointError, StoreError) as error:
            self._report = {"error": str(error)}
        except Exception as error:
            self._report = {"error": f"its file was not written: {type(error).__name__}: {first_line(error)}"}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names in the model's state dict -> the name that the tensor goes by in a checkpoint: its first one."""
    tensors = {name: one for name, one in model.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}
    first = {id(one): name for name, one in reversed(tensors.items())}
    return {name: first[id(one)] for name, one in tensors.items() if first[id(one)] != name}


# -- together ----------------------------------------------------------------------------------------------------------


def gather_reports(world: World, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """What every rank's `work` returned, on every rank.

    Raises:
        CheckpointError: some rank's `work` failed.
    """
    try:
        report = work()
    except (CheckpointError, StoreError) as error:
        report = {"error": str(error)}
    reports = [json.loads(text) for text in world.gather_texts(json.dumps(report), "reports of a checkpoint")]
    failed = next((f"rank {rank}: {one['error']}" for rank, one in enumerate(reports) if "error" in one), None)
    if failed is not None:
        raise CheckpointError(failed if world.size > 1 else failed.removeprefix("rank 0: "))
    return reports


def join(world: World, threads: Sequence[threading.Thread], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Return when these threads have ended, on every rank. Collective.

    Ranks that wait have a deadline and ranks that work have none: so all meet again and again until the last is done.

    Args:
        meanwhile: called by this thread now and then.
    """
    at_work = True
    while at_work:
        end_s = time.monotonic() + min(MEET_S, world.timeout_s / 4)
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        meanwhile()
        words = world.gather_texts("01"[any(thread.is_alive() for thread in threads)], "threads at work")
        at_work = "1" in words


def by_rank_0(world: World, work: Callable[[], Any]) -> Any:
    """What `work` returned on rank 0, where alone it runs, on every rank: a JSON value.

    Raises:
        CheckpointError: it failed; on every rank.
    """
    return gather_reports(world, lambda: {"value": work()} if world.rank == 0 else {})[0]["value"]


def check_shared(world: World, root: Path) -> None:
    """Refuse a folder that is not the same one on every node: no save into it would be whole. Collective.

    Raises:
        CheckpointError: on every rank; it cannot be made, or some ranks do not see what rank 0 writes there.
    """

    def leave_mark() -> str:
        with naming(root, "making it"):
            root.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=".seen-by-all-", dir=root)).name

    mark = root / by_rank_0(world, leave_mark)
    told = gather_reports(world, lambda: {"seen": mark.is_dir()})
    by_rank_0(world, lambda: mark.rmdir())
    if blind := [rank for rank, one in enumerate(told) if not one["seen"]]:
        raise CheckpointError(
            f"{some_ranks(blind)} of {world.size} {'does' if len(blind) == 1 else 'do'} not see {root} as rank 0 does: "
            "checkpoints of several nodes need a disk that all of them share; set checkpoint.dir, or checkpoint.every=0"
        )


# -- one rank ----------------------------------------------------------------------------------------------------------


class _Stretch(NamedTuple):
    """Elements [start, stop) of a unit's flat, without its gaps."""

    unit: int
    kind: str
    dtype: torch.dtype
    layout: Layout
    start: int
    stop: int


def _all_values(
    state: State, buffers: Mapping[str, Tensor], flats: Sequence[Flat], pieces: Iterable[Held]
) -> Iterator[Tensor]:
    """The contents of this rank's file, in order: contiguous, on the host, each valid until the next."""
    for (number, kind), group in itertools.groupby(pieces, key=lambda piece: (piece.flat, piece.kind)):
        if kind == BUFFER:
            for piece in group:
                yield buffers[piece.slot.name].detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
        else:
            flat, unit = flats[number], number % len(state.plan.units)
            dtype = getattr(torch, flat.kinds[kind])
            yield from _values(state, _Stretch(unit, kind, dtype, flat.layout, *flat.share(state.plan.world.rank)))


def _values(state: State, stretch: _Stretch) -> Iterator[Tensor]:
    """The elements of a stretch in order, without gaps: contiguous, on the host, each valid until the next."""
    for start, page in _pages(state, stretch):
        first, last = max(start, stretch.start), min(start + page.numel(), stretch.stop)
        for piece in stretch.layout.pieces(first, last):
            begin = first - start + piece.start_in_range
            yield page[begin : begin + piece.slot_stop - piece.slot_start]


def _pages(state: State, stretch: _Stretch) -> Iterator[tuple[int, Tensor]]:
    """What this rank has of the stretch's flat, page by page: the first element's place in the flat, and values."""
    unit, master = state.runtime.units[stretch.unit], state.plan.precision.master
    if stretch.kind == FROZEN:
        yield from _kept(state, stretch, "frozen", stretch.dtype, unit.frozen_S)
    elif stretch.kind != PARAMETER:
        form = state.plan.optimizer.form(stretch.kind)
        for start, page in _kept(state, stretch, stretch.kind, form.dtype):
            yield start, form.values_of(page)
    elif master.kind is None:
        yield from _parameters(state, stretch)
    else:
        kept = _kept(state, stretch, master.kind, master.dtype)
        params = _parameters(state, stretch) if master.reads_params else itertools.repeat((0, torch.empty(0)))
        for (start, kept_K), (_, param_K) in zip(kept, params, strict=False):
            yield start, master.of(param_K, kept_K)


def _parameters(state: State, stretch: _Stretch) -> Iterator[tuple[int, Tensor]]:
    """The same of what the model computes with."""
    in_memory = state.runtime.units[stretch.unit].own_params(full_update=state.plan.full_update)
    return _kept(state, stretch, "param", state.plan.precision.compute, in_memory)


def _kept(
    state: State, stretch: _Stretch, kind: str, dtype: torch.dtype, in_memory: Tensor | None = None
) -> Iterator[tuple[int, Tensor]]:
    """The pages of one kind that the stretch touches: out of memory, or out of the store."""
    plan, layout = state.plan, stretch.layout
    origin, end = (0, layout.P) if plan.full_update and kind != "frozen" else layout.shard(plan.rank)
    wanted = [
        (number, origin + start, stop - start)
        for number, (start, stop) in enumerate(pages(end - origin, plan.page_numel))
        if origin + start < stretch.stop and origin + stop > stretch.start
    ]
    if in_memory is None:
        yield from _read(state, stretch.unit, kind, dtype, wanted)
        return
    for _, start, numel in wanted:
        yield start, plan.world.compute.host.bring(in_memory[start - origin : start - origin + numel].detach())


def _read(
    state: State, unit: int, kind: str, dtype: torch.dtype, wanted: list[tuple[int, int, int]]
) -> Iterator[tuple[int, Tensor]]:
    """Pages of the store in order, `AHEAD` of them on their way; each valid until the next."""
    store, host = state.runtime.store, state.plan.world.compute.host
    sizes = [(number, start, state.plan.kept.numel(kind, count)) for number, start, count in wanted]
    most = max((numel for _, _, numel in sizes), default=0)
    free = [host.zeros(most, dtype) for _ in sizes[: AHEAD + 1]]
    under_way: deque[tuple[int, Tensor, Tensor, Ticket]] = deque()
    coming = iter(sizes)
    while True:
        for number, start, numel in itertools.islice(coming, len(free)):
            buffer = free.pop()
            under_way.append((start, buffer, buffer[:numel], store.read(Page(unit, kind, number), buffer[:numel])))
        if not under_way:
            return
        start, buffer, page, ticket = under_way.popleft()
        ticket.wait()
        yield start, page
        free.append(buffer)


def random_state() -> dict[str, Any]:
    """Where this rank's generators are: Python's, and torch's on the CPU and on the GPU."""
    version, internal, following = random.getstate()
    return {
        "python": [version, list(internal), following],
        "torch": bytes(memory_of(torch.get_rng_state())).hex(),
        "cuda": bytes(memory_of(torch.cuda.get_rng_state())).hex() if torch.cuda.is_initialized() else None,
    }


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    wide = tensor.float() if tensor.itemsize == 1 else tensor  # torch has no extremes of float8
    return all(math.isfinite(end) for end in torch.aminmax(wide))
