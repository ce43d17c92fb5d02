"""A state is not made before each kernel of its steps is compiled: no step is the first to need one."""

import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

import zero
from tests.common.small import KiB, Setting, adamw_in_8bit, slice_of, small_batch
from tests.engine.test_coded import build
from tests.engine.test_fused import averaged_lion, on_gpu, signum
from tests.simulation import simulated_gpu
from zero.core.groups import decay_matrices
from zero.core.optim import Fused, make_transform
from zero.distributed.world import World
from zero.errors import MachineError
from zero.platform import tiles
from zero.testing import run_ranks

if TYPE_CHECKING:
    import triton.language as tl

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

Variant = tuple[Any, ...]


def variant_of(kernel: Any, args: tuple[Any, ...]) -> Variant:
    """Return the key of Triton's compilation: dtypes, whether addresses and numbers are multiples of 16, constants."""

    def of(parameter: Any, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return arg.dtype, parameter.do_not_specialize_on_alignment or arg.data_ptr() % 16 == 0
        if parameter.is_constexpr:
            return getattr(arg, "__name__", None) or getattr(getattr(arg, "fn", None), "__qualname__", arg)
        return None if parameter.do_not_specialize else (arg == 1, arg % 16 == 0)

    return kernel.fn.__name__, *map(of, kernel.params, args)


def variants(ranks: int, setting: Setting, **how: Any) -> tuple[set[Variant], set[Variant]]:
    """The variants of kernels that the start of a run launches, and those that two steps launch, on all ranks."""
    launched: tuple[set[Variant], set[Variant]] = (set(), set())
    started, run = threading.Barrier(ranks), InterpretedFunction.run
    stepping = threading.Event()

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        launched[stepping.is_set()].add(variant_of(getattr(tiles, self.fn.__name__), args))
        return run(self, *args, **options)

    def train(world: World) -> None:
        state, step = setting.start(world, build)
        started.wait()
        stepping.set()
        for number in range(2):
            batch = small_batch(number, 6 * world.size * setting.accumulate)
            state, _ = step(state, slice_of(batch, world, setting.accumulate))
        state.close()

    with simulated_gpu(fused=True), patch.object(InterpretedFunction, "run", noted):
        run_ranks(ranks, train, **how)
    return launched


SETTINGS = {
    "adamw": Setting(stage=3, clip=0.5),
    "8bit": Setting(stage=3, optimizer=adamw_in_8bit, precision="bf16", page_bytes=4 * KiB, frozen="nf4"),
    "offload": Setting(stage=3, optimizer=adamw_in_8bit, precision="bf16", offload=on_gpu("infinity"), frozen="int8"),
    "accumulate": Setting(stage=2, optimizer=averaged_lion, precision="fp16", accumulate=3),
    "own": Setting(stage=0, optimizer=signum, precision="bf16"),
    "host": Setting(stage=2, precision="bf16", offload=(("preset", "cpu"), ("compute", "host"))),
    "native": Setting(stage=1, precision="bf16", between=("world", "native")),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_needs_no_kernel_that_the_start_did_not(name, ranks):
    at_start, in_steps = variants(ranks, SETTINGS[name])
    assert in_steps <= at_start
    assert ("update" in {variant[0] for variant in in_steps}) == (name != "host")
    assert ("update" in {variant[0] for variant in at_start}) == (name != "host")


@pytest.mark.parametrize("setting", [Setting(between=("node", "node")), Setting(shard="node", precision="bf16")])
def test_sums_between_nodes_need_no_other_kernel(setting):
    at_start, in_steps = variants(4, setting, nodes=2)
    assert in_steps <= at_start
    assert {variant[-3] for variant in in_steps if variant[0] == "add"} == {2}


def broken(lr, *, weight_decay=0.0, clip=None):
    """Make an optimizer whose function for the kernel is wrong."""
    fused = Fused(tile, lambda now: (now.lr,))
    return make_transform("broken", (), lambda batch: None, (), lr, {}, 0.0, clip, decay_matrices, (), fused=fused)


def tile(param, gradient, numbers):
    return param - gradient * tl.no_such_function(numbers)


def test_a_kernel_that_does_not_compile_is_an_error_of_the_start():
    with simulated_gpu(fused=True), pytest.raises(MachineError, match=r"Triton: the kernel for updates by broken does"):
        Setting(stage=1, optimizer=broken).start(zero.open_world())
