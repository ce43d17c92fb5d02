"""Open a checkpoint: read its manifest, and compare every byte with its hashes.

The ranks divide the blocks to hash, and each rank reads the indexes of the files that it hashes.
"""

import itertools
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

from zero.checkpoint.agreement import gather_reports, join_threads
from zero.checkpoint.files.disk import Disk
from zero.checkpoint.files.listing import read_manifest
from zero.checkpoint.files.shard import HASH_THREADS
from zero.checkpoint.format.facts import lineage_of, numbers_of
from zero.checkpoint.format.hashes import HASH_BLOCK_BYTES
from zero.checkpoint.format.manifest import Manifest
from zero.checkpoint.tensors import Checkpoint, reader_of
from zero.distributed.world import World
from zero.engine.arguments import check_folder, check_type
from zero.errors import CheckpointError
from zero.progress import Progress, silent


def open_checkpoint(
    world: World, folder: Path | str, disk: Disk | None = None, progress: Progress = silent
) -> Checkpoint:
    """Read the manifest in `folder` and verify all files of the checkpoint. Collective.

    Args:
        world: the ranks that divide the verification among themselves.
        folder: one checkpoint, such as `checkpoints/step-0000000100`.
        disk: a replacement for the file system calls, for tests.
        progress: called with the number of bytes that this rank has verified.

    Raises:
        ConfigError: `world` is not a World, or `folder` not a path.
        CheckpointError: the checkpoint is not valid. Raised on every rank; names file and offset of the first damage.
    """
    check_type(world, World, "zero.open_checkpoint", "checkpoint = zero.open_checkpoint(world, folder)")
    check_folder(folder, "zero.open_checkpoint", "checkpoint = zero.open_checkpoint(world, folder)")
    folder, disk = Path(folder), disk or Disk()
    manifests: list[Manifest] = []

    def read() -> dict[str, Any]:
        manifest = read_manifest(folder, disk)
        numbers_of(folder, manifest)
        lineage_of(folder, manifest)
        manifests.append(manifest)
        return {"files": sha256("".join(file.index_sha256 for file in manifest.files).encode()).hexdigest()}

    reports = gather_reports(world, read)
    if any(report != reports[0] for report in reports):
        raise CheckpointError(
            f"{folder}: ranks read different files here. Pass a folder on a disk that all ranks share."
        )
    checkpoint = Checkpoint(folder, manifests[0], disk)
    _verify(world, checkpoint, progress)
    return checkpoint


def _verify(world: World, checkpoint: Checkpoint, progress: Progress) -> None:
    """Compare every byte with its hashes. Each rank compares an equal number of blocks, divided among its threads.

    Raises:
        CheckpointError: a file is damaged; raised on every rank.
    """
    files = checkpoint.manifest.files
    blocks = (
        (place, number) for place, file in enumerate(files) for number in range(-(-file.size // HASH_BLOCK_BYTES))
    )
    count = sum(-(-file.size // HASH_BLOCK_BYTES) for file in files)
    begin, stop = (rank * count // world.size for rank in (world.rank, world.rank + 1))
    mine = list(itertools.islice(blocks, begin, stop))
    cuts = [place * len(mine) // HASH_THREADS for place in range(HASH_THREADS + 1)]
    done: list[int] = []
    errors: dict[int, Exception] = {}

    def compare(start: int, stop: int) -> None:
        try:
            for file, part in itertools.groupby(mine[start:stop], key=lambda block: block[0]):
                reader, _ = reader_of(checkpoint, file)
                with reader:
                    for _file, block in part:
                        reader.check(block)
                        done.append(block)
        except Exception as error:
            errors[start] = error

    def raise_first() -> None:
        if errors:
            raise errors[min(errors)]

    threads = [threading.Thread(target=compare, args=ends, daemon=True) for ends in itertools.pairwise(cuts)]
    for thread in threads:
        thread.start()
    what, total = f"verifying {checkpoint.folder.name}", len(mine) * HASH_BLOCK_BYTES
    join_threads(world, threads, lambda: progress(what, len(done) * HASH_BLOCK_BYTES, total))
    gather_reports(world, raise_first)
