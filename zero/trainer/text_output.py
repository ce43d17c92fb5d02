"""Output of the modes that only print an answer (plan, doctor, explain), and helpers for output into pipes."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from zero.errors import ConfigError, one_line
from zero.platform.installed import as_called
from zero.trainer import launch
from zero.trainer.config import Config
from zero.trainer.explain import explain


def print_mode(config: Config, overrides: Sequence[str], conf: Path) -> int:
    """Print the answer of a mode that trains nothing: plan, doctor or explain. Returns the exit code.

    Args:
        overrides: words of the command line, which mode=plan repeats in the command that it proposes.
        conf: the folder of option files, which mode=explain reads.
    """
    if config.mode == "plan":
        launch.import_torch()
        from zero.platform.late_compiler import import_compiler_late

        import_compiler_late()
        from zero.trainer.planning import plan_text

        settings = config.launch
        processes = launch.ProcessSettings(Path(), settings.threads, settings.malloc)
        # the process is set up like a rank's, because mode=plan measures rates in it
        with launch.set_up(processes, ranks=1 if settings.ranks == "auto" else settings.ranks):
            text, fits = plan_text(config, overrides)
        exit_code = 0 if fits else ConfigError.exit_code
    elif config.mode == "doctor":
        launch.import_torch()
        from zero.trainer import doctor

        results = list(doctor.checks(config))
        text, exit_code = doctor.doctor_report(results), doctor.exit_code(results)
    else:
        text, exit_code = explain(config.explain.key, conf), 0
    show(text)
    return exit_code


def show(text: str) -> None:
    with for_a_reader():
        print(as_called(text))


class _CommandLine(argparse.ArgumentParser):
    """An argument parser that prints a mistake as one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        what, _, value = one_line(message).removeprefix("argument ").partition(": ")
        problems = {
            "the following arguments are required": f"{value}: missing",
            "unrecognized arguments": f"{value}: not an argument of this command",
        }
        advice = "" if message.endswith(".") else f". {self.prog} --help explains the arguments."
        self.exit(ConfigError.exit_code, f"{problems.get(what, f'{what}: {value}')}{advice}\n")


def command_line(name: str, text: str) -> argparse.ArgumentParser:
    """Return the argument parser of the command scripts/`name`, with `text` as its help."""
    return _CommandLine(
        as_called(f"scripts/{name}"),
        description=as_called(text),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


@contextlib.contextmanager
def for_a_reader() -> Iterator[None]:
    """End this process silently if the reader of its output closes the pipe during the body, as `| head` does."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGPIPE, before)
