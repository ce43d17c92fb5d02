"""The command line of train.py: its checks, and the start of a run or of the runs of a sweep.

`main` checks the settings of all runs (of a sweep, of the first 64) before torch is imported. Then Hydra makes the
folders and starts the jobs. An error is printed as one line.
"""

import contextlib
import importlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import zero
from zero.core import suggest
from zero.core.secret import refuse_secret_words
from zero.errors import ConfigError, Preempted, RankFailedError, SettingError, one_line
from zero.platform.installed import as_called
from zero.platform.run_files import hold, making
from zero.tracker.report import sweep
from zero.tracker.report.folder import mapping, read_run
from zero.tracker.report.jobs import counts
from zero.trainer import job, launch
from zero.trainer.checks import RUNS_NOTHING, notes_on, parse_config
from zero.trainer.compose import (
    HYDRA_VERSION,
    at_home,
    compose,
    make_run_folder,
    notes_of,
    parser_of_options,
    refuse_secrets_of,
    run_folder_of,
    run_jobs,
    runs_in,
    settings_in,
    this_job,
    with_typed_steps,
)
from zero.trainer.config import Config, read
from zero.trainer.explain import overview
from zero.trainer.launch.request import no_further_sigint
from zero.trainer.option_files import CONF
from zero.trainer.text_output import for_a_reader, print_mode, show

if TYPE_CHECKING:
    from zero.trainer.job import Train


class _SweepStopped(BaseException):
    """The end of a sweep, raised after a job was asked to stop and has saved, so that no other job starts.

    A BaseException, because a sweeper treats an Exception as the failure of one job and makes the folder of the next
    job.
    """


def main(arguments: Sequence[str], train: "Train") -> int:
    """Run a command line and return the exit code. An error is printed as one line on stderr.

    Args:
        arguments: the command line without the name of the program.
        train: the function that each rank runs. It is defined at the top level of a module, because child processes
            import it by its name.
    """
    try:
        refuse_secret_words(arguments, os.environ)
        arguments = with_typed_steps([at_home(word) for word in arguments])
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


def _going_on(arguments: Sequence[str], folder: Path | None) -> str:
    """Return the end of the message about an interrupted run: the command that continues it, or advice on saving."""
    from zero.trainer.run.starts import last_saved

    if folder is None or (config := read_run(folder).config).get("mode") == "eval":
        return ""
    if newest := last_saved(folder):
        return f". Continue with: {suggest.command(arguments, resume=os.path.relpath(newest))}"
    if mapping(config.get("checkpoint")).get("every"):
        return ". Nothing was saved. The first Ctrl-C during the steps saves, and a second one ends the run"
    return ". Nothing was saved. Set checkpoint.every=100: then the first Ctrl-C during the steps saves"


def _by_name(train: "Train") -> "Train":
    """Return `train` from the script imported as a module, because other processes cannot import it from `__main__`."""
    main_module = sys.modules["__main__"]
    if train.__module__ != "__main__" or main_module.__file__ is None:
        return train
    name = main_module.__spec__.name if main_module.__spec__ else Path(main_module.__file__).stem
    return getattr(importlib.import_module(name), train.__name__)


def _warn(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"warning: {as_called(note)}", file=sys.stderr)


def _say(text: str, exit_code: int) -> int:
    """Print a message to stderr and return `exit_code`.

    Under torchrun each rank writes the message to torchrun's error file, and only the first rank of each machine prints
    it, because torchrun also prints the error of every rank.
    """
    reported = launch.under_torchrun() and launch.tell_torchrun(text)
    if not reported or os.environ["LOCAL_RANK"] == "0":
        print(as_called(text), file=sys.stderr, flush=True)
    return exit_code


def _say_stopped(text: str, exit_code: int) -> int:
    """Print a message on a new line, because a terminal has echoed ^C on the line of the progress bar."""
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return _say(text, exit_code)


def _with_hydra(arguments: Sequence[str], train: "Train") -> int:
    """Print the answer to an option or to a mode that trains nothing; otherwise check all runs and start them."""
    if "--version" in arguments:
        show(f"zero {zero.__version__}, Hydra {HYDRA_VERSION}")
        return 0
    options = _options(arguments)
    if options.help:
        show(overview(CONF))
        return 0
    of_hydra = options.hydra_help or options.shell_completion
    runs, folder = ([], Path()) if of_hydra else _parse_runs(options)
    if of_hydra or options.cfg or options.info:
        completes = options.shell_completion and "COMP_LINE" in os.environ
        with for_a_reader(), contextlib.suppress(*([Exception] if completes else [])):  # the shell would show errors
            _start_hydra(arguments, options.overrides, lambda _: None)
        return 0
    if runs[0][0].mode in RUNS_NOTHING:
        return max(print_mode(config, words, CONF) for config, words in runs)
    return _run_jobs(arguments, options, train, folder)


