"""The kernels of a GPU give the bits of the operators. The interpreter of Triton runs them on a CPU."""

from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

import zero
import zero.platform.kernels
from zero.core import fused
from zero.core.formats import PACKED_FORMATS
from zero.core.kept import Kept
from zero.core.layout import Layout
from zero.core.moments import permutation
from zero.core.optim import SQUARES, Hyper, Transform
from zero.core.precision import Precision
from zero.core.updates import PageBatch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

CPU = torch.device("cpu")
LAYOUT = Layout.of({"a": (100,), "b": (3,), "c": (5, 64), "d": (7, 90), "e": ()}, world_size=3, groups={"b": 2, "d": 1})
LR, DECAY = 3e-3, 0.1
OPTIMIZERS: dict[str, Callable[..., Transform]] = {
    "adamw": lambda **more: zero.adamw(LR, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=DECAY, **more),
    "adam": lambda **more: zero.adam(LR, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=DECAY, **more),
    "sgd": lambda **more: zero.sgd(LR, weight_decay=DECAY, **more),
    "momentum": lambda **more: zero.sgd(LR, momentum=0.9, weight_decay=DECAY, **more),
    "nesterov": lambda **more: zero.sgd(LR, momentum=0.9, nesterov=True, weight_decay=DECAY, **more),
    "lion": lambda **more: zero.lion(LR, weight_decay=DECAY, **more),
    "adagrad": lambda **more: zero.adagrad(LR, lr_decay=0.3, eps=1e-6, weight_decay=DECAY, **more),
    "averaged adamw": lambda **more: zero.with_ema(OPTIMIZERS["adamw"](**more), 0.7),
    "averaged sgd": lambda **more: zero.with_ema(OPTIMIZERS["sgd"](**more), 0.7),
}
MASTERS = {
    "none": Precision("fp32"),
    "split": Precision("bf16"),
    "whole": Precision("bf16", master="whole"),
    "fp16": Precision("fp16"),
}
EDGES = [0x00000001, 0x007FFFFF, 0x00800000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
EDGES += [edge - 2**31 for edge in EDGES] + [0x7FFFFFFF]  # NaN of a CPU, of either sign, and of a GPU


def patterns(numel: int, seed: int) -> Tensor:
    """fp32 numbers: ordinary ones, and every 8th a subnormal number, a tie of bf16, a limit, an infinity or a NaN."""
    make = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=make) * torch.exp2(torch.randint(-30, 4, (numel,), generator=make))
    edges = torch.tensor(EDGES, dtype=torch.int32)[torch.randint(len(EDGES), (numel,), generator=make)]
    return torch.where(torch.arange(numel) % 8 == 5, edges.view(torch.float32), values)


def flat_of(layout: Layout, seed: int) -> Tensor:
    """`patterns` in the slots of a flat, and zeros in its gaps."""
    values = patterns(layout.P, seed)
    for start, stop in layout.gaps:
        values[start:stop] = 0.0
    return values


