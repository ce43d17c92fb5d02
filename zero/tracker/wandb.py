"""The Weights & Biases run: the rows of metrics.jsonl once more, for a browser. The only file that imports wandb.

W&B writes a log of its own into the run folder, and sends it where it is online. It is told nothing of the command
line or the environment, and of the code only its commit. Every value is plotted against `step`; `tokens` is in each row
to choose instead. What does not change is in W&B's config or summary, and in no chart.
W&B counts rows by itself: given a step, it would drop the rows of a run that goes on from an earlier one.
"""

import contextlib
import logging
import math
import os
import platform
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from zero.core.secret import hidden
from zero.tracker.settings import Wandb
from zero.tracker.view import SECTIONS, Charts, Row, View

IN_ROWS = frozenset(
    ("steps", "tokens", "samples", "train_loss", "val_loss", "skipped", "device_peak_bytes", "host_peak_bytes")
)
"""Figures of summary.json that the newest row has too: W&B makes its summary of the rows. Of `tokens_per_s` and `mfu` a
row has the newest, and summary.json the median."""

IN_CONFIG = frozenset(("ranks", "parameters_numel", "data_digest"))
"""And those that W&B's config has."""

NO_KEY = "W&B is offline for this run: there is no key; run `wandb login`, or export WANDB_API_KEY"

PATIENCE_S = 5.0
"""How long W&B may look for the network before the run is offline, unless WANDB_INIT_TIMEOUT says another time."""

FLUSH_S = 2.0
"""Seconds after which a row is in W&B's file, for a run that is killed and for who looks on."""

NAME_LENGTH = 128

PROJECT = "functional-zero"
"""Where neither the settings nor WANDB_PROJECT name one."""


class WandbRun(View):
    """A run that is open from here until `close`. Its calls may take as long as the network does.

    Args:
        facts: what is known of the run beside its settings; they go to W&B's config.
        run_id: of a new run, or of one that goes on.
        say: tells a person; called from this thread.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        settings: Wandb,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        run_id: str,
        say: Callable[[str], None],
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("wandb is not installed") from error

        # W&B has a log in the run folder: on a full disk each line would be a traceback
        logging.raiseExceptions = False
        self._wandb, self._say, self._folder, self._artifacts = wandb, say, folder, settings.artifacts
        self._skipped, self._has_called = 0, False
        self._charts, self._best_val_loss = Charts(), math.inf
        name, group = name_and_group(settings, folder)
        versions = {"python": platform.python_version(), "torch": version("torch"), "wandb": version("wandb")}
        self._run = self._init(
            mode_of(settings),
            id=run_id,
            resume="allow",
            project=settings.project or (None if os.environ.get("WANDB_PROJECT") else PROJECT),
            entity=settings.entity,
            name=name,
            group=group,
            tags=settings.tags or None,
            notes=settings.notes,
            job_type=config["mode"],
            dir=str(folder),
            config={**config, "run": {**facts, "versions": versions}},
            settings=_settings(wandb, versions=settings.versions),
        )
        self._run.define_metric("step", hidden=True)  # it is the axis of all others
        for name in ("tokens", "samples", *(f"{section}/*" for section in SECTIONS)):
            self._run.define_metric(name, step_metric="step")

    def log(self, row: Row) -> None:
        """A row, and the one alert of a run if it says that training goes wrong."""
        self._run.log(self._charts.of(row))
        if (loss := row.get("val/loss")) is not None and loss < self._best_val_loss:
            self._best_val_loss = loss
            self._run.summary["best_val_loss"] = loss  # also of a run that is killed
        what = self._trouble(row)
        if what and not self._has_called:
            self._has_called = True
            self._run.alert("training is not finite", f"{what} at step {row['step']}", level="ERROR")

    def saved(self, path: Path, step: int) -> None:
        """Where a checkpoint lies, without a look into it."""
        if not self._artifacts:
            return
        artifact = self._wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint", metadata={"step": step})
        artifact.add_reference(path.absolute().as_uri(), checksum=False)
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def report(self, path: Path) -> None:
        """The page of the run."""
        self._run.log({"report": self._wandb.Html(path.read_text(), inject=False)})

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Return when W&B has everything that it will get."""
        figures = {key: value for key, value in summary.items() if key not in IN_ROWS | IN_CONFIG}
        self._run.summary.update({key: value for key, value in figures.items() if _is_figure(value)})
        folder = Path(self._run.dir).parent
        place = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else folder  # from where the user is
        try:
            self._run.finish(exit_code=exit_code)
        finally:  # `finish` returns before the file is whole; the end of W&B's process does not
            self._wandb.teardown(exit_code)
        if self._is_offline:
            self._say(
                f"W&B was offline; to look at the run, or to send it:\n  wandb leet {place}\n  wandb sync {place}"
            )

    def _init(self, mode: Any, **options: Any) -> Any:
        self._is_offline = mode == "offline"
        place = self._folder / "wandb"
        before = set(place.glob("run-*"))
        try:
            run = self._wandb.init(mode=mode, **options)
        except Exception as refused:  # W&B raises many kinds, and none is a reason not to train
            if self._is_offline:
                raise
            abandon()  # its process would still wait for the network, and keep the run's id
            for attempt in set(place.glob("run-*")) - before:  # it has no row, and `wandb sync` would send it, too
                shutil.rmtree(attempt, ignore_errors=True)
            self._say(f"W&B is offline for this run: {first_line(refused)}")
            return self._init("offline", **options)
        if not self._is_offline:
            self._say(f"W&B: {run.url}")
        return run

    def _trouble(self, row: Row) -> str | None:
        """What is wrong with a row. Loss scaling skips steps on purpose, as long as it can lower its scale."""
        loss, skipped = row.get("train/loss"), int(row.get("train/skipped") or 0)
        was_skipped, self._skipped = skipped > self._skipped, skipped
        if loss is not None and not math.isfinite(loss):
            return f"the loss is {loss}"
        return "a step was skipped" if was_skipped and (row.get("train/loss_scale") or 1) <= 1 else None


