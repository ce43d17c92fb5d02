"""A run that is stopped, killed or moved to other settings goes on as if nothing had happened."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import train
import zero
from tests.conftest import LONG_S
from zero.checkpoint.format.texts import from_text, to_text
from zero.errors import CheckpointError, MachineError
from zero.testing import forked_ranks
from zero.tracker import Tracker
from zero.trainer.config import Config
from zero.trainer.run.resume import find
from zero.trainer.run.starts import record_start

ROOT = Path(__file__).resolve().parents[2]
TINY = ["debug=tiny", "sample.tokens=0", "val.every=0", "tracker.console=none", "offload.page=4KiB"]


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: row["train/loss"] for row in rows}


def folders(here: Path) -> list[Path]:
    return sorted(here.glob("runs/*/*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, float]:
    """The losses of nine steps."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train.main([*TINY, "steps=9"]) == 0
    return losses(folders(folder)[0])


@pytest.mark.parametrize(
    "settings", [["zero.stage=0", "checkpoint.async=true"], ["offload=infinity", "zero.activations=remat"]], ids=str
)
def test_a_run_goes_on_in_other_settings_with_the_same_losses(settings, undisturbed, here):
    assert train.main([*TINY, "steps=9", "debug.stop_at=5", "checkpoint.every=2", *settings]) == 0
    assert train.main([*TINY, "steps=9", "resume=latest", "zero.stage=2", "offload=cpu"]) == 0
    before, after = (losses(folder) for folder in folders(here))
    assert before | after == undisturbed
    assert min(after) == 6
    saved = sorted(path.name for path in (folders(here)[0] / "checkpoints").iterdir())
    assert saved == ["step-0000000004", "step-0000000005"]


def test_latest_looks_where_it_is_told(here):
    assert train.main([*TINY, "checkpoint.every=2", "checkpoint.dir=kept"]) == 0
    assert train.main([*TINY, "steps=6", "checkpoint.dir=kept", "resume=latest", "checkpoint.every=0"]) == 0
    assert min(losses(folders(here)[1])) == 5


def test_there_is_nothing_to_resume_from(here, capfd):
    assert train.main([*TINY, "resume=latest"]) == 0
    assert train.main([*TINY, "mode=eval", "resume=latest", "hydra.run.dir=alone/1"]) == 4
    assert "mode=eval resume=latest: there is no checkpoint" in capfd.readouterr().err


def test_only_damaged_ones_are_an_error_that_names_the_file(here, capfd):
    assert train.main([*TINY, "checkpoint.every=4"]) == 0
    (checkpoint,) = here.glob("runs/*/*/checkpoints/*")
    spoil(checkpoint)
    assert train.main([*TINY, "resume=latest"]) == 4
    assert ".safetensors" in capfd.readouterr().err


def test_a_run_that_goes_on_knows_the_best_and_the_time_of_its_earlier_starts(here):
    """In its folder, and in one of its own; what it learns is worse, and it has saved before it validated."""
    words = [*TINY, "checkpoint.every=2", "val.every=2", "schedule=constant"]
    worse = ["resume=latest", "optim.lr=10", "steps=6"]
    lowest = {"train": float("inf"), "val": float("inf")}

    def run(folder, *more):
        assert train.main([*words, *more, f"hydra.run.dir=alone/{folder}"]) == 0
        rows = [json.loads(line) for line in (here / f"alone/{folder}/metrics.jsonl").read_text().splitlines()]
        for kind in lowest:  # a loss is that of a step's beginning, so the first one may still be better
            lowest[kind] = min(lowest[kind], *(row[f"{kind}/loss"] or 1e9 for row in rows))
        summary = json.loads((here / f"alone/{folder}/summary.json").read_text())
        assert {kind: summary[f"best_{kind}_loss"] for kind in lowest} == lowest
        return summary, rows

    first, rows = run("a", "steps=4")
    best = lowest["val"]
    assert best == rows[-1]["val/loss"]
    (here / "alone/a/summary.json").write_text(json.dumps(first | {"seconds": 1000.0}))
    assert run("a", *worse)[0]["seconds"] > 1000
    other, rows = run("b", *worse, "steps=8", "resume=alone/a/checkpoints")
    assert rows[0]["step"] == 7
    assert other["seconds"] > 1000
    assert lowest["val"] == best, "it was the first start's"


