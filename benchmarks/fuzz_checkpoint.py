#!/usr/bin/env python3
"""Damage checkpoints in many ways, try to load them, and check that zero rejects every wrong one.

    benchmarks/fuzz_checkpoint.py --count 10000 --seed 1          a table; exit code 1 if a wrong one was loaded
    benchmarks/fuzz_checkpoint.py --only "lie: shape" --show      also print every message
    benchmarks/fuzz_checkpoint.py --foreign --count 1000          files of other libraries, 1,000 of each format

Each damaged checkpoint is opened and loaded by one rank, and by two. `refused`: an error of one line names it, and the
state is unchanged. `harmless`: it loaded with the right bits, because the damaged bytes do not matter. `silent`: it
loaded with wrong bits. `wrong`: another error than the right one. Case n has seed `--seed` + n, so it can be repeated.

Files of other libraries are imported. They have no hashes, so the damage is not in values, but in indexes, headers and
metadata. `harmless`: tensors that kept their names and shapes have their right values.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import zero  # noqa: E402, F401 - first: where nothing is installed it says what to type

from tests.checkpoint.test_damage import made, start_of  # noqa: E402 - found through the line above
from tests.formats.test_foreign import TREES, fuzzed, written  # noqa: E402

from tests.faults.damage import KINDS, Case, Verdict, cases, fuzz  # noqa: E402

OUTCOMES = ("refused", "harmless", "silent", "wrong")
WORLDS = (1, 2)
CHUNK = 500


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="how many damaged checkpoints to try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=13, help="width of the model; 300 gives files of several MiB")
    parser.add_argument("--only", choices=KINDS, help="one kind of damage")
    parser.add_argument("--foreign", action="store_true", help="import damaged files of other libraries")
    parser.add_argument("--show", action="store_true", help="print the message of every case")
    return parser.parse_args()


def verdicts_of(wanted: list[Case], width: int, folder: Path) -> list[Verdict]:
    """Return the worse verdict of the two worlds for each case."""
    by_world = [fuzz(size, start_of(width), folder, wanted) for size in WORLDS]
    return [max(both, key=lambda verdict: OUTCOMES.index(verdict.outcome)) for both in zip(*by_world, strict=True)]


def foreign(from_: str, options: argparse.Namespace, folder: Path) -> list[Verdict]:
    """Import damaged files of one format and return the verdicts."""
    good = written(from_, folder / "good")
    verdicts = []
    for seed in range(options.seed, options.seed + options.count):
        outcome, line = fuzzed(from_, seed, good, folder)
        verdicts.append(Verdict(seed, from_, "harmless" if outcome == "equal" else outcome, line))
    return verdicts


def table(verdicts: list[Verdict]) -> str:
    counts = Counter((verdict.kind, verdict.outcome) for verdict in verdicts)
    rows = [(damage, [counts[damage, outcome] for outcome in OUTCOMES]) for damage in (*KINDS, *TREES)]
    rows = [(damage, row) for damage, row in rows if any(row)]
    rows.append(("all", [sum(column) for column in zip(*(row for _, row in rows), strict=True)]))
    head = f"{'damage':<26}{'tried':>8}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES)
    return "\n".join([head, *(f"{damage:<26}{sum(row):>8}" + "".join(f"{n:>10}" for n in row) for damage, row in rows)])


def native(options: argparse.Namespace) -> list[Verdict]:
    """Load damaged checkpoints of this library and return the verdicts."""
    wanted = cases(options.count, options.seed)
    if options.only:
        wanted = [Case(case.seed, options.only) for case in wanted]
    verdicts: list[Verdict] = []
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made(folder, options.width)
        for at in range(0, len(wanted), CHUNK):
            verdicts += verdicts_of(wanted[at : at + CHUNK], options.width, folder)
            print(f"{len(verdicts)} of {len(wanted)}, {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    return verdicts


def main() -> int:
    options = arguments()
    verdicts: list[Verdict] = []
    if options.foreign:
        for from_ in TREES:
            with tempfile.TemporaryDirectory() as name:
                verdicts += foreign(from_, options, Path(name))
            print(f"{from_}: {options.count}", file=sys.stderr)
    else:
        verdicts = native(options)
    bad = [verdict for verdict in verdicts if verdict.outcome in ("silent", "wrong")]
    for verdict in verdicts if options.show else bad:
        print(f"{verdict.kind}, seed {verdict.seed}: {verdict.outcome}: {verdict.line}")
    print(table(verdicts))
    return 1 if bad else 0


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.exit(main())
