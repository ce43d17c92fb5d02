"""No public call draws from a global generator or seeds it; loading a checkpoint sets those that it saved.

A script that calls the library goes through the same random numbers as without it: its augmentations, dropout and
shuffling do not depend on what the library imports, prints or saves.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

from tests.conftest import LONG_S

CONFIG = {
    "train_batch_size": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
    "zero_optimization": {"stage": 3},
    "steps_per_print": 1,
    "tensorboard": {"enabled": True},
}

RETURNED = {"Engine", "Metrics", "State", "Timeline", "World", "ZeroError"}
"""Classes of what the calls return or raise."""


def test_no_public_call_draws_from_a_global_generator_or_seeds_it(tmp_path: Path):
    """The calls run in a process of their own, because the first call of a function imports its modules."""
    subprocess.run([sys.executable, "-m", "tests.test_generators", tmp_path], check=True, timeout=LONG_S)


def generators() -> dict[str, Any]:
    """Return the states of the global generators as comparable values."""
    import random

    import numpy
    import torch

    name, words, *rest = numpy.random.get_state()
    states = {
        "random": random.getstate(),
        "numpy": (name, bytes(words), *rest),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available():
        states["cuda"] = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return states


@contextmanager
def unmoved(call: str) -> Iterator[None]:
    """The body leaves every global generator as it was."""
    before = generators()
    yield
    moved = [name for name, state in generators().items() if state != before[name]]
    assert not moved, f"{call} moves {', '.join(moved)}"


def model() -> Any:
    """A model whose constructor draws nothing."""
    import torch
    from torch import nn

    linear = [torch.nn.utils.skip_init(nn.Linear, 8, 8) for _ in range(3)]
    for layer in linear:
        for parameter in layer.parameters():
            parameter.data.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view(parameter.shape))
    return nn.Sequential(*linear)


def loss_fn(model: Any, rows: Any) -> Any:
    return model(rows).square().mean()


def functions(folder: Path) -> None:
    """A loop of `make_step`, with everything that a loop may call."""
    import torch
    from torch import nn

    import zero

    rows = torch.linspace(0, 1, 32, dtype=torch.float16).view(4, 8)
    with zero.open_world() as world:
        with zero.empty():
            empty = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        zero.Stage(2), zero.linear_warmup(1e-3, 2), zero.warmup_cosine(1e-3, 2, 4)
        for optimizer in (zero.adam(1e-3), zero.sgd(1e-3), zero.lion(1e-4), zero.adagrad(1e-3), zero.muon(1e-3)):
            zero.Plan(empty, optimizer=optimizer, world=world)
        groups = [zero.Group("0.*", lr=zero.warmup_linear(1e-3, 2, 4))]
        optimizer = zero.with_ema(zero.with_moments(zero.adamw(1e-3, groups=groups), "bf16"))
        plan = zero.Plan(
            empty,
            optimizer=optimizer,
            world=world,
            stage=3,
            precision=zero.Precision("fp16", scale=zero.LossScaling()),
            offload=zero.Offload("nvme", path=str(folder)),
        )
        state = zero.init(plan, zero.open_store(plan), seed=3)
        step = zero.make_step(plan, loss_fn)
        with zero.track(state, folder / "track", samples=4, every=1, tracker="tensorboard") as track:
            for _ in range(4):
                state, metrics = step(state, [rows])
                track(state, metrics)
            track.saved(zero.save(state, folder / "functions"))
        pieces = zero.Step(state)
        pieces.microbatch()
        pieces.backward(loss_fn(state.model, rows))
        state, _ = pieces.finish()
        zero.losses.linear_cross_entropy(rows.float(), torch.eye(8), torch.tensor([0, 1, 2, 3]))
        with zero.record(state) as timeline:
            zero.make_forward(plan, loss_fn)(state, rows)
        timeline.write(folder / "trace.json")
        name = next(iter(zero.full_state_dict(state)))
        zero.set_full(state, name, zero.get_full(state, name))
        with zero.gathered(state, [name], modify=True):
            pass
        for _ in zero.stream_weights(state):
            pass
        for offload in ("infinity", "parked", "resident"):
            state = zero.move(state, offload=offload)
        latest, _ = zero.open_latest(world, folder / "functions")
        zero.load(state, zero.open_checkpoint(world, latest.folder)).runtime.store.close()


def sequence(folder: Path) -> None:
    """A model of transformers whose rows ranks share."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import zero

    with zero.open_world() as world, zero.empty():
        parallel = zero.sequence_parallel(GPT2LMHeadModel(GPT2Config(n_layer=1)), zero.sequence.open_group(world, 1))
        _, targets = parallel.slice(dict.fromkeys(("input_ids", "labels"), torch.ones(1, 4, dtype=torch.int64)))
        parallel.loss(torch.ones(()), targets)


def engine(folder: Path) -> None:
    """A loop of DeepSpeed's names."""
    import argparse

    import torch
    from torch.utils.data import TensorDataset

    import zero
    from zero import deepspeed
    from zero.deepspeed.runtime.utils import see_memory_usage
    from zero.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    zero.init_distributed()
    zero.add_config_arguments(argparse.ArgumentParser())
    with deepspeed.zero.Init():
        torch.nn.utils.skip_init(torch.nn.Linear, 8, 8)  # rank 0 builds as usual, and so would draw
    data = TensorDataset(torch.linspace(0, 1, 64).view(8, 8))
    engine, _, loader, _ = zero.initialize(
        model=model(), config=CONFIG, training_data=data, folder=folder / "engine", seed=5
    )
    for _, (rows,) in zip(range(3), deepspeed.utils.RepeatingLoader(loader), strict=False):
        engine.backward(engine(rows).square().mean())
        engine.step()
    weight = engine.module[0].weight
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
        weight.data.mul_(2)
    deepspeed.utils.safe_set_full_fp32_param(weight, deepspeed.utils.safe_get_full_fp32_param(weight))
    engine.save_checkpoint(folder / "engine", client_state={"epoch": 1})
    engine.save_16bit_model(folder / "engine")
    engine.load_checkpoint(folder / "engine")
    engine.load_module_state_dict(engine.module_state_dict())
    engine.eval()
    engine(rows)
    engine.destroy()
    get_fp32_state_dict_from_zero_checkpoint(folder / "engine")
    deepspeed.get_accelerator().synchronize()
    see_memory_usage("end", force=True)


def main(folder: Path) -> None:
    with unmoved("import zero"):
        import zero
        from zero import deepspeed
    for info in walk_packages(deepspeed.__path__, "zero.deepspeed."):
        with unmoved(info.name):
            import_module(info.name)
    for scenario in (functions, engine, *[sequence] * bool(find_spec("transformers"))):
        with unmoved(scenario.__name__):
            scenario(folder)
    for name in ("transformers", "lightning"):
        if find_spec(name):
            import_module(name)  # lightning itself draws from `random` here
            with unmoved(f"import zero.integrations.{name}"):
                import_module(f"zero.integrations.{name}")
    text = Path(__file__).read_text()
    public = {name for name in zero.__all__ if callable(getattr(zero, name))} - RETURNED
    untried = [name for name in sorted(public) if f"zero.{name}(" not in text]
    assert not untried, f"not called here: {', '.join(untried)}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
