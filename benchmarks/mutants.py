#!/usr/bin/env python3
"""Break the engine, the checkpoints and the formats in 81 ways, and check that a test catches each fault.

    benchmarks/mutants.py                       # all: half an hour on two cores
    benchmarks/mutants.py --only crc,no_clip

benchmarks/mutants.toml has the faults. Each is made in a copy of the tree, where the tests that should catch it run.
Exit code 1 if a fault was missed, or if its text is no longer in the code.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 600
"""Seconds after which the tests of a fault count as failed: the fault makes them hang."""


def main() -> int:
    mutants = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", default=",".join(mutants), help="names with commas between")
    names = parser.parse_args().only.split(",")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        tree = Path(folder) / "tree"
        for name in ("zero", "tests", "conf", "benchmarks", "train.py", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            tree.mkdir(exist_ok=True)
            copy(ROOT / name, tree / name)
        for name in names:
            begin_s = time.perf_counter()
            result = outcome(tree, mutants[name])
            missed += result != "caught"
            print(f"{result:8} {time.perf_counter() - begin_s:4.0f} s  {name}: {mutants[name]['fault']}", flush=True)
    print(f"{len(names) - missed} of {len(names)} faults caught")
    return int(missed > 0)


def outcome(tree: Path, mutant: dict[str, Any]) -> str:
    """Return "caught", "missed", or why the tests could not say."""
    path = tree / mutant["file"]
    text = path.read_text()
    if text.count(mutant["old"]) != 1:
        return "no text"
    path.write_text(text.replace(mutant["old"], mutant["new"]))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", *mutant["tests"], "-k", mutant["k"]]
    try:
        code = subprocess.run(command, cwd=tree, capture_output=True, timeout=LIMIT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        return "caught"
    finally:
        path.write_text(text)
    return {0: "missed", 1: "caught"}.get(code, f"pytest {code}")


if __name__ == "__main__":
    sys.exit(main())
