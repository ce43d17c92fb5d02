"""One rank of 64 and of 1,024, and plans of large models on paper: what grows with ranks and units."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zero.core.sizes import GiB, MiB
from zero.engine.model.recorded_values import SEEDED_NUMEL

ROOT = Path(__file__).resolve().parent.parent
many_ranks = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "many_ranks.py")))


@pytest.mark.parametrize("ranks", [64, 1024])
def test_messages_of_the_start_and_of_a_steps_end_grow_with_neither_units_nor_ranks(ranks):
    few, many = (many_ranks.measure(ranks, units) for units in (10, 100))
    assert few.start == many.start == {"gathers": 3, "exchanges": 1}
    assert few.end == many.end == {"gathers": 1}, "the totals and nothing else"


@pytest.mark.parametrize(
    ("name", "ranks", "gathered", "flats"), [("8B", 8, 2 * GiB, 4 * GiB), ("70B", 128, 4 * GiB, 8 * GiB)]
)
def test_buffers_are_those_of_the_largest_units(name, ranks, gathered, flats):
    """A backend that adds needs no memory for received gradients."""
    for reduce, share in (("auto", 1), ("native", 0.57)):
        plan = many_ranks.planned(many_ranks.decoder(name), ranks, "bf16", reduce=reduce)
        bytes_of = many_ranks.buffers_bytes(plan)
        assert bytes_of[0] <= gathered
        assert bytes_of[1] <= share * flats


def test_units_of_many_sizes_share_buffers():
    for reduce, limit in (("exact", 70 * MiB), ("native", 40 * MiB)):
        plan = many_ranks.planned(many_ranks.pyramid(), 8, "fp32", "cpu", reduce)
        gathered, flats = many_ranks.buffers_bytes(plan)
        assert gathered <= 40 * MiB
        assert flats <= limit


def test_a_manifest_grows_little_with_ranks():
    sizes = [many_ranks.manifest_bytes(many_ranks.planned(many_ranks.decoder("70B"), n, "bf16")) for n in (64, 1024)]
    assert sizes[1] <= 2 * sizes[0] + 100 * 1024


def test_a_rank_of_many_draws_its_share_of_the_first_values():
    with torch.device("meta"):
        model = many_ranks.Decoder(width=512, layers=4, hidden=2048, kv=256, vocab=8192)
    numel = sum(parameter.numel() for parameter in model.parameters())
    start = many_ranks.started(model, ranks=64)
    slots = len(list(model.parameters()))
    assert numel / 64 <= start.kept <= start.drawn
    assert start.drawn <= numel / 64 + 3 * SEEDED_NUMEL * slots, "a block at each end of a part, and one for the sample"
    assert start.drawn < numel / 8
