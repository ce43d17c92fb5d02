"""Metrics are read when they are asked for, once, and are used like a named tuple."""

import copy
import pickle

import pytest

from zero.engine.metrics import FIELDS, Metrics

VALUES = dict(zip(FIELDS, (1.5, 2.0, 0.1, 1.0, False, None, {"z": 3.0}, (0.0, 1.0), None), strict=True))


def test_metrics_are_read_once_and_when_they_are_asked_for():
    reads = []

    def read() -> dict[str, object]:
        reads.append(None)
        return VALUES

    metrics = Metrics(read)
    assert not reads
    assert (metrics.loss, metrics.aux, metrics.rank_flags) == (1.5, {"z": 3.0}, (0.0, 1.0))
    assert len(reads) == 1


def test_a_read_that_fails_is_made_again():
    outcomes = [ValueError("the device is lost"), VALUES]

    def read() -> dict[str, object]:
        outcome = outcomes.pop(0)
        if isinstance(outcome, ValueError):
            raise outcome
        return outcome

    metrics = Metrics(read)
    with pytest.raises(ValueError, match="the device is lost"):
        _ = metrics.loss
    assert metrics.loss == 1.5


def test_metrics_are_used_like_a_named_tuple():
    metrics = Metrics(lambda: VALUES)
    loss, *_ = metrics
    assert loss == metrics[0] == metrics._asdict()["loss"] == 1.5
    assert len(metrics) == len(VALUES)
    assert metrics == tuple(VALUES.values()) == Metrics(lambda: VALUES)
    assert metrics._replace(loss=2.5).loss == 2.5
    assert repr(metrics) == (
        "Metrics(loss=1.5, grad_norm=2.0, lr=0.1, loss_scale=1.0, skipped=False, nonfinite_unit=None, "
        "aux={'z': 3.0}, rank_flags=(0.0, 1.0), tokens=None)"
    )
    with pytest.raises(ValueError, match="words"):
        metrics._replace(words=1)
    for other in (pickle.loads(pickle.dumps(metrics)), copy.deepcopy(metrics)):
        assert other == metrics
    with pytest.raises(AttributeError, match="Metrics has no attribute 'words'"):
        _ = metrics.words
