"""From a command line to runs, or to one line that says what is wrong with it.

`main` checks every run that a command line asks for before torch is imported, then has Hydra make the folders and run
the jobs.
"""

import contextlib
import importlib
import itertools
import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import zero
from zero.core import suggest
from zero.core.secret import refuse_secret_words
from zero.errors import ConfigError, MachineError, Preempted, RankFailedError, SettingError, one_line
from zero.platform.installed import as_called
from zero.platform.run_files import hold, making
from zero.tracker.report import sweep
from zero.tracker.report.folder import mapping, read_run
from zero.trainer import job, launch, replies
from zero.trainer.answers import answer, for_a_reader, show
from zero.trainer.checks import RUNS_NOTHING, notes_on, parse_config
from zero.trainer.compose import (
    CONF,
    HYDRA_VERSION,
    at_home,
    complete,
    compose,
    folder_of,
    make_folder,
    notes_of,
    parser_of_options,
    refusal_of,
    refuse_ranges,
    refuse_secrets_of,
    run_jobs,
    runs_in,
    settings_in,
    this_job,
    tried,
)
from zero.trainer.config import Config, keys, read
from zero.trainer.explain import overview
from zero.trainer.launch.request import no_further_sigint

if TYPE_CHECKING:
    from zero.trainer.job import Train


MOST_JOBS = 10_000
"""Of a sweep that was stopped, to be counted."""


class _SweepStopped(BaseException):
    """A job of a sweep was asked to stop, has saved and has said so: no other begins.

    Not an Exception, which to a sweeper is a job that failed, so that it makes the folder of the next one.
    """


def main(arguments: Sequence[str], train: "Train") -> int:
    """Do what a command line says; one line on stderr and an exit code for everything that can go wrong.

    Args:
        arguments: the command line without the name of the program.
        train: what each rank does, defined at the top of a module.
    """
    try:
        refuse_secret_words(arguments, os.environ)
        _check_surroundings()
        arguments = [at_home(word) for word in arguments]
        if launch.under_torchrun():
            return _as_one_rank(arguments, train)
        return _with_hydra(arguments, _by_name(train))
    except KeyboardInterrupt as stopped:
        return _say_stopped(launch.describe(stopped), 130)
    except launch.Interrupted as stopped:
        with no_further_sigint():
            return _say_stopped(launch.describe(stopped) + _going_on(arguments, stopped.folder), stopped.exit_code)
    except Exception as error:
        return _say(launch.describe(error), getattr(error, "exit_code", 1))


def _check_surroundings() -> None:
    """Raise MachineError where the working directory was deleted, or where Linux has no /proc."""
    try:
        Path.cwd()
    except FileNotFoundError:
        folder = os.environ.get("PWD", "the working directory")
        raise MachineError(f"{folder} was deleted while this shell is in it; cd to a folder that exists") from None
    if sys.platform == "linux" and not Path("/proc/self").exists():
        raise MachineError("/proc is not mounted, where memory is read; mount -t proc proc /proc")


def _going_on(arguments: Sequence[str], folder: Path | None) -> str:
    """What is left of a run that was stopped at once, and the command that goes on from there."""
    if folder is None:
        return ""
    from zero.platform.step_folders import step_of
    from zero.trainer.saver import last_saved

    run, newest = read_run(folder), last_saved(folder)
    if run.config.get("mode") == "eval":
        return ""
    last = mapping(run.config.get("debug")).get("stop_at") or run.config.get("steps")
    has_ended = last is not None and run.summary.get("steps") == last
    if has_ended and (newest is None or step_of(newest.name) == last):
        saved = f"the checkpoint is {os.path.relpath(newest)}" if newest else "none of them is saved"
        return f"; all {last} steps were made; {saved}"
    if newest is None:
        every = mapping(run.config.get("checkpoint")).get("every")
        due = f"checkpoint.every={every} was not due yet" if every else "checkpoint.every=100 saves every 100 steps"
        return f"; nothing was saved; {due}, and SIGTERM (not Ctrl-C) saves before it stops"
    command = suggest.command(arguments, resume=os.path.relpath(newest))
    if sys.argv[0].endswith(".py") and Path(sys.argv[0]).name != "__main__.py":  # which `python -m zero` has
        command = command.replace("train.py", shlex.quote(sys.argv[0]), 1)  # as it was typed, from whatever folder
    return f"; the newest checkpoint is {newest.name}; go on with: {command}"


def _going_on_with_job(folder: Path | None) -> str:
    """The same of the job of a sweep that was stopped."""
    return "" if folder is None else f" in run {folder.name}{_going_on(read_run(folder).overrides or [], folder)}"


def _not_begun(words: Sequence[str], folder: Path) -> str:
    """Show the table of a sweep that was stopped; returns which of the runs that its words ask for did not begin."""
    begun = len(_print_sweep(folder).jobs)
    if any(one.startswith("hydra/sweeper") for one in words):
        return ""  # which come next, only the sweeper knows
    left = [" ".join(one for one in run if one not in words) for run in runs_in(words, limit=MOST_JOBS)][begun:]
    return f"{len(left)} of its runs did not begin: {suggest.some(left)}" if left else ""


