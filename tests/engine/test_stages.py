"""Placement is not arithmetic: on one world, nothing that says where a tensor sleeps or when it moves changes a bit.

Digests hold parameters, moments, buffers, step and loss scale; metrics are compared bit for bit beside them. Buffers
are a rank's own, so a rank is compared with the same rank.
"""

import pytest
import torch

import zero
from tests.common.small import Setting, adamw_in_8bit, adamw_in_bf16, slice_of, small_batch, train_small
from zero.engine.update import pieces
from zero.engine.whole.read import digest, full_state_dict
from zero.platform.device import Device
from zero.testing import run_processes, run_ranks
from zero.trainer.models import GPT, GPTConfig, loss as gpt_loss

KiB = 1024


def placements() -> list[Setting]:
    """16 placements in which every pair of choices of any two columns occurs: an orthogonal array over GF(4)."""
    times = ((0, 0, 0, 0), (0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2))
    return [
        Setting(
            stage=a,
            prefetch=b,
            keep=((), ("embed", "blocks.1"))[(a ^ b // 2) % 2],
            update=("lazy", "serial")[(a ^ b) % 2],
            activations=("keep", "remat")[(a ^ times[2][b]) % 2],
            page_bytes=(8 * KiB, 16 * KiB)[(a ^ times[3][b]) % 2],
        )
        for a in range(4)
        for b in range(4)
    ]


def test_the_placements_cover_every_pair():
    """The array is what it says: every stage meets every prefetch, update, kind of activations and page size."""
    rows = placements()
    for key, count in (("prefetch", 4), ("update", 2), ("activations", 2), ("page_bytes", 2)):
        assert len({(row.stage, getattr(row, key)) for row in rows}) == 4 * count
    assert len({(row.update, row.activations) for row in rows}) == 4
    assert len({(row.prefetch, row.activations) for row in rows}) == 8


PLACED = [
    *((3, precision, clip) for precision, clip in (("fp32", 0.5), ("bf16", None), ("fp16", 0.5))),
    *((2, precision, clip) for precision, clip in (("fp32", None), ("bf16", 0.5), ("fp16", None))),
    *((1, precision, clip) for precision, clip in (("fp32", None), ("bf16", 0.5))),
    (8, "bf16", 0.5),
]


@pytest.mark.parametrize(("case", "size", "precision", "clip"), [(case, *rest) for case, rest in enumerate(PLACED)])
def test_no_placement_changes_a_bit(case, size, precision, clip):
    """Stage, prefetch, kept units, update, activations, pages and form of master: the same digests and metrics.

    Six cases share the placements.
    """
    first, *others = (setting.but(precision=precision, clip=clip) for setting in placements())
    expected = run_ranks(size, train_small, first)
    for number, other in enumerate(others[case % 6 :: 6]):
        other = other.but(master=("auto", "whole")[number % 2])
        assert run_ranks(size, train_small, other) == expected, other


@pytest.mark.parametrize(("size", "optimizer"), [(1, adamw_in_8bit), (3, adamw_in_bf16), (3, adamw_in_8bit)])
def test_no_placement_changes_a_bit_of_moments_in_fewer_bits(size, optimizer):
    """Random bits belong to a parameter's element and to the step, whatever holds it and however it is cut."""
    first, *others = (setting.but(precision="bf16", clip=None, optimizer=optimizer) for setting in placements())
    expected = run_ranks(size, train_small, first)
    assert run_ranks(size, train_small, first.but(optimizer=zero.adamw)) != expected, "they do round"
    for other in others[size::4]:
        assert run_ranks(size, train_small, other) == expected, other


@pytest.mark.parametrize("optimizer", [zero.sgd, zero.lion, zero.adam])
def test_no_stage_changes_a_bit_with_other_optimizers(optimizer):
    """Moments are counted, not known by name."""
    setting = Setting(optimizer=optimizer, clip=0.5)
    expected = run_ranks(3, train_small, setting.but(stage=0))
    for stage in (1, 2, 3):
        assert run_ranks(3, train_small, setting.but(stage=stage)) == expected


@pytest.mark.parametrize("size", [1, 3])
def test_no_stage_changes_a_bit_with_a_narrow_reduction(size):
    """Gradients that travel in bf16 are rounded before any rank adds them, so every stage rounds alike."""
    setting = Setting(reduce="bf16", clip=0.5)
    expected = run_ranks(size, train_small, setting.but(stage=0))
    for stage in (1, 2, 3):
        assert run_ranks(size, train_small, setting.but(stage=stage)) == expected
    exact = run_ranks(size, train_small, setting.but(reduce="fp32"))
    assert (expected == exact) is (size == 1), "one rank sends nothing"


@pytest.mark.parametrize("offload", [(), (("preset", "nvme"),)], ids=["device", "nvme"])
def test_an_update_in_pieces_changes_no_bit(offload, monkeypatch):
    """A piece keeps its place in the flat, which decides about weight decay."""
    setting = Setting(offload=offload, weight_decay=0.5)
    expected = run_ranks(2, train_small, setting)
    monkeypatch.setattr(Device, "piece_numel", 64)
    monkeypatch.setattr(pieces, "ROW_NUMEL", 64)  # moments in fp32 may be cut there
    assert run_ranks(2, train_small, setting) == expected


def test_the_same_run_twice_gives_the_same_bits():
    assert run_ranks(3, train_small, Setting()) == run_ranks(3, train_small, Setting())


def test_another_seed_gives_other_bits():
    """The digest is not blind."""
    assert run_ranks(1, train_small, Setting()) != run_ranks(1, train_small, Setting(seed=1))


# -- accumulation ------------------------------------------------------------------------------------------------------


def parameters_after(world, setting):
    state, step = setting.start(world)
    for number in range(3):
        batch = small_batch(number, 6 * world.size * setting.accumulate)
        state, metrics = step(state, slice_of(batch, world, setting.accumulate))
    return metrics, full_state_dict(state)


@pytest.mark.parametrize(("size", "accumulate", "precision"), [(1, 3, "bf16"), (2, 4, "fp16"), (3, 3, "fp32")])
def test_accumulation_is_bitwise_within_the_pairs(size, accumulate, precision):
    """Stages 0 and 1 add microbatches before ranks, 2 and 3 after: the same bits within each pair, and all four equal
    where there is one rank."""
    setting = Setting(accumulate=accumulate, precision=precision, clip=0.5)
    told = {
        stage: run_ranks(size, train_small, setting.but(stage=stage, activations=activations, prefetch=stage))
        for stage, activations in enumerate(("keep", "remat", "remat", "keep"))
    }
    assert told[0] == told[1]
    assert told[2] == told[3]
    if size == 1:
        assert told[0] == told[2]


def test_accumulation_agrees_between_the_pairs():
    """Between the pairs only the order of addition differs: A * W fp32 terms, so about A * W * 2^-24 of the gradient's
    size. SGD passes a gradient on in proportion, and batch normalisation amplifies it a little in three steps: 1e-5 of
    the largest parameter is tenfold room (adaptive optimizers would turn a gradient near zero into a full step)."""
    setting = Setting(accumulate=4, optimizer=zero.sgd)
    before, after = (run_ranks(2, parameters_after, setting.but(stage=stage))[0] for stage in (1, 2))
    assert before[0].loss == pytest.approx(after[0].loss, rel=1e-5)
    assert before[0].grad_norm == pytest.approx(after[0].grad_norm, rel=1e-5)
    for name, value in before[1].items():
        torch.testing.assert_close(value, after[1][name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "precision", "reduce"),
    [(1, "bf16", "fp32"), (2, "fp32", "fp32"), (3, "bf16", "fp32"), (3, "bf16", "bf16")],
)
def test_no_placement_changes_a_bit_of_sums_by_the_backend(size, precision, reduce):
    """Three ranks do not add in the order of ranks; the sum of two has one order."""
    native = {"precision": precision, "reduce": reduce, "between": ("world", "native"), "clip": 0.5}
    first, *others = (setting.but(**native) for setting in placements())
    expected = run_ranks(size, train_small, first)
    assert (run_ranks(size, train_small, first.but(between=("world", "exact"))) == expected) is (size < 3)
    for other in others[size::3]:
        assert run_ranks(size, train_small, other) == expected, other


@pytest.mark.process
def test_no_stage_changes_a_bit_of_sums_by_gloo():
    setting = Setting(precision="bf16", between=("world", "native"), clip=0.5)
    expected = run_processes(2, train_small, setting.but(stage=0))
    for stage, prefetch in ((1, 0), (3, 2)):
        assert run_processes(2, train_small, setting.but(stage=stage, prefetch=prefetch)) == expected


@pytest.mark.parametrize("bucket", [3 * KiB, 1024 * KiB, "auto"], ids=["pairs of units", "one unit", "auto"])
@pytest.mark.parametrize(("size", "clip"), [(1, None), (3, None), (3, 0.5)])
def test_no_bucket_changes_a_bit_of_parameters(size, bucket, clip):
    """The norm adds squares over other ranges in fp64 and is rounded once to fp32, so its bits hardly ever differ."""
    setting = Setting(precision="bf16", optimizer=adamw_in_8bit, clip=clip)
    for stage, activations in enumerate(("remat", "keep", "keep", "remat")):
        setting = setting.but(stage=stage, activations=activations, prefetch=stage)
        expected = run_ranks(size, parameters_after, setting)[0]
        tiers = {"optimizer": "nvme", "param": "nvme" if stage == 3 else "none", "grad": "nvme"}
        for offload in ({}, tiers):
            merged = setting.but(bucket=bucket, offload=tuple(offload.items()))
            metrics, values = run_ranks(size, parameters_after, merged)[0]
            assert (metrics.loss, metrics.grad_norm) == (expected[0].loss, expected[0].grad_norm)
            assert clip is None or metrics.grad_norm > clip
            assert all(torch.equal(value, expected[1][name]) for name, value in values.items())


# -- a deeper model, and real processes --------------------------------------------------------------------------------

CONFIG = GPTConfig(vocab=50, width=32, layers=3, heads=2, seq=16)


def train_gpt(world, setting, steps=3):
    state, step = setting.start(world, lambda: GPT(CONFIG), gpt_loss)
    told = []
    for number in range(steps):
        tokens = torch.randint(0, 50, (2 * world.size, 17), generator=torch.Generator().manual_seed(number))
        state, metrics = step(state, slice_of(tokens, world, 1))
        told.append(metrics)
    pool = state.runtime.residency.pool
    leaks = (pool.overflowed, pool.pinned) if pool is not None else (0, 0)
    return digest(state), told, leaks


def test_no_prefetch_depth_changes_a_bit_of_a_gpt():
    """And at no depth does a gather find every buffer taken, or a step leave one pinned."""
    setting = Setting(clip=1.0)
    expected = run_ranks(2, train_gpt, setting.but(stage=0))
    for prefetch in range(4):
        activations = ("keep", "remat")[prefetch % 2]
        assert run_ranks(2, train_gpt, setting.but(prefetch=prefetch, activations=activations)) == expected
    assert expected[0][2] == (0, 0)
    assert expected[0][0] == expected[1][0], "no running statistics here: all ranks hold the same state"


def over_gloo(world, settings):
    """One gloo world for all of them: starting processes is what takes long."""
    return [train_small(world, setting) for setting in settings]


@pytest.mark.process
def test_processes_agree_with_threads():
    """Gloo moves bytes and the ranks add in order, so processes give the bits that threads give.

    Every precision, and microbatches added before ranks and after.
    """
    expected: list[Setting] = []
    asked: list[Setting] = []
    for precision in ("fp32", "bf16", "fp16"):
        clip = None if precision == "bf16" else 0.5
        for row in placements()[::5]:
            asked.append(row.but(precision=precision, clip=clip))
            expected.append(Setting(precision=precision, clip=clip, stage=0, update="serial"))
        for stage in range(4) if precision == "bf16" else ():
            asked.append(Setting(precision=precision, clip=0.5, stage=stage, accumulate=2))
            expected.append(asked[-1].but(stage=stage // 2 * 2, update="serial", prefetch=0))
    alone = {setting: run_ranks(2, train_small, setting) for setting in set(expected)}
    for rank, told in enumerate(run_processes(2, over_gloo, asked)):
        for result, setting, reference in zip(told, asked, expected, strict=True):
            assert result == alone[reference][rank], setting
