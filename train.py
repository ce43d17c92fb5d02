"""Train a model under ZeRO: a whole run, from settings to summary.

    python train.py                                     one process
    python train.py zero.stage=3 launch.ranks=2         two processes on this machine
    python train.py -m zero.stage=0,1,2,3               one run after another, and a table of them
    python train.py mode=plan model=gpt_7b              what it would take, and what fits
    python train.py ds_config=ds_config.json            settings of a DeepSpeed JSON; other words replace its own
    torchrun --nproc-per-node 2 train.py zero.stage=3   ranks started by someone else

Every rank runs `train`. `zero/trainer/cli.py` reads the command line, and `zero/trainer/job.py` starts the ranks.
Options are in conf/, explained in docs/config.md. A run writes runs/<date>/<time>/. Installed, this is `zero-train`.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

try:
    from zero.trainer import cli, job, launch
    from zero.trainer.config import Config
except KeyboardInterrupt:  # nothing has begun
    sys.exit(130)

if TYPE_CHECKING:
    from zero.tracker.meter import Summary


def train(config: Config, folder: Path) -> "Summary":
    """Train as one rank of the world that the environment describes.

    Args:
        config: the settings of the run, the same on every rank.
        folder: where rank 0 writes config.yaml, metrics.jsonl, summary.json and report.html.

    Raises:
        ZeroError: see `zero/errors.py`.
    """
    import torch  # here, so that a rejected command line does not wait for it

    import zero
    from zero.engine.replay import check_replay
    from zero.engine.retry import Retry
    from zero.platform.installed import from_here
    from zero.tracker import open_tracker
    from zero.trainer.planning import ActivationTraces, plan_of_run, predictor, resolve_auto
    from zero.trainer.run.loop import Run
    from zero.trainer.run.lowered import lower_at_next_start, make_moves
    from zero.trainer.run.out_of_memory import out_of_memory_explained
    from zero.trainer.run.resume import find, resumed
    from zero.trainer.run.rows_of_run import open_rows
    from zero.trainer.run.task import build_task

    if config.deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports torch's compiler
        torch.use_deterministic_algorithms(config.deterministic)
    torch.set_float32_matmul_precision(config.precision.matmul)
    with (
        zero.open_world(config.launch.timeout, config.launch.asked_device()) as world,
        open_tracker(config.tracker, folder if world.rank == 0 else None, steps=config.steps) as tracker,
    ):
        task = build_task(config, world)  # the model, without memory, and its loss
        config, data = open_rows(config, world, tracker)
        activations = ActivationTraces(config, task.model)  # traced once, for what is auto and for the plan
        config, predicted_s, micro = resolve_auto(config, activations, world, tracker)
        if world.rank == 0:
            job.write_config(config, folder)
        check_replay(config.debug.replay, world, "debug.replay")
        tracker.waiting("the plan and its memory")
        plan = plan_of_run(config, world, activations)
        data_line = f"data {config.data.name}, digest {data.digest[:12]}{data.about}"
        tracker.note(f"{plan}\n{data_line}\nfolder {from_here(folder)}")
        checkpoint = find(config, world, folder, tracker, restarts=launch.restart_count())
        with (
            out_of_memory_explained(config, plan),
            lower_at_next_start(plan, folder, config.launch.max_restarts),
            closing(zero.open_store(plan, progress=tracker.progress)) as store,
        ):
            tracker.waiting("the first values")
            for line in task.notes if checkpoint is None else ():
                tracker.note(line)
            state = zero.init(plan, store, seed=config.seed, weights=task.weights, progress=tracker.progress)
            state = make_moves(resumed(state, checkpoint, config, tracker), folder, tracker)
            with Run(config, state, task, data, tracker, folder, checkpoint, predicted_s) as run:
                retry = Retry(run.note_move, predictor(config, plan, activations), micro)
                step = zero.make_step(plan, task.loss, flag=run.flag, replay=config.debug.replay, retry=retry)
                for number in run.steps():
                    with run.recorded(number):
                        state, metrics = step(state, run.microbatches())
                    run.after(state, metrics)
                return run.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    return cli.main(sys.argv[1:] if arguments is None else arguments, train)


if __name__ == "__main__":
    sys.exit(main())
