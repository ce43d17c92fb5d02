"""Adapters of fused experts that are on ranks beside the world: the training of one process, and exports for peft."""

import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")
peft = pytest.importorskip("peft")

import zero  # noqa: E402
from tests.conftest import LONG_S  # noqa: E402
from zero.formats import export_checkpoint, open_newest  # noqa: E402
from zero.testing import run_processes  # noqa: E402

EXPERTS = Path(__file__).resolve().parents[2] / "examples" / "experts.py"
WIDTH, COUNT, ROWS, STEPS, RANK, CLIP = 12, 4, 6, 4, 2, 0.5
EQUAL = ["*.model.0.*", "*.model.3.*", "*.norm.*", "*.gate.*"]  # parameters that are equal on all ranks of "ep"
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "nvme": {"offload": "infinity"},
    "recomputed": {"activations": "remat"},
}


class Fused(nn.Module):
    """The matrices of `count` experts in two parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / WIDTH**0.5)

    def forward(self, rows: Tensor, expert: Tensor) -> Tensor:
        done = torch.zeros_like(rows)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            done[expert == number] = F.linear(F.gelu(F.linear(rows[expert == number], up)), down)
        return done


class Layer(nn.Module):
    """x + p * expert(norm(x)), each row by its best expert; with a group each of its ranks has some of the experts."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group, self.norm, self.gate = group, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, COUNT)
        self.experts = Fused(COUNT)
        self.exchange = runpy.run_path(str(EXPERTS))["Exchange"].apply

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        p, chosen = self.gate(y).softmax(-1).max(-1)
        if self.group is None:
            return x + p.unsqueeze(-1) * self.experts(y, chosen)
        order, part = chosen.argsort(stable=True), COUNT // dist.get_world_size(self.group)
        counts = chosen.bincount(minlength=COUNT).view(-1, part)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
        rows = self.exchange(y[order], sent, received, self.group)
        own = torch.arange(part).repeat(len(sent)).repeat_interleave(arriving.flatten())
        done = self.exchange(self.experts(rows, own), received, sent, self.group)
        return x + p.unsqueeze(-1) * done[order.argsort()]


def whole_model(group: Any = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), Layer(group), Layer(group), nn.Linear(WIDTH, 1))


def with_adapter(model: nn.Module, **first: Any) -> Any:
    torch.manual_seed(1)
    targets = {"target_modules": ["gate"], "target_parameters": ["experts.up", "experts.down"]}
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=3, **targets, **first))


def part_of(name: str, whole: Tensor, rank: int) -> Tensor:
    """Return the part of one of two ranks of "ep" of a parameter, of which the whole model has all experts."""
    if ".experts." not in name:
        return whole
    if "lora_A" in name:  # for each expert its rows
        return whole.chunk(2)[rank]
    if "lora_B" in name:  # the experts are the last dimension of the columns
        return whole.view(len(whole), RANK, COUNT).chunk(2, dim=2)[rank].reshape(len(whole), -1)
    return whole.chunk(2)[rank]


def split_model(group: Any) -> nn.Module:
    """Return a model with the experts of this rank of `group`."""
    model, rank = whole_model(group), dist.get_rank(group)
    for name, module in model.named_modules():
        if isinstance(module, Fused):
            module.up, module.down = (
                nn.Parameter(part_of(f"{name}.experts.", p.data, rank)) for p in (module.up, module.down)
            )
    return model


def build(group: Any) -> Any:
    """Return a model with this rank's experts and its part of the adapter, whose gradients are averaged over "ep"."""
    model, whole = with_adapter(split_model(group)), with_adapter(whole_model(), init_lora_weights=False)
    rank, ranks, values = dist.get_rank(group), dist.get_world_size(group), dict(whole.named_parameters())

    def mean(grad: Tensor) -> Tensor:
        dist.all_reduce(grad := grad / ranks, group=group)
        return grad

    for name, parameter in model.named_parameters():
        parameter.data.copy_(part_of(name, values[name].data, rank))
        if parameter.requires_grad:
            parameter.register_hook((lambda grad: grad / ranks) if ".experts." in name else mean)
    return model


