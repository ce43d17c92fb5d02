#!/usr/bin/env python
"""Compile the kernels for GPUs, which needs none, and print the instructions, registers and accesses of each thread.

    benchmarks/kernels.py --architectures 90

A thread has eight parameters of an update or sum, and 16 values of an expansion. Instructions are those of the machine
code, of which a thread skips the slow paths of roots and divisions.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", type=int, nargs="+", default=[80, 90, 100, 120])
    parser.add_argument("--only", default="", help="a part of the kernels' names")
    options = parser.parse_args()
    from tests.common.gpu_code import EXPANSIONS, SUMS, UPDATES, code_of

    print("| kernel | sm | instructions | registers | local bytes | loads of bits | stores of bits |")
    print("|---|" + "---:|" * 6)
    for name, call in (UPDATES | EXPANSIONS | SUMS).items():
        for architecture in options.architectures if options.only in name else ():
            code = code_of(call, architecture)
            accesses = (
                ", ".join(f"{count} of {bits}" for bits, count in code.bits(access).items()) for access in ("ld", "st")
            )
            figures = name, architecture, code.instructions, code.registers, code.local_bytes, *accesses
            print("|", " | ".join(map(str, figures)), "|", flush=True)


if __name__ == "__main__":
    main()
