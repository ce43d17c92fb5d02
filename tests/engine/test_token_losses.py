"""Losses that are sums over tokens with their count: a step is that of the mean over all tokens of the global batch."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero
from tests.simulation import simulated_gpu
from zero.engine.whole.read import digest
from zero.errors import ConfigError
from zero.testing import run_ranks

STEPS, ROWS, TOKENS, VOCAB, CLIP = 4, 6, 16, 23, 0.4


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def words() -> Words:
    torch.manual_seed(0)
    return Words()


def rows(step: int, count: int) -> Tensor:
    """(count, TOKENS, 2) tokens and targets: few of the first rows count, none of the last one."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randint(0, VOCAB, (count, TOKENS, 2), generator=generator)
    counts = torch.rand(count, TOKENS, generator=generator) < torch.linspace(0.1, 0.9, count)[:, None]
    counts[-1] = False
    batch[..., 1] = torch.where(counts, batch[..., 1], -100)
    return batch


def sum_and_count(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The count is a tensor, as the loss is."""
    logits = model(batch[..., 0]).float().flatten(0, 1)
    targets = batch[..., 1].flatten()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), (targets != -100).sum()


def with_int(model: nn.Module, batch: Tensor) -> tuple[Tensor, int, dict[str, float]]:
    loss, _ = sum_and_count(model, batch)
    return loss, int((batch[..., 1].cpu() != -100).sum()), {"rows": float(len(batch))}


def in_torch(count: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and parameters of plain torch, with the mean over all tokens of the whole batch."""
    model = words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        loss, tokens = sum_and_count(model, rows(step, count))
        (loss / tokens).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss / tokens).item())
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained(world: zero.World, accumulate: int, loss_fn: Any, how: dict[str, Any]) -> tuple[Any, ...]:
    """Losses, norms, tokens, parameters and a digest; each rank has consecutive rows."""
    with world.exclusive():
        model = words()
    optimizer = zero.adamw(1e-2, clip=CLIP, decay=lambda name, shape: True)
    plan = zero.Plan(model, optimizer=optimizer, world=world, accumulate=accumulate, **how)
    state = zero.init(plan, zero.open_store(plan))
    step, results = zero.make_step(plan, loss_fn), []
    for number in range(STEPS):
        mine = rows(number, ROWS * 6).chunk(world.size)[world.rank].to(world.device)
        state, metrics = step(state, mine.chunk(accumulate))
        results.append(metrics)
    values = zero.full_state_dict(state)
    return [m.loss for m in results], [m.grad_norm for m in results], [m.tokens for m in results], values, digest(state)


CASES = [
    (1, 1, {"stage": 0}),
    (1, 4, {"stage": 3}),
    (2, 3, {"stage": 1}),
    (3, 1, {"stage": 2}),
    (3, 4, {"stage": 3, "offload": "cpu"}),
]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("loss_fn", [sum_and_count, with_int])
@pytest.mark.parametrize(("size", "accumulate", "how"), CASES)
def test_the_step_is_that_of_the_mean_over_all_tokens(size, accumulate, how, loss_fn, gpu):
    """Whatever the ranks and microbatches; clipping sees the norm of that mean."""
    losses, norms, values = in_torch(ROWS * 6)
    with simulated_gpu(fused=True) if gpu else nullcontext():
        for result in run_ranks(size, trained, accumulate, loss_fn, how):
            assert result[0] == pytest.approx(losses, rel=1e-6)
            assert result[1] == pytest.approx(norms, rel=1e-5)
            assert result[2] == [int((rows(step, ROWS * 6)[..., 1] != -100).sum()) for step in range(STEPS)]
            for name, value in result[3].items():
                assert torch.allclose(value, values[name], rtol=1e-5, atol=1e-6), name


def test_the_bits_do_not_depend_on_stage_and_tier():
    hows: Sequence[dict[str, Any]] = ({"stage": 3}, {"stage": 2, "offload": "cpu"}, {"stage": 2, "update": "serial"})
    results = [run_ranks(2, trained, 1, sum_and_count, {"precision": "bf16"} | how)[0] for how in hows]
    assert len({result[-1] for result in results}) == 1
    assert results[0][:3] == results[1][:3] == results[2][:3]


def test_in_fp16_sums_do_not_overflow():
    """The first step is made with the usual first scale."""
    losses, _, _, _, _ = run_ranks(1, trained, 2, sum_and_count, {"precision": "fp16"})[0]
    expected, _, _ = in_torch(ROWS * 6)
    assert losses == pytest.approx(expected, rel=1e-2)


def one_masked(world: zero.World) -> list[zero.Metrics]:
    """Train; the second step has no token that counts, and changes no parameter."""
    with world.exclusive():
        model = words()
    plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=world)
    state = zero.init(plan, zero.open_store(plan))
    step, results, values = zero.make_step(plan, sum_and_count), [], []
    for number in range(4):
        batch = rows(number, 12).chunk(world.size)[world.rank].clone()
        if number == 1:
            batch[..., 1] = -100
        state, metrics = step(state, [batch.to(world.device)])
        results.append(metrics)
        values.append(zero.full_state_dict(state))
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    assert not any(torch.equal(values[1][name], values[2][name]) for name in values[0])
    return results


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter: 0 / 0 tokens
@pytest.mark.parametrize("fused", [None, False, True])
def test_a_step_without_a_token_is_skipped_with_one_warning(fused, caplog):
    """Also where the device decides the step."""
    gpu = nullcontext() if fused is None else simulated_gpu(fused=fused)
    with caplog.at_level(logging.WARNING, "zero"), gpu:
        for results in run_ranks(2, one_masked):
            assert [result.skipped for result in results] == [False, True, False, False]
            assert results[1].tokens == 0
            assert results[1].nonfinite_unit is None
    assert [record.message for record in caplog.records if "no token counts" in record.message] == [
        "step 2: no token counts in the losses, so the step is skipped"
    ]