def _start_hydra(arguments: Sequence[str], words: Sequence[str], run: Callable[[Any], float | None]) -> None:
    options = [argument for argument in arguments if argument not in words]
    sys.argv = [sys.argv[0], *words, *options]  # Hydra finds no settings between options
    run_jobs(run)


def _run_jobs(arguments: Sequence[str], options: Any, train: "Train", folder: Path) -> int:
    """Run the jobs of a command line, one run or those of a sweep, in `folder`; returns the largest exit code."""
    codes, process = list[int](), os.getpid()

    def run_one(composed: Any) -> float | None:
        loss = _run_job(composed, train, codes)
        if options.multirun and Preempted.exit_code in codes and os.getpid() == process:  # not in a launcher's process
            raise _SweepStopped
        return loss

    key = "hydra.sweep.dir" if options.multirun else "hydra.run.dir"
    if options.multirun:
        # processes of a Hydra launcher import `train` by its name
        paths = [str(CONF.parent), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, hold(key, folder))
            stack.enter_context(making(key, folder))
            # the folder is passed explicitly, because its default contains the time
            _start_hydra(arguments, [*options.overrides, f"{key}={suggest.word(str(folder))}"], run_one)
    except launch.Interrupted as stopped:
        if not options.multirun:
            raise
        number = f" in run {stopped.folder.name}" if stopped.folder else ""
        words = (read_run(stopped.folder).overrides or []) if stopped.folder else []
        _print_sweep(folder)
        text = f"{launch.describe(stopped)}{number}{_going_on(words, stopped.folder)}"
        return _say_stopped(text, stopped.exit_code)
    except _SweepStopped:
        _print_sweep(folder)
        return Preempted.exit_code
    if options.multirun:
        failed = _print_sweep(folder).failed
        if not codes:  # the jobs ran in other processes, which have printed nothing here
            codes = [_say(f"run {run.name} failed: {run.cause}", 1) for run in failed]
    return max(codes, default=0)


def _options(arguments: Sequence[str]) -> Any:
    """Parse the options (words with dashes) and the overrides `key=value` of a command line, in any order.

    Raises:
        ConfigError: an unknown option, or a wrong value of an option.
    """

    def reject(message: str) -> NoReturn:
        raise ConfigError(f"{one_line(message)}. --help shows how to start, --hydra-help all options.")

    for argument in arguments:
        is_file = argument.endswith((".yaml", ".yml")) and "=" not in argument
        if argument.startswith("--conf") or is_file:
            raise ConfigError(
                f"{argument}: no option names a file of settings. Write FOLDER/experiment/NAME.yaml and type "
                "'hydra.searchpath=[FOLDER]' experiment=NAME."
            )
    parser = parser_of_options()
    parser.error = reject  # type: ignore[method-assign]
    options, unknown = parser.parse_known_intermixed_args(list(arguments))
    if unknown:
        name, _, value = unknown[0].lstrip("-").partition("=")
        raise ConfigError(f"{unknown[0]} is not an option. Settings have no dashes: {name}={value or 'VALUE'}.")
    return options


def _parse_runs(options: Any) -> tuple[list[tuple[Config, Sequence[str]]], Path]:
    """Compose and check the settings of each run of a command line.

    Returns:
        The settings and the overrides of each valid run; and the folder of the run, or of the sweep.

    Raises:
        SettingError: an override is wrong in itself, so that no run can start.
        ConfigError: see `_reject_or_warn`.
    """
    runs: list[tuple[Config, Sequence[str]]] = []
    rejected: dict[str, str] = {}  # error message, by the overrides that only that run has
    notes, folders = dict[str, None](), list[Path]()
    for words in list(runs_in(options.overrides)) if options.multirun else [options.overrides]:
        try:
            composed = compose(words)
            refuse_secrets_of(composed)
            folders.append(run_folder_of(composed, "sweep" if options.multirun else "run"))
            settings = settings_in(composed)
            config = parse_config(settings)
            notes |= dict.fromkeys(notes_of(composed))
            notes |= dict.fromkeys(notes_on(config))
            runs.append((config, words))
        except SettingError:
            raise
        except ConfigError as error:
            rejected[" ".join(word for word in words if word not in options.overrides)] = str(error)
    _reject_or_warn([config.mode for config, _ in runs], rejected, notes)
    return runs, folders[0]


