"""Save a state: every rank writes its file, page by page, and its index; rank 0 publishes all files together.

Deferred updates are applied first, so a checkpoint holds the parameters that the next forward would use. Only a few
pages are read before the writer needs them, so a state larger than memory passes through a few buffers. A GPU copies to
these buffers on a stream of its own.

With `behind`, a thread copies the state during the next forward and backward, which only read it. Before the state
changes, training waits for the end of the copies. The thread then hashes and writes them.

Ranks exchange their results before any of them returns. So a save succeeds on all ranks, or it fails on all ranks and
its files are removed.

Source: Mohan et al. 2021, "CheckFreq", for the list of values that a checkpoint needs.
"""

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zero.checkpoint.agreement import by_rank_0, gather_reports, join_threads
from zero.checkpoint.contents import check_sizes, flats, tied_names
from zero.checkpoint.files.publish import Root, own_root
from zero.checkpoint.files.shard import ShardWriter
from zero.checkpoint.format.facts import saved_facts
from zero.checkpoint.format.manifest import PACKED_SHAPES, File, Held, Index, Manifest, file_name, files_of, held
from zero.checkpoint.format.random_generators import random_state
from zero.checkpoint.format.texts import FORMAT, to_text
from zero.checkpoint.frozen_file import FrozenFile, frozen_version, recall, remember
from zero.checkpoint.pieces import pieces_of, pieces_on_host, staging_bytes
from zero.distributed.world import World
from zero.engine.arguments import check_folder, check_type
from zero.engine.model import buffers_of
from zero.engine.runtime import Runtime
from zero.engine.state import State
from zero.errors import CheckpointError, if_it_fails, with_class
from zero.platform.arena import Arena
from zero.platform.device import PASSED
from zero.platform.files import memory_of
from zero.platform.handle import Then
from zero.platform.modes import unobserved
from zero.platform.threads import BackgroundThread
from zero.progress import Progress, silent

_ROOTS: WeakKeyDictionary[Runtime, dict[Path, Root]] = WeakKeyDictionary()
"""The roots that a run has saved into: `Root.sweep` must know the folders that other saves of the run are writing."""


def save(
    state: State,
    root: Root | str | Path,
    facts: Mapping[str, Any] | None = None,
    progress: Progress = silent,
    *,
    alone: bool = False,
) -> Path:
    """Write `state` to a new folder under `root` and publish it. Collective.

    When this returns, the checkpoint is durable: a crash cannot lose it.

    Args:
        state: a state of any stage and tier. Its deferred updates are applied first. It can be used afterwards.
        root: the folder that holds a run's checkpoints, on a disk that all ranks share; made if its parent exists. A
            world with coordinates, such as {"tp": 1}, has a folder of its own in it, tp-1; then all ranks of the run
            save together.
        facts: JSON values for `Checkpoint.facts`, such as the config.
        progress: called with the number of bytes that this rank has written.
        alone: remove all other checkpoints in `root` when this one is published.

    Returns:
        The published folder: `step-` and the number of steps tried so far, skipped steps included.

    Raises:
        CheckpointError: a rank failed; raised on every rank with the first failure. Nothing was published, and older
            checkpoints are unchanged.
    """
    return Saving(state, root, facts, progress=progress, alone=alone).finish()


def snapshot_bytes(state: State, root: Root) -> int:
    """Return the bytes of host memory that `Saving(behind=True)` needs to copy this rank's part of the state."""
    plan, listed = state.plan, flats(state.plan, buffers_of(state.model))
    numbers = files_of(listed, plan.world.rank, plan.world.size)
    if root.has_links and recall(state.runtime) is not None:
        numbers = numbers[:1]
    parts = [piece.part for number in numbers for piece in held(listed, number, plan.world.size)]
    return sum(part.nbytes for part in parts) + plan.model_buffer_bytes + staging_bytes(plan)


def _root_at(path: Path, runtime: Runtime) -> Root:
    """Return the root in `path`, the same one in each save of a run."""
    root = own_root(path.absolute(), runtime.plan.world)
    return _ROOTS.setdefault(runtime, {}).setdefault(root.path, root)


