"""Updates by the host beside a GPU with kernels: the same bits, for any share of the state that the host updates."""

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

import zero
from tests.common.small import KiB, Setting, adamw_in_8bit, small_batch, train_small, wide
from tests.engine.test_fused import averaged_lion, resting
from tests.simulation import simulated_gpu
from zero.core.groups import decay_matrices
from zero.core.optim import Fused, make_transform
from zero.core.updates import PageBatch
from zero.engine.whole.read import digest
from zero.errors import ConfigError
from zero.platform.host_rule import update_on_host
from zero.testing import run_ranks

if TYPE_CHECKING:
    import triton.language as tl

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def in_bf16(lr, **settings):
    return zero.with_moments(zero.adamw(lr, **settings), "bf16")


def averaged(lr, **settings):
    return zero.with_ema(zero.adamw(lr, **settings), 0.5)


momentum = partial(zero.sgd, momentum=0.9)
nesterov = partial(zero.sgd, momentum=0.9, nesterov=True)


def trained(setting: Setting, preset: str, compute: str | float):
    offload = (("preset", preset), ("compute", compute))
    return run_ranks(2, train_small, setting.but(offload=offload), 3)


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        (zero.adamw, "bf16"), (zero.adam, "fp16"), (averaged, "fp32"), (in_bf16, "bf16"), (adamw_in_8bit, "bf16"),
        (zero.sgd, "fp32"), (momentum, "bf16"), (nesterov, "fp16"), (zero.lion, "bf16"), (zero.adagrad, "fp32"),
        (averaged_lion, "bf16"), (resting, "bf16"),
    ],
)  # fmt: skip
def test_the_host_has_the_bits_of_the_kernel(optimizer, precision):
    setting = Setting(stage=3, optimizer=optimizer, precision=precision, clip=0.5, page_bytes=4 * KiB)
    with simulated_gpu(fused=True):
        assert trained(setting, "cpu", "host") == trained(setting, "cpu", "device")


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize(
    ("optimizer", "precision", "preset", "stage"),
    [(averaged, "bf16", "cpu", 1), (adamw_in_8bit, "bf16", "infinity", 3), (zero.muon, "bf16", "nvme", 2)],
)
def test_no_share_of_the_host_changes_a_bit(optimizer, precision, preset, stage):
    setting = Setting(stage=stage, optimizer=optimizer, precision=precision, clip=0.5, page_bytes=4 * KiB)
    with simulated_gpu(fused=True, races=True):
        expected = trained(setting, preset, "device")
        for share in (0.3, 0.6, "host"):
            assert trained(setting, preset, share) == expected


def test_a_move_to_another_share_changes_no_bit():
    def run(world: zero.World, shares: tuple[float, ...]) -> str:
        setting = Setting(precision="bf16", page_bytes=4 * KiB, offload=(("preset", "cpu"),))
        state, step = setting.start(world, wide)
        for number, share in enumerate(shares):
            state = zero.move(state, offload=zero.Offload("cpu", page_bytes=4 * KiB, compute=share))
            state, _ = step(state, [small_batch(number, 6)])
        return digest(state)

    with simulated_gpu(fused=True):
        expected, moved = (run_ranks(1, partial(run, shares=shares)) for shares in ((0.0,) * 3, (0.0, 0.5, 1.0)))
    assert moved == expected


@pytest.mark.parametrize("optimizer", [zero.adamw, zero.muon])
def test_each_unit_is_shared(optimizer):
    def counts(world: zero.World) -> list[tuple[int, int]]:
        """For each unit, the groups that the host updates and all of them."""
        setting = Setting(optimizer=optimizer, page_bytes=4 * KiB, offload=(("preset", "cpu"), ("compute", 0.4)))
        plan = setting.start(world, wide)[0].plan
        groups, of_host = plan.placement.optimizer, plan.slots.by_host
        return [
            (sum(number == unit.index for number, _ in of_host), sum(number == unit.index for number, _ in groups))
            for unit in plan.units
        ]

    with simulated_gpu(fused=True):
        [shared] = run_ranks(1, counts)
    assert max(count for _, count in shared) > 4
    assert all(host == round(0.4 * count) for host, count in shared)


def batch_of(param: torch.Tensor) -> PageBatch:
    return PageBatch([param], [torch.zeros_like(param)], (), zero.sgd(1.0).groups[0](1), 1.0)


def test_a_root_is_the_nearest():
    """torch's roots of fp32 on a CPU are not, on some."""
    bits = torch.arange(0x3F000000, 0x40000000, 61, dtype=torch.int32)
    square = bits.view(torch.float32)
    fused = Fused(lambda param, gradient, numbers: tl.sqrt_rn(param), lambda now: ())
    root = square.clone()
    update_on_host(fused, batch_of(root))
    neighbours = torch.stack([(root.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)]).double()
    errors = (neighbours.square() - square.double()).abs()
    assert (errors.argmin(0) == 1).all()


def updated(tile, param, grad, *moments):
    fused = Fused(tile, lambda now: ())
    update_on_host(fused, PageBatch([param], [grad], tuple([m] for m in moments), zero.sgd(1.0).groups[0](1), 1.0))
    return param, *moments


def test_a_rule_may_choose_for_each_element_and_return_its_arguments():
    param, grad, mean = (torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    chosen = torch.where(param > 0, 1.0 - param, -grad)
    [result] = updated(lambda p, g, numbers: tl.where(p > 0, 1.0 - p, -g), param.clone(), grad.clone())
    assert torch.equal(result, chosen)
    results = updated(lambda p, g, numbers, m: (p - g, p), param.clone(), grad.clone(), mean.clone())
    assert all(map(torch.equal, results, (param - grad, param)))
    with pytest.raises(ConfigError, match=r"^the optimizer's rule branches on a tile\. Write tl\.where"):
        updated(lambda p, g, numbers: p if p > 0 else g, param, grad)


def rounded(lr, *, weight_decay=0.0, clip=None):
    """Make an optimizer whose rule calls a function that only Triton has."""
    fused = Fused(lambda param, gradient, numbers: tl.floor(param), lambda now: ())
    return make_transform("rounded", (), lambda batch: None, (), lr, {}, 0.0, clip, decay_matrices, (), fused=fused)


def test_a_function_that_only_a_gpu_has_is_one_line():
    with pytest.raises(ConfigError, match=r"^tl\.floor of the optimizer's rule exists on a GPU only\. Set offload"):
        update_on_host(rounded(1.0).fused, batch_of(torch.ones(64)))
