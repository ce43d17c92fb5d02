"""torch's compiler is imported when it compiles, not when a function is only marked."""

import subprocess
import sys

from tests.conftest import LONG_S

CODE = """
import sys, torch
from torch.utils.checkpoint import checkpoint
from zero.platform.late_compiler import import_compiler_late

def imported(): return "torch._dynamo.eval_frame" in sys.modules

import_compiler_late()
x = torch.ones(2, requires_grad=True)
checkpoint(torch.exp, x, use_reentrant=False).sum().backward()
torch.compiler.disable(recursive=False)(abs)
print(imported(), torch.equal(x.grad, torch.exp(x)))
print(torch.compile(lambda y: y + 1, backend="eager")(torch.ones(1)).item(), imported())
"""


def test_a_recomputation_imports_no_compiler_and_compiling_does():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=LONG_S, check=True)
    assert done.stdout.split() == ["False", "True", "2.0", "True"]