def test_mode_eval_gives_the_loss_that_training_gave(here):
    assert train.main([*TINY, "checkpoint.every=4", "val.every=4", "optim.ema=0"]) == 0
    assert train.main([*TINY, "mode=eval", "resume=latest", "offload=nvme"]) == 0
    trained, evaluated = (json.loads((folder / "summary.json").read_text()) for folder in folders(here))
    assert evaluated["val_loss"] == trained["val_loss"]
    assert evaluated["exit_reason"] == "evaluated"
    planned = {kind: nbytes for kinds in evaluated["plan_bytes"].values() for kind, nbytes in kinds.items()}
    activation_bytes = planned.pop("activations")
    assert activation_bytes > 0
    assert set(planned) <= {"parameters", "gathered units", "buffers"}, "no master, no moment, no gradient"
    assert planned == {kind: n for kinds in evaluated["measured_bytes"].values() for kind, n in kinds.items()}
    mean = "val.weights=ema"  # without memory: what the parameters are
    assert train.main([*TINY, "mode=eval", "resume=latest", mean, "optim=lion"]) == 0  # whatever the optimizer
    assert json.loads((folders(here)[2] / "summary.json").read_text())["val_loss"] == trained["val_loss"]


def test_a_failed_save_stops_the_run_or_does_not(here, monkeypatch, capsys):
    from zero.checkpoint import Saving

    def refuse(saving):
        saving.abandon()
        raise CheckpointError("no space")

    monkeypatch.setattr(Saving, "finish", refuse)
    assert train.main([*TINY, "checkpoint.every=2"]) == 4
    assert train.main([*TINY, "checkpoint.every=2", "checkpoint.on_failure=continue", "tracker.console=lines"]) == 0
    assert "\nwarning: not saved, but training continues: no space\n" in capsys.readouterr().out
    assert not list(here.glob("runs/*/*/checkpoints/*"))


# -- where a run goes on from ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def once(tmp_path_factory) -> Path:
    """A run that has saved steps 2 and 4."""
    folder = tmp_path_factory.mktemp("once")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train.main([*TINY, "checkpoint.every=2"]) == 0
    return folders(folder)[0]


@pytest.fixture
def done(once, here) -> Path:
    """A copy of it that may be spoiled."""
    return Path(shutil.copytree(once, here / "runs" / "2026-01-01" / "10-00-00"))


def new_run(done: Path, name: str = "11-00-00") -> Path:
    (done.parent / name).mkdir()
    return done.parent / name


def found(
    folder: Path,
    restarts: int = 0,
    said: list[str] | None = None,
    mode: str = "train",
    several: bool = False,
    **keys: object,
) -> Any:
    """The step that this start of the run in `folder` goes on from; it is recorded as a start."""
    resume = str(keys.pop("resume", "none"))
    config = Config.model_validate({"mode": mode, "resume": resume, "checkpoint": keys})
    tracker = Tracker()
    tracker.note = [].append if said is None else said.append
    checkpoint = find(config, zero.open_world(), folder, tracker, restarts=restarts)
    if mode == "train":
        record_start(folder, checkpoint, several=several)
    return checkpoint and checkpoint.step


