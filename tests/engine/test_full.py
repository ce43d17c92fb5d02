"""Whole values in user code: read, they are what plain torch holds; edited, they are on every rank or on none."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn

import zero
from tests.common.small import KiB, Setting, in_bf16, slice_of, small_batch, small_loss
from zero.engine.step import Step
from zero.engine.whole.read import digest, full_state_dict
from zero.errors import ConfigError, HandshakeError, StaleStateError, WorldError
from zero.testing import run_ranks

EVERYWHERE = [(0, "nvme"), (1, "none"), (1, "cpu"), (2, "nvme"), (3, "none"), (3, "cpu"), (3, "infinity")]


def at(stage: int, preset: str = "none", **changes) -> Setting:
    return Setting(stage=stage, offload=(("preset", preset),), page_bytes=4 * KiB, clip=0.5).but(**changes)


def batch_for(world, number):
    return slice_of(small_batch(number, 6 * world.size), world, 1)


def trained(world, setting, steps=1):
    """A state whose updates wait, and the step."""
    state, step = setting.start(world)
    for number in range(steps):
        state, _ = step(state, batch_for(world, number))
    return state, step


def passed(state, batch, loss=small_loss):
    """A step that has gone backward once and is not finished."""
    step = Step(state)
    step.microbatch()
    told = loss(state.model, batch)
    step.backward(told[0] if isinstance(told, tuple) else told)
    return step


# -- edits persist -----------------------------------------------------------------------------------------------------


def edit_and_look(world, setting):
    state, step = trained(world, setting)
    forward = zero.make_forward(state.plan, lambda model, tokens: model(tokens))
    tokens = small_batch(9, 5)[:, 0]
    before = forward(state, tokens)
    expected = {}
    with zero.gathered(state, ["blocks.*.linear.*", "head.bias"], modify=True) as full:
        assert len(full) == 7, "a frozen bias and a frozen block are there as well"
        for name, tensor in full.items():
            if name == "head.bias":
                full[name] = torch.arange(11, dtype=torch.float64)
            else:
                tensor.mul_(2).add_(0.5)
            expected[name] = full[name].float().clone()
    seen = full_state_dict(state)
    exact = setting.precision == "fp32"
    for name, value in expected.items():
        held = value if exact or not name.startswith(("blocks.2", "blocks.0.linear.bias")) else in_bf16(value)
        assert torch.equal(seen[name], held), name
        assert torch.equal(zero.get_full(state, name, "compute"), value if exact else in_bf16(value)), name
    after = forward(state, tokens)
    assert not torch.equal(before, after)
    state, _ = step(state, batch_for(world, 1))
    state.runtime.store.close()
    return after


@functools.cache
def looked_at_stage_0(precision):
    return run_ranks(2, edit_and_look, at(0, precision=precision))[1]


@pytest.mark.parametrize(
    ("stage", "preset"),
    [(0, "nvme"), (1, "cpu"), (2, "none"), (3, "none"), (3, "infinity")],
)
def test_edits_persist(stage, preset):
    """In the master, in what the model computes with, in frozen parameters, and nowhere does an old copy stay."""
    setting = at(stage, preset, precision=("fp32", "bf16")[stage % 2])
    assert torch.equal(run_ranks(2, edit_and_look, setting)[1], looked_at_stage_0(setting.precision))


def edit_by(world, modify):
    """Return a weight after each rank has written its own number."""
    state, _ = trained(world, at(1))
    with zero.gathered(state, "norm.*", modify=modify) as full:
        full["norm.weight"].fill_(world.rank)
        if world.rank == 2:
            full["norm.bias"].fill_(7)
    return [zero.get_full(state, f"norm.{name}").tolist() for name in ("weight", "bias")]


def test_one_rank_decides():
    """Whatever the others wrote, in the same tensor or in another one, is dropped."""
    for told in run_ranks(3, edit_by, 2):
        assert told == [[2.0] * 13, [7.0] * 13]
    for weight, bias in run_ranks(3, edit_by, 1):
        assert (weight, max(bias) < 1) == ([1.0] * 13, True)


def write_through_data(full):
    full["norm.weight"].data[3] = 5.0  # moves no version counter


@pytest.mark.parametrize(
    ("edit", "modify", "kind", "error", "told"),
    [
        (write_through_data, False, "param", ConfigError, "on rank 1: norm.weight was edited, but it is a copy, so"),
        (write_through_data, False, "mu", ConfigError, "on rank 1: norm.weight was edited, but it is a copy"),
        (write_through_data, True, "param", WorldError, "rank 1 edited norm.weight otherwise than rank 0"),
        (lambda full: full.update(norm=torch.ones(1)), True, "param", ConfigError, "rank 1: 'norm' was put into the"),
        (
            lambda full: full.update({"norm.bias": torch.ones(2)}),
            1,
            "param",
            ConfigError,
            r"given as \(2,\), but must be \(13,",
        ),
        (lambda full: full.update({"norm.bias": 0.5}), True, "nu", ConfigError, r"norm.bias was given as float"),
        (
            lambda full: full["norm.bias"].fill_(torch.nan),
            1,
            "param",
            ConfigError,
            "that is not finite in torch.float16",
        ),
        (lambda full: full["norm.bias"].fill_(1e6), 1, "param", ConfigError, "that is not finite in torch.float16"),
        (lambda full: full["norm.bias"].fill_(torch.inf), 1, "nu", ConfigError, "that is not finite in torch.float32"),
    ],
)
def test_an_illegal_edit_fails_on_all_ranks(edit, modify, kind, error, told):
    """One rank does wrong: all refuse, though the edit beside it was right, and not a bit has changed anywhere."""

    def rank_main(world):
        state, _ = trained(world, at(3, precision="fp16"))
        before = digest(state)

        def block():
            with zero.gathered(state, "norm.*", modify, kind=kind) as full:
                if modify is True:
                    full["norm.weight"].zero_()
                if world.rank == 1:
                    edit(full)

        with pytest.raises(error, match=told):
            block()
        return digest(state) == before

    assert run_ranks(3, rank_main) == [True] * 3


def refused(world):
    """Return the refusal of each request; nothing has been given out before it."""
    state, _ = trained(world, at(2))

    def told(error, names, modify=False, kind="param"):
        with pytest.raises(error) as caught, zero.gathered(state, names, modify, kind=kind):
            pass
        return str(caught.value)

    assert told(ConfigError, "blocks.0.gane") == "no parameter is named blocks.0.gane. Did you mean blocks.0.gain?"
    assert "no parameter is named *.lora. There are embed.weight, " in told(ConfigError, ["norm.*", "*.lora"])
    assert told(ConfigError, "head.weight") == "head.weight is tied to embed.weight. Use the name embed.weight."
    assert told(ConfigError, "blocks.2.gain", kind="mu") == "blocks.2.gain is frozen: it has no mu"
    assert (
        told(ConfigError, None, kind="nus")
        == "kind='nus' does not exist here. Choose from param, compute, grad, mu, nu."
    )
    assert "the world has ranks 0 to 1" in told(ConfigError, None, modify=2)
    assert "Edit kind='param'" in told(ConfigError, None, modify=True, kind="compute")
    with pytest.raises(ConfigError, match="is a pattern"):
        zero.get_full(state, "blocks.*.gain")
    mine = f"blocks.{world.rank}.gain"
    assert "arguments of zero.gathered: names is ['blocks.0.gain'] on rank 0" in told(HandshakeError, mine)


def test_what_cannot_be_gathered_is_refused_with_the_right_word():
    run_ranks(2, refused)


def leave_early(world, interrupted):
    state, step = trained(world, at(3))

    def block(then):
        with zero.gathered(state, modify=True) as full:
            full["norm.bias"].fill_(3)
            return then()

    if interrupted:
        with pytest.raises(ZeroDivisionError):
            block(lambda: 1 / 0)
        following = []
        with pytest.raises(StaleStateError, match="a step or load inside the block"):
            block(lambda: following.extend(step(state, batch_for(world, 1))))
        return digest(following[0])
    return digest(step(state, batch_for(world, 1))[0])


def test_an_edit_that_does_not_end_well_changes_nothing():
    """The block raised; or it took a step, and what it holds is of a state that is gone."""
    assert run_ranks(2, leave_early, True) == run_ranks(2, leave_early, False)


def views_left(world):
    """How many of the given tensors live on after the block, and how much was gathered for them, in units."""
    state, _ = trained(world, at(3))
    zero.full_state_dict(state)
    gathered_bytes = world.traffic.gather_bytes
    with zero.gathered(state, ["blocks.1.*"], modify=True) as full:
        full["blocks.1.gain"].fill_(2)
        given = [weakref.ref(tensor) for tensor in full.values()]
        assert len(given) == 7
    gc.collect()
    unit = next(unit for unit in state.plan.units if unit.name == "blocks.1")
    whole_bytes = 4 * unit.full_numel
    return sum(ref() is not None for ref in given), (world.traffic.gather_bytes - gathered_bytes) / whole_bytes


def test_the_full_view_is_freed_on_exit():
    """Though the name that it was bound to lives on; and only the unit that was asked for was gathered, to read it."""
    for left, gathers in run_ranks(2, views_left):
        assert (left, gathers <= 1) == (0, True)


def edit_under_a_graph(world, stage):
    state, _ = trained(world, at(stage))
    step = Step(state)
    step.microbatch()
    loss, _ = small_loss(state.model, batch_for(world, 1)[0])
    zero.set_full(state, "embed.weight", torch.ones(11, 13))
    with pytest.raises(StaleStateError, match="changed between"):
        step.backward(loss)
    step.abandon()
    _, metrics = passed(state, batch_for(world, 1)[0]).finish()
    return metrics.loss


def test_an_edit_between_forward_and_backward_is_caught():
    """Autograd must not go backward through other parameters than it came forward with; the next step is a good one."""
    assert len({loss for stage in (1, 3) for loss in run_ranks(2, edit_under_a_graph, stage)}) == 1


# -- parameter, gradient and moments, read and written -----------------------------------------------------------------


def put_back(world, setting, edits):
    """Two steps, in each of which everything is overwritten and then set to what it was, gradients included."""
    state, _ = setting.start(world)
    for number in range(2):
        step = passed(state, batch_for(world, number)[0])
        for kind in ("grad", "param", "mu", "nu") if edits else ():
            kept = full_state_dict(step, kind)
            with zero.gathered(step, modify=True, kind=kind) as full:
                for tensor in full.values():
                    tensor.fill_(0.25)
            assert torch.equal(zero.get_full(step, "norm.bias", kind), torch.full((13,), 0.25))
            with zero.gathered(step, modify=True, kind=kind) as full:
                full.update(kept)
        state, metrics = step.finish()
    told = digest(state), metrics
    state.runtime.store.close()
    return told


@functools.cache
def undisturbed(precision):
    return run_ranks(2, put_back, at(0, precision=precision), False)


@pytest.mark.parametrize(("stage", "preset"), EVERYWHERE)
def test_setting_what_was_read_changes_no_bit(stage, preset):
    """On device, host and nvme; two ranks divide a gradient exactly."""
    precision = ("bf16", "fp32")[stage % 2]
    assert run_ranks(2, put_back, at(stage, preset, precision=precision), True) == undisturbed(precision)


def edit_one_element(world):
    """Three ranks do not divide exactly: what was not edited keeps its bits all the same."""
    state, _ = trained(world, at(2, precision="bf16"))
    told = []
    for edits in (False, True):
        step = passed(state, batch_for(world, 1)[0])
        if edits:
            with zero.gathered(step, "embed.weight", modify=True, kind="grad") as full:
                full["embed.weight"][:, 3].neg_()
        mean = zero.get_full(step, "embed.weight", "grad")
        told.append((mean, [unit.grad.clone() for unit in state.runtime.units if unit.spec.trainable.slots]))
        step.abandon()
    (before, raw), (after, edited) = told
    flip = torch.ones(13).index_fill_(0, torch.tensor([3]), -1)
    assert torch.equal(after, before * flip)
    return sum(int((grad != other).sum()) for grad, other in zip(raw, edited, strict=True)), int(
        (before[:, 3] != 0).sum()
    )


def test_what_was_not_edited_keeps_its_bits():
    told = run_ranks(3, edit_one_element)
    assert sum(changed for changed, _ in told) == told[0][1] > 0


class Plain(nn.Module):
    """Two layers without running statistics, the first bias frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 9), nn.Linear(9, 5)])
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x)))


