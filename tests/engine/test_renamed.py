"""Names of 0.1 work for one more version, with a warning that names the new one."""

import pytest
import torch
from torch import Tensor, nn

import zero
from zero.distributed.world import SoloWorld


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.fixture
def plan() -> zero.Plan:
    return zero.Plan(nn.Sequential(nn.Linear(4, 4)), optimizer=zero.sgd(0.1), world=SoloWorld())


def test_the_old_names_of_flags_are_warned_of(plan: zero.Plan) -> None:
    state, batch = zero.init(plan, zero.open_store(plan)), torch.ones(2, 4)
    with pytest.warns(DeprecationWarning, match=r"make_step\(word=...\) is make_step\(flag=...\) now"):
        step = zero.make_step(plan, loss, word=lambda: 3.0)
    state, metrics = step(state, [batch])
    assert metrics.rank_flags == (3.0,)
    with pytest.warns(DeprecationWarning, match="Metrics.words is Metrics.rank_flags now"):
        assert metrics.words == (3.0,)
    with pytest.warns(DeprecationWarning, match="Metrics.blame is Metrics.nonfinite_unit now"):
        assert metrics.blame is None
    under_way = zero.Step(state)
    under_way.microbatch()
    under_way.backward(loss(state.model, batch))
    with pytest.warns(DeprecationWarning, match=r"Step.finish\(word\) is Step.finish\(flag\) now"):
        _, metrics = under_way.finish(word=5.0)
    assert metrics.rank_flags == (5.0,)


def test_a_module_that_is_two_now_has_the_names_of_both() -> None:
    with pytest.warns(DeprecationWarning, match=r"zero.step is zero.engine.init and zero.engine.step now"):
        import zero.step as old  # type: ignore[import-not-found]
    assert old.open_store is zero.open_store
    assert old.make_step is zero.make_step
