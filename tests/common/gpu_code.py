"""The machine code of the kernels for GPUs that this machine lacks, made by the programs in Triton's package."""

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import zero
from zero.core import fused
from zero.core.formats import PACKED_FORMATS
from zero.core.kept import Kept
from zero.core.layout import Layout
from zero.core.moments import permutation
from zero.core.optim import SQUARES, Transform
from zero.core.precision import Precision
from zero.engine.gather import expansion_numel
from zero.platform import kernels
from zero.platform.cuda import TILE_NUMEL

ARCHITECTURES = 80, 90, 100, 120
"""A100, H100, B200 and RTX 50."""

Run = Callable[..., None]
"""A function of (kernel, number of programs, *arguments of the kernel), as `zero.platform.kernels` has."""

PRECISIONS = {
    "fp32": Precision("fp32"),
    "bf16": Precision("bf16"),
    "bf16, whole master": Precision("bf16", master="whole"),
    "fp16": Precision("fp16"),
}
OPTIMIZERS: dict[str, Callable[[], Transform]] = {
    "adamw": lambda: zero.adamw(1e-3),
    "adam": lambda: zero.adam(1e-3),
    "sgd": lambda: zero.sgd(1e-3),
    "momentum": lambda: zero.sgd(1e-3, momentum=0.9),
    "nesterov": lambda: zero.sgd(1e-3, momentum=0.9, nesterov=True),
    "lion": lambda: zero.lion(1e-3),
    "adagrad": lambda: zero.adagrad(1e-3),
    "averaged adamw": lambda: zero.with_ema(zero.adamw(1e-3)),
}
NUMEL = 2**16
CPU = torch.device("cpu")


class Code(NamedTuple):
    """One compiled kernel.

    Attributes:
        instructions: of the machine code, without padding.
        registers: of a thread.
        local_bytes: of a thread in local memory: arrays and spilled registers.
        accesses: "ld" or "st" and the bits that a thread loads from or stores to global memory at once -> instructions.
    """

    ptx: str
    instructions: int
    registers: int
    local_bytes: int
    accesses: Counter[tuple[str, int]]

    def bits(self, access: str) -> dict[int, int]:
        """Return the widths of the loads or stores, in bits -> the number of instructions."""
        return {bits: count for (name, bits), count in sorted(self.accesses.items()) if name == access}


class _Absent:
    """A driver of Triton for a GPU that is absent: kernels are compiled and not launched."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return self._architecture  # kernels are kept for each device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _absent(architecture: int) -> Iterator[None]:
    before = driver._active
    driver.set_active(_Absent(architecture))
    try:
        yield
    finally:
        driver._active = before


def code_of(call: Callable[[Run], object], architecture: int) -> Code:
    """Compile the kernel that `call` launches, with the specializations that Triton chooses for these arguments."""
    codes: list[Code] = []

    def compile(kernel: Any, programs: int, *args: Any) -> None:
        made = kernel.warmup(*args, grid=(programs,), enable_fp_fusion=False)
        codes.append(_code(made.asm["ptx"], made.asm["cubin"]))

    with _absent(architecture):
        call(compile)
    [code] = codes
    return code


def _code(ptx: str, cubin: bytes) -> Code:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        used, listing = (
            subprocess.run(
                [knobs.nvidia.cuobjdump.path, option, path], check=True, capture_output=True, text=True
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    [[registers, stack, local]] = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", used)
    operations = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?([\w.]+)", listing, re.MULTILINE)
    accesses = Counter(filter(None, map(_access, operations)))
    count = sum(operation != "NOP" for operation in operations)
    return Code(ptx, count, int(registers), int(stack) + int(local), accesses)


def _access(operation: str) -> tuple[str, int] | None:
    """Return what an instruction loads or stores; None if it is neither. Its name has a size unless that is 32 bits."""
    name, *parts = operation.split(".")
    if name not in ("LDG", "STG"):
        return None
    sizes = [int(size) for part in parts for size in re.findall(r"^[US]?(8|16|64|128|256)$", part)]
    return ("ld" if name == "LDG" else "st", sizes[0] if sizes else 32)


def update(
    optimizer: str, precision: str, moments: str, grad: torch.dtype = torch.float32, offset: int = 0
) -> Callable[[Run], None]:
    """Return a function that updates a piece.

    Args:
        offset: the number of elements before each moment in its memory.
    """
    transform, chosen = zero.with_moments(OPTIMIZERS[optimizer](), moments), PRECISIONS[precision]
    kept, rule = Kept(chosen.master, transform.forms(transform.moments)), transform.fused
    assert rule is not None
    pages = [torch.zeros(kept.numel(kind, NUMEL) + offset, dtype=dtype)[offset:] for kind, dtype in kept.dtypes.items()]
    numbers = fused.numbers(rule, transform.hyper_at(1, 3.0))
    layout = Layout.of({"x": (NUMEL,)}, world_size=1)
    tables = *fused.tables(layout, 0, NUMEL, TILE_NUMEL), numbers, permutation(CPU) if kept.draws else numbers
    keys, squares = [fused.signed(key) for key in kept.keys(1)], [moment == SQUARES for moment in kept.moments]

    def call(run: Run) -> None:
        param, gradient = torch.zeros(NUMEL, dtype=chosen.compute), torch.zeros(NUMEL, dtype=grad)
        averages = rule.average is not None
        kernels._run_update(run, param, pages, gradient, tables, keys, squares, averages, rule.rule, TILE_NUMEL)

    return call


def expand(name: str, dtype: torch.dtype, numel: int) -> Callable[[Run], None]:
    """Return a function that expands a parameter of `numel` values."""
    form = PACKED_FORMATS[name]
    codes = torch.zeros(form.nbytes(numel), dtype=torch.uint8)
    stored, values = (Layout.of({"x": (count,)}, world_size=1) for count in (codes.numel(), numel))
    tables = [*fused.expansion(stored, values, expansion_numel(TILE_NUMEL)), *form.tables(CPU)]
    return lambda run: kernels._run_expand(
        run, torch.zeros(values.P, dtype=dtype), codes, tables, form.rule, expansion_numel(TILE_NUMEL)
    )


def add(ranks: int, dtype: torch.dtype, accumulate: bool) -> Callable[[Run], None]:
    """Return a function that adds the chunks of some ranks."""
    received = torch.zeros(ranks, NUMEL, dtype=dtype)
    total: Tensor = torch.zeros(NUMEL)
    return lambda run: kernels._run_add(run, total, received, received[0], 0, accumulate, TILE_NUMEL)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_UPDATES = [("adamw", "bf16", "fp32"), ("adamw", "bf16", "8bit"), ("adamw", "bf16", "bf16")]
_UPDATES += [("adamw", precision, "8bit") for precision in PRECISIONS if precision != "bf16"]
_UPDATES += [(name, "bf16", "8bit") for name in OPTIMIZERS if name != "adamw"]
UPDATES = {f"{name}, {precision}, moments {kind}": update(name, precision, kind) for name, precision, kind in _UPDATES}
EXPANSIONS = {f"{form} to {name}": expand(form, DTYPES[name], 1_000_003) for form in PACKED_FORMATS for name in DTYPES}
SUMS = {f"sum of {ranks} ranks in bf16": add(ranks, torch.bfloat16, ranks > 2) for ranks in (2, 8)}
