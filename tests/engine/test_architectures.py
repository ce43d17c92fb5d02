"""Many architectures of transformers train through an engine as they do in plain torch.

A run of the suite takes six of them, always the same. `ZERO_TEST_ARCHITECTURES` takes others: names with commas between
them; or `all`, which lasts some minutes.

Tolerances are those of test_hf.py, for its reasons. AdamW's eps is larger than usual: a gradient that is zero but for
rounding, as that of a bias in front of a norm, would else be a whole step. What torch itself computes otherwise in fp64
by more than they allow (MobileNet, LeViT: long chains of norms over few numbers) is not in the table.
"""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

import zero  # noqa: E402
from tests.common.architectures import ARCHITECTURES, Batch, new_model  # noqa: E402
from tests.engine.test_transformers import FAMILIES  # noqa: E402
from zero.testing import run_ranks  # noqa: E402

STEPS, ROWS, CLIP, LR, DECAY, EPS = 3, 4, 0.5, 1e-2, 0.1, 1e-5
SETTINGS = [(3, 1, "none"), (3, 2, "none")]
"""Stages, ranks, and where parameters sleep."""

ALONE = [(3, 1, "none"), (3, 1, "nvme")]
"""For a model whose draws ranks would share: it is regathered all the same."""

AT_ONCE = 6
"""Architectures in a run of the suite: some seconds."""


def taken(wanted: str) -> list[str]:
    """Return the architectures that `ZERO_TEST_ARCHITECTURES` names, or six of all sorts if it is empty."""
    names = sorted(ARCHITECTURES)
    if wanted:
        return names if wanted == "all" else wanted.split(",")
    return random.Random(0).sample(names, AT_ONCE)


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def batches(name: str) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [ARCHITECTURES[name].feed(ROWS, generator) for _ in range(STEPS)]


def part_of(batch: Batch, rank: int, ranks: int) -> Batch:
    return {name: value.chunk(ranks)[rank] if isinstance(value, Tensor) else value for name, value in batch.items()}


def loss_of(model: Any, batch: Batch) -> Tensor:
    """Its own; of a model that has none the squares of what it gives."""
    told = model(**batch)
    if told.get("loss") is not None:
        return told.loss
    return sum(
        output.square().mean() for output in told.values() if isinstance(output, Tensor) and output.requires_grad
    )


def train_torch(name: str, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and last parameters; the gradients are means over the parts that ranks would have."""
    model, losses = new_model(name), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, eps=EPS)
    for number, batch in enumerate(batches(name)):
        torch.manual_seed(number)  # of what draws
        optimizer.zero_grad()
        parts = []
        for rank in range(ranks):
            parts.append(loss_of(model, part_of(batch, rank, ranks)) / ranks)
            parts[-1].backward()
        unused = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.grad is None]
        for parameter in unused:
            parameter.grad = torch.zeros_like(parameter)  # as here and in DeepSpeed: weight decay and momentum go on
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(sum(loss.item() for loss in parts))
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def train_zero(
    world: zero.World, name: str, stage: int, tier: str, folder: Path
) -> tuple[list[float], dict[str, Tensor]]:
    with world.exclusive():
        model = new_model(name)
    optimizer = {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "eps": EPS}}
    settings = {"train_batch_size": ROWS, "gradient_clipping": CLIP, "optimizer": optimizer}
    settings["zero_optimization"] = {"stage": stage, "offload_param": {"device": tier, "nvme_path": str(folder)}}
    engine, *_ = zero.initialize(model=model, config=settings, world=world)
    losses = []
    for number, batch in enumerate(batches(name)):
        torch.manual_seed(number)
        engine.backward(loss_of(engine, part_of(batch, world.rank, world.size)))
        engine.step()
        losses.append(engine.metrics.loss)
    values = zero.full_state_dict(engine)
    engine.destroy()
    return losses, values


@pytest.mark.filterwarnings("ignore")  # of transformers' and torch's, about code that is transformers'
@pytest.mark.parametrize("name", taken(os.environ.get("ZERO_TEST_ARCHITECTURES", "")))
def test_an_architecture_trains_as_in_plain_torch(name: str, tmp_path: Path):
    """Its units are those of the default policy; on one rank the first loss is the same to the last bit."""
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    settings, wanted = ALONE if ARCHITECTURES[name].draws else SETTINGS, {}
    for stage, ranks, tier in settings:
        if ranks not in wanted:
            wanted[ranks] = train_torch(name, ranks)
        losses, parameters = wanted[ranks]
        told, values = run_ranks(ranks, train_zero, name, stage, tier, tmp_path)[0]
        assert told == pytest.approx(losses, rel=1e-5), (stage, ranks, tier)
        assert ranks > 1 or told[0] == losses[0], stage
        assert values.keys() == parameters.keys()
        for key, value in parameters.items():
            torch.testing.assert_close(values[key], value, rtol=1e-5, atol=2e-4, msg=lambda m, n=key: f"{n}: {m}")


def test_they_are_others_than_those_of_every_run():
    assert len(ARCHITECTURES) >= 60
    assert not ARCHITECTURES.keys() & FAMILIES.keys()
