"""The option files: the groups and options of conf/, and the folders with further options of the user."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero.core import suggest
from zero.errors import SettingError
from zero.platform.installed import TOP

CONF = TOP / "conf"
"""The folder of option files."""

PRESET_GROUPS = ("experiment", "debug")
"""Option groups whose files set keys of other sections."""


def groups() -> set[str]:
    return {path.name for path in CONF.iterdir() if path.is_dir()}


def options_of(group: str, folders: Sequence[Path] = ()) -> list[str]:
    return sorted({path.stem for folder in (CONF, *folders) for path in (folder / group).glob("*.yaml")})


def option_folders(places: Any) -> list[Path]:
    """Return the folders in `hydra.searchpath`.

    Raises:
        SettingError: it is not a list, a folder does not exist, or one of its options has the name of an option of
            conf/.
    """
    if not isinstance(places, list):
        raise SettingError(
            f"hydra.searchpath={suggest.shown(places)}: must be a list, such as 'hydra.searchpath=[own]'."
        )
    folders = [Path(str(place).removeprefix("file://")) for place in places if not str(place).startswith("pkg://")]
    for folder in folders:
        if not folder.is_dir():
            raise SettingError(f"hydra.searchpath: {folder} is not a folder.")
        twins = (folder / path.relative_to(CONF) for path in sorted(CONF.glob("*/*.yaml")))
        if twin := next((path for path in twins if path.exists()), None):
            option = f"{twin.parent.name}={twin.stem}"
            raise SettingError(f"{twin}: {option} is an option of conf/. Give the file another name.")
    return folders
