"""From a command line to runs: composes settings with Hydra, and says in one line what is wrong with them.

`main` checks every run that a command line asks for before torch is imported, then has Hydra make the folders and run
the jobs. The only file that knows Hydra and OmegaConf.
"""

import argparse
import contextlib
import importlib
import itertools
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra._internal.core_plugins.bash_completion import BashCompletion
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import zero
from zero.core import suggest
from zero.core.secret import refuse_secret_words, refuse_secrets
from zero.deepspeed import config as ds_config
from zero.errors import ConfigError, Preempted, RankFailedError, SettingError, one_line
from zero.platform.run_files import making
from zero.tracker.report import sweep
from zero.trainer import job, launch, replies
from zero.trainer.answers import answer, as_called, for_a_reader, show
from zero.trainer.checks import RUNS_NOTHING, notes_on, parse_config
from zero.trainer.commands import COMMANDS
from zero.trainer.config import Config, keys, keys_of, kinds, read, unknown_key
from zero.trainer.explain import entries, explain, options_with, overview

if TYPE_CHECKING:
    from zero.trainer.job import Train

_PACKAGE = Path(__file__).resolve().parent.parent
_INSTALLED = _PACKAGE / "application" / "conf"
CONF = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "conf"
"""The folder of options."""

_VERSION_BASE: Mapping[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}
"""Hydra 1.3 warns without it, 1.4 with it."""

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
    _refuse_several_options(overrides)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize(config_path=None, job_name="train", **_VERSION_BASE):
            return hydra.compose(config_name, list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise SettingError(_explain(overrides, error)) from None


def _refuse_several_options(overrides: Sequence[str]) -> None:
    """Hydra would put one over the other, without a word."""
    for text in overrides:
        key, _, value = text.partition("=")
        if value.startswith("[") and key in _groups():
            both = "; for both, tracker=wandb tracker.tensorboard=true" if key == "tracker" else ""
            raise SettingError(f"{text}: choose one option of {key}{both}")


def _groups() -> set[str]:
    return {path.name for path in CONF.iterdir() if path.is_dir()}


def _options_of(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


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
    for group in sorted(_groups() - set(PRESETS)):
        _refuse_another_name(group, settings[group].get("name"), hydras.runtime.choices.get(group))
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


def _refuse_another_name(group: str, name: str | None, chosen: str | None) -> None:
    """A name belongs to its option: with another one the keys of the option that was chosen mean nothing."""
    if name == _option(group, chosen).get("name", name):
        return
    names = _options_of(group)
    having = [f"{group}={one}" for one in names if _option(group, one)["name"] == name]
    likely = f"type {suggest.alternatives(having)}" if having else suggest.nearest(name or "", names)
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


def _notes(composed: Any) -> Iterator[str]:
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


_NAME = re.compile(r"\w+")
"""What may be the name of an option."""


def _explain(overrides: Sequence[str], error: Exception) -> str:
    """Hydra's message takes several lines and advises `+key`; say instead which word is wrong."""
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            return f"{text} cannot be read; write key=value, and quote what the shell or Hydra would interpret"
        key, value = override.key_or_group, override.value()
        if key in ("hydra/sweeper", "hydra/launcher") and "Could not find" in str(error):
            return f"{text}: this plugin is not installed; pip install 'functional-zero[sweep]' has optuna and submitit"
        if key.startswith("hydra") or key == "ds_config":
            continue
        if override.is_sweep_override():
            return f"{text} is a list of runs; add -m to run them one after another"
        if (CONF / key).is_dir():
            options = _options_of(key)
            if value is not None and value not in options:
                return f"{key}={value} does not exist; {suggest.nearest(str(value), options)}"
        elif key not in keys() and not any(known.startswith(f"{key}.") for known in keys()):
            named = CONF.glob(f"*/{value}.yaml") if _NAME.fullmatch(str(value)) else ()
            groups = [path.parent.name for path in named]
            if group := suggest.meant(key, groups):  # the value tells more than the letters
                return f"unknown key {key}{group.removesuffix('?')}={value}?"
            return unknown_key(key)
    found = re.match(r"Could not override '([^']+)'", str(error))
    if found and found[1] in keys():
        return _of_another_option(found[1], overrides)
    return unknown_key(found[1]) if found else one_line(error)


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
    write = [f"{group}={fitting[0]}", *words]
    refused = _refusal_of([*others, *write])
    typed = " ".join(write)
    return f"{said}; with {typed} in its place: {refused}" if refused else f"{said}; type {typed}"


def main(arguments: Sequence[str], train: "Train") -> int:
    """Do what a command line says; one line on stderr and an exit code for everything that can go wrong.

    Args:
        arguments: the command line without the name of the program.
        train: what each rank does, defined at the top of a module.
    """
    try:
        refuse_secret_words(arguments, os.environ)
        if launch.under_torchrun():
            return _as_one_rank(arguments, train)
        return _with_hydra(arguments, _by_name(train))
    except KeyboardInterrupt as stopped:
        return _say(launch.describe(stopped), 130)
    except launch.Interrupted as stopped:
        return _say(launch.describe(stopped) + _going_on(arguments, stopped.folder), stopped.exit_code)
    except Exception as error:
        return _say(launch.describe(error), getattr(error, "exit_code", 1))


def _going_on(arguments: Sequence[str], folder: Path | None) -> str:
    """What is left of a run that was stopped at once, and the command that goes on from there."""
    if folder is None:
        return ""
    from zero.trainer.saver import last_saved

    newest = last_saved(folder)
    if newest is None:
        return "; nothing was saved: checkpoint.every=100 saves every 100 steps, and so does one SIGTERM"
    command = suggest.command(arguments, resume=os.path.relpath(newest))
    return f"; the newest checkpoint is {newest.name}; go on with: {command}"


def _by_name(train: "Train") -> "Train":
    """The same function of the module that has the script's own name, where other processes find it."""
    main_module = sys.modules["__main__"]
    if train.__module__ != "__main__" or main_module.__file__ is None:
        return train
    name = main_module.__spec__.name if main_module.__spec__ else Path(main_module.__file__).stem
    return getattr(importlib.import_module(name), train.__name__)


def _warn(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)


def _say(text: str, exit_code: int) -> int:
    """Once for each machine: torchrun ends with what every rank reported."""
    reported = launch.under_torchrun() and launch.tell_torchrun(text)
    if not reported or os.environ["LOCAL_RANK"] == "0":
        print(as_called(text), file=sys.stderr, flush=True)
    return exit_code


@contextlib.contextmanager
def _any_help() -> Iterator[None]:
    """Hydra 1.3 has an option whose help is no text, which Python 3.14 refuses when the option is added."""
    argparse.ArgumentParser._check_help = lambda *_: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del argparse.ArgumentParser._check_help  # type: ignore[attr-defined]


@_any_help()
def _with_hydra(arguments: Sequence[str], train: "Train") -> int:
    """Check every run that the command line asks for, then let Hydra make the folders and call us once per run."""
    if "--version" in arguments:
        show(f"zero {zero.__version__}, Hydra {hydra.__version__}")
        return 0
    given = _options(arguments)
    if given.help:
        show(overview(CONF))
        return 0
    if given.shell_completion and "COMP_LINE" in os.environ:
        print("\n".join(complete(os.environ["COMP_LINE"])))
        return 0
    _refuse_synonyms(given.overrides)
    folder, shows = None, bool(given.hydra_help or given.cfg or given.info)
    if not (given.hydra_help or given.shell_completion):
        found, place = _parse_runs(given)
        if found[0][0].mode in RUNS_NOTHING and not shows:
            return max(answer(config, overrides, CONF) for config, overrides in found)
        folder = None if shows else place
    codes: list[int] = []

    def run_one(composed: Any) -> float | None:
        return _run_job(composed, train, codes)

    words = list(given.overrides)
    options = [one for one in arguments if one not in words]
    key = "hydra.sweep.dir" if given.multirun else "hydra.run.dir"
    if folder is not None:
        # the time in its name is read once, so that we know where the jobs are, whoever runs them
        words.append(f"{key}={suggest.word(str(folder))}")
    if given.multirun:
        # a launcher's processes find `train` by its name
        paths = [str(CONF.parent), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.argv = [sys.argv[0], *words, *options]  # between options Hydra finds no settings
    os.environ["HYDRA_FULL_ERROR"] = "1"  # what it does not catch comes to us, and is one line
    with for_a_reader() if folder is None else making(key, folder):
        hydra.main(config_path=None, config_name="config", **_VERSION_BASE)(run_one)()
    if given.multirun and folder is not None and folder.is_dir():
        codes += _report_sweep(folder, reported=bool(codes))
    return max(codes, default=0)


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


def _options(arguments: Sequence[str]) -> Any:
    """What Hydra understands of the command line, wherever in it an option stands.

    Raises:
        ConfigError: an option that it does not have, or with a value that it does not take.
    """

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{one_line(message)}; --help shows how to start, --hydra-help all options")

    for argument, after in itertools.zip_longest(arguments, arguments[1:], fillvalue="-"):
        if argument.startswith("--") and argument[2:].split("=")[0] in keys():
            separate = "=" not in argument and not after.startswith("-") and "=" not in after
            word = f"{argument[2:]}={after}" if separate else argument[2:]
            raise ConfigError(f"{argument}: settings are written without dashes: {word}")
    if (plain := _without_dashes(arguments)) != list(arguments):
        _refuse_synonyms(plain, "settings are written without dashes; ")
    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    given, unknown = parser.parse_known_intermixed_args(list(arguments))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}; settings are written key=value, and --help lists them")
    return given


def _without_dashes(arguments: Sequence[str]) -> list[str]:
    """`--lr 1e-3` and `--lr=1e-3` as `lr=1e-3`, where another program has such an option; --help is ours."""
    words: list[str] = []
    waiting = list(arguments)
    while waiting:
        word, after = waiting.pop(0), waiting[0] if waiting else "-"
        name = word[2:] if word.startswith("--") and word != "--help" else ""
        separate = f"{name}={after}"
        if name and not after.startswith("-") and separate.count("=") == 1 and replies.is_known(separate):
            waiting.pop(0)
            name = separate
        words.append(name if name and replies.is_known(name) else word)
    return words


def _refuse_synonyms(words: Sequence[str], first: str = "") -> None:
    """What other programs call our settings is answered with ours, as it can be typed.

    Args:
        first: what is said before that.

    Raises:
        SettingError: there is such a word. The answer is tried, so that it does not lead to another refusal.
    """
    reply = replies.reply(words)
    if reply is None:
        return
    refused = ""
    if reply.can_be_tried:
        longer = reply._replace(write=(*reply.write, *reply.more))
        for tried in (reply, longer) if reply.more else (reply,):
            refused = _refusal_of([*tried.others, *tried.write])
            if not refused:
                raise SettingError(first + tried.sentence())
    raise SettingError(first + reply.sentence(refused))


def _refusal_of(words: Sequence[str]) -> str:
    """Why these settings, or the first run of such a sweep, are refused; "" where they are not."""
    try:
        run = next(_runs_in([word for word in words if not word.startswith("-")]))
        config = parse_config(settings_in(compose(run)))
        if config.mode == "explain":
            explain(config.explain.key, CONF)
    except ConfigError as error:
        return str(error)
    return ""


def _parse_runs(given: Any) -> tuple[list[tuple[Config, Sequence[str]]], Path]:
    """Compose and check each run; gives those that can be with their words, and the folder of the run or of its jobs.

    Raises:
        SettingError: a word that is wrong whatever else is in the run.
        ConfigError: see `_refuse_or_warn`.
    """
    wanted = list(_runs_in(given.overrides)) if given.multirun else [given.overrides]
    found: list[tuple[Config, Sequence[str]]] = []
    refused: dict[str, str] = {}  # why, by the words that only that run has
    notes, folders = dict[str, None](), list[Path]()
    for overrides in wanted:
        try:
            composed = compose(overrides)
            _refuse_secrets_of(composed)
            folders.append(_folder_of(composed, "sweep" if given.multirun else "run"))
            settings = settings_in(composed)
            notes |= dict.fromkeys(_notes(composed))
            config = parse_config(settings)
            notes |= dict.fromkeys(notes_on(config))
            found.append((config, overrides))
        except SettingError:
            raise
        except ConfigError as error:
            refused[" ".join(one for one in overrides if one not in given.overrides)] = str(error)
    _refuse_or_warn([config.mode for config, _ in found], refused, notes)
    return found, folders[0]


def _folder_of(composed: Any, kind: str) -> Path:
    try:
        folder = Path(composed.hydra[kind].dir)
    except OmegaConfBaseException as error:
        raise SettingError(f"hydra.{kind}.dir: {one_line(error)}") from None
    refuse_secrets({f"hydra.{kind}.dir": str(folder)}, os.environ)
    return folder


def _refuse_secrets_of(composed: Any) -> None:
    """What Hydra writes into the folder of a run: every setting before it is resolved, and those of its own."""
    plain: Any = OmegaConf.to_container(composed, resolve=False)
    hydras = plain.pop("hydra")
    own = {part: hydras[part] for part in ("job", "run", "sweep", "launcher", "sweeper")}
    refuse_secrets(plain | {"hydra": own}, os.environ)


def _refuse_or_warn(modes: Sequence[str], refused: Mapping[str, str], notes: Iterable[str]) -> None:
    """Jobs of a sweep that cannot be are reported here and get a row of its table, as long as there are others.

    Raises:
        ConfigError: about the first run that cannot be, where nothing is to be run.
    """
    to_answer = [mode for mode in modes if mode in RUNS_NOTHING]
    run, why = next(iter(refused.items()), ("", ""))
    first = f"{why} (in the run {run})" if modes or len(set(refused.values())) > 1 else why
    if refused and (to_answer or not modes):
        raise ConfigError(first)
    if to_answer and len(to_answer) < len(modes):
        raise ConfigError(f"mode={to_answer[0]} runs nothing, so it cannot be part of a sweep; ask it by itself")
    _warn(notes)
    if refused:
        _warn([f"{len(refused)} of {len(refused) + len(modes)} runs cannot be, and the others go on: {first}"])


def _run_job(composed: Any, train: "Train", codes: list[int]) -> float | None:
    """One of Hydra's jobs; returns its final validation loss, adds the exit code of a failure to `codes`.

    None, for a failed run, is a failed trial to Optuna's sweeper; NaN would end the search.
    """
    hydras = HydraConfig.get()
    folder, in_sweep = Path(hydras.runtime.output_dir), hydras.mode == RunMode.MULTIRUN
    if Preempted.exit_code in codes:
        return None  # the sweep was to stop, not one job
    try:
        if in_sweep:
            print(f"\nrun {hydras.job.num}: {' '.join(hydras.overrides.task)}", flush=True)
        loss = job.run(train, _parse_job(composed, folder), folder, apart=in_sweep).val_loss
        return loss if math.isfinite(loss) else math.inf  # what diverged is the worst, not a failure
    except Exception as error:
        says_where = isinstance(error, ConfigError | Preempted | RankFailedError)
        where = "" if says_where else f" (log: {folder}/ranks/0.log)"
        codes.append(_say(launch.describe(error) + where, getattr(error, "exit_code", 1)))
        return None  # the other runs of a sweep go on
    finally:
        if in_sweep:
            with contextlib.suppress(Exception):  # what is wrong with its page is said when the sweep ends
                sweep.write(Path(hydras.runtime.cwd) / hydras.sweep.dir)


def _parse_job(composed: Any, folder: Path) -> Config:
    """A job whose settings do not go together is a row of its sweep like any that fails."""
    try:
        return parse_config(settings_in(composed))
    except ConfigError as error:
        job.leave_failure(folder, error, final=True)
        raise


def _report_sweep(folder: Path, *, reported: bool) -> list[int]:
    """Show the table, and where its page is; exit codes of failures that nobody has `reported`, as other processes'."""
    found = sweep.write(folder)
    print(f"\n{sweep.plain(found)}\n\n{sweep.counts(found.jobs)}: {found.page}")
    if any(folder.glob("*/wandb/offline-run-*")):
        print(f"to send the runs to W&B: wandb sync {os.path.relpath(folder)}/*/wandb/offline-run-*")
    return [] if reported else [_say(f"run {one.name} failed: {one.cause}", 1) for one in found.failed]


def _runs_in(overrides: Sequence[str], limit: int = 64) -> Iterator[list[str]]:
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


def _as_one_rank(arguments: Sequence[str], train: "Train") -> int:
    """Under torchrun rank 0 composes, makes the folder if the run has none yet, and sends them to the others."""
    if os.environ["RANK"] != "0":
        job.run_under_torchrun(train, None, _timeout_s(arguments))
        return 0
    if any(argument.startswith("-") for argument in arguments):
        raise ConfigError("torchrun starts one run: give key=value only, or sweep with python train.py -m")
    _refuse_synonyms(arguments)
    composed = compose(arguments)
    _refuse_secrets_of(composed)
    config = parse_config(settings_in(composed))
    if config.mode in RUNS_NOTHING:
        raise ConfigError(f"mode={config.mode} asks one process: python train.py mode={config.mode}")
    _warn([*_notes(composed), *notes_on(config), *launch.notes_on_torchrun()])
    job.run_under_torchrun(train, (config, partial(_make_folder, composed, arguments)), config.launch.timeout)
    return 0


def _timeout_s(arguments: Sequence[str]) -> float:
    """How long a rank waits for its settings, before it has any. What is wrong with them, rank 0 says."""
    try:
        return read(settings_in(compose(arguments))).launch.timeout
    except ConfigError:
        return Config().launch.timeout


def _make_folder(composed: Any, overrides: Sequence[str]) -> Path:
    """What Hydra does for a run that it starts itself."""
    HydraConfig.instance().set_config(composed)
    folder = _folder_of(composed, "run")
    record = folder / (composed.hydra.output_subdir or ".hydra")
    with making("hydra.run.dir", folder):
        record.mkdir(parents=True, exist_ok=True)  # a run that is started again in its folder
        OmegaConf.save(OmegaConf.create(settings_in(composed)), record / "config.yaml")
        OmegaConf.save(OmegaConf.create(list(overrides)), record / "overrides.yaml")
    return folder
