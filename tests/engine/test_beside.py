"""A world beside other parallelism trains the model that one process trains, on every stage and tier.

Each kind is an example of the docs on 2 x 2 gloo ranks: a mesh of "dp", over which state is sharded, and "tp" or "ep".
"""

import math
import os
import re
import runpy
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

import zero
from tests.conftest import LONG_S
from tests.simulation import simulated_gpu
from zero.engine.memory import saved_tensors
from zero.engine.memory.saved_tensors import OnHost
from zero.engine.whole.read import digest
from zero.errors import ConfigError, HandshakeError, OutsideUnitError, PlanError, RankFailedError
from zero.testing import run_processes, run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WIDTH, ROWS, STEPS, LR, CLIP = 12, 6, 4, 1e-2, 0.2
KINDS = {"tensor_parallel": "tp", "split_mlp": "tp", "experts": "ep"}

SETTINGS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "cpu": {"offload": "cpu"},
    "nvme": {"offload": "infinity"},
    "recomputed": {"activations": "remat", "prefetch": 0},
    "serial": {"stage": 2, "update": "serial", "check_writes": True},
}


def rows_of(step: int, part: int) -> Tensor:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(100 * step + part))


def made(kind: str, mesh: Any, **settings: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return an example's model on a mesh, and the arguments of its plan."""
    names, beside = runpy.run_path(str(EXAMPLES / f"{kind}.py")), mesh[KINDS[kind]]
    if kind == "tensor_parallel":
        return names["build"](WIDTH, tp=beside), {"norm_groups": [beside], **settings}
    group = beside.get_group()
    return names["build"](group, WIDTH), {"norm_groups": [group], "replicated": names["EQUAL"], **settings}


def opened(world: zero.World, kind: str, mesh: Any, **settings: Any) -> tuple[zero.State, Callable[..., Any]]:
    model, arguments = made(kind, mesh, **settings)
    plan = zero.Plan(model, optimizer=zero.adamw(LR, clip=CLIP), world=world, **arguments)
    return zero.init(plan, zero.open_store(plan)), zero.make_step(plan, loss_fn)


def loss_fn(model: nn.Module, rows: Tensor) -> Tensor:
    values = model(rows.to(next(model.parameters()).dtype)).squeeze(-1).float()
    return F.mse_loss(values, rows[:, 0] * rows[:, 1])


def grid(kind: str, shape: tuple[int, int] = (2, 2)) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", KINDS[kind]))


def number_of(kind: str, world: zero.World) -> int:
    """Return the number of this rank's rows: each rank of "ep" has its own."""
    return world.ranks[world.rank] if kind == "experts" else world.rank


# -- the same as one process -------------------------------------------------------------------------------------------


def trained(_: zero.World, kind: str, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return, by setting, the digest of the trained state, the metrics, and this rank's parts of all parameters."""
    mesh, results = grid(kind), {}
    with zero.World.from_mesh(mesh, "dp", timeout_s=LONG_S) as world:
        for name, arguments in settings.items():
            state, step = opened(world, kind, mesh, **arguments)
            every = []
            for number in range(STEPS):
                state, metrics = step(state, [rows_of(number, number_of(kind, world))])
                every.append((metrics.loss, metrics.grad_norm))
            results[name] = digest(state), every, zero.full_state_dict(state)
            pool = state.runtime.residency.pool
            assert pool is None or not pool.renewed, "a saved tensor kept the memory of a gathered buffer"
            state.close()
    return results


def alone(model: nn.Module, parts: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Train a model by torch alone on the rows of all ranks; return (loss, norm) of each step, and all parameters."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if (p.ndim > 1) is decays], "weight_decay": 0.01 * decays}
        for decays in (True, False)
    ]
    optimizer, every = torch.optim.AdamW(groups, lr=LR), []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([loss_fn(model, rows_of(number, part)) for part in range(parts)]).mean()
        loss.backward()
        every.append((loss.item(), float(nn.utils.clip_grad_norm_(named.values(), CLIP))))
        optimizer.step()
    return every, {name: parameter.detach() for name, parameter in named.items()}


class PlainExperts(nn.Module):
    """The layer of examples/experts.py without exchanges: every expert sees every row."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = layer.norm, layer.gate, layer.experts

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        p, chosen = self.gate(y).softmax(-1).max(-1)
        every = torch.stack([expert(y) for expert in self.experts])
        return x + p.unsqueeze(-1) * every[chosen, torch.arange(len(x))]


@pytest.fixture
def one_rank_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def plain(kind: str, group: Any) -> nn.Module:
    """Return the whole model of an example, as a model of torch alone."""
    if kind != "experts":  # both split the same layers, with the same first values
        return runpy.run_path(str(EXAMPLES / "tensor_parallel.py"))["build"](WIDTH)
    first, *layers, last = runpy.run_path(str(EXAMPLES / "experts.py"))["build"](group, WIDTH)
    model = nn.Sequential(first, *(PlainExperts(layer) for layer in layers), last)
    for parameter in model.parameters():
        parameter._backward_hooks = None
    return model


def part_of(kind: str, name: str, rank: int, whole: dict[str, Tensor]) -> Tensor:
    """Return the part that one rank of "tp" or "ep" has of a parameter, by the name that it has there."""
    if kind == "experts":
        layer, _, rest = name.partition(".experts.")
        number, _, local = rest.partition(".")
        return whole[f"{layer}.experts.{int(number) + 2 * rank}.{local}"] if rest else whole[name]
    if kind == "split_mlp":
        ends = {".up": ".up.weight", ".start": ".up.bias", ".down": ".down.weight", ".shift": ".down.bias"}
        end = next((end for end in ends if name.endswith(end)), "")
        name = name.removesuffix(end) + ends.get(end, "")
    if ".up." in name:
        return whole[name].chunk(2)[rank]
    return whole[name].chunk(2, dim=1)[rank] if name.endswith(".down.weight") else whole[name]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_norms_and_parameters_are_those_of_one_process_in_equal_bits_on_all_stages_and_tiers(
    kind: str, one_rank_group: Any
):
    model = plain(kind, one_rank_group)
    expected, whole = alone(model, 4 if kind == "experts" else 2)
    assert all(norm > CLIP for _, norm in expected), "a norm below the limit clips nothing"
    ranks = run_processes(4, trained, kind, SETTINGS, timeout_s=LONG_S)
    first = next(iter(SETTINGS))
    for rank, results in enumerate(ranks):
        bits, every, parameters = results[first]
        assert every == ranks[0][first][1], "metrics are equal on all ranks"
        torch.testing.assert_close(torch.tensor(every), torch.tensor(expected), rtol=1e-5, atol=1e-6)
        for name, value in parameters.items():
            torch.testing.assert_close(value, part_of(kind, name, rank % 2, whole), rtol=1e-5, atol=1e-5)
        assert [results[name][:2] for name in SETTINGS] == [(bits, every)] * len(SETTINGS)
    assert ranks[0][first][0] == ranks[2][first][0] != ranks[1][first][0]
    (*_, mine), (*_, others) = ranks[0][first], ranks[1][first]
    equal = [name for name in mine if ".norm." in name or name.startswith("0.")]
    assert len(equal) == 8
    assert all(torch.equal(mine[name], others[name]) for name in equal), "equal parameters stay equal to the bit"


def test_a_mesh_of_one_rank_trains_dtensors_too(one_rank_group: Any):
    mesh = grid("tensor_parallel", (1, 1))
    with zero.World.from_mesh(mesh, "dp") as world:
        state, step = opened(world, "tensor_parallel", mesh)
        assert len(state.plan.beside.placed) == 4 * 3
        every = []
        for number in range(STEPS):
            state, metrics = step(state, [rows_of(number, 0)])
            every.append((metrics.loss, metrics.grad_norm))
        with pytest.raises(OutsideUnitError, match=r"^1\.up\.weight is a DTensor, of which this rank has a part"):
            state.model[1].up.weight.sum()
        with zero.gathered(state, ["1.up.weight"]) as parts:
            assert torch.equal(parts["1.up.weight"], state.model.state_dict()["1.up.weight"])
    expected, _ = alone(plain("tensor_parallel", one_rank_group), 1)
    torch.testing.assert_close(torch.tensor(every), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_a_distributed_module_trains_through_initialize(one_rank_group: Any):
    mesh = init_device_mesh("cpu", (1,))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))

    model = distribute_module(
        make(),
        mesh,
        input_fn=lambda _, inputs, mesh: (DTensor.from_local(inputs[0], mesh, [Replicate()]),),
        output_fn=lambda _, output, mesh: output.to_local(),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"train_batch_size": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3}}
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(2, 3)).square().mean())
    engine.step()
    plain = make()
    plain(torch.ones(2, 3)).square().mean().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(zero.get_full(engine, name), parameter.detach() - 0.1 * parameter.grad)
    engine.destroy()


def test_dtensors_on_a_simulated_gpu_stay_there_when_activations_are_offloaded(
    one_rank_group: Any, monkeypatch: pytest.MonkeyPatch
):
    """Each activation that is copied to the host comes back, and bits are those without offloading."""
    sent, back = list[Any](), list[Any]()
    keep, find = OnHost.keep, OnHost.find
    monkeypatch.setattr(saved_tensors, "LEAST_BYTES", 1)
    monkeypatch.setattr(OnHost, "keep", lambda *args: (sent.append(kept := keep(*args)), kept)[1])
    monkeypatch.setattr(OnHost, "find", lambda *args: (back.append(args[1]), find(*args))[1])
    mesh, results = grid("tensor_parallel", (1, 1)), []
    with simulated_gpu():  # its race detector cannot read DTensors
        for activations in ("keep", "offload"):
            with zero.World.from_mesh(mesh, "dp") as world:
                state, step = opened(world, "tensor_parallel", mesh, activations=activations, offload="cpu")
                for number in range(STEPS):
                    state, _ = step(state, [rows_of(number, 0)])
                results.append(digest(state))
                state.close()
    assert results[0] == results[1]
    assert {id(kept) for kept in sent} == {id(kept) for kept in back} != set()


OTHERS: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate": 2},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
}


def otherwise(_: zero.World) -> list[Any]:
    """Return, by setting and stage, digest and metrics of a short training."""
    mesh, results = grid("tensor_parallel"), []
    with zero.World.from_mesh(mesh, "dp", timeout_s=LONG_S) as world:
        for settings in OTHERS.values():
            for stage in (2, 3):
                state, step = opened(world, "tensor_parallel", mesh, stage=stage, **settings)
                every = []
                for number in range(STEPS):
                    parts = [world.rank + 2 * turn for turn in range(state.plan.accumulate)]
                    state, metrics = step(state, [rows_of(number, part) for part in parts])
                    every.append((metrics.loss, metrics.grad_norm))
                results.append((digest(state), every))
                state.close()
    return results


def test_dtensors_train_in_several_microbatches_and_in_half_precision(one_rank_group: Any):
    ranks = run_processes(4, otherwise, timeout_s=LONG_S)
    for number, (name, settings) in enumerate(OTHERS.items()):
        expected, _ = alone(plain("tensor_parallel", one_rank_group), 2 * settings.get("accumulate", 1))
        rounding = 1e-5 if name == "accumulate" else 5e-2
        for results in ranks:
            first, second = results[2 * number : 2 * number + 2]
            assert repr(first) == repr(second), "norms may be NaN"
            steps = STEPS if name != "fp16" else 1  # until the loss scale is found, steps are skipped
            assert any(math.isfinite(norm) for _, norm in first[1])
            losses, norms = torch.tensor(first[1][:steps]).T
            torch.testing.assert_close(losses, torch.tensor(expected[:steps])[:, 0], rtol=rounding, atol=1e-6)
            assert name == "fp16" or torch.allclose(norms, torch.tensor(expected)[:, 1], rtol=rounding)


class Tokens(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(32, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)
        self.blocks = nn.ModuleList(block(WIDTH) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens_model() -> nn.Module:
    torch.manual_seed(1)
    return Tokens(runpy.run_path(str(EXAMPLES / "tensor_parallel.py"))["Block"])


def tokens_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(step: int, part: int) -> Tensor:
    return torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(100 * step + part))


def sequence_parallel(_: zero.World) -> list[Any]:
    mesh, results = grid("tensor_parallel"), []
    with zero.World.from_mesh(mesh, "dp", timeout_s=LONG_S) as world:
        for settings in ({}, {"offload": "infinity"}, {"activations": "selective"}, {"activations": "offload"}):
            model, tp = tokens_model(), mesh["tp"]
            within = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
            ends = {"embed": within, "norm": SequenceParallel(), "head": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(model, tp, ends)
            for block in model.blocks:
                layers = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1))}
                parallelize_module(block, tp, {"norm": SequenceParallel(), **layers})
            plan = zero.Plan(model, optimizer=zero.sgd(0.1, clip=CLIP), world=world, norm_groups=[tp], **settings)
            state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, tokens_loss)
            every = []
            for number in range(STEPS):
                state, metrics = step(state, [tokens_of(number, world.rank)])
                every.append((metrics.loss, metrics.grad_norm))
            bits = digest(state)
            state.close()
            results.append((bits, every, {name: p.full_tensor().detach() for name, p in model.named_parameters()}))
    return results


def test_sequence_parallel_layouts_whose_gradients_are_partial_sums_train_alike():
    model, expected = tokens_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = (tokens_loss(model, tokens_of(number, 0)) + tokens_loss(model, tokens_of(number, 1))) / 2
        loss.backward()
        expected.append((loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))))
        optimizer.step()
    for results in run_processes(4, sequence_parallel, timeout_s=LONG_S):
        bits, every, parameters = results[0]
        torch.testing.assert_close(torch.tensor(every), torch.tensor(expected), rtol=1e-5, atol=1e-6)
        for name, value in model.named_parameters():
            torch.testing.assert_close(parameters[name], value.detach(), rtol=1e-5, atol=1e-6)
        assert [result[:2] for result in results] == [(bits, every)] * len(results)


# -- what all ranks decide together ------------------------------------------------------------------------------------


def poisoned(_: zero.World, kind: str, names: list[str]) -> list[Any]:
    """Return, for each parameter, the results of a step in which its gradient is NaN on rank 1 alone."""
    mesh, results = grid(kind), []
    with zero.World.from_mesh(mesh, "dp", timeout_s=LONG_S) as world:
        for name in names:
            state, step = opened(world, kind, mesh)
            before = {kind: zero.full_state_dict(state, kind) for kind in ("param", "mu", "nu")}
            if dist.get_rank() == 1:
                state.model.get_parameter(name).register_hook(lambda grad: grad * math.nan)
            state, metrics = step(state, [rows_of(0, number_of(kind, world))])
            same = [
                torch.equal(value, values[name])
                for kind, values in before.items()
                for name, value in zero.full_state_dict(state, kind).items()
            ]
            results.append((metrics.skipped, metrics.nonfinite_unit, state.step, all(same)))
            state.close()
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_on_one_coordinate_skips_the_step_on_all_ranks(kind: str):
    """In a matrix that is split, and in a norm, which does not count in the norm of that rank."""
    split = {"tensor_parallel": "2.up.weight", "split_mlp": "2.up", "experts": "2.experts.0.0.weight"}
    names = [split[kind], "1.norm.bias"]
    assert (
        run_processes(4, poisoned, kind, names, timeout_s=LONG_S) == [[(True, name[0], 0, True) for name in names]] * 4
    )


def failing(_: zero.World, folder: Path, kind: str, *, killed: bool = False) -> None:
    mesh = grid(kind)
    try:
        with zero.World.from_mesh(mesh, "dp", timeout_s=LONG_S) as world:
            state, step = opened(world, kind, mesh)
            state, _ = step(state, [rows_of(0, 0)])
            if dist.get_rank() == 3:
                if killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("no rows left")
            step(state, [rows_of(1, 0)])
    except Exception as error:
        text = "; ".join([str(error), *getattr(error, "__notes__", ())])
        (folder / f"{dist.get_rank()}").write_text(f"{type(error).__name__}: {text}")
        raise


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_fails_ends_all_others_by_its_name(kind: str, tmp_path: Path):
    """One of them waits for it in a collective of torch, whose error gets a note."""
    with pytest.raises(ValueError, match="no rows left"):
        run_processes(4, failing, tmp_path, kind, timeout_s=LONG_S)
    texts = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert all("rank 3 failed first: ValueError: no rows left" in text for text in texts), texts


def test_a_rank_that_is_killed_is_named_by_all_others(tmp_path: Path):
    with pytest.raises((RankFailedError, RuntimeError)):
        run_processes(4, partial(failing, killed=True), tmp_path, "split_mlp", timeout_s=LONG_S)
    texts = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert all(re.search(r"lost ranks? (\d, )*3 in .* killed by signal 9", text) for text in texts), texts


class Pair(nn.Module):
    def __init__(self, own: int) -> None:
        super().__init__()
        self.equal, self.own = nn.Linear(5, 5), nn.Linear(5, 1)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                seed = torch.Generator().manual_seed(0 if name.startswith("equal") else own)
                parameter.copy_(torch.randn(parameter.shape, generator=seed))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.own(x), torch.tanh(self.equal(x))], -1)  # the gradient of "equal" is equal, too


def pair_loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    y = model(x).square().mean()
    return y, {"twice": 2 * y}


def beside_groups(whole: zero.World, settings: dict[str, Any], seeds: list[int]) -> Any:
    """Train `Pair` on a grid of 2 x 2 x 2 threads, with "equal" equal on all; return metrics, and the digest."""
    rank = whole.rank
    world = whole.part([rank % 4, rank % 4 + 4], f"dp {rank % 4}")
    pairs = ([rank - rank % 2, rank - rank % 2 + 1], [r for r in range(8) if r // 4 == rank // 4 and r % 2 == rank % 2])
    groups = [whole.part(ranks, f"{name} {ranks[0]}") for name, ranks in zip("ab", pairs, strict=True)]
    with whole.exclusive():
        model = Pair(seeds[rank % 4])
    replicated = ["equal.*"]
    plan = zero.Plan(
        model, optimizer=zero.sgd(0.1, clip=0.5), world=world, norm_groups=groups, replicated=replicated, **settings
    )
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, pair_loss, flag=lambda: float(rank))
    batch = torch.ones(2, 5) * (1 + whole.rank // 4)
    state, metrics = step(state, [batch])
    return metrics, digest(state)


@pytest.mark.parametrize("settings", [{"stage": 3}, {"stage": 1, "accumulate": 1}], ids=str)
def test_norm_loss_and_flags_are_equal_on_all_ranks_of_all_groups(settings: dict[str, Any]):
    """Of ranks that hold other parts, with another gradient each; equal parameters count once."""
    seeds = [3, 4, 5, 6]
    results = run_ranks(8, beside_groups, settings, seeds)
    assert [metrics for metrics, _ in results] == [results[0][0]] * 8
    squares, losses = 0.0, []
    for number, seed in enumerate(seeds):
        model = Pair(seed)
        parts = [pair_loss(model, torch.ones(2, 5) * size)[0] for size in (1, 2)]
        loss = sum(parts) / 2
        loss.backward()
        losses.append(loss.item())
        counted = model.parameters() if number == 0 else model.own.parameters()
        squares += sum(float(p.grad.double().square().sum()) for p in counted)
    metrics = results[0][0]
    assert metrics.grad_norm == pytest.approx(math.sqrt(squares), rel=1e-6)
    assert metrics.loss == pytest.approx(sum(losses) / 4, rel=1e-6)
    assert metrics.aux["twice"] == pytest.approx(2 * metrics.loss, rel=1e-6)
    assert metrics.rank_flags == (0, 4, 1, 5, 2, 6, 3, 7)


def test_groups_on_a_simulated_gpu_give_the_same_bits_on_every_tier():
    """All waits of a step hold with them, too: side streams run as late as those allow."""
    expected = [bits for _, bits in run_ranks(8, beside_groups, {"stage": 3}, [3, 4, 5, 6])]
    with simulated_gpu(races=True, order="late"):
        for offload in (None, "infinity"):
            results = run_ranks(8, beside_groups, {"stage": 3, "offload": offload}, [3, 4, 5, 6])
            assert [bits for _, bits in results] == expected


def unequal(whole: zero.World, what: str) -> None:
    world = whole.part([whole.rank % 2, whole.rank % 2 + 2], f"dp {whole.rank % 2}")
    group = whole.part([whole.rank - whole.rank % 2, whole.rank - whole.rank % 2 + 1], f"tp {whole.rank // 2}")
    with whole.exclusive():
        model = Pair(1)
        if what == "values" and whole.rank % 2:
            model.equal.bias.data[0] += 1
    clip = 0.5 if what == "clip" and whole.rank % 2 else 0.25
    plan = zero.Plan(
        model, optimizer=zero.sgd(0.1, clip=clip), world=world, norm_groups=[group], replicated=["equal.*"]
    )
    zero.init(plan, zero.open_store(plan))


class Partly(Pair):
    """A model whose gradient of "equal" is a part on each rank, as of torch's norms without SequenceParallel."""

    def forward(self, x: Tensor) -> Tensor:
        return self.own(torch.tanh(self.equal(x)))


def partial_gradients(whole: zero.World, names: list[str]) -> None:
    world, group = whole.part([whole.rank], f"dp {whole.rank}"), whole.part([0, 1], "tp")
    with whole.exclusive():
        model = Partly(whole.rank) if names[0] == names[1] else Pair(whole.rank)
    plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=world, norm_groups=[group], replicated=["equal.*"])
    state = zero.init(plan, zero.open_store(plan))

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = model(x).square().mean()
        return y, {names[whole.rank]: y}

    zero.make_step(plan, loss)(state, [torch.ones(2, 5)])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a", "a"], r"parameters that are equal on ranks 0, 1 have other gradients there, with sums of squares from"),
        (["a", "b"], r"aux: ranks of norm_groups return other names\."),
    ],
)
def test_a_step_compares_gradients_of_equal_parameters_and_names(names: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        run_ranks(2, partial_gradients, names)


@pytest.mark.parametrize(
    ("what", "said"),
    {
        "values": r"different first values of replicated parameters: equal\.bias is .* on rank 0; .* on rank 1",
        "clip": r"different settings of norm_groups: optim is sgd clip=0\.25 on rank 0; sgd clip=0\.5 on rank 1",
    }.items(),
)
def test_ranks_of_a_norm_group_compare_settings_and_equal_parameters(what: str, said: str):
    with pytest.raises(HandshakeError, match=said):
        run_ranks(4, unequal, what)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def refusals(_: zero.World) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, torch_only, part = mesh["tp"], dist.new_group([3]), DeviceMesh("cpu", [2, 3], mesh_dim_names=("dp",))
    build = runpy.run_path(str(EXAMPLES / "tensor_parallel.py"))["build"]
    with zero.World.from_mesh(mesh, "dp", timeout_s=LONG_S) as world:

        def plan(model: nn.Module, optimizer: Any = None, **settings: Any) -> zero.Plan:
            settings = {"norm_groups": [tp], **settings}
            return zero.Plan(model, optimizer=optimizer or zero.adamw(LR), world=world, **settings)

        def partial_sums() -> nn.Module:
            model = nn.Linear(4, 4, bias=False)
            model.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), tp, [Partial()], run_check=False))
            return model

        def over(mesh: Any, places: list[Any]) -> nn.Module:
            model = nn.Linear(4, 4, bias=False)
            model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, places))
            return model

        def hooked() -> nn.Module:
            model = over(tp, [Shard(0)])
            model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
            return model

        def elsewhere() -> None:
            sharded = over(tp, [Shard(0)])
            with patch.object(DeviceMesh, "device_type", "cuda"):
                plan(sharded)

        def opened_by_hand() -> None:
            with patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
                zero.World.from_mesh(mesh, "dp")

        def of(group: Any, tp: Any) -> Callable[[], Any]:
            return lambda: zero.World.from_group(group, coordinates={"tp": tp}, timeout_s=LONG_S)

        apart = zero.World.from_mesh(mesh, "tp", timeout_s=LONG_S)

        def on_meta() -> None:
            with zero.empty():
                model = Pair(0)
            made = plan(model, replicated=["equal.*"])
            zero.init(made, zero.open_store(made))

        calls: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
            "dimension": (ConfigError, lambda: zero.World.from_mesh(mesh, "pp")),
            "no mesh": (ConfigError, lambda: zero.World.from_mesh(tp.get_group(), "tp")),
            "no group": (ConfigError, lambda: zero.World.from_group(mesh)),
            "elsewhere": (ConfigError, lambda: zero.World.from_group(torch_only)) if dist.get_rank() < 3 else None,
            "not there": (ConfigError, lambda: zero.World.from_mesh(part, "dp")) if dist.get_rank() < 2 else None,
            "no norm group": (PlanError, lambda: plan(build(WIDTH, tp), norm_groups=[])),
            "of the world": (PlanError, lambda: plan(over(mesh["dp"], [Shard(0)]))),
            "replicas": (PlanError, lambda: plan(over(mesh["dp"], [Replicate()]))),
            "of both": (PlanError, lambda: plan(over(mesh, [Replicate(), Shard(0)]))),
            "partial": (PlanError, lambda: plan(partial_sums())),
            "compiled": (PlanError, lambda: plan(build(WIDTH, tp), compile=True)),
            "Muon": (PlanError, lambda: plan(build(WIDTH, tp), zero.muon(LR))),
            "pattern": (PlanError, lambda: plan(Pair(0), replicated=["equel.*"])),
            "string": (PlanError, lambda: plan(Pair(0), replicated="equal.*")),
            "no list": (PlanError, lambda: plan(Pair(0), norm_groups=tp)),
            "its own": (PlanError, lambda: plan(Pair(0), norm_groups=[mesh["dp"]])),
            "twice": (PlanError, lambda: plan(Pair(0), norm_groups=[tp, tp])),
            "apart": (PlanError, lambda: plan(Pair(0), norm_groups=[apart])),
            "device": (PlanError, elsewhere),
            "hook": (PlanError, lambda: plan(hooked())),
            "by hand": (ConfigError, opened_by_hand),
            "no place": (ConfigError, of(tp, -1)),
            "one name": (ConfigError, of(mesh["dp"], 0)),
            "other names": (ConfigError, of(tp, dist.get_rank())),
            "overlap": (ConfigError, of(tp if dist.get_rank() < 2 else mesh["dp"], 0)),
            "alone": (PlanError, lambda: plan(Pair(0), norm_groups=[], replicated=["equal.*"])),
            "equal parts": (PlanError, on_meta),
        }
        return {name: refused(*call) for name, call in calls.items() if call is not None}


