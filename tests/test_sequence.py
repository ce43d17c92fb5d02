"""Laws of rows that ranks share: attention, losses and updates are those of whole rows, up to the rounding of fp32."""

from contextlib import closing
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import zero
from zero.engine.whole.read import digest, full_state_dict
from zero.errors import ConfigError, HandshakeError
from zero.sequence import SequenceParallel, SharedRows, _documents, attention, open_group
from zero.testing import run_processes, run_ranks
from zero.trainer.models import GPT, GPTConfig, loss
from zero.trainer.planning.machine import PaperWorld

ROWS, TOKENS = 2, 12
DOCUMENTS = {
    "whole": None,
    "alike": ((5, 1, 6), (5, 1, 6)),
    "others": ((12,), (3, 8, 1)),
}


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def masked(documents) -> torch.Tensor | None:
    """(b, 1, t, t): whether a token sees another, written down from the definition."""
    if documents is None:
        return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    number = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents])
    return (number[:, None, :, None] == number[:, None, None, :]) & torch.ones(TOKENS, TOKENS).tril().bool()


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 4), (8, 2), (4, 1)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_attention_and_its_gradients_are_those_of_whole_rows(size, heads, kv_heads, documents):
    """Keys and values of fewer heads than ranks are repeated. The source is torch's attention with a mask, in fp64."""
    whole = [draw(ROWS, n, TOKENS, 6, seed=n + i) for i, n in enumerate((heads, kv_heads, kv_heads))]
    weights = draw(ROWS, heads, TOKENS, 6, seed=9)

    def of_slice(world):
        q, k, v = (x.chunk(size, dim=2)[world.rank].clone().requires_grad_() for x in whole)
        result = attention(q, k, v, SharedRows(world, DOCUMENTS[documents]), scale=0.3)
        return [result.detach(), *torch.autograd.grad(result, (q, k, v), weights.chunk(size, dim=2)[world.rank])]

    q, k, v = (x.double().requires_grad_() for x in whole)
    mask = masked(DOCUMENTS[documents])
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    exact = [expected, *torch.autograd.grad(expected, (q, k, v), weights.double())]
    for parts, right in zip(zip(*run_ranks(size, of_slice), strict=True), exact, strict=True):
        assert torch.allclose(torch.cat(parts, dim=2).double(), right, atol=2e-6, rtol=0)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("scoring", [{"window": 4}, {"softcap": 0.7}, {"window": 3, "softcap": 0.7}])
def test_windows_caps_and_sinks_are_those_of_whole_rows(scoring, documents):
    """On each rank with the sinks of its heads: other ranks' sinks get no gradient from it."""
    whole = [draw(ROWS, n, TOKENS, 6, seed=n + i) for i, n in enumerate((8, 2, 2))]
    weights, sinks = draw(ROWS, 8, TOKENS, 6, seed=9), draw(8, seed=10)

    def of_slice(world):
        q, k, v = (x.chunk(world.size, dim=2)[world.rank].clone().requires_grad_() for x in whole)
        own = sinks.clone().requires_grad_()
        result = attention(q, k, v, SharedRows(world, DOCUMENTS[documents]), sinks=own, **scoring)
        made = torch.autograd.grad(result, (q, k, v, own), weights.chunk(world.size, dim=2)[world.rank])
        return result.detach(), *made

    alone = run_ranks(1, of_slice)[0]
    for size in (2, 4):
        *parts, of_sinks = zip(*run_ranks(size, of_slice), strict=True)
        for part, right in zip(parts, alone[:4], strict=True):
            assert torch.allclose(torch.cat(part, dim=2), right, atol=2e-6, rtol=0)
        assert torch.allclose(sum(of_sinks), alone[4], atol=2e-6, rtol=0)
        for rank, gradient in enumerate(of_sinks):
            assert gradient.nonzero().flatten().tolist() == [*torch.arange(8).chunk(size)[rank]]


@pytest.mark.parametrize(
    ("scoring", "why"),
    [
        ({"window": 0}, "window=0: must be a whole number, 1 or more"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"sinks": torch.zeros(3)}, r"sinks have shape \(3,\), but q has 4 heads. Pass one for each head."),
    ],
)
def test_numbers_of_attention_out_of_range_are_one_line(scoring, why):
    with pytest.raises(ConfigError, match=why):
        run_ranks(1, lambda world: attention(*[torch.zeros(1, 4, 2, 4)] * 3, SharedRows(world), **scoring))


def test_documents_are_found_from_the_positions_of_all_slices():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])

    def of_slice(world):
        return SharedRows(world).packed(positions.chunk(world.size, dim=1)[world.rank]).documents

    assert run_ranks(3, of_slice) == [((3, 2, 1), (6,))] * 3


@pytest.mark.parametrize(
    ("heads", "kv_heads", "why"),
    [
        (3, 3, "3 attention heads do not divide over 2 ranks"),
        (12, 3, "3 heads of keys and values can neither"),
    ],
)
def test_heads_that_do_not_divide_are_one_line(heads, kv_heads, why):
    def run(world):
        attention(*(torch.zeros(1, n, 2, 4) for n in (heads, kv_heads, kv_heads)), SharedRows(world))

    with pytest.raises(ConfigError, match=why) as refusal:
        run_ranks(2, run)
    assert "\n" not in str(refusal.value)


