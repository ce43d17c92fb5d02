"""Settings of a command line, composed by Hydra from conf/, and what to say when a word of it is wrong.

The only file that knows Hydra and OmegaConf.
"""

import argparse
import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from zero.platform.installed import TOP, install, require

try:
    import hydra
    from omegaconf import OmegaConf
except ModuleNotFoundError:
    require("hydra", "omegaconf")
    raise
from hydra._internal.core_plugins.bash_completion import BashCompletion
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from zero.core import suggest
from zero.core.secret import refuse_secrets
from zero.deepspeed import config as ds_config
from zero.errors import ConfigError, SettingError, one_line
from zero.platform.run_files import hold, making
from zero.trainer import own_files
from zero.trainer.checks import parse_config
from zero.trainer.commands import COMMANDS
from zero.trainer.config import Config, keys, keys_of, kinds, unknown_key
from zero.trainer.explain import entries, explain, options_with
from zero.trainer.replies import Reply, reply

CONF = TOP / "conf"
"""The folder of options."""

_VERSION_BASE: Mapping[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}
"""Hydra 1.3 warns without it, 1.4 with it."""

HYDRA_VERSION = hydra.__version__

PRESETS = ("experiment", "debug")
"""Groups whose options set keys of other sections."""


@cache
def _store_options() -> None:
    """Give Hydra every file of conf/, each over the declared defaults of what it sets."""
    for path in sorted(CONF.rglob("*.yaml")):
        group = None if path.parent == CONF else path.parent.name
        given: Any = OmegaConf.load(path)
        node = OmegaConf.merge(_declared(group, given.get("name")), given)
        package = "_global_" if group in (None, *PRESETS) else group
        ConfigStore.instance().store(path.stem, node, group, package, provider=str(path.parent))


def _declared(group: str | None, name: str | None) -> dict[str, Any]:
    """The defaults of an option's section, of the kind that has this name; without a group those of all others."""
    plain = Config().plain()
    if group is None:
        return {key: plain[key] for key in plain if key in PRESETS or not (CONF / key).is_dir()}
    if group in PRESETS:
        return {}
    kind = kinds(group).get(str(name))
    if kind is None:
        return plain[group]
    return {"name": name, **kind.model_construct().model_dump(by_alias=True, mode="json")}


def _option(group: str, name: str | None) -> Mapping[str, Any]:
    """What an option of conf/ sets; nothing where it is none of them."""
    if not (CONF / group / f"{name}.yaml").exists():
        return {}
    return ConfigStore.instance().load(f"{group}/{name}.yaml").node