class Saving:
    """A save in progress, which `finish` ends. Constructing it is collective.

    Args:
        state, root, facts, progress, alone: as in `save`.
        behind: let a thread copy this rank's part of the state to host memory during the next step, and write the copy
            during later steps.

    Raises:
        CheckpointError: the folder could not be made, or a checkpoint cannot store the dtype of a buffer.
    """

    @unobserved()
    def __init__(
        self,
        state: State,
        root: Root | str | Path,
        facts: Mapping[str, Any] | None = None,
        *,
        behind: bool = False,
        progress: Progress = silent,
        alone: bool = False,
    ) -> None:
        check_type(state, State, "zero.save", "zero.save(state, folder)")
        if not isinstance(root, Root):
            check_folder(root, "zero.save", "zero.save(state, folder)")
        state.runtime.tree.check()
        state.runtime.settle()
        plan, buffers = state.plan, buffers_of(state.model)
        self._world, self._root = plan.world, root if isinstance(root, Root) else _root_at(Path(root), state.runtime)
        self._runtime, self._alone, self._threads = state.runtime, alone, list[threading.Thread]()
        self._copied, self._stopped = threading.Event(), threading.Event()
        self._report: dict[str, Any] = {"error": "the thread that writes its file died"}
        self._world.at(f"step {state.tried}, save")
        dynamic, ties = plan.precision.scale.static is None, tied_names(plan.model)
        numbers = saved_facts(
            state.step, state.scale, dynamic=dynamic, ties=ties, rested=state.runtime.updater.numbers.counts.rested
        )
        packed = {name: list(shape) for name, shape in plan.facts.splitting.packed_shapes().items()}
        self._manifest = Manifest(
            format=FORMAT,
            step=state.tried,
            world=plan.world.size,
            flats=flats(plan, buffers),
            files=(),
            finite=False,
            facts={
                **numbers,
                **({PACKED_SHAPES: packed} if packed else {}),
                **(_beside(plan.world) if plan.world.coordinates else {}),
                "given": dict(facts or {}),
            },
        )
        self._files = files_of(self._manifest.flats, plan.world.rank, plan.world.size)
        self._frozen_version = frozen_version(state.runtime)
        gather_reports(self._world, lambda: check_sizes(buffers))
        self._folder = Path(by_rank_0(self._world, lambda: str(self._begin(state.tried))))
        with if_it_fails(self.abandon):
            self._random = random_state()
            self._buffers = {
                name: pieces_on_host(buffer) for name, buffer in buffers.items()
            }  # a forward may change them
            published = recall(state.runtime) if self._root.has_links else None
            self._linked = {} if published is None else self._link(published)
            if behind and (published is None or self._linked):
                self._start()
            else:  # also if a link fails, which `snapshot_bytes` did not expect
                self._write(progress)

    def _begin(self, step: int) -> Path:
        if self._world.coordinates:  # other coordinates may make this folder too
            Root(self._root.path.parent).make()
        return self._root.begin(step)

    @property
    def is_written(self) -> bool:
        """Return whether this rank's writing thread has ended, so that `finish` need not wait for this rank."""
        return not any(thread.is_alive() for thread in self._threads)

    def finish(self) -> Path:
        """Wait until every rank's file is written, publish the checkpoint and return its folder. Collective.

        Raises:
            CheckpointError: a rank failed; raised on every rank with the first failure.
        """
        with if_it_fails(self.abandon):
            join_threads(self._world, self._threads)
            reports = gather_reports(self._world, lambda: self._report)
            folder = Path(by_rank_0(self._world, lambda: str(self._publish(reports))))
        own = reports[self._world.rank]
        if own["finite"] and len(own["files"]) > 1:
            remember(self._runtime, folder, File(*own["files"][1]), self._frozen_version)
        return folder

    def abandon(self) -> None:
        """Remove the files of this save as far as possible; errors are ignored."""
        if self._world.rank == 0:
            self._root.abandon(self._folder)

    def _publish(self, reports: list[dict[str, Any]]) -> Path:
        files = tuple(
            File(*file) for column in zip(*(report["files"] for report in reports), strict=True) for file in column
        )
        lineage = self._runtime.lineage
        lineage.saved_ns = max(time.time_ns(), lineage.saved_ns + 1)  # ascending even if clocks of machines differ
        facts = {**self._manifest.facts, "lineage": asdict(lineage)}
        finite = all(report["finite"] for report in reports)
        manifest = self._manifest._replace(files=files, finite=finite, facts=facts)
        folder = self._root.publish(self._folder, manifest.step, to_text(manifest))
        if self._alone:
            self._root.keep_only(manifest.step)
        return folder

    def _start(self) -> None:
        self._threads = [BackgroundThread(self._write_behind, name="saving", stop=self._stopped.set)]
        self._threads[0].start()
        self._runtime.copying.append(Then(self._await_copies))

    def _write_behind(self) -> None:
        try:
            self._world.compute.prepare_thread()
            self._write(silent, behind=self._check_stopped)
        finally:
            self._end_copies()

    def _await_copies(self) -> None:
        self._copied.wait()

    def _end_copies(self) -> None:
        self._copied.set()

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise CheckpointError("the script ended before the checkpoint was written. Call finish() before.")

    def _write(self, progress: Progress, *, behind: Callable[[], None] | None = None) -> None:
        plan, listed, done, finite = self._runtime.plan, self._manifest.flats, 0, True
        files, writers = dict(self._linked), dict[int, ShardWriter]()
        pieces = {number: held(listed, number, self._world.size) for number in self._files if number not in files}
        total = sum(piece.part.nbytes for several in pieces.values() for piece in several)

        def finish() -> None:
            for number in [*writers]:
                files[number] = self._finish(number, writers.pop(number))

        with self._reporting(), ExitStack() as stack:
            with closing(Arena(staging_bytes(plan), plan.world.compute, pin=plan.offload.pin)) as staging:
                memory = staging.take(staging.nbytes)
                with plan.world.compute.paging("saving", after=PASSED):
                    for number, several in pieces.items():
                        writers[number] = stack.enter_context(self._writer(number, several, behind))
                        for tensor in pieces_of(several, listed, self._buffers, self._runtime, memory):
                            if behind is not None:
                                behind()
                            finite = finite and _is_finite(tensor)
                            writers[number].write(memory_of(tensor))
                            done += tensor.nbytes
                            progress("saving", done, total)
                        if behind is None:  # otherwise all copies come first
                            finish()
                if behind is not None:
                    self._end_copies()  # before the arena waits for the device
            finish()
            self._report = {"files": [files[number] for number in self._files], "finite": finite}

    def _link(self, published: FrozenFile) -> dict[int, File]:
        """Link the file of frozen values; return number -> entry of the files that exist."""
        number, file = self._files[1], published.file
        linked = self._root.link(published.folder, self._folder, number, self._world.size, file)
        return {number: file} if linked else {}

    def _finish(self, number: int, writer: ShardWriter) -> File:
        # the index of a file that later checkpoints share has no state of this step
        index = Index(writer.finish(), self._random if number < self._world.size else None)
        return self._root.write_index(self._folder, number, self._world.size, index)

    def _writer(self, number: int, pieces: list[Held], behind: Callable[[], None] | None) -> ShardWriter:
        path = self._folder / file_name(number, self._world.size)
        return ShardWriter(self._root.disk, path, [piece.part for piece in pieces], behind=behind)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Store an error of the block for `finish`, which raises it on all ranks.

        A rank that raised the error here alone would leave the other ranks waiting in the next collective.
        """
        try:
            yield
        except Exception as error:
            self._report = {"error": with_class(error)}


def _beside(world: World) -> dict[str, Any]:
    """Return the facts of one coordinate's checkpoint; "save" is equal in all that are saved together. Collective."""
    return {"coordinates": dict(world.coordinates), "save": world.whole.share(secrets.token_hex(8))}


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    wide = tensor.float() if tensor.itemsize == 1 else tensor  # torch.aminmax does not support float8
    return all(math.isfinite(end) for end in torch.aminmax(wide))
