"""A loss in chunks is the plain loss, up to the rounding of fp32, and never holds all logits."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zero
from zero.distributed.world import World
from zero.errors import ConfigError


def draw(tokens: int, width: int, vocab: int, dtype: torch.dtype = torch.float32, *, bias: bool = False):
    generator = torch.Generator().manual_seed(tokens * vocab)
    hidden, weight = torch.randn(tokens, width, generator=generator), torch.randn(vocab, width, generator=generator)
    bias_tensor = torch.randn(vocab, generator=generator).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(vocab, (tokens,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, bias_tensor


def in_fp64(hidden, weight, targets, bias):
    """Loss and gradients, without the rounding of fp32."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    logits = F.linear(*leaves)
    loss = F.cross_entropy(logits, targets)
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def in_chunks(hidden, weight, targets, bias, chunk):
    loss = zero.losses.linear_cross_entropy(hidden, weight, targets, chunk, bias=bias)
    leaves = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def error(computed: torch.Tensor, exact: torch.Tensor) -> float:
    return float((computed.double() - exact).abs().max() / exact.abs().max())


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 200), st.integers(1, 220), st.booleans())
def test_loss_and_gradients_are_those_of_the_plain_one_up_to_fp32(tokens, width, vocab, chunk, bias):
    given_ = draw(tokens, width, vocab, bias=bias)
    for computed, exact in zip(in_chunks(*given_, chunk), in_fp64(*given_), strict=True):
        assert (computed.double() - exact).abs().max() <= 3e-6 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize("chunk", [64, 1000])
def test_in_bf16_no_gradient_is_further_off_than_the_plain_ones(chunk):
    """The sum over chunks is in fp32: each part is rounded once, as the whole is."""
    given_ = draw(256, 128, 4000, torch.bfloat16, bias=True)
    exact = in_fp64(*given_)
    plain, chunked = in_chunks(*given_, None), in_chunks(*given_, chunk)
    for ours, theirs, right in zip(chunked, plain, exact, strict=True):
        assert error(ours, right) <= 1.5 * error(theirs, right) + 1e-6


def test_tokens_that_do_not_count_have_no_gradient_and_none_at_all_is_nan():
    hidden, weight, targets, _ = draw(16, 8, 50)
    targets[::2] = -100
    for chunk in (None, 7):
        loss, for_hidden, _ = in_chunks(hidden, weight, targets, None, chunk)
        assert torch.allclose(loss, F.cross_entropy(hidden[1::2] @ weight.T, targets[1::2]))
        assert (for_hidden[::2] == 0).all()
        assert zero.losses.linear_cross_entropy(hidden, weight, torch.full_like(targets, -100), chunk).isnan()


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_sum_is_the_mean_times_the_tokens_that_count_and_zero_for_none(chunk):
    hidden, weight, targets, _ = draw(16, 8, 50)
    targets[::2] = -100
    total = zero.losses.linear_cross_entropy(hidden, weight, targets, chunk, reduction="sum")
    gradient = torch.autograd.grad(total / 8, hidden)[0]
    mean, for_hidden, _ = in_chunks(hidden, weight, targets, None, chunk)
    assert torch.allclose(total / 8, mean)
    assert torch.allclose(gradient, for_hidden, atol=1e-7)
    none = zero.losses.linear_cross_entropy(hidden, weight, targets.fill_(-100), chunk, reduction="sum")
    assert none == 0
    assert (torch.autograd.grad(none, hidden)[0] == 0).all()
    with pytest.raises(ConfigError, match="reduction='most': must be mean or sum"):
        zero.losses.linear_cross_entropy(hidden, weight, targets, chunk, reduction="most")


@pytest.mark.parametrize("chunk", [1, 5, 15, 20])
def test_entries_that_cannot_come_have_no_share_wherever_chunks_end(chunk):
    """A padded vocabulary has a bias of minus infinity at its end: 0 times that would be NaN."""
    hidden, weight, targets, bias = draw(16, 8, 20, bias=True)
    with torch.no_grad():
        bias[13:] = -torch.inf
        targets %= 13
    for computed, exact in zip(
        in_chunks(hidden, weight, targets, bias, chunk), in_fp64(hidden, weight, targets, bias), strict=True
    ):
        assert (computed.double() - exact).abs().max() <= 3e-6 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize("wrong", [-1, 50, -101])