def test_after_two_failed_starts_from_one_checkpoint_an_older_one_is_taken(done):
    said: list[str] = []
    assert [found(done, restarts, said) for restarts in (1, 2, 3)] == [4, 4, 2]
    assert any("step-0000000004: two starts from it have failed" in line for line in said)
    with (done / "starts.jsonl").open("a") as file:  # step 4 is written anew, and is a suspect no longer
        file.write('{"saved": "4"}\n')
    assert [found(done, restarts) for restarts in (4, 5, 6, 7)] == [4, 4, 2, 2]
    with pytest.raises(
        CheckpointError, match=r"none of its 2 checkpoints is valid. Restore one from a copy. The newest: "
    ):
        found(done, 8)


def test_a_record_of_starts_that_a_full_disk_cut_short_costs_its_last_line(done, monkeypatch):
    """Also if an earlier version has appended to that line."""
    starts = done / "starts.jsonl"
    assert [found(done, restarts) for restarts in (1, 2)] == [4, 4]
    for cut in ('{"from": "/a", "st', '{"saved": "/a/step-00{"from": null, "step": null, "machines": "one"}\n'):
        starts.write_text(starts.read_text() + cut)
        assert found(done, 3) == 2
    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "")))
        before = starts.read_bytes()
        with pytest.raises(MachineError, match=r"starts\.jsonl cannot be written: ENOSPC"):
            record_start(done, None)
    assert starts.read_bytes() == before


def test_a_checkpoint_is_no_suspect_because_machines_fail(done):
    assert [found(done, restarts, several=True) for restarts in (1, 2, 3, 4)] == [4, 4, 4, 4]


@pytest.mark.parametrize("resume", ["latest", "run", "step"])
def test_a_start_from_another_run_steps_back_there_unless_a_step_was_named(resume, done):
    folder, path = new_run(done), {"run": done, "step": done / "checkpoints" / "step-0000000004"}.get(resume, resume)
    then = 4 if resume == "step" else 2
    assert [found(folder, restarts, resume=path) for restarts in range(4)] == [4, 4, then, then]


def test_a_restart_takes_what_its_own_run_saved_or_began_from(done):
    kept, folder = done / "checkpoints", new_run(done)
    assert found(folder, resume=kept / "step-0000000002") == 2
    assert found(folder, 1, resume=kept / "step-0000000002") == 2
    shutil.copytree(kept / "step-0000000004", folder / "checkpoints" / "step-0000000004")
    assert found(folder, 2, resume=kept / "step-0000000002") == 4
    fresh = new_run(done, "12-00-00")
    assert [found(fresh, restarts) for restarts in range(3)] == [None, None, None]


@pytest.mark.parametrize("resume", ["none", "step"])
def test_what_would_be_older_than_what_is_there_is_not_begun(resume, done):
    kept, folder = done / "checkpoints", new_run(done)
    path = kept / "step-0000000002" if resume == "step" else resume
    with pytest.raises(CheckpointError, match=r"step-0000000004: exists, but this run starts.*checkpoint\.dir"):
        found(folder, resume=path, dir=str(kept))
    assert found(folder, resume=kept / "step-0000000002", mode="eval", dir=str(kept)) == 2  # it saves nothing
    spoil(kept / "step-0000000004")
    assert found(folder, resume="latest", dir=str(kept)) == 2  # what is damaged is no rival
    assert found(new_run(done, "12-00-00"), resume=kept, dir=str(kept)) == 2


def test_a_run_does_not_begin_where_another_one_has_saved_older_steps(done):
    """Its first save would make a later resume=latest raise, whatever the number of the step."""
    kept, other = done / "checkpoints", shutil.copytree(done / "checkpoints", done.parent / "other")
    shutil.rmtree(other / "step-0000000004")
    assert found(new_run(done), resume=kept / "step-0000000004", dir=str(other)) == 4
    path = other / "step-0000000002" / "manifest.json"
    manifest = from_text(path.read_bytes())
    manifest.facts["lineage"]["name"] = "0" * 16
    path.write_text(to_text(manifest))
    both = rf"{path.parent} and {kept}/step-0000000004: two runs saved them, .*checkpoint\.dir"
    with pytest.raises(CheckpointError, match=both):
        found(new_run(done, "12-00-00"), resume=kept, dir=str(other))
    assert found(new_run(done, "13-00-00"), resume="latest", dir=str(other)) == 2
    shutil.copytree(kept / "step-0000000004", other / "step-0000000004")
    with pytest.raises(CheckpointError, match="two runs saved them"):
        found(new_run(done, "14-00-00"), resume="latest", dir=str(other))
    path.write_text("{")
    assert found(new_run(done, "15-00-00"), resume=kept / "step-0000000004", dir=str(other)) == 4