REFUSALS = {
    "dimension": "mesh has no dimension named pp: it has dp, tp. Name one of these.",
    "no mesh": "mesh is ProcessGroup: must be a DeviceMesh, from init_device_mesh.",
    "no group": "group is DeviceMesh: must be a process group of torch with this rank, or a mesh of one dimension.",
    "elsewhere": "group does not have this rank. Pass a group with this rank on every rank.",
    "not there": "mesh does not have rank 0. Make it of all ranks of the run.",
    "no norm group": "parameter 1.up.weight is a DTensor over ranks 0, 1, which are no group of norm_groups. Write a "
    'loop with zero.Plan(..., norm_groups=[mesh["tp"]]), which zero.initialize does not have.',
    "of the world": "parameter weight is a DTensor that is sharded over ranks of the world already. Pass the model as "
    "it is before fully_shard.",
    "replicas": "parameter weight is a DTensor that is replicated over ranks of the world already. Pass the model as "
    "it is before distribute_module.",
    "of both": "parameter weight is a DTensor that is replicated over ranks of the world already. Pass the model as it "
    'is before distribute_module, or open the world with zero.World.from_mesh(mesh, "dp").',
    "partial": "parameter weight is a DTensor of partial sums. Redistribute it to Shard or Replicate.",
    "compiled": "zero.compile does not compile modules with DTensors. Set zero.compile=false.",
    "Muon": "Muon updates whole matrices, and of 1.up.weight, 1.down.weight this rank has a part. Use zero.adamw.",
    "pattern": "replicated: no parameter is named equel.*.",
    "string": "replicated='equal.*' is one string. Pass a list: ['equal.*'].",
    "no list": "norm_groups is a DeviceMesh. Pass a list of groups: [group].",
    "its own": "norm_groups: ranks 0, 2 are in the world, too. Pass groups of other dimensions only.",
    "twice": "norm_groups: ranks 0, 1 are in another group, too. Pass groups of other dimensions only.",
    "apart": "norm_groups: a world was opened apart from the plan's. Pass torch's group or mesh instead.",
    "device": 'parameter weight is a DTensor on cuda, but the world is on cpu. Open it with device="cuda".',
    "hook": "parameter weight is a DTensor with a gradient hook. Register the hook after zero.init.",
    "by hand": "torch's process group has rank 0 of 4, but RANK and WORLD_SIZE say 0 of 1. Start with torchrun, or set "
    "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.",
    "no place": "coordinates: 'tp' is -1. Pass names and whole numbers: {\"tp\": 1}.",
    "one name": "coordinates: two worlds have {'tp': 0}, so their checkpoints would have one name.",
    "other names": "group: the ranks have the worlds ([0, 1], {'tp': 0}), ([0, 1], {'tp': 1}), ([2, 3], {'tp': 2}), "
    "([2, 3], {'tp': 3}), but each rank must be in one, with the same coordinates on all its ranks.",
    "overlap": "group: the ranks have the worlds ([0, 1], {'tp': 0}), ([0, 2], {'tp': 0}), ([1, 3], {'tp': 0}), but "
    "each rank must be in one, with the same coordinates on all its ranks.",
    "alone": "replicated is for the ranks of norm_groups. Write zero.Plan(..., norm_groups=[group]).",
    "equal parts": "own.weight, own.bias: each rank of norm_groups has another part, but zero.init would make equal "
    "ones. Build the model with its values, pass weights=, or name parameters that are equal in replicated=[...].",
}