@pytest.mark.parametrize("chunk", [None, 7, 64])
def test_a_target_outside_the_vocabulary_is_refused_by_every_chunk(chunk, wrong):
    hidden, weight, targets, _ = draw(16, 8, 50)
    targets[3], targets[5] = wrong, -100
    with pytest.raises((ConfigError, IndexError), match=f"[Tt]arget {wrong} is"):
        zero.losses.linear_cross_entropy(hidden, weight, targets, chunk)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's compiler
def test_it_compiles_as_one_graph():
    hidden, weight, targets, _ = draw(16, 8, 50)
    loss = zero.losses.linear_cross_entropy
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    assert torch.equal(compiled(hidden, weight, targets, 7), loss(hidden, weight, targets, 7))


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, targets, _ = draw(16, 8, 50)
    loss = zero.losses.linear_cross_entropy(hidden.detach(), weight, targets, 10)
    [grad] = torch.autograd.grad(loss, [weight])
    assert torch.allclose(grad, in_chunks(hidden, weight, targets, None, None)[2], atol=1e-6)
    loss = zero.losses.linear_cross_entropy(hidden, weight.detach(), targets, 10)
    [grad] = torch.autograd.grad(loss, [hidden])
    assert torch.allclose(grad, in_chunks(hidden, weight, targets, None, None)[1], atol=1e-6)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [tensor.numel() for tensor in tree_leaves(made) if isinstance(tensor, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_never_more_than_a_chunk_of_logits(dtype):
    hidden, weight, targets, _ = draw(512, 4, 3000, dtype)
    with Largest() as largest:
        in_chunks(hidden, weight, targets, None, 100)
    assert largest.numel == max(512 * 100, 3000 * 4)


def test_auto_takes_the_plain_loss_where_all_logits_are_few():
    few, many = draw(64, 4, 1000), draw(2**14, 4, 1000)
    for given_, most in ((few, 64 * 1000), (many, zero.losses.CHUNK_NUMEL)):
        with Largest() as largest:
            in_chunks(*given_, "auto")
        assert most // 2 <= largest.numel <= most
    for tensor, other in zip(in_chunks(*few, "auto"), in_chunks(*few, None), strict=True):
        assert torch.equal(tensor, other)


@pytest.mark.parametrize(
    ("hidden", "weight", "targets", "chunk", "why"),
    [
        ((3, 4), (9, 5), (3,), 2, r"Pass hidden \(\.\.\., D\), weight \(V, D\)"),
        ((3, 4), (9, 4), (4,), 2, r"targets \(4,\)"),
        ((3, 4), (9, 4), (3,), 0, "chunk=0"),
        ((3, 4), (9, 4), (3,), "all", "chunk='all'"),
    ],
)
def test_what_does_not_go_together_is_refused(hidden, weight, targets, chunk, why):
    with pytest.raises(ConfigError, match=why):
        zero.losses.linear_cross_entropy(
            torch.zeros(hidden), torch.zeros(weight), torch.zeros(targets, dtype=torch.int64), chunk
        )


class Reads(nn.Module):
    """Reads the weight and bias of its head in its own forward, outside of the unit that owns them."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 5), nn.Linear(5, 11)

    def forward(self, rows, targets):
        return zero.losses.linear_cross_entropy(self.body(rows), self.head.weight, targets, 4, bias=self.head.bias)


@pytest.mark.parametrize("activations", ["keep", "remat"])
def test_a_weight_is_gathered_where_another_module_reads_it(activations):
    plain = Reads()
    with zero.empty():
        ours = Reads()
    batch = torch.ones(3, 5), torch.tensor([2, 10, 0])
    plain(*batch).backward()
    plan = zero.Plan(
        ours, optimizer=zero.sgd(1.0), world=World.solo(), stage=3, units=["Linear"], activations=activations
    )
    with contextlib.closing(zero.open_store(plan)) as store:
        state = zero.init(plan, store, weights=plain.state_dict())
        state, _ = zero.make_step(plan, lambda model, batch: model(*batch))(state, [batch])
        for name, value in zero.full_state_dict(state).items():
            parameter = plain.get_parameter(name)
            torch.testing.assert_close(value, parameter.detach() - parameter.grad)