def compose(overrides: Sequence[str], config_name: str = "config") -> Any:
    """Hydra's composed configuration, with its own part under `hydra`.

    Raises:
        SettingError: one line about the first override that names something that does not exist.
    """
    _store_options()
    _refuse_unless_one_option(overrides)
    _check_own_files(overrides)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize(config_path=None, job_name="train", **_VERSION_BASE):
            return hydra.compose(config_name, list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise SettingError(_explain(overrides, error)) from None


def _refuse_unless_one_option(overrides: Sequence[str]) -> None:
    """Of several Hydra would put one over the other, without a word; without any a section of keys is missing."""
    for text in overrides:
        key, _, value = text.partition("=")
        if value.startswith("[") and key in groups():
            each = Config.for_several.format(key=key, values=",".join(map(str.strip, value.strip("[] ").split(","))))
            end = "; for both, tracker=wandb tracker.tensorboard=true" if key == "tracker" else each
            raise SettingError(f"{text}: choose one option of {key}{end}")
        if key.startswith("~") and key[1:] in groups() - set(PRESETS):
            options = suggest.alternatives(_options_of(key[1:]))
            raise SettingError(f"{text}: a run has one option of {key[1:]}, which is {options}")


def _check_own_files(overrides: Sequence[str]) -> None:
    """Check the user's own files that these words choose, and the files that those choose."""
    folders = _own_folders(overrides)
    options = partial(_options_of, own_folders=folders)
    waiting = [(key, value) for key, _, value in (word.lstrip("+").partition("=") for word in overrides)]
    checked = set[Path]()
    while folders and waiting:
        group, name = waiting.pop()
        for path in _own_file(folders, group, name):
            if path in checked or group.startswith("hydra"):
                continue
            if name in _options_of(group):
                raise SettingError(f"{path}: {group}={name} is an option of conf/ already; give the file another name")
            waiting += own_files.check(path, group, options)
            checked.add(path)


def _own_folders(overrides: Sequence[str]) -> list[Path]:
    """The folders of `hydra.searchpath`.

    Raises:
        SettingError: it is not a list, or a folder in it does not exist.
    """
    words = [word for word in overrides if _key_of(word) == "hydra.searchpath"]
    try:
        values = [override.value() for override in OverridesParser.create().parse_overrides(words)]
    except HydraException:
        return []  # `compose` parses all words and reports the error
    places: list[str] = []
    for word, value in zip(words, values, strict=True):
        if not isinstance(value, list):
            place = str(value).removeprefix("file://")
            raise SettingError(f"{word}: must be a list: 'hydra.searchpath=[file://{place}]'")
        places = [str(place).removeprefix("file://") for place in value]
    folders = [Path(place) for place in places if not place.startswith("pkg://")]
    for folder in folders:
        if not folder.is_dir():
            raise SettingError(f"hydra.searchpath: {folder} is not a folder")
    return folders


def _own_file(folders: Sequence[Path], group: str, name: str) -> list[Path]:
    """The file that makes `group=name` an option, in the first folder that has it."""
    if not (_NAME.fullmatch(name) and group):
        return []
    paths = (folder / group / f"{name}.yaml" for folder in folders)
    return [path for path in paths if path.is_file()][:1]


def groups() -> set[str]:
    return {path.name for path in CONF.iterdir() if path.is_dir()}


def _options_of(group: str, own_folders: Sequence[Path] = ()) -> list[str]:
    return sorted({path.stem for folder in (CONF, *own_folders) for path in (folder / group).glob("*.yaml")})


def settings_in(composed: Any) -> dict[str, Any]:
    """Our part of what Hydra composed, as plain values."""
    ours = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
    try:
        settings: Any = OmegaConf.to_container(ours, resolve=True)
    except OmegaConfBaseException as error:
        raise SettingError(one_line(error)) from None
    if settings.pop("ds_config"):
        return settings_in(_on_ds_config(composed))
    return _of_their_kinds(settings, _hydra_of(composed))


def _hydra_of(composed: Any) -> Any:
    """Hydra's own part, which a job gets without it."""
    return composed.hydra if "hydra" in composed else HydraConfig.get()


def _of_their_kinds(settings: dict[str, Any], hydras: Any) -> dict[str, Any]:
    """Without what an experiment or debug=tiny says of kinds that were not chosen: model=hf has no width."""
    typed = _typed_keys(hydras)
    for group in sorted(groups() - set(PRESETS)):
        _refuse_another_name(group, settings[group].get("name"), hydras)
    for key in sorted(typed & set(keys())):  # a preset's words for one kind, or a `+`, may have made room for them
        section, _, name = key.partition(".")
        if kinds(section) and name not in keys_of(section, settings[section]):
            raise SettingError(_of_another_option(key, hydras.overrides.task))
    for group in PRESETS:
        for section, names in _option(group, hydras.runtime.choices.get(group)).items():
            if not isinstance(names, Mapping) or section not in settings:
                continue
            known = keys_of(section, settings[section])
            for name in names if known else ():
                key = f"{section}.{name}"
                if name not in known and key in keys() and key not in typed:
                    settings[section].pop(name, None)
    return settings


def _refuse_another_name(group: str, name: str | None, hydras: Any) -> None:
    """A name belongs to its option: with another one the keys of the option that was chosen mean nothing."""
    chosen = hydras.runtime.choices.get(group)
    if name == _option(group, chosen).get("name", name):
        return
    names = _options_of(group)
    having = [f"{group}={one}" for one in names if _option(group, one)["name"] == name]
    likely = f"type {suggest.alternatives(having)}" if having else suggest.nearest(str(name or ""), names)
    others = [one for one in hydras.overrides.task if _key_of(one) not in (group, f"{group}.name")]
    if len(having) == 1 and (refused := refusal_of([*others, *having])):
        likely = f"with {having[0]} in its place: {refused}"
    raise SettingError(f"{group}.name={suggest.shown(name)} is not of {group}={chosen}; {likely}")


def _on_ds_config(composed: Any) -> Any:
    """The same command line with the settings of its ds_config before its own words; a section's option replaces it."""
    typed = [one for one in _hydra_of(composed).overrides.task if _key_of(one) != "ds_config"]
    replaced = {_key_of(one) for one in typed if (CONF / _key_of(one)).is_dir()}
    base = ds_config.overrides(ds_config.translate(composed.ds_config).settings)
    kept = [one for one in base if _key_of(one).split(".")[0] not in replaced]
    return compose([*kept, *typed, "ds_config=null"])


def _key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _typed_keys(hydras: Any) -> set[str]:
    return {_key_of(one) for one in hydras.overrides.task}


def at_home(word: str) -> str:
    """Expand ~ where a path begins with it, as a shell does: Hydra's grammar has no ~ in a value."""
    return _HOME.sub(lambda path: suggest.word(os.path.expanduser(path[0])), word)


def notes_of(composed: Any) -> Iterator[str]:
    """What is not as it was typed: words of a ds_config without meaning here, a model that debug=tiny makes small."""
    if composed.ds_config:
        yield from ds_config.translate(composed.ds_config).notes
    hydras = _hydra_of(composed)
    typed, choices = _typed_keys(hydras), hydras.runtime.choices
    if "model" in typed:
        own = _option("model", choices.model)
        others = {f"model.{name}": value for name in own if (value := composed.model.get(name)) != own[name]}
        if changed := [f"{key}={suggest.shown(value)}" for key, value in others.items() if key not in typed]:
            by = " ".join(f"{one}={choices[one]}" for one in PRESETS if choices.get(one) not in (None, "none"))
            yield f"{by} sets {' '.join(changed)} in place of what model={choices.model} says"


_NAME = re.compile(r"[\w-]+")
"""What may be the name of an option."""
_HOME = re.compile(r"(?<=[=\[,])~[^\],]*")
_GUESS = re.compile(r"; did you mean ([\w.]+)(=\w+)?\?$")


def _explain(overrides: Sequence[str], error: Exception) -> str:
    """Hydra's message takes several lines and advises `+key`; say instead which word is wrong."""
    parser, folders = OverridesParser.create(), _own_folders(overrides)
    own_files_of = dict[str, Path]()  # by group
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            quote = "write key=value, and quote what the shell or Hydra would interpret"
            return f"{suggest.shown(text)} cannot be read; {quote}"
        key, value = override.key_or_group, override.value()
        if key in ("hydra/sweeper", "hydra/launcher") and "Could not find" in str(error):
            return f"{text}: this plugin is not installed; {install('sweep')} has optuna and submitit"
        if key.startswith("hydra") or key == "ds_config":
            continue
        if override.is_sweep_override():
            return f"{text} is a list of runs; add -m to run them one after another"
        if own := _own_file(folders, key, str(value)):
            own_files_of[key] = own[0]
            continue
        if (CONF / key).is_dir():
            options = _options_of(key, folders)
            if value is not None and value not in options:
                seen = f"{key}={suggest.shown(value)}"
                return _of_a_path(key, str(value)) or f"{seen} does not exist; {suggest.nearest(str(value), options)}"
        elif text[0] not in "+~" and key not in keys() and not any(known.startswith(f"{key}.") for known in keys()):
            named = CONF.glob(f"*/{value}.yaml") if "." not in key and _NAME.fullmatch(str(value)) else ()
            having = [path.parent.name for path in named]
            if group := suggest.meant(key, having):  # the value tells more than the letters
                said = f"unknown key {key}{group.removesuffix('?')}={value}?"
                return _with_guess_tried(said, text, overrides)
            said = unknown_key(key)
            if not _GUESS.search(said) and (theirs := tried(reply(overrides, misspelt=text))):
                return theirs
            return _with_guess_tried(said, text, overrides)
    found = re.match(r"Could not override '([^']+)'", str(error))
    if found and found[1] in keys():
        group = found[1].split(".")[0]
        if path := own_files_of.get(group):
            return f"{path}: {found[1]} is not in it; begin it with defaults: [OPTION], an option of {group}"
        return _of_another_option(found[1], overrides)
    return unknown_key(found[1]) if found else one_line(error)


def _of_a_path(group: str, value: str) -> str:
    """Return a message about a path as the value of a group: the keys that take one; "" for other values."""
    if "/" not in value and not Path(value).expanduser().exists():
        return ""
    by_option: dict[str, str] = {}
    for entry in entries():
        if entry.group == group and entry.takes.startswith("a path"):
            for option in options_with(entry.key, CONF) if entry.options else [""]:
                path = suggest.typed(f"{entry.key}={value}")
                beside = f"{path} beside {group}={suggest.alternatives(_options_of(group))}"
                by_option.setdefault(option, f"{group}={option} {path}" if option else beside)
    typed = suggest.alternatives(list(by_option.values()))
    return f"{group}={suggest.shown(value)} is a path, not an option of {group}; type {typed}" if typed else ""


def _with_guess_tried(said: str, word: str, overrides: Sequence[str]) -> str:
    """What is said of an unknown key; if the key that it guesses would be refused with the value, what holds then."""
    guess, (_, equals, value) = _GUESS.search(said), word.partition("=")
    if guess is None or not equals:
        return said
    elsewhere = refusal_of([one for one in overrides if one != word])
    if elsewhere:  # another word is wrong, too: then nobody can try this one
        return said if elsewhere.startswith("unknown key") else f"{said} Besides, {elsewhere}"
    write = guess[1] + (guess[2] or f"={value}")
    refused = refusal_of([write if one == word else one for one in overrides])
    if not refused:
        return said
    section, name = _key_of(word).rpartition(".")[0], _key_of(write)
    beside = [key for key in keys() if section and key.startswith(f"{section}.")]
    if beside and "." in name and name not in beside:  # a key of another section
        then = f"there are {', '.join(beside)}"
    elif " in its place: " in refused:  # a guess that needs another guess is none
        then = f"see mode=explain explain.key={name}"
    else:
        then = f"with {suggest.shown(write)} in its place: {refused}"
    return f"{said[: guess.start()]}; {then}"


def _of_another_option(key: str, overrides: Sequence[str]) -> str:
    """What to say of a key that the chosen option does not have: which do, and what to type. The answer is tried."""
    group = key.split(".")[0]
    having = options_with(key, CONF)
    said = f"{key} is a key of {group}={suggest.alternatives(having)} only"
    others = [one for one in overrides if _key_of(one).split(".")[0] != group]
    words = [one.lstrip("+") for one in overrides if one not in others and _key_of(one) not in (group, f"{group}.name")]
    fitting = [name for name in having if all(name in options_with(_key_of(one), CONF) for one in words)]
    if not fitting:
        return f"{said}; leave it out"
    if (
        "tracker=tensorboard" in overrides
        and fitting[0] == "wandb"
        and "tracker.tensorboard" not in map(_key_of, words)
    ):
        words.insert(0, "tracker.tensorboard=true")  # it was asked for, and W&B can have it beside
    write = [f"{group}={fitting[0]}", *words]
    refused = refusal_of([*others, *write])
    if any(refused.startswith(f"{word}: ") for word in words):
        return refused
    typed = " ".join(map(suggest.typed, write))
    return f"{said}; with {typed} in its place: {refused}" if refused else f"{said}; type {typed}"


def tried(found: Reply | None, *, sweep: bool = True) -> str:
    """A reply as one line; "" where there is none. It is tried, so that it does not lead to another refusal."""
    if found is None:
        return ""
    refused = ""
    if found.can_be_tried:
        longer = found._replace(write=(*found.write, *found.more))
        for one in (found, longer) if found.more else (found,):
            refused = refusal_of([*one.others, *one.write], sweep=sweep)
            if not refused:
                return one.sentence()
    return found.sentence(refused)


def refusal_of(words: Sequence[str], *, sweep: bool = True) -> str:
    """Why these settings are refused, or the first run of such a sweep if it is one; "" where they are not."""
    try:
        run = [word for word in words if not word.startswith("-")]
        run = next(runs_in(run)) if sweep else run
        config = parse_config(settings_in(compose(run)))
        if config.mode == "explain":
            explain(config.explain.key, CONF)
    except ConfigError as error:
        return str(error)
    return ""


def runs_in(overrides: Sequence[str], limit: int = 64) -> Iterator[list[str]]:
    """The overrides of the first runs of a sweep. Choices that only a sweeper can make are left out."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(_explain(overrides, error)) from None
    choices = [
        [f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()]
        if one.is_discrete_sweep()
        else [one.input_line]
        for one in parsed
        if one.is_discrete_sweep() or not one.is_sweep_override()
    ]
    return ([str(text) for text in run] for run in itertools.islice(itertools.product(*choices), limit))


def refuse_ranges(composed: Any, overrides: Sequence[str]) -> None:
    """Reject interval(LOW,HIGH) if the sweeper takes lists only.

    Raises:
        SettingError: one line about the first such override.
    """
    if "BasicSweeper" not in composed.hydra.sweeper._target_:
        return
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        value = override.value()
        if isinstance(value, IntervalSweep):
            each = Config.for_several.format(key=override.key_or_group, values=f"{value.start},{value.end}")
            raise SettingError(
                f"{override.input_line}: only a sweeper such as hydra/sweeper=optuna draws from a range{each}"
            )


def folder_of(composed: Any, kind: str) -> Path:
    try:
        folder = Path(composed.hydra[kind].dir)
    except OmegaConfBaseException as error:
        raise SettingError(f"hydra.{kind}.dir: {one_line(error)}") from None
    refuse_secrets({f"hydra.{kind}.dir": str(folder)}, os.environ)
    return folder


def refuse_secrets_of(composed: Any) -> None:
    """What Hydra writes into the folder of a run: every setting before it is resolved, and those of its own."""
    plain: Any = OmegaConf.to_container(composed, resolve=False)
    hydras = plain.pop("hydra")
    own = {part: hydras[part] for part in ("job", "run", "sweep", "launcher", "sweeper")}
    refuse_secrets(plain | {"hydra": own}, os.environ)


def make_folder(composed: Any, overrides: Sequence[str]) -> Path:
    """Make the folder of a run as Hydra makes it, and lock it until this process ends."""
    HydraConfig.instance().set_config(composed)
    folder = folder_of(composed, "run")
    hold("hydra.run.dir", folder)
    record = folder / (composed.hydra.output_subdir or ".hydra")
    with making("hydra.run.dir", folder):
        record.mkdir(parents=True, exist_ok=True)  # a run that is started again in its folder
        OmegaConf.save(OmegaConf.create(settings_in(composed)), record / "config.yaml")
        OmegaConf.save(OmegaConf.create(list(overrides)), record / "overrides.yaml")
    return folder


@contextlib.contextmanager
def _any_help() -> Iterator[None]:
    """Hydra 1.3 has an option whose help is no text, which Python 3.14 refuses when the option is added."""
    argparse.ArgumentParser._check_help = lambda *_: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del argparse.ArgumentParser._check_help  # type: ignore[attr-defined]


@_any_help()
def complete(line: str) -> list[str]:
    """The words that the last one of a command line may become, as Hydra's completion asks for them.

    Args:
        line: as it was typed so far, with the name of the program.
    """
    typed = BashCompletion.strip_python_or_app_name(line)
    by_key = {entry.key: entry for entry in entries()}
    modes, starts = by_key["mode"].choices, list[str]()
    first, blank, rest = typed.partition(" ")
    last = typed.rpartition(" ")[2]
    if not blank:
        starts = [word for word in (*modes, *COMMANDS) if word.startswith(first)]
    elif first in COMMANDS:
        return []  # the shell offers files
    elif first == "explain":
        return [key for key in by_key if key.startswith(last)]
    elif first in modes:
        typed = rest
    key, equals, value = last.partition("=")
    if equals and key in by_key and by_key[key].choices:
        return [f"{key}={word}" for word in by_key[key].choices if word.startswith(value)]
    _store_options()
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize(config_path=None, job_name="train", **_VERSION_BASE):
            return starts + BashCompletion(GlobalHydra.instance().config_loader())._query("config", typed)
    except (HydraException, OmegaConfBaseException):
        return starts  # of a line that says nothing yet, such as one with an open bracket, nobody wants an error


class Job(NamedTuple):
    """A run that Hydra calls us for.

    Attributes:
        folder: where it writes.
        sweep: the folder of its sweep; None: it is in none.
        name: in its sweep, the number and what only this run says.
    """

    folder: Path
    sweep: Path | None = None
    name: str = ""


def this_job() -> Job:
    hydras = HydraConfig.get()
    folder = Path(hydras.runtime.output_dir)
    if hydras.mode != RunMode.MULTIRUN:
        return Job(folder)
    name = f"run {hydras.job.num}: {' '.join(hydras.overrides.task)}"
    return Job(folder, Path(hydras.runtime.cwd) / hydras.sweep.dir, name)


@_any_help()
def parser_of_options() -> argparse.ArgumentParser:
    """Hydra's, for what begins with dashes."""
    return get_args_parser()


@_any_help()
def run_jobs(run: Callable[[Any], float | None]) -> None:
    """Let Hydra read the program's arguments, make the folders and call `run` with the settings of each run."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # what it does not catch comes to us, and is one line
    hydra.main(config_path=None, config_name="config", **_VERSION_BASE)(run)()