def test_combinations_that_cannot_train_are_named_in_one_line():
    first, *others = run_processes(4, refusals, timeout_s=LONG_S)
    assert first == REFUSALS
    assert all(texts.keys() >= first.keys() - {"elsewhere", "not there"} for texts in others)
    assert all(texts["other names"] == first["other names"] for texts in others), "raised alike by all"


def restored(_: zero.World) -> Any:
    """Train, close, and run the model again as torch's tensor parallelism."""
    mesh = grid("tensor_parallel")
    with zero.World.from_mesh(mesh, "dp", timeout_s=LONG_S) as world:
        state, step = opened(world, "tensor_parallel", mesh)
        state, _ = step(state, [rows_of(0, world.rank)])
        evaluated = zero.make_forward(state.plan, lambda model, rows: model(rows))(state, rows_of(1, 0))
        model, calls = state.model, list[Tensor]()
        model[1].up.weight.register_hook(calls.append)
        state.close()
        values = model(rows_of(1, 0))
        values.sum().backward()
        return torch.equal(evaluated, values), type(model[1].up.weight).__name__, len(calls)


def test_a_closed_state_leaves_a_model_of_dtensors_with_its_hooks():
    assert run_processes(4, restored, timeout_s=LONG_S) == [(True, "DTensor", 1)] * 4
