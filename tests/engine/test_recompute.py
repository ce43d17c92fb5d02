"""Recomputed activations: the same numbers as kept ones, and no operator of the table runs twice without need."""

import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import TorchDispatchMode

import zero
from zero.distributed.world import SoloWorld
from zero.engine.recompute import PRODUCTS

aten = torch.ops.aten


def attention(*args, **kwargs):
    """Run a GPU's attention operator on a CPU: the query, with dropout from the default generator."""
    query, p = args[0], kwargs.pop("p")
    mask = (torch.rand(query.shape) >= p) / (1 - p) if p else torch.ones(query.shape)
    return query * mask, mask


class Flash:
    def forward(query, key, value, p=0.0, *_, **__):
        output, mask = attention(query, p=p)
        none = torch.zeros(0, dtype=torch.int64)
        return output, torch.zeros(1), none, none, 0, 0, mask, none, none

    def backward(grad, query, key, value, *rest, **_):
        return grad * rest[8], torch.zeros_like(key), torch.zeros_like(value)


class Efficient:
    def forward(query, key, value, bias, log, p=0.0, *_, **__):
        output, mask = attention(query, p=p)
        return output, torch.zeros(1), mask, torch.zeros(0)

    def backward(grad, query, key, value, bias, output, log, mask, *_, **__):
        return grad * mask, torch.zeros_like(key), torch.zeros_like(value), None


class CuDNN:
    def forward(query, key, value, bias, log, p=0.0, *_, **__):
        output, mask = attention(query, p=p)
        none = torch.zeros(0, dtype=torch.int64)
        return output, torch.zeros(1), none, none, 0, 0, mask, none, none

    def backward(grad, query, key, value, output, log, mask, *_, **__):
        return grad * mask, torch.zeros_like(key), torch.zeros_like(value)


@pytest.fixture(scope="module")
def operators_of_a_gpu():
    library = torch.library.Library("aten", "IMPL")
    for name, stand_in in (("flash", Flash), ("efficient", Efficient), ("cudnn", CuDNN)):
        library.impl(f"_scaled_dot_product_{name}_attention", stand_in.forward, "CPU")
        library.impl(f"_scaled_dot_product_{name}_attention_backward", stand_in.backward, "CPU")
    yield
    library._destroy()


class Scaled(torch.autograd.Function):
    """A product in float8, which torch does not differentiate."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        one = torch.ones(())
        narrow, wide = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        return torch._scaled_mm(narrow, wide.t(), one, one, out_dtype=torch.bfloat16).float()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0], None


def flexible(q, p):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        return flex.flex_attention(q, q * 2, q * 3)


CALLS = {
    aten.mm.default: lambda q, p: torch.mm(q[0, 0], q[0, 1])[None, None],
    aten.addmm.default: lambda q, p: torch.addmm(q[0, 0], q[0, 0], q[0, 1])[None, None],
    aten.bmm.default: lambda q, p: torch.bmm(q[0], q[0])[None],
    aten.baddbmm.default: lambda q, p: torch.baddbmm(q[0], q[0], q[0])[None],
    aten._grouped_mm.default: lambda q, p: torch._grouped_mm(q[0].bfloat16(), q[0].bfloat16())[None].float(),
    aten._scaled_mm.default: lambda q, p: Scaled.apply(q[0, 0], q[0, 1].detach())[None, None],
    torch.ops.higher_order.flex_attention: flexible,
    aten._scaled_dot_product_flash_attention.default: lambda q, p: aten._scaled_dot_product_flash_attention(
        q, q * 2, q * 3, p
    )[0],
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda q, p: (
        aten._scaled_dot_product_flash_attention_for_cpu(q, q * 2, q * 3, p)[0]
    ),
    aten._scaled_dot_product_efficient_attention.default: lambda q, p: aten._scaled_dot_product_efficient_attention(
        q, q * 2, q * 3, None, True, dropout_p=p
    )[0],
    aten._scaled_dot_product_cudnn_attention.default: lambda q, p: aten._scaled_dot_product_cudnn_attention(
        q, q * 2, q * 3, None, True, p
    )[0],
    aten.convolution.default: lambda q, p: torch.conv2d(q, q[:, :, :3, :3], padding=1),
}
"""Each operator that is kept, and one that is not, on (1, 2, 16, 16) with a probability of dropout."""

DROPS = [
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]


class Runs(TorchDispatchMode):
    """Count the operators that run, outside of the modes that answer with kept results."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, call, p):
        super().__init__()
        self.before, self.after, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.5)
        self.call, self.p = call, p

    def forward(self, x):
        y = self.call(torch.tanh(self.before(x)), self.p).mean((1, 2), keepdim=True)
        return self.drop(torch.tanh(self.after(y * x)))


def test_the_table_has_no_operator_without_a_test():
    assert {*PRODUCTS} <= {*CALLS}


@pytest.mark.parametrize(
    ("operator", "p"),
    [(operator, 0.0) for operator in CALLS] + [(operator, 0.25) for operator in DROPS],
    ids=lambda value: str(value).removeprefix("aten._scaled_dot_product_"),
)
def test_a_kept_result_does_not_change_the_random_numbers_that_follow(operator, p, operators_of_a_gpu, monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # it allows no backward on a CPU
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)

    def step(policy):
        torch.manual_seed(0)
        model = nn.Sequential(Block(CALLS[operator], p), Block(CALLS[operator], p))
        plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=SoloWorld(), activations=policy)
        state, runs = zero.init(plan, zero.open_store(plan)), Runs()

        def loss(model, x):
            return model(x).square().sum()

        torch.manual_seed(5)
        with runs:
            _, metrics = zero.make_step(plan, loss)(state, [torch.randn(1, 2, 16, 16)])
        return metrics, runs.counts[operator], torch.rand(1)

    keep, remat, selective = (step(policy) for policy in ("keep", "remat", "selective"))
    assert keep[0] == selective[0] == remat[0]
    assert keep[2] == selective[2]
    assert keep[1] < remat[1]
    assert selective[1] == (keep[1] if operator in PRODUCTS and not p else remat[1])
