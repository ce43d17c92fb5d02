"""An update is arithmetic on one page: the same bits however a flat is cut, and what plain torch computes."""

import pickle
from itertools import pairwise
from math import inf, nan

import pytest
import torch
from torch import Tensor

from zero.core.groups import Group, decay_matrices
from zero.core.optim import Transform
from zero.core.optimizers import adagrad, adam, adamw, lion, sgd, with_ema
from zero.core.updates import GroupSettings, PageBatch
from zero.errors import ConfigError

LR, DECAY = 3e-3, 0.1
SETTINGS = {
    "adamw": lambda: adamw(LR, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=DECAY),
    "adam": lambda: adam(LR, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=DECAY),
    "sgd": lambda: sgd(LR, weight_decay=DECAY),
    "momentum": lambda: sgd(LR, momentum=0.9, weight_decay=DECAY),
    "nesterov": lambda: sgd(LR, momentum=0.9, nesterov=True, weight_decay=DECAY),
    "lion": lambda: lion(LR, beta1=0.9, beta2=0.99, weight_decay=DECAY),
    "ema": lambda: with_ema(lion(LR, weight_decay=DECAY), 0.99),
    "adagrad": lambda: adagrad(LR, lr_decay=0.1, eps=1e-6, weight_decay=DECAY),
}
VECTORS = [1, 65, 2047, 4097]
"""Sizes of a flat in vectors of 64 elements; the last ones are large enough for every kernel to use its threads."""


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def take_steps(transform: Transform, numel: int, cuts: list[int], *, device="cpu") -> list[Tensor]:
    """Parameters and moments after three updates, each made range by range."""
    make = torch.Generator().manual_seed(numel)
    param = torch.randn(numel, generator=make).to(device)
    moments = tuple(torch.zeros(numel, device=device) for _ in transform.moments)
    for step in (1, 2, 3):
        grad = torch.randn(numel, generator=make).to(device)
        _, now = transform.hyper_at(step, 3.7).groups
        for start, stop in pairwise(cuts):
            transform.update(
                PageBatch([param[start:stop]], [grad[start:stop]], tuple([m[start:stop]] for m in moments), now, 3.7)
            )
    return [param, *moments]


def random_cuts(vectors: int) -> list[list[int]]:
    choose = torch.Generator().manual_seed(vectors)
    inner = [torch.randint(0, vectors + 1, (count,), generator=choose).mul(64).tolist() for count in (0, 1, 2, 9)]
    return [[0, *sorted(cuts), 64 * vectors] for cuts in inner]


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("name", SETTINGS)
def test_any_cut_between_vectors_gives_the_same_bits(name, vectors, threads):
    """The law that makes pages, shards and segments free to choose."""
    threads(1)
    whole = take_steps(SETTINGS[name](), 64 * vectors, [0, 64 * vectors])
    for count in (1, 2, 3):
        threads(count)
        for cuts in random_cuts(vectors):
            for expected, seen in zip(whole, take_steps(SETTINGS[name](), 64 * vectors, cuts), strict=True):
                assert torch.equal(expected, seen), f"{count} threads, cuts {cuts}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", SETTINGS)
def test_any_cut_gives_the_same_bits_on_a_gpu(name):
    for vectors in VECTORS:
        whole = take_steps(SETTINGS[name](), 64 * vectors, [0, 64 * vectors], device="cuda")
        for cuts in random_cuts(vectors):
            seen = take_steps(SETTINGS[name](), 64 * vectors, cuts, device="cuda")
            assert all(torch.equal(a, b) for a, b in zip(whole, seen, strict=True)), f"cuts {cuts}"


def plain_torch(name: str, param: Tensor) -> torch.optim.Optimizer:
    settings = {"lr": LR, "weight_decay": DECAY}
    return {
        "adamw": lambda: torch.optim.AdamW([param], betas=(0.8, 0.95), eps=1e-6, **settings),
        "adam": lambda: torch.optim.Adam([param], betas=(0.8, 0.95), eps=1e-6, **settings),
        "sgd": lambda: torch.optim.SGD([param], **settings),
        "momentum": lambda: torch.optim.SGD([param], momentum=0.9, **settings),
        "nesterov": lambda: torch.optim.SGD([param], momentum=0.9, nesterov=True, **settings),
        "adagrad": lambda: torch.optim.Adagrad([param], lr_decay=0.1, eps=1e-6, **settings),
    }[name]()


