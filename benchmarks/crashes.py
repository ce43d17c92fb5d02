#!/usr/bin/env python3
"""Kill ranks with SIGKILL at random places, and check that nothing is lost.

    benchmarks/crashes.py                     100 kills; prints the seed
    benchmarks/crashes.py --kills 10 --seed 3

In each run, two ranks train at stage 3 with all state in a file, and save every few steps. One of them kills itself in
forward, backward, update, paging or save, at a random call. The launcher starts both again from the newest checkpoint.
The last checkpoint must equal that of an undisturbed run, bit by bit. The restart must have continued from the last
save that was reported as finished. No file may be left in the offload folder, none incomplete among checkpoints.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SITES = ("forward", "backward", "update", "paging", "save")
STEPS, EVERY = 9, 3


class Kill(NamedTuple):
    """Place in the code, rank, and number of the call since the start of training at which the rank kills itself."""

    site: str
    rank: int
    call: int


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    return parser.parse_args()


def config_of(offload: Path) -> Any:
    from zero.trainer.compose import compose, settings_in
    from zero.trainer.config import read

    overrides = ["debug=tiny", f"steps={STEPS}", f"checkpoint.every={EVERY}", "val.every=0", "sample.tokens=0"]
    overrides += ["offload=infinity", f"offload.path={offload}", "offload.page=4KiB", "launch.ranks=2"]
    return read(settings_in(compose([*overrides, "launch.threads=1", "tracker.console=none"]))).on(2)


def place_of(site: str) -> tuple[type, str]:
    """Return the (class, method) of a site."""
    from zero.checkpoint.files.disk import Disk
    from zero.engine.backward import BackwardPass
    from zero.engine.forward import SiteRunner
    from zero.store import PrefetchStore
    from zero.engine.update.update import Updater

    places: dict[str, tuple[type, str]] = {
        "forward": (SiteRunner, "run"),
        "backward": (BackwardPass, "deliver"),
        "update": (Updater, "_update_offloaded"),
        "paging": (PrefetchStore, "_copy"),
        "save": (Disk, "pwrite"),
    }
    return places[site]


def entry(plain: dict[str, Any], folder: Path, kill: Kill | None) -> None:
    """Train as one rank. In the first start, the chosen rank kills itself."""
    from train import train
    from zero.trainer import launch
    from zero.trainer.config import read

    if kill is not None and launch.restart_count() == 0:
        record_saves(folder / "acknowledged")
        if int(os.environ["RANK"]) == kill.rank:
            arm(kill)
    train(read(plain), folder)


def record_saves(path: Path) -> None:
    """Make every rank append the names of its finished saves to a file."""
    from zero.checkpoint import Saving

    finish = Saving.finish

    def recorded(saving: Any) -> Path:
        folder = finish(saving)
        with path.open("a") as file:
            file.write(f"{folder.name}\n")
        return folder

    Saving.finish = recorded  # type: ignore[method-assign]


def arm(kill: Kill) -> None:
    owner, name = place_of(kill.site)
    real: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def deadly(*args: Any, **keys: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == kill.call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **keys)

    setattr(owner, name, deadly)


def run(kill: Kill | None, folder: Path) -> dict[str, Any]:
    """Train with one kill or none; return digests, starts and files. Ranks are forked: they import the same modules."""
    from zero.trainer import launch
    from zero.testing import forked_ranks

    offload = folder / "offload"
    offload.mkdir(parents=True)
    job = entry, config_of(offload).plain(), folder, kill
    with forked_ranks():
        launch.launch(*job, ranks=2, processes=launch.ProcessSettings(folder / "ranks", threads=1), max_restarts=1)
    checkpoints = folder / "checkpoints"
    indexes = sorted((checkpoints / f"step-{STEPS:010d}").glob("rank-*.json"))
    lines = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    starts = [line["step"] for line in lines if "from" in line]
    path = folder / "acknowledged"
    saved = path.read_text().split() if path.exists() else []
    return {
        "bits": [json.loads(index.read_text())["digests"] for index in indexes],
        "starts": starts,
        "acknowledged": max((int(name.removeprefix("step-")) for name in saved), default=0),
        "left": sorted(path.name for path in offload.iterdir()),
        "checkpoints": sorted(path.name for path in checkpoints.iterdir()),
    }


def complaint(outcome: dict[str, Any], undisturbed: dict[str, Any]) -> str | None:
    """Return the fault of a run that was killed; None if it has none."""
    if outcome["bits"] != undisturbed["bits"]:
        return "the last checkpoint differs"
    if outcome["left"] or outcome["checkpoints"] != undisturbed["checkpoints"]:
        return f"left {outcome['left']}, {outcome['checkpoints']}"
    if len(outcome["starts"]) > 1 and (outcome["starts"][1] or 0) < outcome["acknowledged"]:
        return f"continued from step {outcome['starts'][1]}, though step {outcome['acknowledged']} was saved"
    return None


def main() -> int:
    options = arguments()
    choose, wrong = random.Random(options.seed), 0
    print(f"seed {options.seed}", flush=True)
    print("| kill | rank | call | restarted from | |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="crashes_") as top:
        undisturbed = run(None, Path(top, "undisturbed"))
        call_limits = {"forward": 4 * STEPS, "backward": 13 * STEPS, "update": 20 * STEPS, "paging": 900, "save": 12}
        killed = 0
        for number in range(2 * options.kills):  # a call that is never made kills nothing and does not count
            site, rank = SITES[killed % len(SITES)], killed // len(SITES) % 2
            kill = Kill(site, rank, choose.randrange(1, call_limits[site]))
            outcome = run(kill, Path(top, str(number)))
            again = outcome["starts"][1:]
            problem = complaint(outcome, undisturbed)
            killed, wrong = killed + bool(again), wrong + (problem is not None)
            restarted = again[0] if again else "not killed"
            print(f"| {kill.site} | {kill.rank} | {kill.call} | {restarted} | {problem or 'same bits'} |", flush=True)
            if killed == options.kills:
                break
        else:
            print(f"only {killed} of {options.kills} kills took place")
            return 1
    print(f"{options.kills} kills, {wrong} of them lost something")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
