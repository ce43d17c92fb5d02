"""An engine's checkpoints: in a folder or in that of a tag, and what they hold of a loop beside the state."""

from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from zero import checkpoint
from zero.checkpoint.disk import naming
from zero.checkpoint.save import by_rank_0
from zero.deepspeed.plain import plain, read_back
from zero.distributed.world import World
from zero.errors import CheckpointError


class Remembered(NamedTuple):
    """What an engine says beside its state; None and nothing where a checkpoint was not made by one."""

    client_state: dict[str, Any]
    micro_steps: int
    param_groups: list[dict[str, Any]] | None
    lr_scheduler: dict[str, Any] | None

    @property
    def facts(self) -> dict[str, Any]:
        """For `checkpoint.save`."""
        return {"engine": plain(self._asdict())}

    @classmethod
    def of(cls, found: checkpoint.Checkpoint) -> "Remembered":
        known = {"client_state": {}, "micro_steps": 0, "param_groups": None, "lr_scheduler": None}
        said = read_back(found.facts.get("engine", {}))
        return cls(**{name: said.get(name, value) for name, value in known.items()})


def root_of(folder: str | PathLike[str], tag: str | None) -> Path:
    return Path(folder) if tag is None else Path(folder) / str(tag)


def make_root(world: World, root: Path) -> None:
    """Have the folder there. Collective.

    Raises:
        CheckpointError: it cannot be made; on every rank.
    """

    def make() -> None:
        with naming(root, "making it"):
            root.mkdir(parents=True, exist_ok=True)

    by_rank_0(world, make)


def refuse_deepspeeds(world: World, folder: Path) -> None:
    """A folder of DeepSpeed's is nothing to start afresh from in silence. Collective.

    Raises:
        CheckpointError: there is one.
    """

    def theirs() -> list[str]:
        return [str(one) for one in sorted(folder.glob("**/*_states.pt"))[:1]] if folder.is_dir() else []

    if found := by_rank_0(world, theirs):
        raise CheckpointError(
            f"{folder} is a checkpoint of DeepSpeed's ({Path(found[0]).name}); make it universal with its "
            "ds_to_universal.py, then: scripts/import --from deepspeed UNIVERSAL, and load what that makes"
        )
