"""Orthogonalization of matrices, and which rank does it."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

import zero
from zero.core.layout import Layout
from zero.core.matrices import Matrices, owners
from zero.core.optimizers import muon
from zero.core.optimizers.muon import BATCH_NUMEL, Muon, orthogonalize

PLAIN = Muon(2, True, "original", (), ())


def orthogonal(matrices: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The result for (batch, rows, columns), in bf16 or in fp32 rounded to bf16."""
    made = matrices.to(torch.bfloat16)
    count, rows, columns = made.shape
    orthogonalize(made, torch.empty(Matrices(0, count, rows, columns).scratch_numel, dtype=dtype))
    return made.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 40), (2, 40, 16), (1, 1, 7), (1, 7, 1)])
def test_singular_values_become_about_one_and_their_vectors_stay(shape, dtype):
    """The coefficients bring singular values from a hundredth of the norm on to [0.65, 1.25]."""
    make = torch.Generator().manual_seed(sum(shape))
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=make, dtype=torch.float64), full_matrices=False)
    values = torch.linspace(1.0, 0.05, u.shape[-1], dtype=torch.float64)
    factors = orthogonal(u @ torch.diag_embed(values.expand(shape[0], -1)) @ v, dtype)
    assert torch.linalg.svdvals(factors).min() > 0.65
    assert torch.linalg.svdvals(factors).max() < 1.25
    middle = u.mT @ factors @ v.mT
    assert (middle - torch.diag_embed(torch.diagonal(middle, dim1=-2, dim2=-1))).abs().max() < 0.05


def test_scales_do_not_matter_and_zeros_stay():
    """Powers of two: no rounding differs."""
    matrices = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
    assert torch.equal(orthogonal(matrices), orthogonal(matrices * 2.0**10))
    assert torch.equal(orthogonal(torch.zeros(2, 8, 12)), torch.zeros(2, 8, 12).double())


def test_a_matrix_that_is_not_finite_spoils_itself_alone():
    matrices = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(0))
    expected = orthogonal(matrices)
    matrices[1, 2, 3] = float("nan")
    factors = orthogonal(matrices)
    assert torch.equal(factors[[0, 2]], expected[[0, 2]])
    assert factors[1].isnan().all()


shapes = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


@given(shapes, st.integers(1, 9))
def test_every_matrix_is_whole_on_the_rank_that_has_its_middle(shapes, ranks):
    layout = Layout.of({f"{number}": shape for number, shape in enumerate(shapes)}, world_size=ranks)
    batches = PLAIN.batches(layout)
    assert [batch.start for batch in batches] == [slot.offset for slot in layout.slots if slot.numel]
    cuts = owners(batches, layout)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, layout.P, ranks + 1)
    assert all(a <= b for a, b in pairwise(cuts))
    for batch in batches:
        (owner,) = [rank for rank in range(ranks) if cuts[rank] <= batch.start and batch.stop <= cuts[rank + 1]]
        first, last = layout.shard(owner)
        assert first <= (batch.start + batch.stop) / 2 <= last


def test_batches_are_parts_of_a_parameter_of_limited_size():
    """So that a few parameters of many experts are spread over the ranks."""
    many = Muon(2, True, "original", (("experts", 100),), ())
    layout = Layout.of({"experts": (100, 1024, 512), "matrix": (8192, 4096)}, world_size=4)
    *experts, matrix = many.batches(layout)
    assert [batch.number for batch in experts] == [32, 32, 32, 4]
    assert all(batch.number * batch.rows * batch.columns <= BATCH_NUMEL for batch in experts)
    assert (matrix.number, matrix.rows, matrix.columns) == (1, 8192, 4096)
    assert [batch.start for batch in (*experts, matrix)][1:] == [batch.stop for batch in experts]


@pytest.mark.parametrize(
    ("name", "shape", "taken"),
    [
        ("blocks.0.up.weight", (4, 4), True),
        ("blocks.0.up.bias", (4,), False),
        ("scale", (), False),
        ("embed.weight", (4, 4), False),
        ("lm_head.weight", (4, 4), False),
        ("conv.weight", (4, 4, 3), False),
        ("experts", (2, 4, 4), True),
    ],
)
def test_matrices_are_taken_by_shape_and_by_name(name, shape, taken):
    transform = muon(0.1, blocks={"experts": 2})
    group = transform.group(name, shape)
    assert transform.takes_matrices(group) is taken
    assert transform.moments_of(group) == (("mu",) if taken else ("mu", "nu"))
    assert transform.groups[group](1).betas == ((0.95,) if taken else (0.9, 0.95))
    assert transform.groups[group](1).weight_decay == (0.1 if len(shape) >= 2 else 0.0)


def test_groups_are_of_both_optimizers():
    first = zero.Group(["*.up.*", "embed.*"], lr=0.5, betas=(0.8,))
    transform = muon(0.1, adamw_lr=0.01, groups=[first])
    settings = {
        name: transform.groups[transform.group(name, (4, 4))](1) for name in ("a.up.weight", "embed.weight", "b")
    }
    assert [(now.lr, now.betas) for now in settings.values()] == [(0.5, (0.8,)), (0.5, (0.9, 0.95)), (0.1, (0.95,))]