class State:
    """Parameters with master and moments in their formats, and the two ways to update them."""

    def __init__(self, transform: Transform, precision: Precision, params: Tensor, moments: list[Tensor]) -> None:
        self.transform, self.master = transform, precision.master
        self.kept = Kept(precision.master, transform.forms(transform.moments))
        self.param = zero.core.master.rounded(params, precision.compute)
        self.forms = [transform.form(kind) for kind in transform.moments]
        master = [] if self.master.kind is None else [self.master.page_of(params).clone()]
        self.pages = [
            *master,
            *(form.page_of(moment).clone() for form, moment in zip(self.forms, moments, strict=True)),
        ]

    def clone(self, device: torch.device = CPU) -> "State":
        copy = object.__new__(State)
        copy.__dict__ |= self.__dict__
        copy.param, *copy.pages = (tensor.to(device, copy=True) for tensor in (self.param, *self.pages))
        return copy

    def values(self) -> list[Tensor]:
        master = self.master.of(self.param, self.pages[0] if self.master.kind else self.param)
        stored = self.pages[len(self.pages) - len(self.forms) :]
        return [self.param, master, *(form.values_of(page) for form, page in zip(self.forms, stored, strict=True))]

    def by_kernel(self, layout: Layout, grad: Tensor, hyper: Hyper, cuts: list[int], tile_numel: int = 256) -> None:
        made = self.transform.fused
        assert made is not None
        numbers = fused.numbers(made, hyper)
        keys = [fused.signed(key) for key in self.kept.keys(hyper.step)]
        squares = [moment == SQUARES for moment in self.transform.moments]
        for start, stop in pairwise(cuts):
            count = len(self.pages) - len(self.forms)
            values = [form.values_of(page) for form, page in zip(self.forms, self.pages[count:], strict=True)]
            pieces = [form.page_of(moment[start:stop]) for form, moment in zip(self.forms, values, strict=True)]
            pages = [*(page[start:stop] for page in self.pages[:count]), *pieces]
            device = self.param.device
            tables = [table.to(device) for table in (*fused.tables(layout, start, stop, tile_numel), numbers)]
            tables.append(permutation(device))
            rule, averages = made.rule, made.average is not None
            args = self.param[start:stop], pages, grad[start:stop], tables, keys, squares, averages, rule, tile_numel
            torch.ops.zero.update(*args)
            for form, page, moment, piece in zip(self.forms, self.pages[count:], values, pieces, strict=True):
                moment[start:stop] = form.values_of(piece)
                page.copy_(form.page_of(moment))

    def by_operators(self, layout: Layout, grad: Tensor, hyper: Hyper, update: Callable[[PageBatch], None]) -> None:
        places = [layout.pieces(0, layout.P)] if self.kept.draws else []
        with self.kept.opened([self.param], [self.pages], places, hyper.step) as tensors:
            for start, stop, group in layout.segments(0, layout.P):
                now = hyper.groups[group]
                if now.trains:
                    masters, *moments = ([tensor[start:stop] for tensor in same] for same in tensors)
                    grads = [grad[start:stop].float()]
                    update(PageBatch(masters, grads, tuple(moments), now, hyper.divisor))


def elementwise(transform: Transform) -> Callable[[PageBatch], None]:
    """Return the update that the kernel computes, in operators that round once each."""

    def update(batch: PageBatch) -> None:
        now, lr, decay = batch.settings, batch.settings.lr, batch.settings.weight_decay
        [param], [grad], moments = batch.params, batch.grads, [moment for [moment] in batch.moments]
        grad = grad.mul(1 / batch.divisor)
        if transform.name == "adamw":
            param.sub_(param.mul(lr * decay))
        elif transform.name in ("adam", "sgd"):
            grad = grad.add(param.mul(decay))
        if transform.name == "sgd":
            [momentum] = now.betas
            if momentum:
                [mu] = moments
                mu.copy_(grad if now.step == 1 else mu.mul(momentum).add_(grad))
                grad = grad.add(mu.mul(momentum)) if transform.constants[0] else mu
            param.sub_(grad.mul(lr))
            return
        if transform.name == "adagrad":
            [nu], (lr_decay, eps) = moments, transform.constants
            grad = grad.add(param.mul(decay)) if decay else grad
            nu.add_(grad.mul(grad))
            param.sub_(grad.mul(lr / (1 + (now.step - 1) * lr_decay)).div_(root_of(nu).add_(torch.tensor(eps))))
            return
        (beta1, beta2), (mu, nu), [eps, *_] = now.betas, moments, transform.constants
        mu.mul_(beta1).add_(grad.mul(1 - beta1))
        nu.mul_(beta2).add_(grad.mul(1 - beta2).mul_(grad))
        root = root_of(nu).mul_((1 - beta2**now.step) ** -0.5).add_(torch.tensor(eps))
        param.sub_(mu.mul(lr / (1 - beta1**now.step)).div_(root))

    def averaged(batch: PageBatch) -> None:
        *moments, [mean] = batch.moments
        update(batch._replace(moments=tuple(moments)))
        mean.mul_(transform.constants[-1]).add_(batch.params[0].mul(1 - transform.constants[-1]))

    if transform.copies:
        return averaged
    return transform.update if transform.name == "lion" else update


def root_of(squares: Tensor) -> Tensor:
    """Return roots, computed in fp64, because MKL's are not always the nearest; this double rounding is exact."""
    return squares.double().sqrt().float()


