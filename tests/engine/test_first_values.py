"""First values by ranges: a rank makes or reads its own part, and the parts of all ranks are the whole."""

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zero
from zero.engine.model.recorded_values import SEEDED_NUMEL
from zero.engine.whole.first_values import SAMPLE
from zero.platform.safetensors_files import StoredWeights
from zero.testing import run_ranks

ROWS = 3 * SEEDED_NUMEL // 64 + 5
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
    whole = values(zero.open_world(), module)
    for size in (2, 3):
        for made in run_ranks(size, values, module):
            assert all(torch.equal(made[name], whole[name]) for name in whole)


def test_values_are_those_of_their_initializers():
    made = values(zero.open_world(), Initialized)
    assert 0.019 < made["normal"].std() < 0.021
    assert made["cut"].abs().max() <= 2
    assert 3 <= made["twice"].min() < made["twice"].max() <= 6
    assert (made["ones"] == 1).all()
    assert not made["row"][1].any()
    assert torch.equal(made["copied"], made["normal"])
    bound = 64**-0.5
    assert 0.99 * bound < made["linear.weight"].max() <= bound, "the bound of the whole matrix, not of a block"
    torch.testing.assert_close(made["turned"].t() @ made["turned"], torch.eye(64))
    blocks = [block for name in ("normal", "cut", "linear.weight") for block in made[name].view(-1).split(SEEDED_NUMEL)]
    starts = {tuple(block[:8].tolist()) for block in blocks}
    assert len(starts) == len(blocks), "two blocks draw the same numbers"


def test_meta_and_empty_models_begin_alike():
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, ROWS)

    on_meta = values(zero.open_world(), OnMeta)
    assert all(torch.equal(value, on_meta[name]) for name, value in values(zero.open_world(), Empty).items())


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

    for made in run_ranks(3, rank_main):
        assert torch.equal(made["weight"].view(-1), torch.arange(float(numel)))
    assert sum(counted) == numel + ROWS + 3 * 2 * SAMPLE


class Resets(nn.Module):
    """A module on meta whose `reset_parameters` does more than to fill its parameters with numbers."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.weight = nn.Parameter(torch.empty(ROWS, 64))

    def reset_parameters(self) -> None:
        raise NotImplementedError


class Cuts(Resets):
    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, a=-0.5, b=0.5)


class Reads(Resets):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        with torch.no_grad():
            self.weight.mul_(0.01 / self.weight.std().item())


class Replaces(Resets):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.weight.data = self.weight.data * 0.01


class Assigns(Resets):
    def reset_parameters(self) -> None:
        self.weight.data = torch.randn(ROWS, 64) * 0.01


class KeepsACopy(Resets):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.01)
        self.register_buffer("first", self.weight.detach().clone())


class Scales(Resets):
    """Is scaled before its values exist, as only a parameter that a constructor wrote can be."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(64))
        self.weight.data.mul_(2)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.005)
        nn.init.zeros_(self.bias)


@pytest.mark.parametrize("module", [Reads, Replaces, Assigns, KeepsACopy])
def test_a_reset_that_cannot_run_in_blocks_runs_on_the_whole(module):
    made = values(zero.open_world(), module)
    assert 0.009 < made["weight"].std() < 0.011
    assert len(made["weight"].unique()) > ROWS


def test_a_reset_is_recorded_whether_or_not_a_model_was_built_empty():
    plan = zero.Plan(Cuts(), optimizer=zero.sgd(0.1), world=zero.open_world(), precision="fp32")
    made = zero.full_state_dict(zero.init(plan, zero.open_store(plan), seed=3))
    assert made["weight"].abs().max() <= 0.5
    assert torch.equal(made["weight"], values(zero.open_world(), Cuts)["weight"])


def test_a_copy_that_a_reset_keeps_has_values():
    model = KeepsACopy()
    plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=zero.open_world(), precision="fp32")
    made = zero.full_state_dict(zero.init(plan, zero.open_store(plan)))
    assert torch.equal(model.first, made["weight"])


def test_numbers_beside_parameters_are_drawn_from_the_seed():
    class Draws(Resets):
        def reset_parameters(self) -> None:
            nn.init.uniform_(self.weight, 0, torch.rand(1).item())

    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made.append(values(zero.open_world(), Draws)["weight"])
    assert torch.equal(*made)


def test_a_scaled_parameter_without_values_is_reset():
    with zero.empty():
        model = Scales()
    plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=zero.open_world(), precision="fp32")
    made = zero.full_state_dict(zero.init(plan, zero.open_store(plan)))
    assert not made["bias"].any()
    assert 0.009 < made["weight"].std() < 0.011


def test_views_of_an_empty_parameter_are_views_of_its_values():
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.square = nn.Parameter(torch.empty(3, 5)), nn.Parameter(torch.empty(64, 64))
            view = self.weight.data
            view.t_()
            view.copy_(torch.arange(15.0).view(5, 3))
            nn.init.normal_(self.square)
            q, _ = torch.linalg.qr(self.square.data)
            q.mul_(0.5)
            self.square.data.copy_(q)

    made = values(zero.open_world(), Turned)
    assert torch.equal(made["weight"], torch.arange(15.0).view(5, 3).t())
    torch.testing.assert_close(made["square"] @ made["square"].t(), 0.25 * torch.eye(64))
