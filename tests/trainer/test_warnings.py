"""Settings that are probably mistakes: a disk that is memory, and two numbers of ranks."""

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import train
import zero
from tests.conftest import LONG_S
from tests.trainer.test_cli import ROOT, TINY
from zero.platform import run_files
from zero.trainer import checks, job
from zero.trainer.launch import cores, count_ranks, world_size


@pytest.fixture
def tmpfs(monkeypatch):
    monkeypatch.setattr(run_files, "file_system", lambda folder: "tmpfs")


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(run_files, "file_system", lambda folder: "ext4")


QUIET = [*TINY, "sample.tokens=0", "launch.malloc=default", "tracker.console=none", "steps=1", "val.every=0"]
WARNING = "is memory, not a disk (tmpfs): its files take host memory. Use a folder on a disk"


def test_a_disk_that_is_memory_is_warned_of_once(here, tmpfs, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what the engine said would be said twice
        assert train.main([*QUIET, "offload=nvme", f"offload.path={here}"]) == 0
    printed = capsys.readouterr().err
    assert printed.count("is memory") == 1
    assert printed.startswith(f"warning: offload.path={here} {WARNING}, or offload=cpu")
    assert printed.count("\n") == 1


@pytest.mark.parametrize("words", [["offload=none"], ["offload=cpu"], ["offload=auto"], []], ids=str)
def test_what_uses_no_disk_is_not_warned_of(here, tmpfs, capsys, monkeypatch, words):
    monkeypatch.setattr(job, "run", lambda *args, **how: 1 / 0)
    train.main([*QUIET, *words])
    assert "is memory" not in capsys.readouterr().err


def test_a_disk_is_not_warned_of(here, disk, capsys, monkeypatch):
    monkeypatch.setattr(job, "run", lambda *args, **how: 1 / 0)
    train.main([*QUIET, "offload=nvme", f"offload.path={here}"])
    assert "is memory" not in capsys.readouterr().err


def test_python_is_warned_where_the_store_is_opened(tmp_path, tmpfs):
    offload = zero.Offload("nvme", path=str(tmp_path))
    world = zero.open_world()
    plan = zero.Plan(nn.Linear(8, 8), optimizer=zero.adamw(lr=1e-3), world=world, offload=offload)
    with pytest.warns(UserWarning, match=r"is memory, not a disk \(tmpfs\)") as caught:
        zero.open_store(plan).close()
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_the_type_of_a_file_system_is_the_mounts(tmp_path):
    assert run_files.mount_of("22 1 0:1 / / rw - ext4 x rw\n30 22 0:2 / /dev/shm rw - tmpfs x rw\n", "/dev/shm/a") == (
        "tmpfs"
    )
    assert run_files.file_system(tmp_path)


# Ranks


def test_ranks_that_contradict_torchrun_are_refused(here, monkeypatch, capsys):
    variables = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job, "run_under_torchrun", lambda *args: pytest.fail("the settings were accepted"))
    assert train.main([*TINY, "launch.ranks=4"]) == 2
    assert capsys.readouterr().err == (
        "launch.ranks=4 contradicts torchrun, which has started 2 ranks. Leave it out.\n"
    )
    assert not list(here.iterdir())


def test_ranks_that_agree_with_torchrun_are_accepted(here, monkeypatch):
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    began = []
    monkeypatch.setattr(job, "run_under_torchrun", lambda train, given, _: began.append(given[0].launch.ranks))
    assert train.main([*TINY, "launch.ranks=2"]) == 0
    assert train.main(TINY) == 0
    assert began == [2, "auto"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            "WORLD_SIZE=2: set without LOCAL_RANK, MASTER_PORT. Start the ranks with torchrun, or unset it.\n",
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "4"},
            "launch.ranks=auto: srun has started 4 tasks, and each would be a run of its own. Start torchrun in one "
            "task per node, or type launch.ranks=1.\n",
        ),
    ],
)
def test_a_process_that_may_be_one_of_several_is_no_run_of_its_own(here, monkeypatch, capsys, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert train.main(TINY) == 2
    assert capsys.readouterr().err == message
    assert not list(here.iterdir())
    assert count_ranks(2) == 2, "ranks of its own"


@pytest.mark.parametrize(
    ("variables", "gpus", "words", "message"),
    [
        (
            {"RANK": "1"}, 0, [],
            "RANK=1 without WORLD_SIZE is ignored: this is a run of its own. torchrun starts ranks.",
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0, [], ""),
        (
            {"CUDA_VISIBLE_DEVICES": "9"}, 0, [],
            "there is a GPU driver, but torch finds no GPU with CUDA_VISIBLE_DEVICES=9, so a CPU trains. "
            "Set launch.device=cuda or cpu.",
        ),
        (
            {}, 0, [],
            "there is a GPU driver, but torch finds no GPU, so a CPU trains. Set launch.device=cuda or cpu.",
        ),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, [], ""),
        ({}, 1, [], ""),
        ({}, 0, ["launch.device=cpu"], ""),
    ],
)  # fmt: skip
def test_a_run_that_is_another_than_meant_says_so(here, monkeypatch, capsys, variables, gpus, words, message):
    """A driver is there where no RANK is."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job, "run", lambda *args, **how: SimpleNamespace(val_loss=1.0))
    monkeypatch.setattr(world_size, "_has_driver", lambda: "RANK" not in variables)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert train.main([*TINY, *words]) == 0
    assert capsys.readouterr().err == (f"warning: {message}\n" if message else "")


def test_a_gpu_that_is_not_there_is_refused_before_the_data_is_read(here, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(checks, "check_data", lambda *args: pytest.fail("the data was read"))
    assert train.main([*TINY, "launch.device=cuda"]) == 3
    assert capsys.readouterr().err.startswith("launch.device=cuda, and torch finds no GPU. Use launch.device=cpu")
    assert not list(here.iterdir())


def test_a_key_that_is_typed_twice_is_warned_of(here, monkeypatch, capsys):
    monkeypatch.setattr(job, "run", lambda *args, **how: SimpleNamespace(val_loss=1.0))
    assert train.main(["steps=3", "seed=1", "steps=4", "seed=1"]) == 0
    assert capsys.readouterr().err == "warning: steps=3 is replaced by steps=4, which is typed later\n"


def test_ranks_that_another_command_starts_share_the_cores(tmp_path):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(cores()), "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    code = (
        "import sys, torch; from pathlib import Path; from zero.trainer.launch import ProcessSettings, joined\n"
        "sys.exit(joined(torch.get_num_threads, processes=ProcessSettings(Path(sys.argv[1]))))"
    )
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables
    done = subprocess.run([sys.executable, "-c", code, tmp_path], env=env, cwd=ROOT, timeout=LONG_S, check=False)
    assert done.returncode == 1
