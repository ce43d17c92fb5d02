"""Groups of parameters: torch's `param_groups` are the oracle, and what does not train does not move by a bit."""

import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.common.small import Setting, Small, slice_of, small_batch, small_loss, train_small
from tests.simulation import simulated_gpu
from zero.core.groups import Group
from zero.core.lr_schedule import Cycle, CycledMomentum, OneCycleSchedule
from zero.core.optimizers import adagrad, adam, adamw, lion, sgd
from zero.core.updates import PageBatch
from zero.engine.whole.read import digest, full_state_dict
from zero.errors import ConfigError
from zero.testing import run_ranks

LR, DECAY, CLIP = 1e-2, 0.1, 0.5


def is_bias(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith("bias")


EMBED = Group(["embed.weight"], lr=3e-3, weight_decay=0.0)
BIASES = Group(is_bias, lr=2e-2)
"""The first takes one name, the second what a function says; blocks.0.linear.bias is frozen for good in `Small`."""


def settings_at(transform: zero.core.optim.Transform, name: str, shape: tuple[int, ...], step: int = 1) -> Any:
    return transform.groups[transform.group(name, shape)](step)


PLACES = [(0, "nvme"), (1, "none"), (2, "nvme"), (3, "none"), (3, "nvme")]


def tiers(stage: int, tier: str) -> tuple[tuple[str, str], ...]:
    return (("optimizer", tier), ("param", tier)) if stage == 3 else (("optimizer", tier),)


# -- which settings a parameter gets -----------------------------------------------------------------------------------


def test_the_first_group_that_takes_a_parameter_has_it():
    groups = [
        Group(["a"], lr=1.0),
        Group(["a", "blocks.*.bias"], lr=2.0, weight_decay=0.5),
        Group("head", trains=False),
    ]
    transform = adamw(3.0, weight_decay=0.1, groups=groups)
    assert settings_at(transform, "a", (2, 2)) == (1.0, 0.1, (0.9, 0.999), True, 1), "what it leaves out is the call's"
    assert settings_at(transform, "a", (2,)).weight_decay == 0.0, "and so is the mask"
    assert settings_at(transform, "blocks.7.bias", (2,))[:2] == (2.0, 0.5), "a decay of its own is for all it takes"
    assert not settings_at(transform, "head", (2, 2)).trains
    assert settings_at(transform, "other", (2,)) == (3.0, 0.0, (0.9, 0.999), True, 1)
    assert transform.hyper_at(7, 2.0).lr == transform.groups[0](7).lr == 3.0, "the default group's"


def test_a_group_follows_the_step_and_a_dict():
    live: dict[str, Any] = {"lr": 0.5}
    late = Group(["late"], lr=lambda step: step / 10, trains=lambda step: step > 2)
    transform = adamw(1.0, groups=[late, Group(["live"], live=live)])
    assert [settings_at(transform, "late", (1,), step)[::3] for step in (1, 3)] == [(0.1, False), (0.3, True)]
    decided = transform.hyper_at(1, 1.0)
    live.update(lr=torch.tensor(0.25), weight_decay=0.125, betas=(0.5, 0.75), trains=False)
    assert settings_at(transform, "live", (1,)) == (0.25, 0.125, (0.5, 0.75), False, 1)
    assert decided.groups[transform.group("live", (2, 2))].lr == 0.5, "what was decided stays"


def test_a_group_travels_to_another_process():
    transform = sgd(LR, momentum=0.9, groups=[Group(["a"], betas=(0.5,))])
    copy = pickle.loads(pickle.dumps(transform))
    assert copy.hyper_at(3, 2.0) == transform.hyper_at(3, 2.0)
    assert copy.fields() == transform.fields()


@pytest.mark.parametrize(
    ("said", "make"),
    [
        (r"optim\.groups\[0\]\.lr at step 1=-1.0", lambda: adamw(LR, groups=[Group(["a"], lr=-1.0)])),
        (r"optim\.groups\[1\]\.beta2 at step 1=1.0", lambda: lion(LR, groups=[BIASES, Group(["a"], betas=(0.9, 1.0))])),
        (r"optim\.groups\[0\]\.betas=\(0\.9,\): this optimizer has the betas \(beta1, beta2\)",
         lambda: adam(LR, groups=[Group(["a"], live={"momentum": 0.9})])),
        (r"betas=\(0\.9,\): this optimizer has no betas", lambda: adagrad(LR, groups=[Group(["a"], betas=(0.9,))])),
        (r"optim\.beta1 at step 1=1\.5", lambda: adamw(LR, beta1=lambda step: 1.5)),
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused_with_its_group(said, make):
    with pytest.raises(ConfigError, match=said):
        make().hyper_at(1, 1.0)


# -- against torch -----------------------------------------------------------------------------------------------------


def in_torch(before: dict[str, torch.Tensor], make: Callable[..., torch.optim.Optimizer]) -> Any:
    """A model of plain torch with the groups of `zero_run`, its optimizer, and its trainable parameters by name."""
    model = Small()
    model.load_state_dict(before, strict=False)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    embed, biases = named["embed.weight"], [p for name, p in named.items() if name.endswith("bias")]
    taken = {id(p) for p in (embed, *biases)}
    rest = [p for p in named.values() if id(p) not in taken]
    optimizer = make(
        [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": DECAY},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
            {"params": [embed], "lr": 3e-3, "weight_decay": 0.0},
            {"params": biases, "lr": 2e-2, "weight_decay": 0.0},
        ]
    )
    return model, optimizer, named


def never(number: int) -> bool:
    return False


def torch_steps(model: nn.Module, optimizer: Any, named: Any, steps: range, freeze: Any = never) -> list[float]:
    """Norms of plain torch with the same groups, which has no gradient for what does not train."""
    norms = []
    for number in steps:
        optimizer.zero_grad()
        small_loss(model, small_batch(number, 12))[0].backward()
        for p in named.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if freeze(number):
            named["embed.weight"].grad = None
        norms.append(float(nn.utils.clip_grad_norm_(named.values(), CLIP)))
        optimizer.step()
    return norms


def zero_run(world: zero.World, setting: Setting, steps: int, freeze: Any) -> Any:
    live: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.0}
    make = setting.optimizer

    def with_groups(*args: Any, **how: Any) -> zero.core.optim.Transform:
        return make(*args, groups=[Group(["embed.weight"], live=live), BIASES], **how)

    state, step = setting.but(optimizer=with_groups).start(world)
    before, norms = full_state_dict(state), []
    for number in range(steps):
        live["trains"] = not freeze(number)
        state, metrics = step(state, slice_of(small_batch(number, 12), world, setting.accumulate))
        norms.append(metrics.grad_norm)
    return before, norms, full_state_dict(state), digest(state)


def in_the_middle(number: int) -> bool:
    return number in (0, 1, 4, 5)


def momentum_sgd(lr: Any, **how: Any) -> zero.core.optim.Transform:
    return sgd(lr, momentum=0.9, **how)


def slowed_adagrad(lr: Any, **how: Any) -> zero.core.optim.Transform:
    return adagrad(lr, lr_decay=0.1, **how)


PAIRS: dict[Any, Callable[..., torch.optim.Optimizer]] = {
    adamw: lambda groups: torch.optim.AdamW(groups, lr=LR),
    adam: lambda groups: torch.optim.Adam(groups, lr=LR),
    momentum_sgd: lambda groups: torch.optim.SGD(groups, lr=LR, momentum=0.9),
    slowed_adagrad: lambda groups: torch.optim.Adagrad(groups, lr=LR, lr_decay=0.1),
}
"""Optimizers and torch's."""


def close(parameters: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        if name != "blocks.1.linear.bias":  # batch norm takes it out again: its gradient is nothing but rounding
            torch.testing.assert_close(parameters[name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("ours", PAIRS)
def test_eight_steps_with_groups_are_those_of_torch(ours):
    """Also with a group that is frozen at first, thawed, frozen and thawed: each keeps its own count of updates.

    One rank: batch norm's statistics are those of a microbatch. SGD's groups of torch take a buffer at their first
    gradient, ours begin with zeros: the same numbers.
    """
    for freeze in (never, in_the_middle):
        setting = Setting(stage=3, optimizer=ours, lr=LR, weight_decay=DECAY, clip=CLIP)
        before, norms, parameters, _ = run_ranks(1, zero_run, setting, 8, freeze)[0]
        model, optimizer, named = in_torch(before, PAIRS[ours])
        assert norms == pytest.approx(torch_steps(model, optimizer, named, range(8), freeze), rel=1e-5)
        close(parameters, dict(model.named_parameters()))


def test_the_bits_do_not_depend_on_stage_or_tier():
    """With groups, live settings, freezing and thawing."""
    settings = [Setting(stage=stage, clip=CLIP, offload=tiers(stage, tier), precision="bf16") for stage, tier in PLACES]
    assert len({run_ranks(2, zero_run, setting, 6, in_the_middle)[0][3] for setting in settings}) == 1


KEPT = ("blocks.0.*", "embed.weight", "head.bias")
"""Parameters whose moments a load leaves as they are: some of the groups' parameters, not all."""


def loaded_in_part(world: zero.World, setting: Setting, own: int, folder: Any) -> Any:
    """Values before, and after 3 steps, `own` steps of another state that takes all but moments, and 3 more steps."""
    make = setting.optimizer
    groups = [Group(["embed.weight"], lr=3e-3, weight_decay=0.0), BIASES]
    setting = setting.but(optimizer=lambda *args, **how: make(*args, groups=groups, **how))

    def go_on(state: zero.State, step: Any, numbers: range) -> zero.State:
        for number in numbers:
            state, _ = step(state, slice_of(small_batch(number, 12), world, 1))
        return state

    state, step = setting.start(world)
    before = full_state_dict(state)
    saved = zero.save(go_on(state, step, range(3)), folder / "first")
    state, step = setting.start(world)
    state = go_on(state, step, range(own))
    partial = [f"{moment}/{name}" for moment in state.plan.optimizer.moments for name in KEPT]
    state = go_on(zero.load(state, zero.open_checkpoint(world, saved), partial=partial), step, range(3, 5))
    again = zero.open_checkpoint(world, zero.save(state, folder / "second"))
    state, step = setting.start(world)
    return before, full_state_dict(go_on(zero.load(state, again), step, range(5, 6)))


@pytest.mark.parametrize("own", [0, 5])
@pytest.mark.parametrize(
    ("ours", "options"), [*((ours, {}) for ours in PAIRS), (adamw, {"fused": True}), (adam, {"fused": True})]
)
def test_moments_that_a_load_keeps_also_keep_their_number_of_updates(ours, options, own, tmp_path):
    """Each parameter's count, as in torch: `own` for the parameters that keep moments, 3 for the others of a group."""
    setting = Setting(stage=3, optimizer=ours, lr=LR, weight_decay=DECAY, clip=CLIP)
    with simulated_gpu(**options) if options else nullcontext():
        before, parameters = run_ranks(1, loaded_in_part, setting, own, tmp_path)[0]
    (model, optimizer, named), (other, whole, others) = (in_torch(before, PAIRS[ours]) for _ in range(2))
    torch_steps(model, optimizer, named, range(3))
    torch_steps(other, whole, others, range(own))
    for name, parameter in named.items():
        if any(fnmatchcase(name, pattern) for pattern in KEPT):
            state = whole.state[others[name]] or {
                key: torch.zeros_like(value) for key, value in optimizer.state[parameter].items()
            }
            optimizer.state[parameter].update(state)
    torch_steps(model, optimizer, named, range(3, 6))
    close(parameters, dict(model.named_parameters()))


# -- what does not train -----------------------------------------------------------------------------------------------


def frozen_and_thawed(world: zero.World, setting: Setting) -> None:
    live: dict[str, Any] = {"trains": True}
    make = setting.optimizer
    setting = setting.but(
        optimizer=lambda *args, **how: make(*args, groups=[Group(["embed.weight", "norm.*"], live=live)], **how)
    )
    state, step = setting.start(world)
    kinds = ("param", "compute", *state.plan.optimizer.moments)

    def held() -> dict[tuple[str, str], torch.Tensor]:
        return {(name, kind): value for kind in kinds for name, value in full_state_dict(state, kind).items()}

    def moved(before: dict[tuple[str, str], torch.Tensor]) -> set[str]:
        return {name for (name, kind), value in held().items() if not torch.equal(value, before[name, kind])}

    mine = {"embed.weight", "norm.weight", "norm.bias"}
    for number, trains in enumerate([True, True, False, False, True]):
        live["trains"] = trains
        before = held()
        state, metrics = step(state, slice_of(small_batch(number, 12), world, 1))
        live["trains"] = not trains  # too late: the step has begun with the other
        assert (moved(before) & mine == mine) is trains
        assert trains or not moved(before) & mine
        assert "head.bias" in moved(before)
    assert metrics.grad_norm > 0


@pytest.mark.parametrize("update", ["lazy", "serial"])
@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (3, "none"), (3, "nvme")])
def test_a_frozen_group_keeps_every_bit_and_trains_again(stage, tier, update):
    offload = (("optimizer", tier), ("param", tier)) if stage == 3 else ()
    run_ranks(2, frozen_and_thawed, Setting(stage=stage, precision="bf16", offload=offload, update=update))


class TwoWeights(nn.Module):
    """Gradients of 3 and 4, and infinity where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.a)
        nn.init.zeros_(self.b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (3 * self.a + x * self.b).sum()


def norms_of(world: zero.World, live: dict[str, Any], xs: list[tuple[bool, float]]) -> list[tuple[float, bool]]:
    def make(lr: Any, **how: Any) -> zero.core.optim.Transform:
        return sgd(lr, groups=[Group(["b"], live=live)], **how)

    state, step = Setting(optimizer=make).start(world, TwoWeights, lambda model, x: model(x))
    told = []
    for trains, x in xs:
        live["trains"] = trains
        state, metrics = step(state, [torch.tensor([x])])
        told.append((metrics.grad_norm, metrics.skipped))
    return told


def test_the_norm_is_of_what_trains():
    """A frozen parameter cannot make a step be skipped either."""
    steps = [(True, 4.0), (False, 4.0), (False, torch.inf), (True, 4.0)]
    assert run_ranks(1, norms_of, {}, steps)[0] == [(5.0, False), (3.0, False), (3.0, False), (5.0, False)]


def resumed(world: zero.World, folder: Any) -> None:
    late = Group(["embed.weight"], trains=lambda step: step > 3)

    def start() -> Any:
        return Setting(optimizer=lambda *args, **how: adamw(*args, groups=[late], **how)).start(world)

    def held(state: zero.State) -> dict[str, list[float]]:
        return {name: value.tolist() for name, value in full_state_dict(state).items()}

    def go_on(state: Any, step: Any, numbers: range) -> Any:
        for number in numbers:
            state, _ = step(state, slice_of(small_batch(number, 12), world, 1))
        return state

    state, step = start()
    state = go_on(state, step, range(5))
    saved = zero.save(state, folder)
    straight = held(go_on(state, step, range(5, 8)))
    state, step = start()
    state = zero.load(state, zero.open_checkpoint(world, saved))
    assert held(go_on(state, step, range(5, 8))) == straight


def test_a_resumed_run_counts_each_groups_updates_as_the_one_that_went_on(tmp_path):
    run_ranks(2, resumed, tmp_path / "kept")


# -- a mean of the parameters ------------------------------------------------------------------------------------------


def with_mean(*args: Any, **how: Any) -> zero.core.optim.Transform:
    return zero.with_ema(adamw(*args, groups=[Group(["embed.weight"], trains=lambda step: step > 2)], **how), 0.75)


def means(world: zero.World, setting: Setting, folder: Any) -> Any:
    """The mean next to the one that is taken of whole parameters; saved half-way and loaded."""
    state, step = setting.but(optimizer=with_mean).start(world)
    names = full_state_dict(state, "ema")
    expected = {name: value for name, value in full_state_dict(state).items() if name in names}
    assert all(torch.equal(value, expected[name]) for name, value in names.items()), "it begins as the parameters"
    for number in range(4):
        state, _ = step(state, slice_of(small_batch(number, 12), world, 1))
        now = full_state_dict(state)
        for name, mean in expected.items():
            if name != "embed.weight" or number >= 2:
                expected[name] = mean * 0.75 + now[name] * 0.25
        if number == 1:
            state = zero.load(state, zero.open_checkpoint(world, zero.save(state, folder)))
    averages = full_state_dict(state, "ema")
    assert all(torch.equal(averages[name], mean) for name, mean in expected.items())
    return digest(state)


def test_the_mean_of_the_parameters_is_a_moment_at_every_stage_and_tier(tmp_path):
    settings = {
        f"{stage} {tier}": Setting(stage=stage, offload=tiers(stage, tier), precision="bf16", clip=CLIP)
        for stage, tier in PLACES
    }
    assert len({run_ranks(2, means, setting, tmp_path / name)[0] for name, setting in settings.items()}) == 1


def without_then_with(world: zero.World, folder: Any) -> None:
    state, step = Setting(precision="bf16").start(world)
    state, _ = step(state, slice_of(small_batch(0, 12), world, 1))
    saved = zero.save(state, folder)
    state, _ = Setting(precision="bf16", optimizer=with_mean, seed=1).start(world)
    said: list[str] = []
    state = zero.load(state, zero.open_checkpoint(world, saved), note=said.append)
    assert said == [f"{saved} has no ema, which starts as a copy of the parameters"]
    now = full_state_dict(state)
    assert all(torch.equal(mean, now[name]) for name, mean in full_state_dict(state, "ema").items())


def test_a_mean_begins_as_the_parameters_of_a_checkpoint_that_has_none(tmp_path):
    run_ranks(2, without_then_with, tmp_path / "kept")


# -- momentum that cycles ----------------------------------------------------------------------------------------------


def test_one_cycle_moves_rate_and_momentum_of_adam():
    """Against torch's optimizer, whose groups get the same two numbers."""
    cycle = Cycle(3, 4, decay_every=2)
    rate, momentum = OneCycleSchedule(LR, 1e-3, cycle, decay_rate=0.5), CycledMomentum(0.8, 0.9, cycle)
    ours, theirs = torch.ones(64), torch.ones(64, requires_grad=True)
    transform, oracle = adamw(rate, beta1=momentum), torch.optim.AdamW([theirs], lr=0.0)
    moments = (torch.zeros(64), torch.zeros(64))
    for step in range(1, 11):
        grad = torch.linspace(-step, 1, 64)
        oracle.param_groups[0].update(lr=rate(step), betas=(momentum(step), 0.999))
        theirs.grad = grad.clone()
        oracle.step()
        transform.update(PageBatch([ours], [grad], tuple([m] for m in moments), transform.groups[1](step), 1.0))
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)


def test_the_configuration_hands_the_momentum_to_the_optimizer():
    from zero.settings.build import build_optimizer
    from zero.trainer.config import read

    schedule = {"name": "one_cycle", "rise": 2, "fall": 2}
    sgd_with = {"name": "sgd", "momentum": 0.9}
    for optim, at_rest, at_peak in (({"name": "adamw"}, (0.9, 0.999), (0.8, 0.999)), (sgd_with, (0.9,), (0.8,))):
        transform = build_optimizer(read({"optim": optim, "schedule": schedule}))
        assert [transform.groups[0](step).betas for step in (1, 3)] == [at_rest, pytest.approx(at_peak)]


def test_the_configuration_asks_for_a_mean():
    from zero.settings.build import build_optimizer
    from zero.trainer.config import read

    assert build_optimizer(read({"optim": {"name": "sgd", "momentum": 0.9, "ema": 0.99}})).moments == ("mu", "ema")
    with pytest.raises(ConfigError, match=r"optim\.ema=1\.0: must be at least 0 and less than 1"):
        zero.with_ema(sgd(LR), 1.0)


@pytest.mark.parametrize(
    ("takes", "said"),
    [
        (["head.bias", "embd.weight"], "takes 'embd.weight', but no parameter matches it. Did you mean embed.weight?"),
        ("blokcs.*", "takes 'blokcs.*', but no parameter matches it"),
        (lambda name, shape: len(shape) == 7, "takes none of the model's 25 parameters"),
    ],
)
def test_a_group_for_parameters_that_the_model_has_not_is_refused(takes, said):
    def strange(*args: Any, **how: Any) -> zero.core.optim.Transform:
        return adamw(*args, groups=[Group(["embed.weight"]), Group(takes)], **how)

    with pytest.raises(ConfigError, match=f"^{re.escape(f'optim.groups[1] {said}')}"):
        Setting(optimizer=strange).plan(zero.open_world())
    nothing = Group(frozenset())  # as that of an optimizer of torch whose parameters are all frozen
    Setting(optimizer=lambda *args, **how: adamw(*args, groups=[nothing], **how)).plan(zero.open_world())


def test_no_groups_have_the_bits_of_a_group_that_says_nothing():
    def same(*args: Any, **how: Any) -> zero.core.optim.Transform:
        return adamw(*args, groups=[Group(["blocks.*"]), Group(is_bias)], **how)

    plain, grouped = (
        run_ranks(2, train_small, Setting(optimizer=optimizer, clip=CLIP))[0][0] for optimizer in (adamw, same)
    )
    assert plain == grouped
