"""A checkpoint of `ZeroStrategy`: a folder with a file of Lightning's part and the sharded training state.

A new checkpoint is written beside its place and gets its name when it is whole. An earlier checkpoint of that name is
replaced at the moment when the new training state is complete, because that state names the file of Lightning's part.
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from zero.checkpoint.agreement import by_rank_0
from zero.checkpoint.files.claim import Claim, is_of_this_boot, unclaimed
from zero.checkpoint.files.disk import Disk
from zero.errors import CheckpointError
from zero.integrations.foreign_loop import STATE_FOLDER
from zero.platform.files import Files, give_name, naming, sync
from zero.user_loop.engine import Engine

LOOP_FILE = "lightning.ckpt"
"""The file in a checkpoint's folder with Lightning's part; after a replacement, the state has the file's new name."""

PART = re.compile(r"(?P<name>.+?)(\.(?P<nonce>[0-9a-f]{16}))?\.part", re.DOTALL)
"""The name of a checkpoint's folder until it is whole, then of a file that it replaced. Old versions wrote no nonce."""


def save_folder(engine: Engine, path: Path, write: Callable[[Path], None]) -> None:
    """Save the training state and Lightning's part in the folder `path`. Collective.

    Args:
        write: function that writes Lightning's part to a file; called on rank 0.
    """
    world, saved = engine.plan.world, ExitStack()
    loop_file = by_rank_0(world, lambda: _begin(path))
    is_new, writes = loop_file == LOOP_FILE, world.rank == 0
    with saved:
        folder = Path(by_rank_0(world, lambda: str(saved.enter_context(_part(path))))) if is_new else path
        if writes:
            write(folder / loop_file)
            sync(folder / loop_file, Files())  # the file's name is synced when the state is published
        engine.save_checkpoint(folder, STATE_FOLDER, {"loop": loop_file}, save_latest=False)
        if writes:
            for file in folder.glob("lightning*.ckpt"):
                if file.name != loop_file:
                    file.unlink()
            if is_new:
                _give_name(folder, path)


def load_folder(engine: Engine, path: Path, *, strict: bool) -> Path:
    """Load the training state in the folder `path`; return the file of Lightning's part. Collective.

    Raises:
        CheckpointError: the folder has no training state, or the training state is damaged.
    """
    loaded, saved = engine.load_checkpoint(
        path, STATE_FOLDER, load_module_strict=strict, load_module_only=not engine.plan.facts.trains
    )
    if loaded is None:
        raise CheckpointError(f"{path}/{STATE_FOLDER} holds no training state, so ZeroStrategy did not write it")
    return path / Path(saved.get("loop", LOOP_FILE)).name


def _begin(path: Path) -> str:
    """Return the name of the file of Lightning's part in a save at `path`: a new name if the save replaces another.

    First remove files of killed saves beside `path`.

    Raises:
        CheckpointError: there is a folder that is no checkpoint.
    """
    _sweep(path)
    if path.is_symlink() or not path.is_dir():
        return LOOP_FILE
    if not (path / STATE_FOLDER).is_dir():
        raise CheckpointError(f"{path}: is a folder, but no checkpoint. Save under a name that does not exist.")
    return f"lightning-{secrets.token_hex(8)}.ckpt"


def _give_name(folder: Path, path: Path) -> None:
    """Rename a new checkpoint to `path`, in place of a link or a file of weights; a crash leaves one of the two.

    No rename replaces a file by a folder. So the two exchange their names, if the file system can do that.
    """
    if not os.path.lexists(path):
        give_name(folder, path)
        return
    files, old = Files(), folder
    with naming(path, "replacing it"):
        sync(folder, files)
        try:
            files.exchange(folder, path)
        except OSError:  # such as NFS: a crash between two renames leaves the old file under another name
            old = folder.with_suffix(".old")
            files.replace(path, old)
            files.replace(folder, path)
        files.fsync_folder(path.parent)
        files.unlink(old)


def _sweep(path: Path) -> None:
    """Remove files of killed saves beside `path`: folders that are not whole, and files that were replaced.

    Parts of the same name are removed; of other names, only if this machine made them and saves nothing here now.
    """
    with naming(path.parent, "making it"):
        path.parent.mkdir(parents=True, exist_ok=True)
    parts = [(part, match) for part in path.parent.iterdir() if (match := PART.fullmatch(part.name))]
    with unclaimed(path.parent, Disk()) as is_free:
        for part, match in parts:
            if match["name"] == path.name or (is_free and is_of_this_boot(match["nonce"] or "")):
                if match["nonce"] and (part.is_symlink() or part.is_file()):
                    part.unlink(missing_ok=True)
                shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _part(path: Path) -> Iterator[Path]:
    """Yield the name under which a new checkpoint is written beside `path`."""
    claim = Claim(path.parent, Disk())
    try:
        yield path.with_name(f"{path.name}.{claim.nonce()}.part")
    finally:
        claim.release()
