"""A wrong argument raises an error of one line, with the line to write instead."""

from collections import namedtuple
from functools import partial
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
    world = zero.open_world()
    plan = zero.Plan(model, optimizer=zero.adamw(lr=1e-3), world=world)
    store = zero.open_store(plan)
    state = zero.init(plan, store)
    arguments = {"model": model, "world": world, "plan": plan, "store": store, "state": state, "folder": tmp_path}
    yield SimpleNamespace(**arguments, batch=torch.ones(3, 4), step=zero.make_step(plan, loss_fn))
    store.close()


def loss_fn(model, batch):
    return model(batch).square().mean()


LOSSES = [
    (lambda loss: {"loss": loss}, 'the loss is a dict, but must be a tensor. Write return outputs["loss"]'),
    (lambda loss: loss.item(), "the loss is a float, but must be a tensor. Write return loss, without .item()"),
    (lambda loss: 1, "the loss is an int, but must be a tensor"),
    (lambda loss: None, "loss_fn returned None. End it with return loss"),
    (lambda loss: [loss], "the loss is a list, but must be a tensor"),
    (lambda loss: loss.detach(), "the loss has no gradient, because it does not depend"),
    (lambda loss: torch.ones((), requires_grad=True), "the loss has no gradient, because it does not depend"),
    (lambda loss: loss.expand(2), r"the loss has shape (2,). Return a scalar: the mean of the microbatch"),
    (lambda loss: (loss,), "a tuple (a Tensor). Write return loss, or return loss_sum, count for a loss by tokens"),
    (lambda loss: (loss, loss), "a tuple (a Tensor, a Tensor). Write return loss, or return loss_sum, count"),
    (lambda loss: (loss.item(), {}), "the loss is a float, but must be a tensor"),
    (
        lambda loss: (loss, {"hits": torch.ones(3)}),
        "'hits' beside the loss is float32 of shape (3,), but must be one real number",
    ),
    (lambda loss: (loss, {"name": "cat"}), "'name' beside the loss is a str, but must be a number"),
    (lambda loss: (loss, {"seen": None}), "'seen' beside the loss is None, but must be a number"),
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
    with pytest.raises(ConfigError, match=r'Write step.backward\(outputs\["loss"\]\)'):
        step.backward({"loss": 1})
    step.abandon()


def test_numbers_beside_the_loss_are_read_after_backward(run):
    """A hook of backward may write them; and what is refused is refused before it, with nothing counted."""
    norm = torch.zeros(())

    def note(gradient):
        norm.copy_(gradient.norm())

    step = zero.Step(run.state)
    step.microbatch()
    outputs = run.state.model(run.batch)
    outputs.register_hook(note)
    loss = outputs.square().mean()
    with pytest.raises(ConfigError, match="'norm' beside the loss is complex64 of shape"):
        step.backward(loss, {"norm": torch.ones((), dtype=torch.complex64)})
    with pytest.raises(ConfigError, match="'norm' beside the loss is float32 of shape"):
        step.count(loss, {"norm": torch.ones(2)})
    assert not step.has_loss
    step.backward(loss, {"norm": norm, "third": 1 / 3})
    _, metrics = step.finish()
    assert metrics.aux == {"norm": float(norm), "third": 1 / 3}
    assert norm > 0


TAKES_A_LIST = "Pass a list of microbatches: step(state, [batch])"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda batch: batch, f"microbatches is a Tensor. {TAKES_A_LIST}"),
        (lambda batch: {"x": batch}, f"microbatches is a dict. {TAKES_A_LIST}"),
        (lambda batch: Pair(batch, batch), f"microbatches is a Pair. {TAKES_A_LIST}"),
        (lambda batch: iter([batch]), TAKES_A_LIST),
        (lambda batch: None, f"microbatches is None. {TAKES_A_LIST}"),
        (lambda batch: SimpleNamespace(x=batch), f"microbatches is a SimpleNamespace. {TAKES_A_LIST}"),
        (lambda batch: (batch, batch), "Pass one batch, also a tuple of tensors, as [batch]"),
        (lambda batch: [batch, batch], "a step takes batch.accumulate=1 microbatches (in Python Plan("),
    ],
)
def test_microbatches_without_the_list(run, given, said):
    with pytest.raises(ConfigError) as refused:
        run.step(run.state, given(run.batch))
    assert said in str(refused.value)


def test_a_loader_of_microbatches_is_a_list_of_them(run):
    run.step(run.state, torch.utils.data.DataLoader([run.batch]))


LOSS_FN = "Write def loss_fn(model, batch): ... return loss"

