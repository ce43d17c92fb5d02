"""TensorBoard's files have the rows of metrics.jsonl, and nothing of TensorBoard can end a run."""

import io
import json
import sys

import pytest

from zero.tracker import ROW, open_tracker
from zero.trainer.compose import compose, settings_in
from zero.trainer.config import read

NEVER = "offload/read_bytes"


def settings(**tracker):
    return read({"steps": 40, "tracker": {"name": "jsonl", "tensorboard": True, "console": "lines", **tracker}})


def row(step, **more):
    return dict.fromkeys(ROW) | {"step": step, "train/loss": 3 / step, "train/skipped": 0, NEVER: 0} | more


def written(folder):
    """Key to (step, value) of each point, as TensorBoard shows them; and the text of the settings."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = event_accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    points = {
        key: [(event.step, event.value) for event in accumulator.Scalars(key)]
        if key in accumulator.Tags()["scalars"]
        else tensors(accumulator, key)
        for key in [*accumulator.Tags()["scalars"], *accumulator.Tags()["tensors"]]
    }
    return points, accumulator


def tensors(accumulator, key):
    return [(event.step, event.tensor_proto) for event in accumulator.Tensors(key)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_row_is_there_and_a_run_that_goes_on_replaces_its_own(tmp_path):
    pytest.importorskip("tensorboard")
    for steps in ((1, 2, 3), (3, 4)):
        with open_tracker(settings().tracker, tmp_path, io.StringIO(), steps=40) as tracker:
            tracker.begin(settings().plain(), {})
            for step in steps:
                tracker.log(row(step, **{"val/loss": 2.5} if step == 2 else {}))
            tracker.saved(tmp_path / "step-3", 3)
            tracker.finish({"steps": steps[-1]})
    points, accumulator = written(tmp_path)
    assert points["train/loss"] == [(1, 3.0), (2, 1.5), (3, 1.0), (4, 0.75)]
    assert points["val/loss"] == [(2, 2.5)]
    assert NEVER not in points, "what a run does not have gets no chart"
    assert "step" not in points, "it is the axis"
    assert "settings/text_summary" in points
    assert "hparams" in str(accumulator.summary_metadata)


def test_a_tensorboard_that_is_not_installed_ends_nothing_and_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    stream = io.StringIO()
    with open_tracker(settings().tracker, tmp_path, stream, steps=40) as tracker:
        tracker.begin(settings().plain(), {})
        for step in (1, 2, 3):
            tracker.log(row(step))
    said = stream.getvalue()
    assert said.count("TensorBoard gets no rows from now on: it is not installed: pip install") == 1
    assert len([json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]) == 3


@pytest.mark.parametrize(
    ("words", "name"),
    [(["tracker=tensorboard"], "jsonl"), (["tracker=wandb", "tracker.tensorboard=true"], "wandb")],
)
def test_it_is_chosen_alone_or_beside_wandb(words, name):
    chosen = read(settings_in(compose(words))).tracker
    assert (chosen.name, chosen.tensorboard) == (name, True)