def _by_name(train: "Train") -> "Train":
    """The same function of the module that has the script's own name, where other processes find it."""
    main_module = sys.modules["__main__"]
    if train.__module__ != "__main__" or main_module.__file__ is None:
        return train
    name = main_module.__spec__.name if main_module.__spec__ else Path(main_module.__file__).stem
    return getattr(importlib.import_module(name), train.__name__)


def _warn(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"warning: {as_called(note)}", file=sys.stderr)


def _say(text: str, exit_code: int) -> int:
    """Once for each machine: torchrun ends with what every rank reported."""
    reported = launch.under_torchrun() and launch.tell_torchrun(text)
    if not reported or os.environ["LOCAL_RANK"] == "0":
        print(as_called(text), file=sys.stderr, flush=True)
    return exit_code


def _say_stopped(text: str, exit_code: int) -> int:
    """On a line of its own: a terminal has echoed ^C behind the bar."""
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return _say(text, exit_code)


def _with_hydra(arguments: Sequence[str], train: "Train") -> int:
    """Check every run that the command line asks for, then let Hydra make the folders and call us once per run."""
    if "--version" in arguments:
        show(f"zero {zero.__version__}, Hydra {HYDRA_VERSION}")
        return 0
    given = _options(arguments)
    if given.help:
        show(overview(CONF))
        return 0
    if given.shell_completion and "COMP_LINE" in os.environ:
        print("\n".join(complete(os.environ["COMP_LINE"])))
        return 0
    _refuse_synonyms(given.overrides, sweep=given.multirun)
    folder, shows = None, bool(given.hydra_help or given.cfg or given.info)
    if not (given.hydra_help or given.shell_completion):
        found, place = _parse_runs(given)
        if found[0][0].mode in RUNS_NOTHING and not shows:
            return max(answer(config, overrides, CONF) for config, overrides in found)
        folder = None if shows else place
    codes, process = list[int](), os.getpid()

    def run_one(composed: Any) -> float | None:
        loss = _run_job(composed, train, codes)
        if given.multirun and Preempted.exit_code in codes and os.getpid() == process:  # not a launcher's own process
            raise _SweepStopped
        return loss

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
    try:
        with contextlib.ExitStack() as stack:
            if folder is None:
                stack.enter_context(for_a_reader())
            else:
                stack.callback(os.close, hold(key, folder))
                stack.enter_context(making(key, folder))
            run_jobs(run_one)
    except launch.Interrupted as stopped:
        if folder is None or not given.multirun:
            raise
        left = _not_begun(given.overrides, folder)
        text = f"{launch.describe(stopped)}{_going_on_with_job(stopped.folder)}"
        return _say_stopped(f"{text}; {left}" if left else text, stopped.exit_code)
    except _SweepStopped:
        assert folder is not None
        left = _not_begun(given.overrides, folder)
        return _say(left, Preempted.exit_code) if left else Preempted.exit_code
    if given.multirun and folder is not None and folder.is_dir():
        codes += _report_sweep(folder, reported=bool(codes))
    return max(codes, default=0)


def _options(arguments: Sequence[str]) -> Any:
    """What Hydra understands of the command line, wherever in it an option stands.

    Raises:
        ConfigError: an option that it does not have, or with a value that it does not take.
    """

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{one_line(message)}; --help shows how to start, --hydra-help all options")

    sweep = not {"-m", "--multirun"}.isdisjoint(arguments)
    for argument, after in itertools.zip_longest(arguments, arguments[1:], fillvalue="-"):
        if argument.startswith("--") and argument[2:].split("=")[0] in keys():
            separate = "=" not in argument and not after.startswith("-") and "=" not in after
            word = f"{argument[2:]}={after}" if separate else argument[2:]
            _refuse_synonyms([word], "settings are written without dashes; ", sweep=sweep)
            others = [one for one in arguments if one != argument and not (separate and one == after)]
            refused = refusal_of([*others, word]) if "=" in word else ""
            typed = suggest.typed(suggest.shown(word)) if "=" in word else f"{word}=VALUE"
            end = f"; with {typed} in its place: {refused}" if refused else f": {typed}"
            raise ConfigError(f"{argument}: settings are written without dashes{end}")
    if (plain := _without_dashes(arguments)) != list(arguments):
        _refuse_synonyms(plain, "settings are written without dashes; ", sweep=sweep)
    plain_words = [word for word in arguments if "=" not in word or word.startswith("-")]
    if of_a_file := [word for word in plain_words if word.startswith("--conf") or word.endswith((".yaml", ".yml"))]:
        raise ConfigError(
            f"{of_a_file[0]}: no option names a file of settings; options of your own are found with "
            "'hydra.searchpath=[file:///FOLDER]', for instance FOLDER/experiment/NAME.yaml with experiment=NAME"
        )
    parser = parser_of_options()
    parser.error = refuse  # type: ignore[method-assign]
    options, unknown = parser.parse_known_intermixed_args(list(arguments))
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}; settings are written key=value, and --help lists them")
    return options


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