def rows_of(step: int, part: int) -> Tensor:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(100 * step + part))


def loss_fn(model: nn.Module, rows: Tensor) -> Tensor:
    return F.mse_loss(model(rows).squeeze(-1), rows[:, 0] * rows[:, 1])


def trained(_: zero.World, folder: str) -> dict[str, Any]:
    """Return, by setting, losses and norms, and this rank's parts of all parameters."""
    mesh, results = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")), {}
    ep = mesh.get_group("ep")
    with zero.World.from_mesh(mesh, "dp", timeout_s=LONG_S) as world:
        for setting, arguments in SETTINGS.items():
            optimizer = zero.adamw(1e-2, weight_decay=0.0, clip=CLIP)
            plan = zero.Plan(
                build(ep), optimizer=optimizer, world=world, norm_groups=[ep], replicated=EQUAL, **arguments
            )
            state, every = zero.init(plan, zero.open_store(plan)), []
            step = zero.make_step(plan, loss_fn)
            for number in range(STEPS):
                state, metrics = step(state, [rows_of(number, world.ranks[world.rank])])
                every.append((metrics.loss, metrics.grad_norm))
            results[setting] = every, zero.full_state_dict(state)
            if setting == "stage 3":
                check_export(state, plan, Path(folder), ep)
            state.close()
    return results


def check_export(state: zero.State, plan: zero.Plan, folder: Path, ep: Any) -> None:
    """peft reads the adapter of these experts, computes the same outputs, and merges the same weights."""
    rows = rows_of(0, dist.get_rank())
    outputs = zero.make_forward(plan, lambda model: model(rows))(state)
    merged = dict(zero.stream_weights(state, merged=True))
    zero.save(state, folder / "checkpoints")
    dist.barrier()
    own = folder / "checkpoints" / f"ep-{dist.get_rank(ep)}"
    adapter = folder / f"adapter-{dist.get_rank()}"
    export_checkpoint(open_newest(own)[0], "peft", adapter)
    state.model.peft_config["default"].save_pretrained(adapter)
    loaded = peft.PeftModel.from_pretrained(split_model(ep), adapter)
    with torch.no_grad():
        assert torch.equal(loaded(rows), outputs)
    expected = dict(loaded.merge_and_unload().named_parameters())
    assert merged.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in merged.items())


def alone() -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    model: Any = with_adapter(whole_model(), init_lora_weights=False)
    adapter = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, every = torch.optim.AdamW(adapter, lr=1e-2, weight_decay=0.0), []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([loss_fn(model, rows_of(number, part)) for part in range(4)]).mean()
        loss.backward()
        every.append((loss.item(), float(nn.utils.clip_grad_norm_(adapter, CLIP))))
        optimizer.step()
    return every, {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_adapters_of_experts_beside_the_world_train_as_in_one_process_and_load_in_peft(tmp_path: Path):
    expected, whole = alone()
    assert any(norm > CLIP for _, norm in expected)
    ranks = run_processes(4, trained, str(tmp_path), timeout_s=LONG_S)
    began = dict(with_adapter(whole_model(), init_lora_weights=False).named_parameters())
    for rank, results in enumerate(ranks):
        every, values = results["stage 0"]
        torch.testing.assert_close(torch.tensor(every), torch.tensor(expected), rtol=1e-5, atol=1e-6)
        for name, value in values.items():
            part = part_of(name, whole[name], rank % 2)
            torch.testing.assert_close(value, part, rtol=1e-5, atol=1e-5)
            changed = not torch.equal(value, part_of(name, began[name].detach(), rank % 2))
            assert changed == ("lora_" in name), name
        for setting, (others, there) in results.items():
            assert others == every, setting
            assert all(torch.equal(value, there[name]) for name, value in values.items()), setting
