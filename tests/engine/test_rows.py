"""Recomputed units on chunks of their rows: the sums of plain torch, one gather for all chunks, and errors."""

import os
import subprocess
import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zero
from tests.conftest import LONG_S
from zero.core.tree import leaves_in
from zero.distributed.world import World
from zero.engine.gather.visit_order import CollectiveLog
from zero.errors import ConfigError, HandshakeError
from zero.testing import run_ranks
from zero.trainer.models import GPT, loss
from zero.trainer.models.gpt_config import GPTConfig

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROWS, TOKENS, WIDTH = 8, 16, 12
"""Powers of two, so that means over fewer rows are the same sums with other exponents."""


def gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(width=32, layers=3, heads=4, seq=TOKENS, vocab=61))


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def llama_loss(model, batch):
    return model(input_ids=batch[:, :-1], labels=batch[:, 1:], use_cache=False).loss


def padded_loss(model, batch):
    """With a mask and positions that differ from row to row."""
    tokens, first = batch[:, :-1], torch.arange(len(batch))[:, None] % 3
    places = torch.arange(tokens.shape[1])[None]
    mask, positions = (places >= first).long(), (places - first).clamp(min=0)
    labels = batch[:, 1:].where(mask.bool(), -100)
    return model(input_ids=tokens, attention_mask=mask, position_ids=positions, labels=labels, use_cache=False).loss


MODELS = {
    "gpt": (gpt, loss, "blocks"),
    "llama": (llama, llama_loss, "model.layers"),
    "padded": (llama, padded_loss, "model.layers"),
}


def batch_of(rank, rows=ROWS):
    return torch.randint(0, 61, (rows, TOKENS + 1), generator=torch.Generator().manual_seed(rank))


