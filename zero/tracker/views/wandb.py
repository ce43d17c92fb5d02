"""The Weights & Biases view, which logs the rows of metrics.jsonl to a W&B run. The only file that imports wandb.

W&B writes a log in the run folder, and uploads it when it is online. W&B gets neither the command line nor the
environment, and of the code only the commit. Every value is plotted against `step`; each row also has `tokens` as a
second axis. Constant values are in W&B's config or summary and have no chart. Rows are logged without W&B's argument
`step`, because W&B would drop the rows of steps that a resumed run repeats.
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
from zero.platform.installed import from_here
from zero.tracker.settings import WandbSettings
from zero.tracker.views.view import SECTIONS, Charts, Row, View

IN_ROWS_OR_CONFIG = frozenset(
    (
        *("steps", "tokens", "samples", "train_loss", "val_loss", "skipped", "device_peak_bytes", "host_peak_bytes"),
        *("ranks", "parameters_numel", "data_digest"),
    )
)
"""Figures of summary.json that W&B already has from the newest row or from its config."""

NO_KEY = "W&B is offline for this run: there is no key. Run `wandb login`, or export WANDB_API_KEY."

CONNECT_TIMEOUT_S = 5.0
"""Seconds that W&B may try to connect before the run continues offline, unless WANDB_INIT_TIMEOUT is set."""

WANDB_FLUSH_S = 2.0
"""Seconds until a row is written to W&B's file, so that a killed run loses few rows."""

NAME_LENGTH = 128

PROJECT = "functional-zero"
"""The W&B project if neither the settings nor WANDB_PROJECT name one."""


class WandbRun(View):
    """A view that logs to a W&B run, from its constructor until `close`. Methods may block on the network.

    Args:
        facts: values about the run beside its settings, for W&B's config.
        run_id: W&B's id of a new run, or of the run to continue.
        say: function that prints a line for the user; called from the thread that calls this view.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        settings: WandbSettings,
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

        # W&B logs to a file in the run folder: on a full disk, logging would print a traceback for each line
        logging.raiseExceptions = False
        self._wandb, self._say, self._folder, self._artifacts = wandb, say, folder, settings.artifacts
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
        self._run.define_metric("step", hidden=True)  # the x axis of all other metrics
        for name in ("tokens", "samples", *(f"{section}/*" for section in SECTIONS)):
            self._run.define_metric(name, step_metric="step")

    def log(self, row: Row) -> None:
        self._run.log(self._charts.of(row))
        if (loss := row.get("val/loss")) is not None and loss < self._best_val_loss:
            self._best_val_loss = loss
            self._run.summary["best_val_loss"] = loss  # at once, so that a killed run has it

    def saved(self, path: Path, step: int) -> None:
        """Log a W&B artifact that refers to the checkpoint's folder; no file is uploaded."""
        if not self._artifacts:
            return
        artifact = self._wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint", metadata={"step": step})
        artifact.add_reference(path.absolute().as_uri(), checksum=False)
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def report(self, path: Path) -> None:
        self._run.log({"report": self._wandb.Html(path.read_text(), inject=False)})

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Finish the run, and wait until W&B has written its file completely."""
        figures = {key: value for key, value in summary.items() if key not in IN_ROWS_OR_CONFIG}
        self._run.summary.update({key: value for key, value in figures.items() if _is_figure(value)})
        place = from_here(Path(self._run.dir).parent)
        try:
            self._run.finish(exit_code=exit_code)
        finally:  # `finish` returns before the file is complete; `teardown` waits for W&B's process
            self._wandb.teardown(exit_code)
        if self._is_offline:
            self._say(
                f"W&B was offline. To look at the run, or to upload it:\n  wandb leet {place}\n  wandb sync {place}"
            )

    def _init(self, mode: Any, **options: Any) -> Any:
        self._is_offline = mode == "offline"
        place = self._folder / "wandb"
        before = set(place.glob("run-*"))
        try:
            run = self._wandb.init(mode=mode, **options)
        except Exception as error:  # W&B raises errors of many classes; after any of them the run is offline
            if self._is_offline:
                raise
            abandon()  # W&B's process would still wait for the network, and hold the run's id
            for attempt in set(place.glob("run-*")) - before:  # no rows, but `wandb sync` would upload it
                shutil.rmtree(attempt, ignore_errors=True)
            self._say(f"W&B is offline for this run: {heading_line(error)}")
            return self._init("offline", **options)
        if not self._is_offline:
            self._say(f"W&B: {run.url}")
        return run


def _is_figure(value: object) -> bool:
    return not isinstance(value, Mapping) and value not in ("", math.inf)


def abandon() -> None:
    """Kill W&B's process, because it hangs and the interpreter's exit would wait for it."""
    import wandb

    cores = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
    for core in cores:
        core.kill()
    psutil.wait_procs(cores, timeout=1)
    with contextlib.suppress(Exception, SystemExit):  # SystemExit, because its process was killed
        wandb.teardown(1)


def mode_of(settings: WandbSettings) -> str:
    """Return W&B's mode: online, offline or disabled.

    Without an API key it is not online, because W&B would ask for the key on the terminal.
    """
    mode = wanted_mode(settings)
    return ("online" if has_key() else "offline") if mode in ("auto", "online") else mode


def wanted_mode(settings: WandbSettings) -> str:
    """Return the mode that the settings or WANDB_MODE name, without a check for an API key."""
    return os.environ.get("WANDB_MODE", "auto") if settings.mode == "auto" else settings.mode


def has_key() -> bool:
    """Return whether the environment or a netrc file has an API key for W&B; the key itself is not read."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = re.sub(r"^\w+://|[:/].*$", "", os.environ.get("WANDB_BASE_URL", "")) or "wandb"
    places = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    try:
        files = [path for place in places if (path := Path(place).expanduser()).is_file()]
        machines = [name for path in files for name in re.findall(r"machine\s+(\S+)", path.read_text(errors="replace"))]
    except (OSError, RuntimeError):  # W&B cannot read the file either
        return False
    return any(host in machine for machine in machines)