def test_means_and_sums_do_not_mix():
    def train(world: zero.World) -> None:
        with world.exclusive():
            model = words()
        plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=world)
        state = zero.init(plan, zero.open_store(plan))

        def loss_fn(model: nn.Module, batch: Tensor) -> Any:
            loss, count = sum_and_count(model, batch)
            return (loss, count) if world.rank == 0 else loss / count

        with pytest.raises(ConfigError, match="some losses of this step are means"):
            zero.make_step(plan, loss_fn)(state, [rows(0, 6)])

    run_ranks(2, train)


@pytest.mark.parametrize("count", [-1, 2.0, True, torch.tensor([3]), torch.tensor(2.0)], ids=str)
def test_a_count_is_a_number_of_tokens(count):
    world = zero.World.solo()
    plan = zero.Plan(words(), optimizer=zero.adamw(1e-2), world=world)
    state = zero.init(plan, zero.open_store(plan))
    with pytest.raises(ConfigError, match="loss_fn returned a tuple"):
        zero.make_step(plan, lambda model, batch: (sum_and_count(model, batch)[0], count))(state, [rows(0, 6)])
    step = zero.Step(state)
    step.microbatch()
    with pytest.raises(ConfigError, match="is no number of tokens"):
        step.backward(sum_and_count(plan.model, rows(0, 6))[0], count=count)
    step.abandon()


def test_an_engine_takes_a_count():
    losses, norms, values = in_torch(ROWS * 6)

    def train(world: zero.World) -> dict[str, Tensor]:
        with world.exclusive():
            model = words()
        settings = {
            "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 3, "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
            "zero_optimization": {"stage": 1},
        }  # fmt: skip
        engine, *_ = zero.initialize(model=model, config=settings, world=world)
        for number in range(STEPS):
            for batch in rows(number, ROWS * 6).chunk(world.size)[world.rank].chunk(3):
                loss, count = sum_and_count(engine, batch)
                mean = engine.backward(loss, count=count)
                assert count == 0 or mean.item() == pytest.approx((loss / count).item())
                with pytest.raises(ConfigError, match="cannot be read or edited in a step whose losses"):
                    _ = model.head.weight.grad
                engine.step()
            assert engine.metrics.loss == pytest.approx(losses[number], rel=1e-6)
            assert engine.metrics.grad_norm == pytest.approx(norms[number], rel=1e-5)
        return engine.module_state_dict()

    for result in run_ranks(2, train):
        for name, value in result.items():
            assert torch.allclose(value, values[name], rtol=1e-5, atol=1e-6), name


def test_a_replay_and_a_move_keep_counts():
    """Pairs: a step made twice, and a state that moves between steps."""

    def train(world: zero.World, replay: int, moves: bool) -> str:
        with world.exclusive():
            model = words()
        plan = zero.Plan(model, optimizer=zero.adamw(1e-2, clip=CLIP), world=world, accumulate=2)
        state = zero.init(plan, zero.open_store(plan))
        step = zero.make_step(plan, sum_and_count, replay=replay)
        for number in range(STEPS):
            state, _ = step(state, rows(number, 24).chunk(world.size)[world.rank].chunk(2))
            if moves and number == 1:
                state = zero.move(state, offload="cpu")
        return digest(state)

    digests = {run_ranks(2, train, replay, moves)[0] for replay, moves in ((0, False), (2, False), (0, True))}
    assert len(digests) == 1


def waits(world: zero.World, loss_fn: Any) -> int:
    """The waits of the host for the device in a step that follows others, of which nobody reads the metrics."""
    with world.exclusive():
        model = words()
    plan = zero.Plan(model, optimizer=zero.adamw(1e-2, clip=CLIP), world=world, precision="bf16")
    state = zero.init(plan, zero.open_store(plan))
    step, counts = zero.make_step(plan, loss_fn), world.compute.streams.counts
    for number in range(STEPS):
        before = counts["waits of the host"]
        state, _ = step(state, [rows(number, 12).chunk(world.size)[world.rank].to(world.device)])
    return counts["waits of the host"] - before


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    loss, count = sum_and_count(model, batch)
    return loss / count.clamp(min=1)


@pytest.mark.parametrize("size", [1, 2])
def test_the_host_waits_no_more_than_for_a_mean(size):
    """The count stays on the device, which divides by it."""
    with simulated_gpu(races=True, fused=True):
        assert run_ranks(size, waits, sum_and_count) == run_ranks(size, waits, mean)


@pytest.mark.parametrize("equal", [True, False])
def test_the_ranks_of_a_norm_group_count_the_same_tokens(equal):
    """They have parts of one model, so each divides by the same number."""

    def train(whole: zero.World) -> float:
        world, group = whole.part([whole.rank], f"dp {whole.rank}"), whole.part([0, 1], "tp")
        with whole.exclusive():
            model = words()
        plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=world, norm_groups=[group])
        state = zero.init(plan, zero.open_store(plan))
        number = 0 if equal else whole.rank
        _, metrics = zero.make_step(plan, sum_and_count)(state, [rows(number, 12)])
        return metrics.loss

    if equal:
        losses = run_ranks(2, train)
        assert losses[0] == losses[1] == pytest.approx(in_torch(12)[0][0], rel=1e-6)
    else:
        with pytest.raises(ConfigError, match=r"the ranks of a norm group count \d+, \d+ tokens"):
            run_ranks(2, train)
