"""What a call got in place of what it takes is refused as ours, in one line, with the line to write."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zero
from zero.errors import ConfigError

Pair = namedtuple("Pair", "inputs targets")


@pytest.fixture
def run(tmp_path):
    """A plan, a store and a state, and what a loop has beside them."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    world = zero.World.from_env()
    plan = zero.Plan(model, optimizer=zero.adamw(lr=1e-3), world=world)
    store = zero.open_store(plan)
    state = zero.init(plan, store)
    found = {"model": model, "world": world, "plan": plan, "store": store, "state": state, "folder": tmp_path}
    yield SimpleNamespace(**found, batch=torch.ones(3, 4), step=zero.make_step(plan, loss_fn))
    store.close()


def loss_fn(model, batch):
    return model(batch).square().mean()


LOSSES = [
    (lambda loss: {"loss": loss}, 'the loss is a dict, and it must be a tensor; write return outputs["loss"]'),
    (lambda loss: loss.item(), "the loss is a float, and it must be a tensor; write return loss, without .item()"),
    (lambda loss: 1, "the loss is an int, and it must be a tensor"),
    (lambda loss: None, "loss_fn returned None; end it with return loss"),
    (lambda loss: [loss], "the loss is a list, and it must be a tensor of one number"),
    (lambda loss: loss.detach(), "the loss has no gradient: no parameter that trains is in it"),
    (lambda loss: loss.expand(2), r"the loss has shape (2,); it must be a scalar: the mean of the microbatch"),
    (lambda loss: (loss,), 'a tuple (a Tensor); write return loss, or return loss, {"accuracy": accuracy}'),
    (lambda loss: (loss, loss), "a tuple (a Tensor, a Tensor); write return loss, or return loss, {"),
    (lambda loss: (loss.item(), {}), "the loss is a float, and it must be a tensor"),
]


@pytest.mark.parametrize(("returned", "said"), LOSSES, ids=lambda value: value[:30] if type(value) is str else "")
def test_a_loss_that_is_none_says_what_to_return(run, returned, said):
    """And the state is still good."""
    step = zero.make_step(run.plan, lambda model, batch: returned(loss_fn(model, batch)))
    with pytest.raises(ConfigError) as refused:
        step(run.state, [run.batch])
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    _, metrics = run.step(run.state, [run.batch])
    assert metrics.loss > 0


def test_a_step_in_pieces_says_it_in_its_own_words(run):
    step = zero.Step(run.state)
    step.microbatch()
    with pytest.raises(ConfigError, match=r'write step.backward\(outputs\["loss"\]\)'):
        step.backward({"loss": 1})
    step.abandon()


TAKES_A_LIST = "pass a list of them: step(state, [batch])"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda batch: batch, f"microbatches is a Tensor; {TAKES_A_LIST}"),
        (lambda batch: {"x": batch}, f"microbatches is a dict; {TAKES_A_LIST}"),
        (lambda batch: Pair(batch, batch), f"microbatches is a Pair; {TAKES_A_LIST}"),
        (lambda batch: iter([batch]), TAKES_A_LIST),
        (lambda batch: None, f"microbatches is None; {TAKES_A_LIST}"),
        (lambda batch: SimpleNamespace(x=batch), f"microbatches is a SimpleNamespace; {TAKES_A_LIST}"),
        (lambda batch: (batch, batch), "a tuple of 2 tensors, and a step takes batch.accumulate=1 microbatches; if it"),
        (lambda batch: [batch, batch], "a step takes batch.accumulate=1 microbatches, not 2"),
    ],
)
def test_microbatches_without_the_list(run, given, said):
    with pytest.raises(ConfigError) as refused:
        run.step(run.state, given(run.batch))
    assert said in str(refused.value)


def test_a_loader_of_microbatches_is_a_list_of_them(run):
    run.step(run.state, torch.utils.data.DataLoader([run.batch]))


CALLS = [
    # a state, or something else, in a plan's place
    (lambda run: zero.open_store(run.state), "is a State; write store = zero.open_store(state.plan)"),
    (lambda run: zero.open_store(run.model), "is a Sequential; write store = zero.open_store(plan)"),
    (lambda run: zero.init(run.state), "write state = zero.init(state.plan, zero.open_store(state.plan))"),
    (lambda run: zero.init(run.state, run.store), "zero.init takes a Plan, and this is a State; write "),
    (lambda run: zero.init(run.plan), "zero.init needs a store; write state = zero.init(plan, zero.open_store(plan))"),
    (lambda run: zero.init(run.plan, run.state), "zero.init takes a store second, and this is a State"),
    (lambda run: zero.init(run.store, run.plan), "zero.init takes a Plan, and this is a PrefetchStore"),
    (lambda run: zero.make_step(run.state, loss_fn), "State; write step = zero.make_step(state.plan, loss_fn)"),
    (lambda run: zero.make_step(zero.Plan, loss_fn), "this is the class Plan; write step = zero.make_step(plan, "),
    (lambda run: zero.make_step(run.plan, run.batch), "loss_fn is a Tensor; give a function of the model"),
    (lambda run: zero.make_forward(run.state, loss_fn), "write forward = zero.make_forward(state.plan, fn)"),
    # a plan, or something else, in a state's place
    (lambda run: run.step(run.plan, [run.batch]), "is a Plan; write state = zero.init(plan, store), and then state, m"),
    (lambda run: run.step((run.state, 1), [run.batch]), "is a tuple with one; write state, metrics = step(state, "),
    (lambda run: run.step([run.batch]), "a step takes a State, and this is a list; write state, metrics = step(state"),
    (lambda run: run.step([run.batch], run.state), "a step takes a State, and this is a list"),
    (lambda run: zero.make_forward(run.plan, loss_fn)(run.plan), "a forward takes a State, and this is a Plan"),
    (lambda run: zero.Step(run.plan), "zero.Step takes a State, and this is a Plan"),
    (lambda run: zero.record(run.plan).__enter__(), "zero.record takes a State, and this is a Plan"),
    (lambda run: zero.save(run.plan, run.folder), "zero.save takes a State, and this is a Plan"),
    (lambda run: zero.save(run.folder, run.state), "zero.save takes a State, and this is a PosixPath; write zero.sa"),
    (lambda run: zero.load(run.plan, None), "zero.load takes a State, and this is a Plan"),
    (lambda run: zero.load(run.state, run.folder), "zero.load takes a Checkpoint second, and this is a PosixPath"),
    (lambda run: zero.full_state_dict(run.plan), "zero.full_state_dict takes a State, and this is a Plan"),
    (lambda run: zero.full_state_dict(run.state.model), "this is a Sequential; write zero.full_state_dict(state)"),
    (lambda run: zero.get_full(run.plan, "0.weight"), "zero.get_full takes a State, and this is a Plan"),
    (lambda run: zero.gathered(run.plan).__enter__(), "zero.gathered takes a State, and this is a Plan"),
    (lambda run: zero.set_full(run.plan, "0.weight", run.batch), "zero.set_full takes a State, and this is a Plan"),
]


@pytest.mark.parametrize(("call", "said"), CALLS, ids=lambda value: value[:40] if type(value) is str else "")
def test_one_thing_in_anothers_place(run, call, said):
    """Nothing has begun: the state and its store go on."""
    with pytest.raises(ConfigError) as refused:
        call(run)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert run.step(run.state, [run.batch])[0].step == 1
