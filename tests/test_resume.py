"""A run that is stopped, killed or moved to other settings goes on as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
import zero
from zero.config import Config
from zero.errors import CheckpointError
from zero.saver import find, record_start

ROOT = Path(__file__).resolve().parent.parent
TINY = ["debug=tiny", "sample.tokens=0", "val.every=0", "tracker.console=none", "offload.page=4KiB"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: row["train/loss"] for row in rows}


def folders(here: Path) -> list[Path]:
    return sorted(here.glob("runs/*/*"))


@pytest.mark.parametrize(
    "settings",
    [["zero.stage=0"], ["offload=nvme"], ["offload=infinity", "zero.activations=remat"], ["checkpoint.async=true"]],
    ids=str,
)
def test_a_run_goes_on_in_other_settings_with_the_same_losses(settings, here):
    assert train.main([*TINY, "steps=9"]) == 0
    assert train.main([*TINY, "steps=9", "debug.stop_at=5", "checkpoint.every=2", *settings]) == 0
    assert train.main([*TINY, "steps=9", "resume=latest", "zero.stage=2", "offload=cpu"]) == 0
    alone, before, after = (losses(folder) for folder in folders(here))
    assert before | after == alone
    assert min(after) == 6
    assert sorted(path.name for path in (folders(here)[1] / "checkpoints").iterdir()) == [
        "step-0000000004",
        "step-0000000005",
    ]


def test_latest_looks_where_it_is_told_and_path_may_be_a_step_a_run_or_a_root(here):
    assert train.main([*TINY, "checkpoint.every=2", "checkpoint.dir=kept"]) == 0
    for number, resume in enumerate(("latest", "kept", "kept/step-0000000004")):
        assert train.main([*TINY, "steps=6", "checkpoint.dir=kept", f"resume={resume}", "checkpoint.every=0"]) == 0
        assert min(losses(folders(here)[number + 1])) == 5


def test_there_is_nothing_to_resume_from(here, capfd):
    assert train.main([*TINY, "resume=latest"]) == 0
    assert train.main([*TINY, "resume=nowhere"]) == 4
    said = capfd.readouterr().err.strip()
    assert "resume=nowhere" in said
    assert "\n" not in said


def test_only_damaged_ones_are_an_error_that_names_the_file(here, capfd):
    assert train.main([*TINY, "checkpoint.every=4"]) == 0
    (file,) = here.glob("runs/*/*/checkpoints/*/*.safetensors")
    octets = bytearray(file.read_bytes())
    octets[random.randrange(4096, len(octets))] ^= 64
    file.write_bytes(octets)
    assert train.main([*TINY, "resume=latest"]) == 4
    assert file.name in capfd.readouterr().err


def test_mode_eval_gives_the_loss_that_training_gave(here):
    assert train.main([*TINY, "checkpoint.every=4", "val.every=4"]) == 0
    assert train.main([*TINY, "mode=eval", "resume=latest", "offload=nvme"]) == 0
    trained, evaluated = (json.loads((folder / "summary.json").read_text()) for folder in folders(here))
    assert evaluated["val_loss"] == trained["val_loss"]
    assert evaluated["exit_reason"] == "evaluated"


def test_a_failed_save_stops_the_run_or_does_not(here, monkeypatch, recwarn):
    from zero.checkpoint import Saving

    def refuse(saving):
        saving.abandon()
        raise CheckpointError("no space")

    monkeypatch.setattr(Saving, "finish", refuse)
    assert train.main([*TINY, "checkpoint.every=2"]) == 4
    assert train.main([*TINY, "checkpoint.every=2", "checkpoint.on_failure=continue"]) == 0
    assert any("not saved, training goes on: no space" in str(one.message) for one in recwarn)
    assert not list(here.glob("runs/*/*/checkpoints/*"))


def test_after_two_failed_starts_from_one_checkpoint_an_older_one_is_taken(here):
    assert train.main([*TINY, "checkpoint.every=2"]) == 0
    (folder,) = folders(here)
    config, world, said = Config(resume="none"), zero.World.from_env(), []
    assert find(config, world, folder, said.append, restarts=1).step == 4
    for _ in range(2):
        record_start(folder, 4)
    assert find(config, world, folder, said.append, restarts=3).step == 2
    assert any("step-0000000004: two starts from it have failed" in line for line in said)
    for _ in range(2):
        record_start(folder, 2)
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints is valid"):
        find(config, world, folder, said.append, restarts=5)


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("to_a_rank", [False, True], ids=["to the program", "to one rank"])
def test_a_signal_saves_on_all_ranks_and_exits_with_75(to_a_rank, here):
    command = [sys.executable, str(ROOT / "train.py"), *TINY, "launch.ranks=2", "launch.threads=1"]
    with subprocess.Popen([*command, "steps=100000"], stderr=subprocess.PIPE, text=True) as running:
        end_s = time.monotonic() + 60
        while not any(losses(folder) for folder in folders(here)):
            assert running.poll() is None, running.stderr.read()
            assert time.monotonic() < end_s
        (folder,) = folders(here)
        log = (folder / "ranks" / "1.log").read_text()
        os.kill(int(log.split("process ")[1].split()[0]) if to_a_rank else running.pid, signal.SIGTERM)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 75, said
    assert said.startswith("stopped by a signal after step ")
    (saved,) = folder.glob("checkpoints/step-*")
    last = max(losses(folder))
    assert saved.name == f"step-{last:010d}"
    done = subprocess.run([*command, f"steps={last + 2}", "resume=latest"], timeout=60)
    assert done.returncode == 0
    assert min(losses(folders(here)[1])) == last + 1


@pytest.mark.process
@pytest.mark.timeout(280)
def test_killed_ranks_start_again_and_lose_nothing():
    seed = random.randrange(10**6)
    script = [sys.executable, str(ROOT / "scripts" / "crash_test"), "--kills", "10", "--seed", str(seed)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=270)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