@pytest.mark.parametrize("divisor", [1.0, 3.0])
@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ("lion", "ema")])
def test_ten_steps_are_those_of_plain_torch(name, divisor):
    """Its single-tensor loop is the oracle: in fp64, so that all rounding is ours, ten steps of a few ulp each."""
    make = torch.Generator().manual_seed(0)
    start = torch.randn(192, generator=make)
    ours, theirs = start.clone(), start.double().requires_grad_()
    transform, oracle = SETTINGS[name](), plain_torch(name, theirs)
    moments = tuple(torch.zeros(192) for _ in transform.moments)
    for step in range(1, 11):
        grad = torch.randn(192, generator=make)
        theirs.grad = grad.double() / divisor
        oracle.step()
        transform.update(PageBatch([ours], [grad], tuple([m] for m in moments), transform.groups[1](step), divisor))
    torch.testing.assert_close(ours.double(), theirs.detach(), rtol=2e-6, atol=2e-6)
    state = oracle.state[theirs]
    expected = [state[key] for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum") if state.get(key) is not None]
    assert len(expected) == len(moments)
    for moment, value in zip(moments, expected, strict=True):
        torch.testing.assert_close(moment.double(), value, rtol=2e-6, atol=2e-6)


def test_lion_is_the_papers_algorithm():
    """Algorithm 2 of the paper, one number at a time in Python's floats."""
    make = torch.Generator().manual_seed(1)
    param, mu = torch.randn(64, generator=make), torch.zeros(64)
    expected, momentum = param.tolist(), [0.0] * 64
    transform = SETTINGS["lion"]()
    for step in range(1, 11):
        grad = torch.randn(64, generator=make)
        for i, g in enumerate((grad.double() / 3).tolist()):
            direction = 0.9 * momentum[i] + 0.1 * g
            sign = (direction > 0) - (direction < 0)
            expected[i] -= LR * (sign + DECAY * expected[i])
            momentum[i] = 0.99 * momentum[i] + 0.01 * g
        transform.update(PageBatch([param], [grad], ([mu],), transform.groups[1](step), 3.0))
    torch.testing.assert_close(param.double(), torch.tensor(expected).double(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(mu.double(), torch.tensor(momentum).double(), rtol=2e-6, atol=2e-6)


def test_the_first_step_of_momentum_starts_the_buffer_as_the_gradient():
    param, grad, mu = torch.zeros(64), torch.full((64,), 2.0), torch.full((64,), nan)
    sgd(0.5, momentum=0.9).update(PageBatch([param], [grad], ([mu],), GroupSettings(0.5, 0.0, (0.9,)), 1.0))
    assert mu.eq(2.0).all()
    assert param.eq(-1.0).all()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_divisor_divides_the_gradient_once(name):
    """Dividing by a power of two is exact, so a scaled gradient with its divisor leaves the same bits."""
    make = torch.Generator().manual_seed(2)
    start, grad = torch.randn(128, generator=make), torch.randn(128, generator=make)
    results = []
    for scale in (1.0, 2.0**16):
        transform, param = SETTINGS[name](), start.clone()
        moments = tuple(torch.zeros(128) for _ in transform.moments)
        transform.update(PageBatch([param], [grad * scale], tuple([m] for m in moments), transform.groups[1](1), scale))
        results.append([param, *moments])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_an_empty_page_is_no_work(name):
    transform = SETTINGS[name]()
    empty, moments = torch.zeros(0), tuple([torch.zeros(0)] for _ in transform.moments)
    transform.update(PageBatch([empty], [empty.clone()], moments, transform.groups[1](1), 2.0))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_transform_travels_to_another_process(name):
    transform = SETTINGS[name]()
    copy = pickle.loads(pickle.dumps(transform))
    assert (copy.name, copy.moments, copy.fields()) == (transform.name, transform.moments, transform.fields())
    for a, b in zip(take_steps(transform, 64, [0, 64]), take_steps(copy, 64, [0, 64]), strict=True):
        assert torch.equal(a, b)


def test_only_matrices_decay_by_default():
    assert [decay_matrices("p", shape) for shape in [(), (4,), (4, 4), (2, 3, 4)]] == [False, False, True, True]


def test_the_learning_rate_may_be_a_function_of_the_step():
    assert adamw(0.5).groups[0](7).lr == 0.5
    assert adamw(lambda step: step / 10).groups[0](7).lr == 0.7
    with pytest.raises(ConfigError, match="lr at step 3=nan"):
        adamw(lambda step: nan).groups[0](3)


@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("lr", lambda: adamw(-1.0)),
        ("lr", lambda: lion(nan)),
        ("beta1", lambda: adamw(LR, beta1=1.0)),
        ("beta2", lambda: adam(LR, beta2=-0.1)),
        ("eps", lambda: adamw(LR, eps=nan)),
        ("lr_decay", lambda: adagrad(LR, lr_decay=-1.0)),
        ("clip", lambda: sgd(LR, clip=0.0)),
        ("weight_decay", lambda: adamw(LR, weight_decay=inf)),
        ("momentum", lambda: sgd(LR, momentum=-0.9)),
        ("nesterov", lambda: sgd(LR, nesterov=True)),
        ("lr", lambda: adamw("1e-3")),
        ("lr at step 1", lambda: adamw(lambda step: "1e-3").groups[0](1)),
        ("beta2", lambda: adam(LR, beta2=None)),
        ("clip", lambda: sgd(LR, clip="1")),
        ("eps", lambda: adagrad(LR, eps="small")),
        (r"groups\[0\].lr at step 1", lambda: lion(LR, groups=[Group(["w"], lr="1e-3")]).groups[2](1)),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_key(key, make):
    with pytest.raises(ConfigError, match=rf"optim\.{key}="):
        make()


def test_a_momentum_that_begins_later_is_refused_by_name():
    live = {"momentum": 0.0}
    transform = sgd(0.1, groups=[Group(["*"], live=live)])
    transform.hyper_at(1, 1.0)
    live["momentum"] = 0.9
    with pytest.raises(ConfigError, match=r"optim\.momentum was 0 at the beginning"):
        transform.hyper_at(2, 1.0)
