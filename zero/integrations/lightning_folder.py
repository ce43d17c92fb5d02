"""A checkpoint of `ZeroStrategy`: a folder with a file of Lightning's part and the sharded training state.

A new checkpoint is written beside its place and gets its name when it is whole. An earlier checkpoint of that name is
replaced at the moment when the new training state is complete, because that state names its file of Lightning's part.
"""

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
"""The file in a checkpoint's folder with the part that Lightning writes; after a replacement the state has its name."""

PART = re.compile(r"(?P<name>.+?)(\.(?P<nonce>[0-9a-f]{16}))?\.part", re.DOTALL)
"""The name of a checkpoint's folder until it is whole. Earlier versions wrote no nonce."""


def save_folder(engine: Engine, path: Path, write: Callable[[Path], None]) -> None:
    """Save the training state and Lightning's part in the folder `path`. Collective.

    Args:
        write: function that writes Lightning's part to a file; called on rank 0.
    """
    world, saved = engine.plan.world, ExitStack()
    loop_file = by_rank_0(world, lambda: _new_loop_file(path))
    is_new, writes = loop_file == LOOP_FILE, world.rank == 0
    with saved:
        folder = Path(by_rank_0(world, lambda: str(saved.enter_context(_part(path))))) if is_new else path
        if writes:
            write(folder / loop_file)
            sync(folder / loop_file, Files())
        engine.save_checkpoint(folder, STATE_FOLDER, {"loop": loop_file}, save_latest=False)
        if writes:
            for file in folder.glob("lightning*.ckpt"):
                if file.name != loop_file:
                    file.unlink()
            if is_new:
                path.unlink(missing_ok=True)  # a link, or a file of weights
                give_name(folder, path)


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


def _new_loop_file(path: Path) -> str:
    """Return the name of the file of Lightning's part in a save at `path`: a new name if the save replaces another.

    Raises:
        CheckpointError: there is a folder that is no checkpoint.
    """
    if path.is_symlink() or not path.is_dir():
        return LOOP_FILE
    if not (path / STATE_FOLDER).is_dir():
        raise CheckpointError(f"{path}: is a folder, but no checkpoint. Save under a name that does not exist.")
    return f"lightning-{secrets.token_hex(8)}.ckpt"


@contextmanager
def _part(path: Path) -> Iterator[Path]:
    """Yield the name under which a new checkpoint is written beside `path`, after removing those of killed saves.

    A killed save of the same name is known by its name; of another name, by the claim that its process has lost.
    """
    disk = Disk()
    with naming(path.parent, "making it"):
        path.parent.mkdir(parents=True, exist_ok=True)
    parts = [(part, match) for part in path.parent.iterdir() if (match := PART.fullmatch(part.name))]
    with unclaimed(path.parent, disk) as is_free:
        for part, match in parts:
            if match["name"] == path.name or (is_free and is_of_this_boot(match["nonce"] or "")):
                shutil.rmtree(part, ignore_errors=True)
    claim = Claim(path.parent, disk)
    try:
        yield path.with_name(f"{path.name}.{claim.nonce()}.part")
    finally:
        claim.release()