def _refuse_synonyms(words: Sequence[str], first: str = "", *, sweep: bool = False) -> None:
    """What other programs call our settings is answered with ours, as it can be typed.

    Args:
        first: what is said before that.
        sweep: lists are of runs.

    Raises:
        SettingError: there is such a word.
    """
    if said := tried(replies.reply(words), sweep=sweep):
        raise SettingError(first + said)


def _parse_runs(given: Any) -> tuple[list[tuple[Config, Sequence[str]]], Path]:
    """Compose and check each run; gives those that can be with their words, and the folder of the run or of its jobs.

    Raises:
        SettingError: a word that is wrong whatever else is in the run.
        ConfigError: see `_refuse_or_warn`.
    """
    wanted = list(runs_in(given.overrides)) if given.multirun else [given.overrides]
    found: list[tuple[Config, Sequence[str]]] = []
    refused: dict[str, str] = {}  # why, by the words that only that run has
    notes, folders = dict[str, None](), list[Path]()
    for overrides in wanted:
        try:
            composed = compose(overrides)
            refuse_secrets_of(composed)
            refuse_ranges(composed, given.overrides)
            folders.append(folder_of(composed, "sweep" if given.multirun else "run"))
            settings = settings_in(composed)
            notes |= dict.fromkeys(notes_of(composed))
            config = parse_config(settings)
            notes |= dict.fromkeys(notes_on(config))
            found.append((config, overrides))
        except SettingError:
            raise
        except ConfigError as error:
            refused[" ".join(one for one in overrides if one not in given.overrides)] = str(error)
    _refuse_or_warn([config.mode for config, _ in found], refused, notes)
    return found, folders[0]


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
    one = this_job()
    try:
        if one.sweep is not None:
            print(f"\n{one.name}", flush=True)
        loss = job.run(train, _parse_job(composed, one.folder), one.folder, apart=one.sweep is not None).val_loss
        return loss if math.isfinite(loss) else math.inf  # what diverged is the worst, not a failure
    except Exception as error:
        log = one.folder / "ranks" / "0.log"
        says_where = isinstance(error, ConfigError | Preempted | RankFailedError) or not log.exists()
        where = "" if says_where else f" (log: {log})"
        codes.append(_say(launch.describe(error) + where, getattr(error, "exit_code", 1)))
        return None  # the other runs of a sweep go on
    finally:
        if one.sweep is not None:
            with contextlib.suppress(Exception):  # what is wrong with its page is said when the sweep ends
                sweep.write(one.sweep)


def _parse_job(composed: Any, folder: Path) -> Config:
    """A job whose settings do not go together is a row of its sweep like any that fails."""
    try:
        return parse_config(settings_in(composed))
    except ConfigError as error:
        job.leave_failure(folder, error, final=True)
        raise


def _report_sweep(folder: Path, *, reported: bool) -> list[int]:
    """Show the table; exit codes of failures that nobody has `reported`, as other processes'."""
    found = _print_sweep(folder)
    return [] if reported else [_say(f"run {one.name} failed: {one.cause}", 1) for one in found.failed]


def _print_sweep(folder: Path) -> sweep.Sweep:
    """The table so far, and where its page is."""
    found = sweep.write(folder)
    table = sweep.plain(found, shutil.get_terminal_size((sweep.ANY_COLUMNS, 24)).columns)
    print(f"\n{table}\n\n{sweep.counts(found.jobs)}: {found.page}")
    if any(folder.glob("*/wandb/offline-run-*")):
        print(f"to send the runs to W&B: wandb sync {os.path.relpath(folder)}/*/wandb/offline-run-*")
    return found


def _as_one_rank(arguments: Sequence[str], train: "Train") -> int:
    """Under torchrun rank 0 composes, makes the folder if the run has none yet, and sends them to the others."""
    if os.environ["RANK"] != "0":
        job.run_under_torchrun(train, None, _timeout_s(arguments))
        return 0
    if any(argument.startswith("-") for argument in arguments):
        raise ConfigError("torchrun starts one run: give key=value only, or sweep with python train.py -m")
    _refuse_synonyms(arguments)
    composed = compose(arguments)
    refuse_secrets_of(composed)
    config = parse_config(settings_in(composed))
    if config.mode in RUNS_NOTHING:
        raise ConfigError(f"mode={config.mode} asks one process: python train.py mode={config.mode}")
    _warn([*notes_of(composed), *notes_on(config), *launch.notes_on_torchrun()])
    job.run_under_torchrun(train, (config, partial(make_folder, composed, arguments)), config.launch.timeout)
    return 0


def _timeout_s(arguments: Sequence[str]) -> float:
    """How long a rank waits for its settings, before it has any. What is wrong with them, rank 0 says."""
    try:
        return read(settings_in(compose(arguments))).launch.timeout
    except ConfigError:
        return Config().launch.timeout
