"""`scripts/gpu`: its dry run, what is left of it when something hangs, crashes or is killed, and its page.

What only a GPU can say is not here: the doors are the same code with a simulated one behind them.
"""

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import LONG_S

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "gpu"
PARTS = str(ROOT / "benchmarks")
sys.path.append(PARTS)

from gpu_parts.page import HEADING, NONE_YET, page, row_text  # noqa: E402 - found through the line above

Results = dict[str, Any]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    completed = subprocess.run(
        command, capture_output=True, text=True, timeout=LONG_S, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed


def rows(results: Results, kind: str) -> list[dict[str, Any]]:
    return [row for task in results["tasks"] for row in task.get("rows", []) if row["kind"] == kind]


# -- a dry run ---------------------------------------------------------------------------------------------------------


def every_part_ends_well_and_says_nothing_of_an_error(results: Results, folder: Path) -> None:
    ends = {f"{task['part']} {task['name']}": task["status"] for task in results["tasks"]}
    assert set(ends.values()) == {"done"}, (ends, (folder / "log.txt").read_text()[-3000:])
    assert {task["part"] for task in results["tasks"]} == {1, 2, 3, 4, 5, 6}
    assert not [row for task in results["tasks"] for row in task["rows"] if "error" in row]
    assert results["simulated"]


def all_ways_to_train_have_the_same_bits(results: Results, folder: Path) -> None:
    digests = rows(results, "digest")
    assert all(row["equal"] for row in digests)
    families = Counter((row["precision"], row["family"]) for row in digests)
    assert {precision for precision, _ in families} == {"fp32", "bf16", "fp16"}
    assert families["bf16", ""] >= 15
    assert families["bf16", "compiled"] >= 3
    for reduce in ("exact", "native"):
        assert families["bf16", f"2 ranks, {reduce} sums"] == 9
    alone = ("plain torch", "masks: documents", "masks: a window", "masks: a cap")
    bounds = [(row["precision"], row["reference"], row["ranks"]) for row in rows(results, "bound") if row["holds"]]
    assert bounds == [
        *((precision, reference, 1) for precision in ("fp32", "bf16", "fp16") for reference in alone),
        *(("bf16", reference, 2) for reference in ("plain torch", "exact sums")),
    ]


def every_system_takes_its_turns_and_is_looked_into(results: Results, folder: Path) -> None:
    for model, systems in (("tiny", 7), ("tiny on 2 GPUs", 5)):
        timed = Counter(row["system"] for row in rows(results, "speed") if row["model"] == model)
        assert len(timed) == systems
        assert len(set(timed.values())) == 1, "as often as each other"
        inside = {row["system"]: row for row in rows(results, "step") if row["model"] == model}
        assert set(inside) == set(timed)
        assert all(row["launches"] > 0 for row in inside.values())
    ahead, late = (inside[f"stage 3{name}"]["shares"]["gather"] for name in ("", ", prefetch=0"))
    assert ahead[0] > 0
    assert late[0] > 0
    steps = {row["system"]: row for row in rows(results, "step") if row["model"] == "tiny"}
    assert "page in" in steps["stage 3, nvme"]["shares"]
    assert steps["FSDP2"]["waits"] is None, "not on a simulated GPU"


def the_largest_lies_on_every_tier(results: Results, folder: Path) -> None:
    forecast = rows(results, "forecast")[-1]
    assert all(forecast["bytes"][tier] > 0 for tier in ("device", "host", "nvme"))
    assert forecast["step_s"] > 0
    assert len([row for row in rows(results, "largest") if row["model"] == forecast["model"]]) == 2


def ranks_that_fail_are_named(results: Results, folder: Path) -> None:
    ends = {(row["case"], row["rank"]): row["end"] for row in rows(results, "failure")}
    assert ends["rank 1 is killed", 1] == "killed by SIGKILL"
    assert ends["rank 1 is killed", 0].startswith("failed: RankFailedError: rank 0 lost rank 1 in ")
    for rank in range(2):
        assert ends["rank 1 skips a collective", rank] == (
            "failed: WorldError: the ranks run different operations: gather of unit 0, 8 elements of torch.float32 on "
            "rank 0; gather of unit 1, 8 elements of torch.float32 on rank 1"
        )


def collectives_have_a_rate(results: Results, folder: Path) -> None:
    rates = {row["what"]: row["rate"] for row in rows(results, "collective")}
    assert set(rates) == {"gather, bf16", "exact sum of bf16", "native sum of bf16", "native sum of fp32"}
    assert all(rate > 0 for rate in rates.values())


def traces_are_small_files_that_a_viewer_opens(results: Results, folder: Path) -> None:
    names = [name for row in rows(results, "exposed") for name in row["files"]]
    assert len(names) == 4
    for name in names:
        with gzip.open(folder / name) as file:
            assert json.load(file)["traceEvents"]
    left = [path for path in folder.rglob("*") if path.is_file()]
    assert len(left) <= 8, "as many as a machine that is lent may give back"
    assert not [path for path in folder.iterdir() if path.is_dir()], "nothing of what slept on the disk"


# -- the page ----------------------------------------------------------------------------------------------------------


def the_page_is_made_from_the_json_alone(results: Results, folder: Path) -> None:
    made = run(SCRIPT, "--page", folder / "gpu.json").stdout
    assert made == (folder / "gpu.md").read_text() == page(results)
    assert made.startswith(f"{HEADING}\n\nNothing of this ran on a GPU")
    for title in ("The machine", "The laws", "Speed", "The largest", "One step", "Several GPUs", "How the parts ended"):
        assert f"### {title}" in made
    for line in made.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def there_is_a_page_of_whatever_was_told(results: Results, folder: Path) -> None:
    """A run that is cut short anywhere."""
    for number, task in enumerate(results["tasks"]):
        cut = deepcopy(results)
        for later in cut["tasks"][number:]:
            later.update(status="not begun", rows=[])
        for count in range(len(task["rows"])):
            cut["tasks"][number].update(status="cut after 3 s, its limit", rows=task["rows"][:count])
            assert "cut after 3 s" in page(cut)
    for task in results["tasks"]:
        assert all(row_text(row) for row in task["rows"])


@pytest.mark.slow
def test_a_dry_run_from_its_beginning_to_its_page(tmp_path):
    """One run, looked at from all sides."""
    run(SCRIPT, "--dry", "--out", tmp_path)
    results = json.loads((tmp_path / "gpu.json").read_text())
    every_part_ends_well_and_says_nothing_of_an_error(results, tmp_path)
    all_ways_to_train_have_the_same_bits(results, tmp_path)
    every_system_takes_its_turns_and_is_looked_into(results, tmp_path)
    the_largest_lies_on_every_tier(results, tmp_path)
    traces_are_small_files_that_a_viewer_opens(results, tmp_path)
    collectives_have_a_rate(results, tmp_path)
    ranks_that_fail_are_named(results, tmp_path)
    the_page_is_made_from_the_json_alone(results, tmp_path)
    there_is_a_page_of_whatever_was_told(results, tmp_path)


def test_a_page_shows_what_only_a_gpu_can_say():
    speed = {"kind": "speed", "model": "1B", "round": 0, "tokens": 1000, "plan_bytes": 2**30, "flops": 4e13}
    speed |= {"peak_bytes": 3 * 2**29, "peak_flops": 1e15}
    bound = {"kind": "bound", "precision": "fp32", "reference": "plain torch", "ranks": 1, "steps": 8, "bound": 1e-5}
    given = [
        {"kind": "fact", "what": "GPU", "value": "NVIDIA H200"},
        {"kind": "rate", "what": "a way that is shut", "unit": "GB/s", "error": "RuntimeError: no"},
        {"kind": "digest", "precision": "bf16", "family": "", "case": "nvme", "digest": "abc", "equal": False},
        {**bound, "loss": 1e-3, "norm": 0.0, "holds": False},
        {"kind": "hazards", "case": "cpu", "found": 2, "texts": ["2 x write by aten::copy_"]},
        {"kind": "model", "model": "1B", "parameters": 10**9, "activations": "keep", "seq": 10},
        {**speed, "system": "forward and backward", "step_s": [0.1]},
        {**speed, "system": "FSDP2", "step_s": [0.2]},
        {**speed, "system": "stage 3", "step_s": [0.15, 0.17, 0.16]},
        {"kind": "speed", "model": "1B", "system": "stage 3, cpu", "round": 0, "error": "OutOfMemoryError: CUDA"},
        {"kind": "forecast", "model": "14B", "parameters": 14 * 10**9, "tokens": 5, "error": "ConfigError: too little"},
    ]
    made = page({"tasks": [{"part": 1, "name": "all", "status": "done", "rows": given}]})
    assert "NVIDIA H200. One rank, unless" in made
    assert "| a way that is shut | RuntimeError: no |" in made
    assert "| bf16 |  | 1 | 0 | nvme: abc |" in made
    assert "**does not**" in made
    assert "2 x write by aten::copy_" in made
    assert "| stage 3 | 160.0 (150.0 to 170.0) | 6,250 | 25.0% | 1.60 | 0.80 | 1.50 | 1.00 |" in made
    assert "stage 3, cpu: OutOfMemoryError: CUDA" in made
    assert "ConfigError: too little" in made
    assert "dry run" not in made


def section() -> str:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    begin = text.index(f"{HEADING}\n")
    end = text.find("\n## ", begin)
    return text[begin : len(text) if end < 0 else end + 1].strip() + "\n"


def test_documentation_and_readme_say_what_has_been_seen_of_a_gpu():
    """`docs/gpu.json` is what a run on one left; without it both say that there was none."""
    readme, seen = (ROOT / "README.md").read_text(), ROOT / "docs" / "gpu.json"
    if seen.exists():
        results = json.loads(seen.read_text())
        assert not results["simulated"], "a dry run has seen no GPU"
        assert section() == page(results), "scripts/gpu --page docs/gpu.json prints the section"
        assert "No GPU has run it yet" not in readme
        assert "docs/benchmarks.md#on-a-gpu" in readme
    else:
        assert section() == f"{HEADING}\n\n{NONE_YET}\n"
        assert "No GPU has run it yet" in readme


# -- what is left when something goes wrong ----------------------------------------------------------------------------

BROKEN = """
import os, signal, sys, threading
from pathlib import Path
from gpu_parts.page import page
from gpu_parts.run import Budget, Ledger, Task, run_all

def hang(emit, budget):
    emit({"kind": "note", "text": "before it hung"})
    threading.Event().wait()

def crash(emit, budget):
    emit({"kind": "note", "text": "before it crashed"})
    os.kill(os.getpid(), signal.SIGSEGV)

def fail(emit, budget):
    emit({"kind": "note", "text": "before it failed"})
    raise ValueError("wrong\\nby far")

def leave(emit, budget):
    os._exit(3)

def well(emit, budget):
    emit({"kind": "note", "text": f"{budget.limit_s:.0f}"})

tasks = [Task(1, "hang", 3.2, hang), Task(2, "crash", 10, crash), Task(3, "fail", 10, fail),
         Task(3, "leave", 10, leave), Task(4, "well", 10, well), Task(5, "lacks", 10, well, ("torch", "zlib_ng")),
         Task(5, "last", 1, well)]
out = Path(sys.argv[1])
ledger = Ledger(out, {"simulated": True}, tasks, page)
run_all(tasks, ledger, Budget(54.2), log=out / "log.txt", missing=["zlib_ng"])
"""


def test_a_task_that_hangs_or_crashes_costs_only_itself(tmp_path):
    program = tmp_path / "broken.py"
    program.write_text(f"import sys\nsys.path.append({PARTS!r})\n{BROKEN}")
    printed = run(program, tmp_path / "out").stdout
    results = json.loads((tmp_path / "out" / "gpu.json").read_text())
    ends = {task["name"]: task["status"] for task in results["tasks"]}
    assert ends["hang"].startswith("cut after 3 s")
    assert ends["crash"] == "killed by SIGSEGV"
    assert ends["fail"] == "failed: ValueError: wrong"
    assert ends["leave"] == "ended with 3"
    assert ends["well"] == ends["last"] == "done"
    assert ends["lacks"] == "skipped: this Python has no zlib_ng"
    notes = [row["text"] for row in rows(results, "note")]
    assert notes[:3] == ["before it hung", "before it crashed", "before it failed"]
    assert int(notes[3]) > 10, "what the others left of their time went to those after them"
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "in hang" in log, "where it hung"
    assert "Segmentation fault" in log
    assert "part 2, crash: killed by SIGSEGV" in printed
    assert "killed by SIGSEGV" in (tmp_path / "out" / "gpu.md").read_text()


def test_a_run_that_is_killed_leaves_the_parts_that_it_had(tmp_path):
    command = [sys.executable, str(SCRIPT), "--dry", "--parts", "1,2", "--out", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as child:
        assert child.stdout is not None
        try:
            assert any(line.startswith("part 1, the machine: done") for line in child.stdout)
        finally:
            child.kill()
    results = json.loads((tmp_path / "gpu.json").read_text())
    first, second = results["tasks"][:2]
    assert first["status"] == "done"
    assert rows({"tasks": [first]}, "rate")
    assert second["status"] in ("running", "not begun")
    assert "running" in page(results) or "not begun" in page(results)


def test_processes_that_are_not_forked_do_the_same(tmp_path):
    printed = run(SCRIPT, "--dry", "--start", "spawn", "--parts", "1,5", "--out", tmp_path).stdout
    assert "part 1, the machine: done" in printed
    assert "part 5, trace: done" in printed


NO_CUDA = """
import importlib, importlib.machinery, importlib.util, sys
import torch

def refuse(*args, **more):
    raise SystemExit("CUDA was used before the fork")

for name in ("is_available", "device_count", "_lazy_init", "init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, refuse)
loader = importlib.machinery.SourceFileLoader("gpu", sys.argv[1])
script = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu", loader))
loader.exec_module(script)
assert script.missing() == []
assert "gpu_parts.largest" in sys.modules
print("no call of CUDA")
"""


def test_cuda_is_not_initialized_before_processes_are_forked():
    """A forked process could not use the GPU then."""
    assert "no call of CUDA" in run("-c", NO_CUDA, SCRIPT).stdout


def test_works_forked_says_whether_a_forked_process_succeeds():
    program = (
        f"import sys; sys.path.append({PARTS!r}); from gpu_parts.run import works_forked\n"
        "print(works_forked(int), works_forked(lambda: 1 / 0))"
    )
    assert run("-c", program).stdout == "True False\n"


def test_a_machine_without_a_gpu_is_refused(tmp_path):
    completed = subprocess.run(
        [sys.executable, SCRIPT, "--out", tmp_path], env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=LONG_S, check=False,
    )  # fmt: skip
    assert completed.returncode == 1
    assert "finds no GPU. Use --dry to simulate one." in completed.stderr


def test_a_part_that_does_not_exist_is_refused(tmp_path):
    completed = subprocess.run(
        [sys.executable, SCRIPT, "--parts", "7", "--out", tmp_path],
        capture_output=True, text=True, timeout=LONG_S, check=False,
    )  # fmt: skip
    assert completed.returncode == 1
    assert "choose from 1 to 6" in completed.stderr


ONE_GPU = """
import importlib.machinery, importlib.util, sys
import torch

torch.cuda.device_count = lambda: 1
loader = importlib.machinery.SourceFileLoader("gpu", sys.argv.pop(1))
script = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu", loader))
loader.exec_module(script)
sys.exit(script.main())
"""


def test_one_gpu_skips_the_part_of_several(tmp_path):
    printed = run("-c", ONE_GPU, SCRIPT, "--parts", "6", "--start", "fork", "--out", tmp_path).stdout
    assert "part 6 is skipped: it needs two GPUs or more" in printed
    assert json.loads((tmp_path / "gpu.json").read_text())["tasks"] == []


def test_a_finding_of_the_sanitizer_names_the_lines_of_the_library():
    from gpu_parts.devices import _hazard_text

    def access(kind: str, line: int) -> SimpleNamespace:
        frames = [
            SimpleNamespace(filename=name, lineno=line)
            for name in (str(ROOT / "zero" / "engine" / "update.py"), "/x/torch/autograd.py")
        ]
        return SimpleNamespace(type=SimpleNamespace(name=kind), operator="aten::copy_(Tensor self)", stack_trace=frames)

    error = SimpleNamespace(current_access=access("WRITE", 7), previous_access=access("READ", 3))
    here = "by aten::copy_ at zero/engine/update.py"
    expected = f"write {here}:7, and no wait after read {here}:3"
    assert _hazard_text(error) == expected
