"""The modes that print an answer and run nothing."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from zero.errors import ConfigError
from zero.platform.installed import as_called
from zero.trainer import launch
from zero.trainer.config import Config
from zero.trainer.explain import explain


def answer(config: Config, overrides: Sequence[str], conf: Path) -> int:
    """Print what `config.mode` answers, and return an exit code.

    Args:
        overrides: the words of the command line, which the answer repeats.
        conf: the folder of options.
    """
    if config.mode == "plan":
        launch.import_torch()
        from zero.trainer.planning import plan_text

        given = config.launch
        how = launch.Processes(Path(), given.threads, given.malloc)
        with launch.set_up(how, ranks=1 if given.ranks == "auto" else given.ranks):  # what is timed is as in a rank
            text, fits = plan_text(config, overrides)
        exit_code = 0 if fits else ConfigError.exit_code
    elif config.mode == "doctor":
        launch.import_torch()
        from zero.trainer import doctor

        found = list(doctor.checks(config))
        text, exit_code = doctor.report(found), doctor.exit_code(found)
    else:
        text, exit_code = explain(config.explain.key, conf), 0
    show(text)
    return exit_code


def show(text: str) -> None:
    """Print it."""
    with for_a_reader():
        print(as_called(text))


def command_line(name: str, text: str) -> argparse.ArgumentParser:
    """The parser of the command that is scripts/`name` in a checkout, with `text` for its help."""
    how = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(as_called(f"scripts/{name}"), description=as_called(text), formatter_class=how)


@contextlib.contextmanager
def for_a_reader() -> Iterator[None]:
    """What the body prints may be more than is read: `| head` then ends this process without a word, as it does cat."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGPIPE, before)