def test_latest_looks_at_runs_of_the_same_layout_and_at_no_others(done):
    sweep = done.parent.parent / "2026-01-02" / "09-00-00" / "3"
    for folder in (new_run(done), sweep):
        folder.mkdir(parents=True, exist_ok=True)
        assert found(folder, resume="latest") == 4
    for strange in (done.parent.parent / "mine", done.parent.parent.parent / "mine", done / "mine" / "1"):
        strange.mkdir(parents=True)
        assert found(strange, resume="latest") is None
    odd = done.parent.parent.parent / "line\u2028separator"
    moved = Path(shutil.copytree(done.parent.parent, odd / "runs")) / done.parent.name
    assert found(moved / "11-00-00", resume="latest") == 4


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_step_that_is_no_folder_is_rejected_and_not_passed_over(kind, done):
    root = done.parent / "kept"
    root.mkdir()
    name = "step-0000000004"
    if kind == "link":
        (root / name).symlink_to(done / "checkpoints" / name)
    else:
        (root / name).write_text("")
    with pytest.raises(CheckpointError, match=f"none of its 1 checkpoints is valid.* newest: .*{name}: is a link, or"):
        found(new_run(done), resume="latest", dir=str(root))


def test_another_runs_checkpoints_may_vanish_while_they_are_looked_at(done, monkeypatch):
    real, folder = Path.lstat, new_run(done)

    def vanishing(path: Path) -> os.stat_result:
        if path.name == "step-0000000002":
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(Path, "lstat", vanishing)
    assert found(folder, resume="latest") == 4


def test_a_step_may_be_named_under_any_name_and_from_inside(done, monkeypatch):
    best = Path(shutil.copytree(done / "checkpoints" / "step-0000000004", done.parent / "best"))
    assert found(new_run(done), resume=best) == 4
    monkeypatch.chdir(best)
    assert found(new_run(done, "12-00-00"), resume=".") == 4


def spoil(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    octets = bytearray(file.read_bytes())
    octets[5000] ^= 1
    file.write_bytes(octets)


@pytest.mark.process
def test_a_signal_to_one_rank_saves_on_all_ranks_and_exits_with_75(here):
    words = [*TINY, "launch.ranks=2", "launch.threads=1", "tracker.console=lines"]
    command, pipe = [sys.executable, ROOT / "train.py", *words, "steps=100000"], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as running:
        next(line for line in running.stdout if line.startswith("step "))
        (folder,) = folders(here)
        log = (folder / "ranks" / "1.log").read_text()
        os.kill(int(log.split("process ")[1].split()[0]), signal.SIGTERM)
        _, said = running.communicate(timeout=LONG_S)
    assert running.returncode == 75, said
    assert "\nstopped by a signal after step " in said  # behind a warning about the console, which is typed twice
    (saved,) = folder.glob("checkpoints/step-*")
    last = max(losses(folder))
    assert saved.name == f"step-{last:010d}"
    with forked_ranks():
        assert train.main([*words, f"steps={last + 2}", "resume=latest"]) == 0
    assert min(losses(folders(here)[1])) == last + 1


@pytest.mark.process
def test_killed_ranks_start_again_and_lose_nothing():
    script = [sys.executable, str(ROOT / "benchmarks" / "crashes.py"), "--kills", "2", "--seed", "7"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=LONG_S)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
