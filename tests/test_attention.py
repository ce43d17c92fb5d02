"""Laws of attention over whole rows: windows, sinks, caps and documents as they are defined, in linear memory."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from zero import attention
from zero.attention import Scoring, causal_attention
from zero.errors import ConfigError

ROWS, HEADS, TOKENS, CHANNELS = 2, 4, 12, 6
DOCUMENTS = {"whole": None, "alike": ((5, 1, 6), (5, 1, 6)), "others": ((12,), (3, 8, 1))}


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors(kv_heads=HEADS):
    return [draw(ROWS, n, TOKENS, CHANNELS, seed=seed) for seed, n in enumerate((HEADS, kv_heads, kv_heads))]


def defined(q, k, v, documents, scoring):
    """Attention with all scores and a mask, in fp64, written down from the definition."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    rows = documents or ((q.shape[2],),) * len(q)
    number = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    seen = (number[:, None, :, None] == number[:, None, None, :]) & (distance >= 0)
    if scoring.window is not None:
        seen &= distance < scoring.window
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    shares = scores.exp() * seen
    total = shares.sum(-1, keepdim=True)
    if scoring.sinks is not None:
        total = total + scoring.sinks.double().exp()[:, None, None]
    return shares / total @ v


def compare(parts, documents, scoring, function=causal_attention):
    """The result and its gradients are those of the definition."""
    weights = draw(ROWS, HEADS, TOKENS, CHANNELS, seed=9)
    made = []
    for attend, dtype in ((function, torch.float32), (defined, torch.float64)):
        q, k, v = (x.to(dtype).requires_grad_() for x in parts)
        sinks = None if scoring.sinks is None else scoring.sinks.to(dtype).requires_grad_()
        result = attend(q, k, v, documents, scoring._replace(sinks=sinks))
        leaves = [x for x in (q, k, v, sinks) if x is not None]
        made.append([result, *torch.autograd.grad(result, leaves, weights.to(dtype))])
    for ours, right in zip(*made, strict=True):
        torch.testing.assert_close(ours.double(), right, atol=2e-6, rtol=0)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), list(product((None, 1, 4, 100), (None, 0.7), (False, True)))[1:], ids=str
)
def test_attention_is_that_of_the_definition(window, softcap, sinks, documents, monkeypatch):
    """In blocks of several sizes, the last one shorter; heads share keys."""
    scoring = Scoring(0.3, window=window, softcap=softcap, sinks=draw(HEADS, seed=7) if sinks else None)
    for block in (5, 1024):
        monkeypatch.setattr(attention, "BLOCK", block)
        monkeypatch.setattr(attention, "LEAST_BLOCK", block)
        for kv_heads in (HEADS, 2):
            compare(tensors(kv_heads), DOCUMENTS[documents], scoring)


def test_a_sink_takes_its_share_also_without_a_scale_and_in_bf16():
    q, k, v = tensors()
    sinks = torch.tensor([-1.0, 0.5, 4.0, 30.0])
    compare((q, k, v), None, Scoring(sinks=sinks))
    low = [x.bfloat16() for x in (q, k, v)]
    right = defined(*low, None, Scoring(sinks=sinks))
    for window in (None, TOKENS - 1):
        result = causal_attention(*low, None, Scoring(sinks=sinks.bfloat16(), window=window))
        seen = right if window is None else defined(*low, None, Scoring(sinks=sinks, window=window))
        torch.testing.assert_close(result.double(), seen, atol=3e-2, rtol=0)
        assert result[:, 3].abs().max() < 1e-6, "nearly all of the weight is on the sink"


@pytest.mark.parametrize("scoring", [Scoring(window=64), Scoring(softcap=5.0), Scoring(window=64, sinks=torch.ones(2))])
def test_what_is_kept_for_backward_is_linear_in_the_tokens(scoring):
    """Only q, k, v and the sinks are kept: no scores, and no mask."""
    kept = {}
    for tokens in (2048, 4096):
        saved = []
        q, k, v = (draw(1, 2, tokens, 8, seed=seed).requires_grad_() for seed in range(3))
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.nbytes) or x, lambda x: x):
            causal_attention(q, k, v, None, scoring)
        kept[tokens] = sum(saved)
    assert kept[4096] <= 2 * kept[2048]
    assert kept[4096] <= 3 * 2 * 4096 * 8 * 4 + 64


@pytest.mark.parametrize("scoring", [Scoring(dropout=0.1, window=4), Scoring(dropout=0.1, softcap=2.0)])
def test_dropout_in_blocks_is_one_line(scoring):
    with pytest.raises(ConfigError, match=r"attention has no dropout=0.1 with a window or capped scores. Set it to 0."):
        causal_attention(*tensors(), None, scoring)
    assert causal_attention(*tensors(), None, Scoring(dropout=0.1, window=TOKENS)).shape == tensors()[0].shape


# -- the kernel of variable lengths, which only GPUs have --------------------------------------------------------------


def lengths_on_a_cpu(q, k, v, ends, ends_of_keys, longest, longest_of_keys, *, scale, window_size, enable_gqa):
    """Compute one document after the other, with the arguments that `varlen_attn` documents."""
    assert ends.dtype == torch.int32
    assert ends is ends_of_keys
    assert longest == longest_of_keys == ends.diff().max()
    assert window_size == (-1, 0)
    results = []
    for parts in zip(*(x.split(ends.diff().tolist()) for x in (q, k, v)), strict=True):
        heads_first = [x.transpose(0, 1)[None] for x in parts]
        result = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        results.append(result[0].transpose(0, 1))
    return torch.cat(results)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("documents", ["alike", "others"])
def test_documents_of_all_rows_are_one_call_of_the_kernel(documents, kv_heads, monkeypatch):
    """A CPU in the kernel's place; its arguments are those that it documents."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lengths_on_a_cpu)
    monkeypatch.setattr(attention, "_takes_varlen", lambda *_: True)
    compare(tensors(kv_heads), DOCUMENTS[documents], Scoring(0.3))


@pytest.mark.parametrize(
    ("taken", "dtype", "channels", "scoring"),
    [
        (True, torch.bfloat16, 64, Scoring()),
        (True, torch.bfloat16, 64, Scoring(window=7)),
        (False, torch.bfloat16, 64, Scoring(window=6)),
        (False, torch.bfloat16, 64, Scoring(softcap=50.0)),
        (False, torch.bfloat16, 60, Scoring()),
        (False, torch.bfloat16, 320, Scoring()),
        (False, torch.float32, 64, Scoring()),
    ],
)
def test_a_gpu_takes_the_kernel_where_it_can(taken, dtype, channels, scoring, monkeypatch):
    """On tensors of a GPU that have no memory, with the arguments that torch's own kernel takes."""
    if not attention._varlen_groups_heads():
        pytest.skip("this torch has no grouped heads in its kernel of variable lengths")
    calls, of_lengths = [], attention._of_lengths
    monkeypatch.setattr(attention, "_of_lengths", lambda *args: calls.append(1) or of_lengths(*args))
    monkeypatch.setattr(attention, "_of_document", lambda q, k, v, scoring: q)  # torch 2.13 needs a GPU for its views
    with FakeTensorMode():
        q, k, v = (torch.empty(2, n, TOKENS, channels, dtype=dtype, device="cuda") for n in (8, 2, 2))
        result = causal_attention(q, k, v, ((5, 7), (7, 5)), scoring)
        assert (result.shape, result.dtype) == (q.shape, dtype)
    assert bool(calls) == taken