def in_plain_chunks(block, rows):
    """Have plain torch run a block on chunks of rows, the last one first, so that gradients add up in row order."""
    call = block.forward

    def forward(x, *args, **kwargs):
        tables = [leaf for leaf in leaves_in((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        assert all(len(table) == 1 for table in tables)
        return torch.cat([call(part, *args, **kwargs) for part in reversed(x.split(rows))][::-1])

    block.forward = forward


def plain(name, rows, ranks):
    """The losses and the mean gradients of plain torch."""
    build, loss_of, blocks = MODELS[name]
    losses, grads = [], []
    for rank in range(ranks):
        model = build()
        for block in model.get_submodule(blocks):
            in_plain_chunks(block, rows)
        value = loss_of(model, batch_of(rank))
        value.backward()
        losses.append(value.item())
        grads.append({key: parameter.grad for key, parameter in model.named_parameters()})
    return losses, {key: sum(grad[key] for grad in grads) / ranks for key in grads[0]}


def trained(world, name, rows, activations="remat", stage=3, preset="none", precision="fp32"):
    """The loss and the gradients of a step."""
    build, loss_of, _ = MODELS[name]
    with world.exclusive():
        model = build()
    values = {key: value.detach().clone() for key, value in model.named_parameters()}
    plan = zero.Plan(
        model,
        optimizer=zero.sgd(0.1),
        world=world,
        stage=stage,
        offload=preset,
        activations=activations,
        rows=rows,
        check_rows=True,
        precision=precision,
    )
    store = zero.open_store(plan)
    state = zero.init(plan, store, weights=lambda key, tensor: tensor.copy_(values[key]))
    step = zero.Step(state)
    step.microbatch()
    value = loss_of(plan.model, batch_of(world.rank))
    step.backward(value)
    grads = zero.full_state_dict(step, "grad")
    store.close()
    return value.item(), grads


def assert_equal(grads, expected):
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad.any()
        assert torch.equal(grads[name], grad), name


def assert_close(grads, expected, tolerance=1e-6):
    for name, grad in expected.items():
        assert (grads[name] - grad).norm() <= tolerance * grad.norm(), name


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize(("size", "rows"), [(1, 1), (1, 2), (2, 2), (2, 3), (1, 4), (2, 8)])
def test_gradients_have_the_bits_of_chunks_that_plain_torch_adds_up_in_row_order(name, size, rows):
    losses, expected = plain(name, rows, size)
    whole_losses, whole = plain(name, ROWS, size)
    settings = (
        [(stage, "none") for stage in range(4)] + [(3, "nvme")] if (size, rows) in ((1, 2), (2, 2)) else [(3, "none")]
    )
    for stage, preset in settings:
        for rank, (value, grads) in enumerate(run_ranks(size, trained, name, rows, "remat", stage, preset)):
            assert value == losses[rank]
            assert value == pytest.approx(whole_losses[rank], rel=1e-6)
            assert_equal(grads, expected)
            assert_close(grads, whole)


@pytest.mark.parametrize("rows", [1, 3])
def test_masks_and_positions_of_rows_are_split(rows):
    whole, chunks = run_ranks(1, trained, "padded", 0)[0], run_ranks(1, trained, "padded", rows)[0]
    assert chunks[0] == pytest.approx(whole[0], rel=1e-6)
    assert_close(chunks[1], whole[1])


@pytest.mark.parametrize("policy", ["remat", "selective", {"blocks.1": "remat"}])
def test_a_chunk_of_all_rows_and_kept_activations_have_the_bits_of_whole_units(policy):
    expected = run_ranks(1, trained, "gpt", 0, "keep")[0]
    for rows in (ROWS, 2 * ROWS):
        value, grads = run_ranks(1, trained, "gpt", rows, policy)[0]
        assert value == expected[0]
        assert_equal(grads, expected[1])


def test_results_that_are_kept_are_those_of_chunks():
    expected, kept = run_ranks(1, trained, "gpt", 2)[0], run_ranks(1, trained, "gpt", 2, "selective")[0]
    assert kept[0] == expected[0]
    assert_equal(kept[1], expected[1])


class Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH), nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Stack(nn.Module):
    """Blocks, and nothing else that computes."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def stack(count=3, p=0.0, build=Block, **arguments):
    torch.manual_seed(0)
    return Stack(*(build(**arguments) if arguments else build(p) for _ in range(count)))


def weighted(model, x, weights):
    """A loss whose gradient of a row does not depend on the number of rows."""
    return (model(x).float() * weights).sum()


def data(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 5, WIDTH, generator=generator), torch.randn(rows, 5, WIDTH, generator=generator)


def stack_step(model, rows, *, micro=ROWS, precision="fp32", policy="remat", check=False, compile=False, world=None):
    """The gradients of a step over `data`, in microbatches of `micro` rows."""
    values = {key: value.detach().clone() for key, value in model.named_parameters()}
    parts = [part.split(micro) for part in data()]
    plan = zero.Plan(
        model,
        optimizer=zero.sgd(0.1),
        world=world or World.solo(),
        activations=policy,
        rows=rows,
        check_rows=check,
        precision=precision,
        compile=compile,
        accumulate=len(parts[0]),
    )
    state = zero.init(plan, zero.open_store(plan), weights=lambda key, tensor: tensor.copy_(values[key]))
    step = zero.Step(state)
    torch.manual_seed(5)
    for x, weights in zip(*parts, strict=True):
        step.microbatch()
        step.backward(weighted(model, x.to(plan.precision.compute), weights) * len(parts[0]))
    return zero.full_state_dict(step, "grad"), torch.rand(1)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_gradients_have_the_bits_of_microbatches_of_as_many_rows(rows):
    model = stack()
    for x, weights in zip(*(part.split(rows) for part in data()), strict=True):
        weighted(model, x, weights).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_equal(stack_step(stack(), rows)[0], expected)
    assert_equal(stack_step(stack(), 0, micro=rows)[0], expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_in_half_precision_are_added_in_fp32_and_rounded_once(rows):
    model = stack().bfloat16()
    sums = {}
    for x, weights in zip(*(part.split(rows) for part in data()), strict=True):
        value = weighted(model, x.bfloat16(), weights)
        grads = torch.autograd.grad(value, [*model.parameters()])
        for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
            assert grad.dtype == torch.bfloat16
            sums[name] = sums[name] + grad.float() if name in sums else grad.float()
    expected = {name: total.bfloat16().float() for name, total in sums.items()}
    assert any(not torch.equal(total, expected[name]) for name, total in sums.items())
    assert_equal(stack_step(stack(), rows, precision="bf16")[0], expected)


def test_chunks_draw_dropout_once_and_the_same_again_in_backward():
    for rows in (2, 3):
        model = stack(p=0.5)
        for block in model.blocks:
            in_plain_chunks(block, rows)
        torch.manual_seed(5)
        weighted(model, *data()).backward()
        expected, after = {name: parameter.grad for name, parameter in model.named_parameters()}, torch.rand(1)
        for check in (False, True):
            grads, drawn = stack_step(stack(p=0.5), rows, check=check)
            assert_equal(grads, expected)
            assert drawn == after


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler reads it
def test_compiled_blocks_run_in_chunks():
    expected, _ = stack_step(stack(), 2)
    assert_equal(stack_step(stack(), 2, compile="eager", check=True)[0], expected)


def test_frozen_parameters_and_several_backwards():
    model = stack()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    x, weights = data()
    expected = torch.autograd.grad(
        weighted(model, x, weights), trainable := [p for p in model.parameters() if p.requires_grad]
    )
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trainable) == len(names)
    plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=World.solo(), activations="remat", rows=3)
    values = {key: value.detach().clone() for key, value in model.named_parameters()}
    state = zero.init(plan, zero.open_store(plan), weights=lambda key, tensor: tensor.copy_(values[key]))
    step = zero.Step(state)
    step.microbatch()
    x.requires_grad_()
    value = weighted(model, x, weights)
    (of_x,) = torch.autograd.grad(value, x, retain_graph=True)
    step.backward(value, retain_graph=True)
    once = zero.full_state_dict(step, "grad")
    assert_close(once, dict(zip(names, expected, strict=True)))
    assert torch.equal(x.grad, of_x)


# -- gathers -----------------------------------------------------------------------------------------------------------


def test_a_unit_is_gathered_once_in_each_pass_for_all_chunks(monkeypatch):
    noted = []
    monkeypatch.setattr(CollectiveLog, "note", lambda self, what: noted.append(what))

    def step(world, rows):
        with world.exclusive():
            model = stack(4)
        stack_step(model, rows, world=world)

    counts = []
    for rows in (0, 1, 3):
        noted.clear()
        run_ranks(2, step, rows)
        counts.append(Counter(what for what in noted if "blocks" in what))
        gathers = {what: count for what, count in counts[-1].items() if "gather" in what}
        # a gather of each pass on each rank; the last blocks stay gathered between the passes
        assert sorted(gathers.values()) in ([2, 2, 4, 4], [2, 4, 4, 4])
    assert counts[0] == counts[1] == counts[2]


# -- rows that meet, or are unknown ------------------------------------------------------------------------------------


class Normed(Block):
    def __init__(self, statistics):
        super().__init__()
        self.norm = nn.BatchNorm1d(5, track_running_stats=statistics)

    def forward(self, x):
        return super().forward(self.norm(x))


class Balanced(Block):
    """A block with a loss that balances something over its rows."""

    def __init__(self, way):
        super().__init__()
        self.way, self.seen, self.all_seen = way, None, []

    def forward(self, x):
        y = super().forward(x)
        aside = y.mean((0, 1)).square().sum()
        if self.way == "returned":
            return y, aside
        if self.way == "attribute":
            self.seen = aside
        if self.way == "list":
            self.all_seen.append(aside)
        if self.way == "inside":
            return y * aside
        if self.way == "one":
            return y, aside[None]
        return y


class First(Stack):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


@pytest.mark.parametrize(
    ("block", "rows", "check", "message"),
    [
        (partial(Normed, True), 2, False, r"blocks\.0 writes norm\.num_batches_tracked in its forward"),
        (partial(Normed, True), 2, True, r"blocks\.0 computes a row from the rows beside it, as batch norm does"),
        (partial(Normed, False), 1, True, r"blocks\.0 computes a row from the rows beside it"),
        (partial(Balanced, "inside"), 2, True, r"blocks\.0 computes a row from the rows beside it"),
        (partial(Balanced, "returned"), 2, False, r"blocks\.0 returns a tensor of shape \(\) for 2 rows, as a bal"),
        (partial(Balanced, "returned"), 2, True, r"blocks\.0 returns a tensor of shape \(\) for 2 rows, as a bal"),
        (partial(Balanced, "one"), 1, True, r"blocks\.0 returns a tensor of shape \(1,\) for 2 rows"),
        (partial(Balanced, "attribute"), 2, False, r"blocks\.0 writes seen in its forward"),
        (partial(Balanced, "list"), 2, False, r"blocks\.0 writes all_seen in its forward"),
    ],
)  # fmt: skip
def test_a_unit_whose_rows_meet_raises_one_line_with_its_name(block, rows, check, message):
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match=rf"zero\.rows={rows}: {message}.*so its rows meet\. Set zero\.rows=0\.$"):
        stack_step(First(block(), block()), rows, check=check)


def test_rows_that_meet_may_be_in_one_chunk():
    kept = {}
    for rows in (0, ROWS):
        torch.manual_seed(0)
        model = Stack(Normed(True), Normed(True))
        grads, _ = stack_step(model, rows, check=True)
        kept[rows] = grads, {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert_equal(kept[ROWS][0], kept[0][0])
    assert kept[0][1]["blocks.0.norm.num_batches_tracked"] == 1
    assert all(torch.equal(kept[ROWS][1][name], buffer) for name, buffer in kept[0][1].items())


def test_the_comparison_runs_once_and_changes_nothing():
    calls = Counter()

    class Counted(Block):
        def forward(self, x):
            calls[len(x)] += 1
            return super().forward(x)

    def step(check):
        calls.clear()
        model = stack(2, build=Counted)
        return stack_step(model, 2, micro=4, check=check), dict(calls)

    (grads, after), plain_calls = step(False)
    (checked, checked_after), checked_calls = step(True)
    assert_equal(checked, grads)
    assert checked_after == after
    assert plain_calls == {2: 2 * 2 * 2 * 2}  # blocks, microbatches, chunks, forward and backward
    assert checked_calls == {2: plain_calls[2] + 2 * 2}


def test_router_logits_that_transformers_records_for_a_balancing_loss_raise():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "num_key_value_heads": 2, "num_local_experts": 4, "use_cache": False}

    def step(rows, **outputs):
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
        values = {key: value.detach().clone() for key, value in model.named_parameters()}
        plan = zero.Plan(
            model, optimizer=zero.sgd(0.1), world=World.solo(), activations="remat", rows=rows, check_rows=True
        )
        state = zero.init(plan, zero.open_store(plan), weights=lambda key, tensor: tensor.copy_(values[key]))
        engine = zero.Step(state)
        engine.microbatch()
        engine.backward(model(input_ids=batch_of(0), labels=batch_of(0), **outputs).loss)
        return zero.full_state_dict(engine, "grad")

    assert_close(step(2), step(0))
    for outputs in ({"output_router_logits": True}, {"output_hidden_states": True}):
        with pytest.raises(
            ConfigError, match=r"layers\.0 writes output_collector in its forward, as batch norm and bal"
        ):
            step(2, **outputs)


class Masked(nn.Module):
    """A block with further inputs: of each row, of each token, of all rows, and none."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, tables, mask=None, scale=1.0, *, config):
        by_row, by_token, for_all = tables["by_row"], tables["by_token"], tables["for_all"]
        assert mask is None
        assert config == {"name": "x", "dtype": torch.float32}
        return {"y": x + scale * torch.tanh(self.linear(x)) * by_row + by_token + for_all, "none": None}


class Called(nn.Module):
    def __init__(self, more=None):
        super().__init__()
        self.blocks, self.more = nn.ModuleList([Masked(), Masked()]), more

    def forward(self, x):
        generator = torch.Generator().manual_seed(3)
        tables = {
            "by_row": torch.randn(len(x), 1, WIDTH, generator=generator),
            "by_token": torch.randn(x.shape[1], WIDTH, generator=generator),
            "for_all": torch.randn(1, x.shape[1], 1, generator=generator),
        }
        for block in self.blocks:
            x = block(x, tables | (self.more or {}), scale=0.5, config={"name": "x", "dtype": torch.float32})["y"]
        return x


def test_inputs_are_split_if_they_have_rows_wherever_they_are():
    whole, chunks = stack_step(Called(), 0), None
    torch.manual_seed(0)
    model = Called()
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    whole, _ = stack_step(model, 0)
    model = Called()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    chunks, _ = stack_step(model, 3, check=True)
    assert_close(chunks, whole)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"packed": torch.ones(3 * ROWS, WIDTH)}, rf"a tensor of shape \({3 * ROWS}, {WIDTH}\), beside {ROWS} rows"),
        ({"cache": SimpleNamespace()}, "an argument of class SimpleNamespace, such as a cache"),
    ],
)
def test_an_input_whose_rows_are_unknown_raises_one_line(more, message):
    with pytest.raises(ConfigError, match=rf"zero\.rows=2: blocks\.0 gets {message}, so its rows are unknown\."):
        stack_step(Called(more), 2)