def assert_same(first: State, second: State) -> None:
    for ours, theirs in zip(first.values(), second.values(), strict=True):
        same = (ours.view(torch.int16 if ours.itemsize == 2 else torch.int32)) == theirs.view(
            torch.int16 if theirs.itemsize == 2 else torch.int32
        )
        assert (same | (ours.isnan() & theirs.isnan())).all()


def hyper_of(transform: Transform, step: int) -> Hyper:
    """Settings of a step with one group that does not train and one whose learning rate is 0."""
    hyper = transform.hyper_at(step, 3.0)
    default, decayed, other, *rest = hyper.groups
    resting = decayed._replace(trains=False, step=0)  # it has never trained
    return hyper._replace(groups=(default._replace(step=step), resting, other._replace(lr=0.0), *rest))


def states(name: str, precision: Precision, moments: str, layout: Layout, seed: int) -> State:
    transform = zero.with_moments(
        OPTIMIZERS[name](groups=[zero.Group(["x"], lr=LR / 7, weight_decay=0.3)]), moments, seed=7
    )
    made = [flat_of(layout, seed + 1 + i) for i in range(len(transform.moments))]
    made = [moment.abs() if kind == "nu" else moment for kind, moment in zip(transform.moments, made, strict=True)]
    return State(transform, precision, flat_of(layout, seed), made)


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_kernel_gives_the_bits_of_the_operators(name, master):
    """Pieces with several parameters, gaps and groups, of which one does not train; every class of fp32 patterns."""
    precision = MASTERS[master]
    for step, (moments, dtype) in enumerate(product(("fp32", "bf16", "8bit"), {torch.float32, precision.compute}), 1):
        ours = states(name, precision, moments, LAYOUT, 10 * step)
        theirs, grad = ours.clone(), flat_of(LAYOUT, 10 * step + 5).to(dtype)
        hyper = hyper_of(ours.transform, step)
        ours.by_kernel(LAYOUT, grad, hyper, [0, 64, 256, LAYOUT.P])
        theirs.by_operators(LAYOUT, grad, hyper, elementwise(ours.transform))
        assert_same(ours, theirs)


def by_both(
    name: str, numels: list[int], dtype: torch.dtype, tile_numel: int, device: torch.device = CPU
) -> list[tuple[Tensor, Tensor]]:
    """The values of the parameters of a flat by the operators of the format and by the kernel, as bits."""
    form = PACKED_FORMATS[name]
    codes = [form.encode(torch.randn(n, generator=torch.Generator().manual_seed(n)) / 7) for n in numels]
    values = Layout.of({str(i): (n,) for i, n in enumerate(numels)}, world_size=1)
    stored = Layout.of({str(i): (n.numel(),) for i, n in enumerate(codes)}, world_size=1)
    stored_P, values_P = torch.zeros(stored.P, dtype=torch.uint8), torch.zeros(values.P + 1, dtype=dtype, device=device)
    for slot, part in zip(stored.slots, codes, strict=True):
        slot.of(stored_P).copy_(part)
    tables = [table.to(device) for table in fused.expansion(stored, values, tile_numel)]
    torch.ops.zero.expand(values_P[:-1], stored_P.to(device), [*tables, *form.tables(device)], form.rule, tile_numel)
    by_kernel = values_P.cpu()
    for start, stop in (*values.gaps, (values.P, values.P + 1)):
        assert not by_kernel[start:stop].any()
    by_operators = [torch.empty(n, dtype=dtype) for n in numels]
    for part, result in zip(codes, by_operators, strict=True):
        form.expand(part, result)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    return [
        (ours.view(bits), slot.of(by_kernel).view(bits)) for ours, slot in zip(by_operators, values.slots, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("numels", "tile_numel"),
    [([1], 64), ([333, 64, 0, 100], 64), ([16384, 5], 4096), ([40_001], 1024), ([7, 33_000], 16384)],
)
@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_the_kernel_expands_codes_to_the_bits_of_the_operators(name, numels, tile_numel, dtype):
    for by_operators, by_kernel in by_both(name, numels, dtype, tile_numel):
        assert torch.equal(by_kernel, by_operators)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "numel"), [("nf4", 333), ("int8", 256)])
