"""The settings of a command line, composed by Hydra from the option files in conf/.

No other file imports Hydra or OmegaConf.
"""

import argparse
import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zero.platform.installed import install, require

try:
    import hydra
    from omegaconf import OmegaConf
except ModuleNotFoundError:
    require("hydra", "omegaconf")
    raise
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from zero.core import suggest
from zero.core.schema import flat_fields
from zero.core.secret import refuse_secrets
from zero.deepspeed import config as ds_config
from zero.errors import ConfigError, SettingError, one_line
from zero.platform.run_files import hold, making
from zero.trainer.complaints import complaint, of_another_option, unknown_setting
from zero.trainer.config import Config, default_lr, is_section, keys, keys_of, kinds
from zero.trainer.foreign_settings import foreign_message
from zero.trainer.option_files import CONF, PRESET_GROUPS, option_folders

_VERSION_BASE: Mapping[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}
"""The argument `version_base` for Hydra 1.3, which warns if it is missing. Hydra 1.4 warns if it is given."""

HYDRA_VERSION = hydra.__version__

_HOME = re.compile(r"(?<=[=\[,])~[^\],]*")


@cache
def _store_options() -> None:
    """Register every file of conf/ with Hydra, merged over the declared defaults of the section that it sets."""
    for path in sorted(CONF.rglob("*.yaml")):
        group = None if path.parent == CONF else path.parent.name
        option: Any = OmegaConf.load(path)
        node = OmegaConf.merge(_declared(group, option.get("name")), option)
        package = "_global_" if group in (None, *PRESET_GROUPS) else group
        ConfigStore.instance().store(path.stem, node, group, package, provider=str(path.parent))


def _declared(group: str | None, name: str | None) -> dict[str, Any]:
    """Return the declared defaults of the section `name` of a group; for None, of all sections without option files."""
    plain = Config().plain()
    if group is None:
        return {key: plain[key] for key in plain if key in PRESET_GROUPS or not (CONF / key).is_dir()}
    if group in PRESET_GROUPS:
        return {}
    section = kinds(group).get(str(name))
    if section is None:
        return plain[group]
    declared = {"name": name, **section.model_construct().model_dump(by_alias=True, mode="json")}
    return declared | {"lr": None} if group == "optim" else declared  # see `settings_in`


def _option(group: str, name: str | None) -> Mapping[str, Any]:
    """Return the settings in the file of an option of conf/; empty if there is no such option."""
    if not (CONF / group / f"{name}.yaml").exists():
        return {}
    return ConfigStore.instance().load(f"{group}/{name}.yaml").node