def test_as_many_rows_as_tokens_are_no_rows_alone():
    x = torch.randn(5, 5, WIDTH)
    model = Called()
    plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=World.solo(), activations="remat", rows=2)
    zero.init(plan, zero.open_store(plan), weights=lambda key, tensor: tensor.fill_(0.1))
    with pytest.raises(ConfigError, match=r"blocks\.0 gets a tensor of shape \(5, 1, 12\), and 5 is not the number of"):
        model(x)
    with torch.no_grad():
        model(x)  # runs whole


# -- the setting -------------------------------------------------------------------------------------------------------


def test_a_plan_without_recomputed_units_has_no_chunks():
    arguments = {"optimizer": zero.sgd(0.1), "world": World.solo()}
    with pytest.raises(
        ConfigError, match=r"zero\.rows=2 splits units that are recomputed, and none is\. Set zero\.act"
    ):
        zero.Plan(stack(), rows=2, **arguments)
    with pytest.raises(ConfigError, match=r"zero\.rows=-1: must be a number of rows, 0 or more"):
        zero.Plan(stack(), rows=-1, activations="remat", **arguments)
    with pytest.raises(ConfigError, match=r"zero\.check_rows='yes': must be True or False"):
        zero.Plan(stack(), check_rows="yes", **arguments)