def test_groups_are_consecutive_ranks():
    def run(world):
        group = open_group(world, 2)
        number = torch.tensor([world.rank])
        return group.rank, group.exchange(number).flatten().tolist()

    assert run_ranks(4, run) == [(0, [0, 1]), (1, [0, 1]), (0, [2, 3]), (1, [2, 3])]
    names = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PaperWorld, "part", lambda world, ranks, name: names.append(name))
        for size in (1, 2, 4):
            open_group(PaperWorld(4, local_size=4, device="cpu"), size)
    assert len(set(names)) == 3, "communicators of a GPU are found by their names"
    with pytest.raises(ConfigError, match="3 ranks do not divide into groups of 2"):
        run_ranks(3, partial(open_group, size=2))


@pytest.mark.parametrize("name", ["input_ids", "position_ids"])
def test_ranks_of_a_group_with_different_rows_are_one_line(name):
    def run(world):
        batch = {key: torch.zeros(1, 8, dtype=torch.int64) for key in ("input_ids", "labels", "position_ids")}
        batch[name] += world.rank
        SequenceParallel(open_group(world, 2)).slice(batch)

    with pytest.raises(HandshakeError, match=f"different rows of a group: {name}"):
        run_ranks(2, run)


@pytest.mark.parametrize("name", ["input_ids", "labels", "position_ids"])
@pytest.mark.parametrize("change", [lambda rows: rows.flip(1), lambda rows: rows.roll(1, 0), lambda rows: rows ^ 1])
def test_later_rows_that_differ_end_the_loss(name, change):
    def run(world):
        parallel = SequenceParallel(world)
        for number in range(3):
            rows = torch.randint(8, (2, 8), generator=torch.Generator().manual_seed(number))
            batch = dict.fromkeys(("input_ids", "labels", "position_ids"), rows)
            if number == 2 and world.rank == 1:
                batch[name] = change(rows)
            _, targets = parallel.slice(batch)
            if number == 2:
                with pytest.raises(HandshakeError, match="the ranks of a group have different rows"):
                    parallel.loss(torch.ones(()), targets)
            else:
                parallel.loss(torch.ones(()), targets)

    run_ranks(2, run)


# -- slices of a batch, and the loss over them -------------------------------------------------------------------------


def test_slices_have_the_labels_and_positions_of_their_rows():
    ids = torch.arange(16).view(2, 8)
    labels = ids.clone()
    labels[1, 4] = -100
    slices = run_ranks(4, lambda world: SequenceParallel(world).slice({"input_ids": ids, "labels": labels}))
    assert torch.equal(torch.cat([inputs["input_ids"] for inputs, _ in slices], dim=1), ids)
    assert torch.equal(torch.cat([inputs["position_ids"] for inputs, _ in slices], dim=1), torch.arange(8).expand(2, 8))
    assert {inputs["shared_rows"].documents for inputs, _ in slices} == {None}
    targets = torch.cat([targets for _, targets in slices], dim=1)
    assert targets.tolist() == [[1, 2, 3, 4, 5, 6, 7, -100], [9, 10, 11, -100, 13, 14, 15, -100]]


def test_padding_predicts_nothing():
    rows, mask = torch.arange(8).view(1, 8), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0]])
    _, targets = run_ranks(1, lambda world: SequenceParallel(world).slice(
        {"input_ids": rows, "labels": rows, "attention_mask": mask}
    ))[0]  # fmt: skip
    assert targets.tolist() == [[-100, -100, -100, 4, 5, 6, 7, -100]]


def test_documents_begin_where_positions_do_and_padding_is_apart():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    assert _documents(positions, None) == ((3, 2, 1), (6,))
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]])
    assert _documents(positions, mask) == ((3, 2, 1), (2, 4))
    constant = torch.tensor([[1, 1, 1, 0, 1, 2]])  # as transformers numbers padding on the left
    assert _documents(constant, torch.tensor([[0, 0, 0, 1, 1, 1]])) == ((3, 3),)
    again = torch.tensor([[0, 1, 2, 3, 0, 1]])
    assert _documents(again, torch.tensor([[1, 1, 0, 0, 1, 1]])) == ((2, 2, 2),)
    with pytest.raises(ConfigError, match="padding between its tokens"):
        _documents(torch.arange(6)[None], torch.tensor([[1, 1, 0, 0, 1, 1]]))


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({"input_ids": torch.zeros(1, 4)}, "a batch with input_ids cannot be sliced"),
        ({"input_ids": torch.zeros(1, 4), "labels": torch.zeros(1, 3)}, r"labels has shape \(1, 3\), but input_ids"),
        (dict.fromkeys(("input_ids", "labels", "token_type_ids"), torch.zeros(1, 4)), "token_type_ids cannot"),
        (dict.fromkeys(("input_ids", "labels"), torch.zeros(1, 5)), "5 tokens do not divide into 2 slices"),
    ],
)
def test_batches_that_cannot_be_sliced_are_one_line(batch, why):
    with pytest.raises(ConfigError, match=why):
        run_ranks(2, lambda world: SequenceParallel(world).slice(batch))