def plain_loss(model, x):
    return model(x).square().mean()


def plain_batch(number):
    return torch.randn(12, 7, generator=torch.Generator().manual_seed(number))


EDITS = {
    "param": {"layers.0.weight": lambda w: w * 0.5, "layers.0.bias": lambda b: b + 0.25},
    "grad": {"layers.1.weight": lambda g: g.clamp(-0.01, 0.02) + 0.1},
    "mu": {"layers.1.bias": torch.zeros_like},
    "nu": {"layers.0.weight": lambda n: n * 4},
}
"""Edits by the user's code in the third of five steps."""


def by_zero(world, setting):
    state, _ = setting.start(world, Plain, plain_loss)
    first, seen = full_state_dict(state), {}
    for number in range(5):
        step = passed(state, slice_of(plain_batch(number), world, 1)[0], plain_loss)
        if number == 2:
            for kind in ("param", "grad", "mu", "nu"):
                seen[kind] = full_state_dict(step, kind)
                for name, edit in EDITS[kind].items():
                    zero.set_full(step, name, edit(zero.get_full(step, name, kind)), kind)
        state, metrics = step.finish()
    last = full_state_dict(state)
    state.runtime.store.close()
    return first, seen, metrics.grad_norm, last


def by_torch(first):
    model = Plain()
    model.load_state_dict(first)
    held = dict(model.named_parameters())
    trains = {name: parameter for name, parameter in held.items() if parameter.requires_grad}
    matrices = [parameter for parameter in trains.values() if parameter.ndim > 1]
    vectors = [parameter for parameter in trains.values() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    seen = {}
    for number in range(5):
        optimizer.zero_grad()
        plain_loss(model, plain_batch(number)).backward()
        if number == 2:
            places = {"param": held, "grad": {name: parameter.grad for name, parameter in trains.items()}}
            for kind, moment in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
                places[kind] = {name: optimizer.state[parameter][moment] for name, parameter in trains.items()}
            with torch.no_grad():
                for kind, tensors in places.items():
                    seen[kind] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
                    for name, edit in EDITS[kind].items():
                        tensors[name].copy_(edit(tensors[name]))
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
    return seen, norm, {name: parameter.detach() for name, parameter in held.items()}


@pytest.mark.parametrize(("stage", "preset"), [(0, "none"), (2, "nvme"), (3, "infinity")])
def test_parameter_gradient_and_moments_are_read_and_written_as_plain_torch_holds_them(stage, preset):
    """Gradients are the mean over ranks, before clipping. Training on after the edits is what torch does after them."""
    first, seen, norm, last = run_ranks(2, by_zero, at(stage, preset, clip=0.05))[0]
    expected, expected_norm, expected_last = by_torch(first)
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    for kind, tensors in expected.items():
        assert seen[kind].keys() == tensors.keys()
        for name, value in tensors.items():
            torch.testing.assert_close(seen[kind][name], value, rtol=1e-5, atol=1e-7, msg=f"{kind} {name}")
    for name, value in expected_last.items():
        torch.testing.assert_close(last[name], value, rtol=1e-5, atol=1e-6, msg=name)


def halve_after_the_first(world, setting):
    """Return two gradients as read after the first of two microbatches, and after the second."""
    state, _ = setting.start(world, Plain, plain_loss)
    step, seen = Step(state), [full_state_dict(state)]
    for microbatch in slice_of(plain_batch(0), world, 2):
        step.microbatch()
        step.backward(plain_loss(state.model, microbatch))
        seen.append(full_state_dict(step, "grad"))
        if step.microbatches == 1:
            with zero.gathered(step, "layers.1.*", modify=True, kind="grad") as full:
                for tensor in full.values():
                    tensor.mul_(0.5)
    state, _ = step.finish()
    state.runtime.store.close()
    return seen


@pytest.mark.parametrize(("stage", "preset"), [(0, "nvme"), (2, "none"), (3, "infinity")])
def test_an_edit_between_microbatches_is_added_to(stage, preset):
    first, *seen = run_ranks(2, halve_after_the_first, at(stage, preset, accumulate=2))[0]
    model = Plain()
    model.load_state_dict(first)
    parts = plain_batch(0).chunk(4)  # microbatch m of rank r is slice 2 m + r
    for number, told in enumerate(seen):
        for part in parts[2 * number : 2 * number + 2]:
            (plain_loss(model, part) / 4).backward()
        for name, value in told.items():
            torch.testing.assert_close(value, model.get_parameter(name).grad, rtol=1e-5, atol=1e-7, msg=name)
        for parameter in model.layers[1].parameters():
            parameter.grad.mul_(0.5)


def look_at_gradients(world, setting):
    """When there is one, and that looking is all that is done."""
    state, _ = trained(world, setting)
    wrong = []

    def refuse(source):
        with pytest.raises(
            StaleStateError, match="there is no gradient: gradients exist only between backward and the end"
        ) as no:
            zero.get_full(source, "embed.weight", "grad")
        wrong.append(no)

    refuse(state)
    step = Step(state)
    refuse(step)
    step.abandon()
    step = passed(state, batch_for(world, 1)[0])
    mean = zero.get_full(step, "embed.weight", "grad")
    state, metrics = step.finish()
    refuse(state)
    assert len(wrong) == 3
    told = digest(state), metrics.grad_norm
    state.runtime.store.close()
    return told, mean


@pytest.mark.parametrize(("stage", "preset"), [(0, "none"), (1, "nvme"), (3, "infinity")])
def test_a_gradient_is_there_from_backward_to_the_end_of_the_step(stage, preset):
    """fp16's loss scale is not in it. Before and after it is refused: there it is the last step's, or used up."""
    setting = at(stage, preset, precision="fp16")

    def straight_on(world):
        state, step = trained(world, setting)
        state, metrics = step(state, batch_for(world, 1))
        told = digest(state), metrics.grad_norm
        state.runtime.store.close()
        return told

    results = run_ranks(2, look_at_gradients, setting)
    assert [told for told, _ in results] == run_ranks(2, straight_on)
    assert 0 < results[0][1].norm() < results[0][0][1] < 100