def test_ranks_agree_on_the_rows():
    def plans(world):
        plan = zero.Plan(stack(), optimizer=zero.sgd(0.1), world=world, activations="remat", rows=1 + world.rank)
        zero.init(plan, zero.open_store(plan))

    with pytest.raises(HandshakeError, match=r"zero\.rows"):
        run_ranks(2, plans)


def test_without_the_files_of_the_setting_all_else_trains():
    """Every function and class of both files is replaced by one that raises, but for the checks that pass all."""
    code = (
        "import torch, zero\n"
        "from zero.core.activations import rows as setting\n"
        "from zero.engine.forward import recompute, rows, run_sites\n"
        "from zero.trainer.models import GPT, loss\n"
        "from zero.trainer.models.gpt_config import GPTConfig\n"
        "def gone(*_, **__): raise AssertionError\n"
        "for file in (setting, rows):\n"
        "    for name, value in [*vars(file).items()]:\n"
        "        is_own = getattr(value, '__module__', '') == file.__name__\n"
        "        if is_own and name != 'check_recomputes': setattr(file, name, gone)\n"
        "run_sites.Chunks = gone\n"
        "plan = zero.Plan(GPT(GPTConfig(width=16, layers=2, heads=2, seq=8, vocab=11)), optimizer=zero.sgd(0.1),\n"
        "                 world=zero.World.solo(), activations='remat')\n"
        "state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, loss)\n"
        "print(step(state, [torch.zeros(2, 9, dtype=torch.int64)])[1].loss > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.stdout == "True\n", done.stderr
