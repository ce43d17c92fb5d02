"""First values by ranges: a rank makes or reads its own part, and the parts of all ranks are the whole."""

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zero
from zero.engine.first_values import BLOCK, SAMPLE
from zero.platform.safetensors_files import StoredWeights
from zero.testing import run_ranks

ROWS = 3 * BLOCK // 64 + 5
"""Rows of a matrix with 64 columns that takes three blocks and a part of a fourth."""


class Initialized(nn.Module):
    """Parameters of several blocks, one for each way to initialize them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, ROWS)
        self.normal, self.cut, self.twice, self.ones, self.scaled, self.row, self.turned, self.copied = (
            nn.Parameter(torch.empty(ROWS, 64)) for _ in range(8)
        )
        nn.init.normal_(self.normal, std=0.02)
        nn.init.trunc_normal_(self.cut)
        self.twice.data.uniform_(1, 2).mul_(3)
        nn.init.ones_(self.ones)
        nn.init.xavier_normal_(self.scaled)
        self.scaled.data = self.scaled.data * 0.5
        nn.init.normal_(self.row)
        nn.init.zeros_(self.row[1])
        nn.init.orthogonal_(self.turned)
        self.copied.data.copy_(self.normal)


class OnMeta(nn.Module):
    """Modules without recorded writes: `reset_parameters` initializes them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.linear, self.words = nn.Linear(64, ROWS), nn.Embedding(ROWS, 64, padding_idx=3)


def values(world: zero.World, module: type[nn.Module]) -> dict[str, Tensor]:
    with world.exclusive(), zero.empty():
        model = module()
    plan = zero.Plan(
        model, optimizer=zero.sgd(0.1), world=world, precision="fp32", offload=zero.Offload(page_bytes=12288)
    )
    return zero.full_state_dict(zero.init(plan, zero.open_store(plan), seed=3))


@pytest.mark.parametrize("module", [Initialized, OnMeta])
def test_the_ranges_of_all_ranks_are_the_whole(module):
    whole = values(zero.World.from_env(), module)
    for size in (2, 3):
        for found in run_ranks(size, values, module):
            assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_values_are_those_of_their_initializers():
    made = values(zero.World.from_env(), Initialized)
    assert 0.019 < made["normal"].std() < 0.021
    assert made["cut"].abs().max() <= 2
    assert 3 <= made["twice"].min() < made["twice"].max() <= 6
    assert (made["ones"] == 1).all()
    assert not made["row"][1].any()
    assert torch.equal(made["copied"], made["normal"])
    bound = 64**-0.5
    assert 0.99 * bound < made["linear.weight"].max() <= bound, "the bound of the whole matrix, not of a block"
    torch.testing.assert_close(made["turned"].t() @ made["turned"], torch.eye(64))
    blocks = [block for name in ("normal", "cut", "linear.weight") for block in made[name].view(-1).split(BLOCK)]
    starts = {tuple(block[:8].tolist()) for block in blocks}
    assert len(starts) == len(blocks), "two blocks draw the same numbers"


def test_meta_and_empty_models_begin_alike():
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, ROWS)

    on_meta = values(zero.World.from_env(), OnMeta)
    assert all(torch.equal(value, on_meta[name]) for name, value in values(zero.World.from_env(), Empty).items())


def test_a_rank_reads_its_part_of_a_file(tmp_path, monkeypatch):
    numel = ROWS * 64
    save_file(
        {"weight": torch.arange(float(numel)).view(ROWS, 64), "bias": torch.ones(ROWS)}, tmp_path / "w.safetensors"
    )
    counted: list[int] = []
    read = StoredWeights.read

    def reading(stored: StoredWeights, name: str, start: int, stop: int) -> Tensor:
        counted.append(stop - start)
        return read(stored, name, start, stop)

    monkeypatch.setattr(StoredWeights, "read", reading)

    def rank_main(world: zero.World) -> dict[str, Tensor]:
        with world.exclusive(), zero.empty():
            model = nn.Linear(64, ROWS)
        plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=world, precision="fp32")
        return zero.full_state_dict(zero.init(plan, zero.open_store(plan), weights=tmp_path / "w.safetensors"))

    for found in run_ranks(3, rank_main):
        assert torch.equal(found["weight"].view(-1), torch.arange(float(numel)))
    assert sum(counted) == numel + ROWS + 3 * 2 * SAMPLE