def run_id_of(config: Mapping[str, Any], folder: Path, stored: str | None) -> str:
    """Return the W&B run id for the run in `folder`.

    The id is the first of these that exists: WANDB_RUN_ID, which the agent of a W&B sweep sets; the id of an earlier
    start in this folder; `stored`, the id in the checkpoint that the run resumes from; else a new id. Evaluations and
    jobs of a Hydra sweep do not use `stored`, because several of them may begin from one checkpoint. Jobs of a Hydra
    sweep do not use WANDB_RUN_ID either.
    """
    is_in_sweep = _is_in_sweep(folder)
    if (run_id := os.environ.get("WANDB_RUN_ID")) and not is_in_sweep:
        return run_id
    latest = folder / "wandb" / "latest-run"  # a link to run-<time>-<id>
    if latest.is_symlink():
        return latest.readlink().name.rpartition("-")[2]
    goes_on = config["mode"] == "train" and not is_in_sweep
    return stored if stored and goes_on else uuid.uuid4().hex[:8]


def name_and_group(settings: WandbSettings, folder: Path) -> tuple[str, str | None]:
    """Return W&B's name and group of a run.

    By default a job of a Hydra sweep is named after its overrides, and its group after the sweep's folder.
    """
    folder, name = folder.absolute(), settings.run or os.environ.get("WANDB_NAME")
    if not _is_in_sweep(folder):
        return name or folder.name, settings.group
    lines = (folder / ".hydra" / "overrides.yaml").read_text().splitlines()
    # multirun.yaml lists the overrides that all jobs share; `hydra.sweep.subdir` may be several folders below it
    lists = next((path for above in folder.parents if (path := above / "multirun.yaml").is_file()), None)
    common = set() if lists is None else {line.strip() for line in lists.read_text().splitlines()}
    differing = [line for line in lines if line not in common] or lines
    overrides = " ".join(line.removeprefix("- ").strip("'\"") for line in differing)
    sweep = (folder if lists is None else lists).parent
    return (name or overrides or folder.name)[:NAME_LENGTH], settings.group or sweep.name


def heading_line(error: BaseException) -> str:
    """Return the first line of an error, with secrets hidden."""
    return hidden(next(iter(str(error).splitlines()), "") or type(error).__name__, os.environ)


def _is_in_sweep(folder: Path) -> bool:
    record = folder / ".hydra" / "hydra.yaml"
    return record.is_file() and re.search(r"^\s+mode: MULTIRUN$", record.read_text(), re.MULTILINE) is not None


def _settings(wandb: Any, *, versions: bool) -> Any:
    wanted: dict[str, Any] = {
        "silent": True,
        "console": "off",
        "x_disable_meta": True,  # metadata would have the command line and the environment
        "save_code": False,
        "x_save_requirements": versions,
    }
    if not versions:  # else WANDB_DISABLE_GIT decides
        wanted["disable_git"] = True
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        wanted["init_timeout"] = CONNECT_TIMEOUT_S
    flush = "x_transaction_log_flush_interval"
    if flush in wandb.Settings.model_fields:  # W&B has it since 0.31
        wanted[flush] = WANDB_FLUSH_S
    return wandb.Settings(**wanted)