def compose(words: Sequence[str]) -> Any:
    """Return the configuration that Hydra composes from `words`, with Hydra's own settings under `hydra`.

    Raises:
        SettingError: a word or an option file is wrong; the message has one line.
    """
    _store_options()
    overrides = _parsed(words)
    searched = [override.value() for override in overrides if override.key_or_group == "hydra.searchpath"]
    folders = [folder for places in searched for folder in option_folders(places)]
    messages = [
        complaint(
            str(override.input_line),
            override.key_or_group,
            override.value(),
            folders,
            is_sweep=override.is_sweep_override(),
            is_delete=override.is_delete(),
        )
        for override in overrides
    ]
    if messages := list(filter(None, messages)):
        raise SettingError(" ".join(messages))
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize(config_path=None, job_name="train", **_VERSION_BASE):
            return hydra.compose("config", list(words), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        plugin = error.missing_cfg_file if isinstance(error, MissingConfigException) else None
        if plugin and plugin.startswith(("hydra/sweeper/", "hydra/launcher/")):
            raise SettingError(f"{plugin} is not installed. Type {install('sweep')}.") from None
        key = str(getattr(error.__cause__, "full_key", None))
        if key in keys() or is_section(key):
            raise SettingError(of_another_option(key)) from None
        raise SettingError(
            unknown_setting(key, "") if is_section(key.rpartition(".")[0]) else one_line(error)
        ) from None


def _parsed(words: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    overrides: list[Override] = []
    for word in words:
        try:
            overrides.append(parser.parse_override(word))
        except HydraException:
            advice = "Write key=value, and quote what the shell or Hydra would interpret."
            cannot = f"{suggest.shown(word)} cannot be read. {advice}"
            raise SettingError(foreign_message(word) or _spaced(words) or cannot) from None
    return overrides


def _spaced(words: Sequence[str]) -> str:
    """Return the error message for a setting with blanks around its =, which is several words; "" if there is none."""
    match = re.search(r"^([\w.]+)(?:\n=\n?|=\n)([^=\n]+)$", "\n".join(words), re.MULTILINE)
    if match is None:
        return ""
    key, value = match.groups()
    return f"{key} = {suggest.shown(value)} has blanks around its =. Write {suggest.typed(f'{key}={value}')}."


def settings_in(composed: Any) -> dict[str, Any]:
    """Return the run's settings in Hydra's configuration as plain values, with the settings of its ds_config.

    An optim.lr that nothing sets gets its default here, because that depends on the model.
    """
    ours = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
    try:
        settings: Any = OmegaConf.to_container(ours, resolve=True)
    except OmegaConfBaseException as error:
        raise SettingError(one_line(error)) from None
    if settings.pop("ds_config"):
        return settings_in(_with_ds_config(composed))
    if settings["optim"].get("lr") is None and "optim.lr" not in _typed_keys(_hydra_of(composed)):
        settings["optim"]["lr"] = default_lr(settings)
    return _without_other_options(settings, _hydra_of(composed))


def _hydra_of(composed: Any) -> Any:
    """Return Hydra's own settings, from HydraConfig if `composed` is the configuration of a job, which lacks them."""
    return composed.hydra if "hydra" in composed else HydraConfig.get()


def _without_other_options(settings: dict[str, Any], hydra_config: Any) -> dict[str, Any]:
    """Remove settings of a preset that the chosen options do not have, such as model.width with model=hf.

    Raises:
        SettingError: a typed key belongs to another option, or an experiment file is malformed.
    """
    typed, choices = _typed_keys(hydra_config), hydra_config.runtime.choices
    if "experiment" in settings:
        raise SettingError(f"experiment={choices.experiment}: the first line of the file must be # @package _global_")
    if dotted := next((key for key in settings if "." in str(key)), ""):
        raise SettingError(f"{dotted}: a key has no dots. Write the section, and its keys indented below it.")
    for key in sorted(typed & set(keys())):  # a preset or a `+` may have added keys that the option lacks
        section, name = (*key.split("."), "")[:2]
        if kinds(section) and name not in keys_of(section, settings[section]):
            raise SettingError(of_another_option(key))
    for group in PRESET_GROUPS:
        for section, names in _option(group, choices.get(group)).items():
            known = keys_of(section, settings[section]) if isinstance(names, Mapping) and section in settings else ()
            for name in names if known else ():
                if name not in known and (f"{section}.{name}" in keys() or is_section(f"{section}.{name}")):
                    settings[section].pop(name, None)
    return settings


def _with_ds_config(composed: Any) -> Any:
    """Compose again with the settings of the ds_config before the typed words, so that typed words replace them.

    A typed option, such as optim=lion, replaces all settings of its section in the ds_config.
    """
    typed = [word for word in _hydra_of(composed).overrides.task if _key_of(word) != "ds_config"]
    replaced = {_key_of(word) for word in typed if (CONF / _key_of(word)).is_dir()}
    base = ds_config.overrides(ds_config.translate(composed.ds_config).settings)
    kept = [word for word in base if _key_of(word).split(".")[0] not in replaced]
    return compose([*kept, *typed, "ds_config=null"])


def _key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _typed_keys(hydra_config: Any) -> set[str]:
    return {_key_of(word) for word in hydra_config.overrides.task}


def at_home(word: str) -> str:
    """Expand a ~ at the beginning of a path, because Hydra's grammar allows no ~ in a value."""
    return _HOME.sub(lambda path: suggest.word(os.path.expanduser(path[0])), word)


def with_typed_steps(arguments: list[str]) -> list[str]:
    """Return the command line without the epochs of an experiment if `steps` is typed; both raise ConfigError."""
    keys = {word.partition("=")[0] for word in arguments}
    if {"steps", "epochs"} <= keys and "epochs=null" not in arguments:
        raise ConfigError("steps and epochs: one follows from the other. Set one of them.")
    return [*arguments, "epochs=null"] if {"experiment", "steps"} <= keys and "epochs" not in keys else arguments


def notes_of(composed: Any) -> Iterator[str]:
    """Yield warnings: ignored keys of a ds_config, keys typed twice, and settings of a model that a preset replaces."""
    if composed.ds_config:
        yield from ds_config.translate(composed.ds_config).notes
    hydra_config = _hydra_of(composed)
    typed, choices = _typed_keys(hydra_config), hydra_config.runtime.choices
    last = dict[str, str]()
    for word in hydra_config.overrides.task:
        if last.setdefault(_key_of(word), word) != word:
            yield f"{last[_key_of(word)]} is replaced by {word}, which is typed later"
        last[_key_of(word)] = word
    option, chosen = (
        flat_fields(_option("model", choices.model) if "model" in typed else {}),
        flat_fields(composed.model),
    )
    changed = [
        f"model.{name}={suggest.shown(chosen.get(name))}"
        for name in option
        if chosen.get(name) != option[name]
        and not any(f"model.{name}.".startswith(f"{key}.") for key in typed if key != "model")
    ]
    if changed:
        presets = " ".join(
            f"{group}={choices[group]}" for group in PRESET_GROUPS if choices.get(group) not in (None, "none")
        )
        yield f"{presets} replaces settings of model={choices.model}: {' '.join(changed)}"


def runs_in(words: Sequence[str], limit: int = 64) -> Iterator[list[str]]:
    """Yield the overrides of the first `limit` runs of a sweep, without those whose value only a sweeper can choose."""
    choices = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_discrete_sweep()
        else [override.input_line]
        for override in _parsed(words)
        if override.is_discrete_sweep() or not override.is_sweep_override()
    ]
    return ([str(word) for word in run] for run in itertools.islice(itertools.product(*choices), limit))


def run_folder_of(composed: Any, mode: str) -> Path:
    """Return the folder of a run, or of a sweep.

    Args:
        mode: "run" or "sweep".
    """
    try:
        folder = Path(composed.hydra[mode].dir)
    except OmegaConfBaseException as error:
        raise SettingError(f"hydra.{mode}.dir: {one_line(error)}") from None
    refuse_secrets({f"hydra.{mode}.dir": str(folder)}, os.environ)
    return folder


def refuse_secrets_of(composed: Any) -> None:
    """Raise ConfigError for a secret, such as an API key, in settings that Hydra writes into the folder of a run."""
    plain: Any = OmegaConf.to_container(composed, resolve=False)
    hydra_config = plain.pop("hydra")
    written = {part: hydra_config[part] for part in ("job", "run", "sweep", "launcher", "sweeper")}
    refuse_secrets(plain | {"hydra": written}, os.environ)


def make_run_folder(composed: Any, words: Sequence[str]) -> Path:
    """Make the folder of a run, with the files that Hydra would write, and lock it until this process ends."""
    HydraConfig.instance().set_config(composed)
    folder = run_folder_of(composed, "run")
    hold("hydra.run.dir", folder)
    record = folder / (composed.hydra.output_subdir or ".hydra")
    with making("hydra.run.dir", folder):
        record.mkdir(parents=True, exist_ok=True)  # the folder exists if the run was started before
        OmegaConf.save(OmegaConf.create(settings_in(composed)), record / "config.yaml")
        OmegaConf.save(OmegaConf.create(list(words)), record / "overrides.yaml")
    return folder


@contextlib.contextmanager
def _any_help() -> Iterator[None]:
    """Disable argparse's check of help texts during the body.

    Hydra 1.3 has an option whose help is not a str, which Python 3.14 rejects.
    """
    argparse.ArgumentParser._check_help = lambda *_: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del argparse.ArgumentParser._check_help  # type: ignore[attr-defined]


class SweepJob(NamedTuple):
    """A run that Hydra starts.

    Attributes:
        folder: the run's folder.
        sweep: the folder of the sweep that the run is part of; None for a single run.
        name: the number of the run in its sweep, and its overrides.
    """

    folder: Path
    sweep: Path | None = None
    name: str = ""


def this_job() -> SweepJob:
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    if hydra_config.mode != RunMode.MULTIRUN:
        return SweepJob(folder)
    name = f"run {hydra_config.job.num}: {' '.join(hydra_config.overrides.task)}"
    return SweepJob(folder, Path(hydra_config.runtime.cwd) / hydra_config.sweep.dir, name)


@_any_help()
def parser_of_options() -> argparse.ArgumentParser:
    """Return Hydra's argument parser for options, the words that begin with dashes."""
    return get_args_parser()


@_any_help()
def run_jobs(run: Callable[[Any], float | None]) -> None:
    """Let Hydra read the program's arguments, make the folders and call `run` with the settings of each run."""
    _store_options()  # needed for shell completion, which does not call `compose`
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises uncaught errors to the caller
    hydra.main(config_path=None, config_name="config", **_VERSION_BASE)(run)()