def _is_figure(value: object) -> bool:
    """Neither a table nor the best of nothing."""
    return not isinstance(value, Mapping) and value not in ("", math.inf)


def abandon() -> None:
    """Kill W&B's process, which hangs: Python would wait for it when it ends."""
    import wandb

    cores = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
    for core in cores:
        core.kill()
    psutil.wait_procs(cores, timeout=1)
    with contextlib.suppress(Exception, SystemExit):  # with which it would end ours, for the signal it got
        wandb.teardown(1)


def mode_of(settings: Wandb) -> str:
    """online, offline or disabled. Never online without a key: W&B would ask for one, on the terminal."""
    asked = os.environ.get("WANDB_MODE", "auto") if settings.mode == "auto" else settings.mode
    return ("online" if has_key() else "offline") if asked in ("auto", "online") else asked


def lacks_key(settings: Wandb) -> bool:
    """Whether somebody asked for an online run, and there is no key for it."""
    asked = os.environ.get("WANDB_MODE") if settings.mode == "auto" else settings.mode
    return asked == "online" and not has_key()


def has_key() -> bool:
    """Whether the environment or a netrc file has something for W&B; what it is nobody here looks at."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = re.sub(r"^\w+://|[:/].*$", "", os.environ.get("WANDB_BASE_URL", "")) or "wandb"
    places = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    try:
        found = [path for place in places if (path := Path(place).expanduser()).is_file()]
        return any(
            host in line for path in found for line in re.findall(r"machine\s+(\S+)", path.read_text(errors="replace"))
        )
    except (OSError, RuntimeError):  # not readable, or nobody's home: then W&B finds nothing there either
        return False


def run_id_of(config: Mapping[str, Any], folder: Path, stored: str | None) -> str:
    """The id of the W&B run for the run in `folder`.

    WANDB_RUN_ID, which an agent of a W&B sweep sets; that of an earlier start in this folder; or `stored`, the one of
    the run that this one goes on from; else a new one. Evaluations and jobs of a Hydra sweep are runs of their own,
    though they may all begin from one checkpoint.
    """
    is_in_sweep = _is_in_sweep(folder)
    if (given := os.environ.get("WANDB_RUN_ID")) and not is_in_sweep:
        return given
    latest = folder / "wandb" / "latest-run"  # a link to run-<time>-<id>
    if latest.is_symlink():
        return latest.readlink().name.rpartition("-")[2]
    goes_on = config["mode"] == "train" and not is_in_sweep
    return stored if stored and goes_on else uuid.uuid4().hex[:8]


def name_and_group(settings: Wandb, folder: Path) -> tuple[str, str | None]:
    """What W&B calls a run and its group: in a sweep the overrides that it alone has, and the sweep's folder."""
    folder, given = folder.absolute(), settings.run or os.environ.get("WANDB_NAME")
    if not _is_in_sweep(folder):
        return given or folder.name, settings.group
    lines = (folder / ".hydra" / "overrides.yaml").read_text().splitlines()
    # where an override that differs between jobs is a list; `hydra.sweep.subdir` may be several folders
    lists = next((found for above in folder.parents if (found := above / "multirun.yaml").is_file()), None)
    common = set() if lists is None else {line.strip() for line in lists.read_text().splitlines()}
    own = [line for line in lines if line not in common] or lines
    overrides = " ".join(line.removeprefix("- ").strip("'\"") for line in own)
    sweep = (folder if lists is None else lists).parent
    return (given or overrides or folder.name)[:NAME_LENGTH], settings.group or sweep.name


def first_line(error: BaseException) -> str:
    """What an error says, without what nobody should see."""
    return hidden(next(iter(str(error).splitlines()), "") or type(error).__name__, os.environ)


def _is_in_sweep(folder: Path) -> bool:
    record = folder / ".hydra" / "hydra.yaml"
    return record.is_file() and re.search(r"^\s+mode: MULTIRUN$", record.read_text(), re.MULTILINE) is not None


def _settings(wandb: Any, *, versions: bool) -> Any:
    wanted: dict[str, Any] = {
        "silent": True,
        "console": "off",  # it would be our progress line
        "x_disable_meta": True,  # the command line and the environment are nobody's business
        "save_code": False,
        "x_save_requirements": versions,
    }
    if not versions:  # else WANDB_DISABLE_GIT decides
        wanted["disable_git"] = True
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        wanted["init_timeout"] = PATIENCE_S
    flush = "x_transaction_log_flush_interval"
    if flush in wandb.Settings.model_fields:  # since 0.31
        wanted[flush] = FLUSH_S
    return wandb.Settings(**wanted)