def test_the_loss_is_the_mean_over_all_tokens_also_if_a_slice_has_none_that_count():
    logits, labels = draw(ROWS, TOKENS, 7, seed=1), torch.randint(7, (ROWS, TOKENS))
    labels[:, 3 : TOKENS // 2 + 2] = -100  # all of the second of four slices

    def of_slice(world):
        parallel = SequenceParallel(world)
        _, targets = parallel.slice({"input_ids": labels, "labels": labels})
        own = logits.chunk(4, dim=1)[world.rank].clone().requires_grad_()
        mean = parallel.loss(F.cross_entropy(own.flatten(0, 1), targets.flatten(), reduction="sum"), targets)
        return mean.detach(), torch.autograd.grad(mean, own)[0]

    exact = logits.clone().requires_grad_()
    expected = F.cross_entropy(exact[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    losses, gradients = zip(*run_ranks(4, of_slice), strict=True)
    assert len({loss.item() for loss in losses}) == 1, "of the group's rows, on each rank"
    assert torch.allclose(losses[0], expected, atol=1e-6)
    assert torch.allclose(torch.cat(gradients, dim=1) / 4, torch.autograd.grad(expected, exact)[0], atol=1e-7)


def test_the_loss_of_rows_without_labels_is_0_and_so_is_its_gradient():
    def of_slice(world):
        parallel, ids = SequenceParallel(world), torch.zeros(1, 4, dtype=torch.int64)
        _, targets = parallel.slice({"input_ids": ids, "labels": ids - 100})
        logits = draw(1, 2, 7, seed=1).requires_grad_()
        mean = parallel.loss(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets)
        return mean.item(), torch.autograd.grad(mean, logits)[0].abs().max().item()

    assert run_ranks(2, of_slice) == [(0, 0)] * 2


# -- training ----------------------------------------------------------------------------------------------------------

SIZES = {"vocab": 61, "width": 32, "layers": 2, "heads": 4, "seq": 16}
WORLD, STEPS, LR = 4, 3, 1e-2


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 61, (4, 17), generator=torch.Generator().manual_seed(step))


def first_model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**SIZES))


def plainly() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The run in plain torch on whole rows."""
    model = first_model()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0), []
    for step in range(STEPS):
        value = loss(model, batch(step))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def in_slices(world, size: int, **how):
    """The run with rows that `size` ranks share; returns losses, parameters and a digest."""
    with world.exclusive():
        model = first_model()
    group = open_group(world, size)
    plan = zero.Plan(model, world=world, optimizer=zero.adamw(LR, weight_decay=0.0), **how)
    with closing(zero.open_store(plan)) as store:
        state = zero.init(plan, store)
        step = zero.make_step(plan, partial(loss, shared_rows=SharedRows(group)))
        losses = []
        for number in range(STEPS):
            rows = batch(number).chunk(world.size // size)[world.rank // size]
            tokens = 16 // size
            state, metrics = step(state, [rows[:, group.rank * tokens : (group.rank + 1) * tokens + 1]])
            losses.append(metrics.loss)
        return losses, full_state_dict(state), digest(state)


@pytest.fixture(scope="module")
def exact():
    return plainly()


def check(losses, parameters, exact) -> None:
    """Parameters may differ by a fiftieth of a step, where a gradient is so small that its sign hangs on the order."""
    assert losses == pytest.approx(exact[0], rel=2e-6)
    for name, value in parameters.items():
        assert torch.allclose(value, exact[1][name], atol=LR / 50, rtol=0), name


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_run_in_slices_is_the_run_of_whole_rows_with_the_same_bits_at_every_stage(size, exact, tmp_path):
    """Also where units are recomputed in backward, which exchanges again, and where the state is on another tier."""
    settings = [
        {"stage": 0},
        {"stage": 1},
        {"stage": 2, "offload": zero.Offload("cpu", page_bytes=4096)},
        {"stage": 3, "activations": "remat", "offload": zero.Offload("infinity", path=str(tmp_path), page_bytes=4096)},
        {"stage": 3, "activations": {"blocks.0": "selective", "*": "offload"}},
    ]
    digests = set()
    for how in settings:
        [losses, parameters, bits], *_ = run_ranks(WORLD, partial(in_slices, size=size, **how))
        check(losses, parameters, exact)
        digests.add(bits)
    assert len(digests) == 1


@pytest.mark.process
def test_processes_have_the_bits_of_threads():
    train = partial(in_slices, size=2, stage=3)
    processes, threads = run_processes(WORLD, train), run_ranks(WORLD, train)
    assert [bits for *_, bits in processes] == [bits for *_, bits in threads]
    assert processes[0][0] == threads[0][0]


@pytest.mark.parametrize("between", ["world", "node"])
def test_groups_work_beside_collectives_by_node(between, exact):
    reduce = {"world": "exact", "node": "node"}[between]
    train = partial(in_slices, size=2, stage=3, gather=between, reduce=reduce)
    check(*run_ranks(WORLD, train, nodes=2)[0][:2], exact)