def _reject_or_warn(modes: Sequence[str], rejected: Mapping[str, str], notes: Iterable[str]) -> None:
    """Print notes, and a warning about jobs of a sweep that cannot start while others can.

    Args:
        modes: the mode of each valid run.
        rejected: the error message of each invalid run, by its own overrides.

    Raises:
        ConfigError: no run is valid, or a mode that only prints an answer is part of a sweep with invalid or other
            runs.
    """
    answers = [mode for mode in modes if mode in RUNS_NOTHING]
    run, why = next(iter(rejected.items()), ("", ""))
    first = f"{why} (in the run {run})" if modes or len(set(rejected.values())) > 1 else why
    if rejected and (answers or not modes):
        raise ConfigError(first)
    if answers and len(answers) < len(modes):
        raise ConfigError(f"mode={answers[0]} runs nothing, so it cannot be part of a sweep. Type it alone.")
    _warn(notes)
    if rejected:
        _warn([f"{len(rejected)} of {len(rejected) + len(modes)} runs cannot start: {first}"])


def _run_job(composed: Any, train: "Train", codes: list[int]) -> float | None:
    """Run one of Hydra's jobs and return its final validation loss; a failure adds its exit code to `codes`.

    A failed run returns None, because Optuna's sweeper counts None as a failed trial, but NaN would end its search.
    """
    this = this_job()
    try:
        if this.sweep is not None:
            print(f"\n{this.name}", flush=True)
        loss = job.run(train, _parse_job(composed, this.folder), this.folder, apart=this.sweep is not None).val_loss
        return loss if math.isfinite(loss) else math.inf  # a diverged run is the worst trial, not a failed one
    except Exception as error:
        log = this.folder / "ranks" / "0.log"
        says_where = isinstance(error, ConfigError | Preempted | RankFailedError) or not log.exists()
        where = "" if says_where else f" (log: {log})"
        codes.append(_say(launch.describe(error) + where, getattr(error, "exit_code", 1)))
        return None  # the other runs of the sweep continue
    finally:
        if this.sweep is not None:
            with contextlib.suppress(Exception):  # the last write of the page, after all jobs, reports its error
                sweep.write_sweep(this.sweep)


def _parse_job(composed: Any, folder: Path) -> Config:
    """Parse the settings of a job. An error leaves a summary.json, so that the job has a row in the sweep's table."""
    try:
        return parse_config(settings_in(composed))
    except ConfigError as error:
        job.leave_failure(folder, error, final=True)
        raise


def _print_sweep(folder: Path) -> sweep.Sweep:
    """Write the report of a sweep, print its table and the path of its page, and return it."""
    written = sweep.write_sweep(folder)
    table = sweep.plain(written, shutil.get_terminal_size((sweep.ANY_COLUMNS, 24)).columns)
    print(f"\n{table}\n\n{counts(written.jobs)}: {written.page}")
    if any(folder.glob("*/wandb/offline-run-*")):
        print(f"to send the runs to W&B: wandb sync {os.path.relpath(folder)}/*/wandb/offline-run-*")
    return written


def _as_one_rank(arguments: Sequence[str], train: "Train") -> int:
    """Run as one rank of torchrun.

    Rank 0 composes the settings, makes the folder of a new run, and sends both to the other ranks.
    """
    if os.environ["RANK"] != "0":
        job.run_under_torchrun(train, None, _timeout_s(arguments))
        return 0
    if any(argument.startswith("-") for argument in arguments):
        raise ConfigError("torchrun starts one run. Give key=value only, or sweep with python train.py -m.")
    composed = compose(arguments)
    refuse_secrets_of(composed)
    config = parse_config(settings_in(composed))
    if config.mode in RUNS_NOTHING:
        raise ConfigError(f"mode={config.mode} runs in one process. Type python train.py mode={config.mode}")
    _warn([*notes_of(composed), *notes_on(config), *launch.notes_on_torchrun()])
    job.run_under_torchrun(train, (config, partial(make_run_folder, composed, arguments)), config.launch.timeout)
    return 0


def _timeout_s(arguments: Sequence[str]) -> float:
    """Return the seconds that a rank waits for rank 0's settings: launch.timeout, or its default if they are invalid.

    Rank 0 reports the error in the settings.
    """
    try:
        return read(settings_in(compose(arguments))).launch.timeout
    except ConfigError:
        return Config().launch.timeout