CALLS = [
    # a state, or something else, in a plan's place
    (lambda run: zero.open_store(run.state), "not a State. Write store = zero.open_store(plan)"),
    (lambda run: zero.open_store(run.model), "not a Sequential. Write store = zero.open_store(plan)"),
    (lambda run: zero.init(run.state), "a State. Write state = zero.init(plan, zero.open_store(plan))"),
    (
        lambda run: zero.init(run.plan),
        "zero.init takes a PrefetchStore, not None. Write state = zero.init(plan, ",
    ),
    (lambda run: zero.init(run.store, run.plan), "zero.init takes a Plan, not a PrefetchStore"),
    (lambda run: zero.make_step(run.state, loss_fn), "State. Write step = zero.make_step(plan, loss_fn)"),
    (lambda run: zero.make_step(zero.Plan, loss_fn), "not the class Plan. Write step = zero.make_step(plan, "),
    (lambda run: zero.make_step(run.plan, run.batch), "loss_fn is a Tensor. Pass a function that takes (model"),
    (lambda run: zero.make_forward(run.state, loss_fn), "Write forward = zero.make_forward(plan, fn)"),
    # a plan, or something else, in a state's place
    (lambda run: run.step(run.plan, [run.batch]), "not a Plan. Write state, metrics = step(state, [batch])"),
    (lambda run: run.step((run.state, 1), [run.batch]), "not a tuple. Write state, metrics = step(state, "),
    (lambda run: run.step([run.batch]), "a step takes a State, not a list. Write state, metrics = step(state"),
    (lambda run: zero.make_forward(run.plan, loss_fn)(run.plan), "a forward takes a State, not a Plan"),
    (lambda run: zero.Step(run.plan), "zero.Step takes a State, not a Plan"),
    (lambda run: zero.record(run.plan).__enter__(), "zero.record takes a State, not a Plan"),
    (lambda run: zero.save(run.folder, run.state), "zero.save takes a State, not a PosixPath. Write zero.sa"),
    (lambda run: zero.load(run.plan, None), "zero.load takes a State, not a Plan"),
    (
        lambda run: zero.load(run.state, run.folder),
        "zero.load takes a Checkpoint as its second argument, not a PosixPath",
    ),
    (lambda run: zero.full_state_dict(run.state.model), "not a Sequential. Write zero.full_state_dict(state)"),
    (lambda run: zero.gathered(run.plan).__enter__(), "zero.gathered takes a State, not a Plan"),
    (lambda run: zero.set_full(run.plan, "0.weight", run.batch), "zero.set_full takes a State, not a Plan"),
    (lambda run: zero.get_full("0.weight", run.state), "not a str. Write zero.get_full(state, name)"),
    (lambda run: zero.track("runs/x", run.state), "not a str. Write with zero.track(state, folder) as track:"),
    (lambda run: zero.track(run.plan, "runs/x"), "zero.track takes a State, not a Plan"),
    # a path in a world's place, or the other way round
    (
        lambda run: zero.open_latest(run.folder, run.world),
        "Write checkpoint, rejected = zero.open_latest(world, folder)",
    ),
    (lambda run: zero.open_latest(run.world, None), "zero.open_latest takes a folder second, not None"),
    (lambda run: zero.open_checkpoint(run.folder, run.world), "Write checkpoint = zero.open_checkpoint(world, folder)"),
    (lambda run: zero.save(run.state, None), "not None. Write zero.save(state, folder)"),
    (lambda run: zero.save(run.state, ""), "zero.save: the folder is ''. Write its path, or '.' for the current one."),
    (lambda run: zero.open_latest(run.world, ""), "zero.open_latest: the folder is ''. Write its path"),
    (lambda run: zero.open_checkpoint(run.world, ""), "zero.open_checkpoint: the folder is ''. Write its path"),
    (lambda run: zero.track(run.state, ""), "zero.track: the folder is ''. Write its path"),
    (lambda run: zero.adam(1e-3, decay="all"), "decay='all': must be a function of a parameter's name and shape"),
    (lambda run: zero.track(run.state, run.world), "zero.track takes a folder second, not a World"),
    # an optimizer whose steps would change nothing
    (lambda run: torch.optim.SGD(run.model.parameters(), lr=1.0).step(), "Write state, metrics = step(state, [batch])"),
    (lambda run: torch.optim.AdamW(list(run.model.named_parameters())).step(), "a torch optimizer holds 0.weight"),
    # a function of other arguments
    (lambda run: zero.make_step(run.plan, nn.MSELoss()), f"torch's MSELoss, which does not call the model. {LOSS_FN}"),
    (
        lambda run: zero.make_step(run.plan, nn.functional.mse_loss),
        f"torch's mse_loss, which does not call the model. {LOSS_FN}",
    ),
    (lambda run: zero.make_forward(run.plan, None), "fn is None. Pass a function that takes (model"),
]