def test_the_kernel_expands_a_scale_that_is_nan_to_nan(name, numel, dtype):
    """A GPU's NaN is 0x7FFFFFFF, to which no rounding may be added."""
    form = PACKED_FORMATS[name]
    codes = form.encode(torch.ones(numel))
    codes[:4] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.uint8)
    layouts = [Layout.of({"x": (count,)}, world_size=1) for count in (codes.numel(), numel)]
    tables = [*fused.expansion(*layouts, 64), *form.tables(CPU)]
    whole = torch.zeros(layouts[1].P, dtype=dtype)
    torch.ops.zero.expand(whole, codes, tables, form.rule, 64)
    assert whole[:numel].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_a_gpu_expands_codes_to_the_bits_of_the_operators(name, dtype):
    for numels, tile_numel in (([333, 1], 64), ([40_001, 64], 1024), ([3_000_000, 100], 4096)):
        for by_operators, by_kernel in by_both(name, numels, dtype, tile_numel, torch.device("cuda")):
            assert torch.equal(by_kernel, by_operators)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gpu_gives_the_bits_of_the_interpreter(name, master):
    for step, moments in enumerate(("fp32", "bf16", "8bit"), 1):
        here = states(name, MASTERS[master], moments, LAYOUT, 10 * step)
        there, grad = here.clone(torch.device("cuda")), flat_of(LAYOUT, 10 * step + 5)
        hyper = hyper_of(here.transform, step)
        here.by_kernel(LAYOUT, grad, hyper, [0, LAYOUT.P])
        there.by_kernel(LAYOUT, grad.cuda(), hyper, [0, 256, LAYOUT.P], tile_numel=1024)
        assert_same(here, there.clone())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_no_cut_and_no_tile_changes_a_bit(name, moments):
    whole = states(name, MASTERS["split"], moments, LAYOUT, 3)
    grad, hyper = flat_of(LAYOUT, 4), hyper_of(whole.transform, 2)
    parts = whole.clone()
    whole.by_kernel(LAYOUT, grad, hyper, [0, LAYOUT.P], tile_numel=64)
    parts.by_kernel(LAYOUT, grad, hyper, [0, 64, 192, 576, 1216, LAYOUT.P], tile_numel=1024)
    assert_same(whole, parts)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_every_bf16_parameter_with_sampled_state(moments):
    """All 65,536 parameters, in a group with a learning rate and in one without, and a second block of random bits."""
    layout = Layout.of({"x": (2**16,), "still": (2**16 + 2**12,)}, world_size=1, groups={"still": 2})
    ours = states("adamw", MASTERS["split"], moments, layout, 20)
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    ours.param[: 2**17].copy_(every.repeat(2))
    theirs, grad = ours.clone(), flat_of(layout, 25).bfloat16()
    hyper = hyper_of(ours.transform, 3)
    ours.by_kernel(layout, grad, hyper, [0, layout.P], tile_numel=2**16)
    theirs.by_operators(layout, grad, hyper, elementwise(ours.transform))
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_are_those_of_the_fused_kernels_of_torch(name):
    """The difference is at most 4 units in the last place of the value, or of 1 if the value is smaller."""
    layout = Layout.of({"x": (16, 64)}, world_size=1, groups={"x": 1})
    make = torch.Generator().manual_seed(3)
    transform = OPTIMIZERS[name]()
    moments = [torch.zeros(layout.P) for _ in transform.moments]
    ours = State(transform, MASTERS["none"], torch.randn(layout.P, generator=make), moments)
    theirs = ours.clone()
    for step in range(1, 6):
        grad, hyper = torch.randn(layout.P, generator=make), transform.hyper_at(step, 3.0)
        hyper = hyper._replace(groups=tuple(group._replace(step=step) for group in hyper.groups))
        ours.by_kernel(layout, grad, hyper, [0, layout.P])
        theirs.by_operators(layout, grad, hyper, transform.update)
    for first, second in zip(ours.values(), theirs.values(), strict=True):
        assert ((first - second).abs() <= 4 * 2.0**-23 * second.abs().clamp(min=1.0)).all()
