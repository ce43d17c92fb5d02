#!/usr/bin/env python
"""Compare the time of a step that mode=plan predicts with the time that steps really take on this machine.

    benchmarks/step_time.py                                     a list of models and settings
    benchmarks/step_time.py --rounds 1 --only model=gpt_nano    those whose words contain this
    benchmarks/step_time.py model=gpt_124m precision=bf16       these settings alone

Predictions and runs take turns, each in a process of its own, and the medians are compared. A CPU that others use too
makes a step longer than its own work. So beside the quickest and the median step stands how long the thread that trains
computed, or with several ranks all threads of one (`own`). The ratio is the prediction divided by that time where ranks
have one thread each, as they have by default; by the quickest step where there are more, because threads that wait for
one another count as computing; and by the longer of the two where a step waits for a disk or for other ranks.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero.trainer.config import Config

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SMALL = "model=gpt_124m model.seq=512 batch.global=2"
MIDDLE = "model=gpt_340m model.seq=512 batch.global=1"
LARGE = "model=gpt_1b model.seq=256 batch.global=1"
CASES = (
    "model=gpt_nano",
    "model=gpt_nano precision=bf16",
    SMALL,
    f"{SMALL} precision=bf16",
    f"{SMALL} precision=bf16 zero.stage=1",
    f"{SMALL} precision=bf16 zero.activations=remat",
    f"{SMALL} precision=bf16 batch.accumulate=2",
    f"{SMALL} precision=bf16 offload=nvme",
    f"{SMALL} precision=bf16 offload=infinity",
    f"{SMALL} precision=bf16 launch.ranks=2",
    f"{MIDDLE} precision=bf16",
    f"{MIDDLE} precision=bf16 offload=nvme",
    f"{LARGE} precision=bf16 offload=nvme",
    f"{LARGE} precision=bf16 offload=infinity zero.activations=remat launch.malloc=lean",
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="words of a command line of train.py; default: a list of cases")
    parser.add_argument("--only", default="", help="of that list the cases that contain this")
    parser.add_argument("--rounds", type=int, default=2, help="predictions, and runs")
    parser.add_argument("--steps", type=int, default=4, help="of a run, the first of which does not count")
    parser.add_argument("--threads", default="1", help="of a rank, or auto")
    parser.add_argument("--folder", default=None, help="folder for offload files; default: a temporary one")
    parser.add_argument("--child", choices=("predict", "run"), help=argparse.SUPPRESS)
    return parser.parse_args()


def predict(words: list[str]) -> None:
    """Print the prediction for exactly these settings."""
    from zero.core.stage import Stage
    from zero.trainer import launch
    from zero.trainer.compose import compose, settings_in
    from zero.trainer.config import read
    from zero.trainer.planning import ActivationTraces, Machine, choices
    from zero.trainer.planning.choices import largest
    from zero.trainer.planning.probes import measured_rates
    from zero.trainer.run.task import build_task

    config = read(settings_in(compose(words)))
    launch_settings = config.launch
    ranks = 1 if launch_settings.ranks == "auto" else launch_settings.ranks
    with launch.set_up(launch.ProcessSettings(Path(), launch_settings.threads, launch_settings.malloc), ranks=ranks):
        machine = Machine.described(config)
        activations = ActivationTraces(config, build_task(config).model)
        begin_s = time.perf_counter()
        rates = measured_rates(
            config, machine, largest(config, machine, activations), disk="nvme" in config.offload.kinds
        )
        probe_s = time.perf_counter() - begin_s
        assert config.zero.stage != "auto"
        (choice,) = choices(
            config, machine, activations, rates, stages=[Stage(config.zero.stage)], presets=["config"],
        )  # fmt: skip
    print(json.dumps({"step_s": choice.seconds, "probe_s": probe_s, "rates": rates.source}))


def run(words: list[str], folder: str) -> None:
    """Train with these settings. Each step writes a line: its time, and the CPU time of the thread that trains."""
    from zero.trainer import cli

    sys.exit(cli.main([*words, f"hydra.run.dir={folder}"], timed_train))


def timed_train(config: "Config", folder: Path) -> object:
    """Call `train` of train.py with a step that is timed."""
    from train import train
    import zero

    make_step = zero.make_step

    def timed(*args: object, **kwargs: object) -> object:
        step = make_step(*args, **kwargs)  # type: ignore[arg-type]

        def call(*inputs: object) -> object:
            clock = time.thread_time if os.environ["WORLD_SIZE"] == "1" else time.process_time
            begin_s, own_s = time.perf_counter(), clock()
            made = step(*inputs)  # type: ignore[arg-type]
            line = {"wall_s": time.perf_counter() - begin_s, "own_s": clock() - own_s}
            with open(folder / f"times-{os.environ.get('RANK', '0')}.jsonl", "a", encoding="utf-8") as lines:
                print(json.dumps(line), file=lines)
            return made

        return call

    zero.make_step = timed  # type: ignore[assignment]
    return train(config, folder)


def child(part: str, words: list[str], folder: str) -> str:
    ranks = next((word.split("=")[1] for word in words if word.startswith("launch.ranks=")), "1")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", ranks] if part == "run" else []
    if part == "run":
        words = [word for word in words if not word.startswith("launch.ranks=")]
    command = [sys.executable, *torchrun, __file__, "--child", part, "--folder", folder, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def compare(case: str, options: argparse.Namespace, folder: Path) -> None:
    words = [*case.split(), f"launch.threads={options.threads}", f"offload.path={folder}", "data=synthetic"]
    words += [f"steps={options.steps}", "val.every=0", "val.rows=1", "sample.tokens=0"]
    predicted, walls, owns = [], [], []
    for number in range(options.rounds):
        prediction = json.loads(child("predict", words, str(folder)).splitlines()[-1])
        predicted.append(prediction["step_s"])
        runs = folder / f"run-{len(list(folder.iterdir()))}-{number}"
        child("run", words, str(runs))
        for path in runs.glob("times-*.jsonl"):
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][1:]
            walls += [line["wall_s"] for line in lines]
            owns += [line["own_s"] for line in lines]
    forecast, own_s, wall_s = statistics.median(predicted), statistics.median(owns), statistics.median(walls)
    really_s = min(walls)
    if options.threads == "1":
        waits = any(word in case for word in ("nvme", "infinity", "ranks"))
        really_s = max(own_s, really_s) if waits else own_s
    numbers = "".join(f"{seconds:>10.3f}" for seconds in (forecast, own_s, min(walls), wall_s))
    print(f"{numbers}{forecast / really_s:>8.2f}  {case}", flush=True)
    print(f"    {prediction['rates']}; probe {prediction['probe_s']:.1f} s", file=sys.stderr, flush=True)


def main() -> int:
    options = arguments()
    if options.child == "predict":
        predict(options.settings)
        return 0
    if options.child == "run":
        run(options.settings, options.folder)
    cases = [" ".join(options.settings)] if options.settings else [case for case in CASES if options.only in case]
    print(f"{'predicted':>10}{'own':>10}{'quickest':>10}{'median':>10}{'ratio':>8}  settings (seconds a step)")
    for case in cases:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            compare(case, options, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