@pytest.mark.parametrize("schedule", [zero.warmup_cosine, zero.warmup_linear])
def test_a_share_in_a_rates_place_is_refused(schedule):
    """On the command line `schedule.final` is a share; in Python a rate of 0.1 would be thirty times the peak."""
    with pytest.raises(ConfigError, match=r"final=0.1 is above lr=0.003\. Give a learning rate, not a share of lr"):
        schedule(3e-3, warmup=5, total=100, final=0.1)
    assert schedule(3e-3, warmup=5, total=100, final=3e-3)(100) == 3e-3


LEFTOVERS = [
    lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
    lambda parameters: torch.optim.SGD(parameters, lr=1.0).zero_grad(),
]


@pytest.mark.parametrize("call", LEFTOVERS)
def test_a_line_that_finds_no_gradients_warns(run, call):
    with pytest.warns(UserWarning, match=r"^0\.weight\.grad is None, because .*clip=1\.0"):
        call(list(run.model.parameters())[:1])


def test_the_gradients_of_others_are_clipped_beside_a_model_that_rests(run):
    run.model.requires_grad_(False)
    other = nn.Parameter(torch.ones(4))
    other.grad = torch.ones(4)
    nn.utils.clip_grad_norm_([*run.model.parameters(), other], 1.0)
    assert other.grad.norm() < 1
    assert next(run.model.parameters()).grad is None


@pytest.mark.parametrize(("call", "said"), CALLS, ids=lambda value: value[:40] if type(value) is str else "")
def test_one_thing_in_anothers_place(run, call, said):
    """Nothing has begun: the state and its store go on."""
    with pytest.raises(ConfigError) as refused:
        call(run)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert run.step(run.state, [run.batch])[0].step == 1


class Weighted(nn.Module):
    """A loss with a number of its own."""

    def forward(self, model, batch):
        return 2 * loss_fn(model, batch)


@pytest.mark.parametrize(
    "given",
    [
        Weighted(),
        partial(lambda scale, model, batch: scale * loss_fn(model, batch), 2),
        lambda *both, more=1: loss_fn(*both),
    ],
)
def test_whatever_takes_a_model_and_a_microbatch_is_a_loss_fn(run, given):
    zero.make_step(run.plan, given)(run.state, [run.batch])


def test_a_call_of_track_has_the_state_first(run):
    state, metrics = run.step(run.state, [run.batch])
    with zero.track(state, run.folder / "run") as track:
        with pytest.raises(ConfigError, match=r"not a Metrics. Write track\(state, metrics\)"):
            track(metrics, state)
        with pytest.raises(
            ConfigError, match=r"takes Metrics as its second argument, not a float. Write track\(state, metrics\)"
        ):
            track(state, metrics.loss)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"compile": "yes"}, "zero.compile=yes: must be True, False or a backend of torch.compile: "),
        ({"compile": {"modes": "x"}}, "zero.compile: modes must be one of backend, mode, dynamic, fullgraph"),
        ({"compile": {"backend": False}}, "zero.compile=none: must be True, False or a backend of torch.compile: "),
        ({"shard": "node", "reduce": "native"}, "zero.shard=node adds by node. Set zero.reduce=auto."),
        ({"compile": {"backend": "no"}}, "zero.compile=no: must be True, False or a backend of torch.compile: "),
        ({"compile": 1}, "zero.compile=1: must be True, False or a backend of torch.compile: "),
        ({"update": "eager"}, "zero.update=eager: must be one of lazy, serial"),
        ({"accumulate": 0}, "batch.accumulate=0: must be a number of microbatches, 1 or more"),
    ],
)
def test_arguments_of_a_plan_in_the_words_of_python(run, given, said):
    with pytest.raises(ConfigError) as refused:
        zero.Plan(nn.Linear(4, 4), **({"optimizer": zero.adamw(lr=1e-3), "world": run.world} | given))
    assert said in str(refused.value)


@pytest.mark.parametrize(("offload", "tiers"), [("auto", ["host"]), ("none", ["device"])])
def test_a_plan_shows_the_tiers_that_hold_something(offload, tiers):
    plan = zero.Plan(nn.Linear(4, 4), optimizer=zero.adamw(lr=1e-3), world=zero.open_world(), offload=offload)
    assert str(plan).splitlines()[1].split() == ["per", "rank", *tiers]
    assert " 0 B" not in str(plan)
