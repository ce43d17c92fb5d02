"""Saves of processes that were really killed, next to saves under other tags."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zero
from tests.conftest import LONG_S
from tests.deepspeed.harness import config, net
from zero.checkpoint.files.publish import Root

DIE = """
import os, sys
from pathlib import Path
from unittest import mock
import zero
from tests.deepspeed.harness import config, net
from zero.checkpoint import Root

engine, *_ = zero.initialize(model=net(), config=config())
with mock.patch.object(Root, "publish", lambda *_: os._exit(7)):
    engine.save_checkpoint(sys.argv[1], sys.argv[2])
"""


def killed(folder: Path, tag: str) -> Path:
    """Return the unpublished folder that a process leaves which ends in a save under `tag`."""
    ended = subprocess.run([sys.executable, "-c", DIE, folder, tag], timeout=LONG_S, check=False)
    assert ended.returncode == 7
    (left,) = (folder / tag).iterdir()
    assert left.name.startswith(".tmp-")
    assert any(left.iterdir())
    return left


@pytest.fixture
def engine():
    engine, *_ = zero.initialize(model=net(), config=config())
    yield engine
    engine.destroy()


def test_a_save_under_another_tag_removes_what_a_killed_one_left(tmp_path: Path, engine):
    left = killed(tmp_path, "first")
    published = engine.save_checkpoint(tmp_path, "second")
    assert not left.exists()
    assert published.is_dir()


def test_a_save_in_the_next_folder_of_a_loop_removes_what_a_killed_one_left(tmp_path: Path, engine):
    """Trainer's, Lightning's and Accelerate's checkpoints have one tag, each in a folder of its own."""
    left = killed(tmp_path / "checkpoint-1", "zero")
    engine.save_checkpoint(tmp_path / "checkpoint-2", "zero")
    assert not left.exists()


def test_nothing_of_a_save_under_way_and_nothing_foreign_is_removed(tmp_path: Path, engine):
    """Nor of another machine, whose locks may not be seen here: names without this boot's number are of one."""
    root = Root(tmp_path / "first")
    under_way = root.begin(3)
    names = [".tmp-0000000003-" + "0" * 16, ".old-0000000003-" + "0" * 16, under_way.name + "0", "notes"]
    for name in names:
        (tmp_path / "second" / name).mkdir(parents=True)
    engine.save_checkpoint(tmp_path, "third")
    assert under_way.is_dir()
    assert sorted(os.listdir(tmp_path / "second")) == sorted(names)
    root.abandon(under_way)
    under_way.mkdir()
    engine.save_checkpoint(tmp_path, "third")
    assert not under_way.exists()
