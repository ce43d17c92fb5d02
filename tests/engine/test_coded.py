"""A run with codes has the bits of the run whose frozen parameters were expanded once and kept in the compute dtype."""

import contextlib
import re
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import zero
from tests.common.small import Setting, Small, adamw_in_8bit, slice_of, small_batch, small_loss
from tests.faults.disks import FaultyFiles, flip
from tests.simulation import simulated_gpu
from tests.simulation.simulated_gpu import count_launches
from zero.core.formats import PACKED_FORMATS, PackedFormat
from zero.distributed.world import World
from zero.engine.model.coded import CodedWeights
from zero.engine.plan.traffic import traffic
from zero.engine.whole.measured import measured
from zero.engine.whole.read import full_state_dict
from zero.errors import ConfigError, PlanError, StoreError
from zero.store import NvmeStore
from zero.testing import run_ranks

KiB = 1024
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INFINITY = (("preset", "infinity"),)


def build(width: int = 13) -> Small:
    """A unit whose parameters train, one of them frozen and coded, and a unit that is frozen and used twice."""
    model = Small(width=width)
    model.blocks[0].linear.weight.requires_grad_(False)
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    return model


def large() -> Small:
    """A model whose codes have several rows and pages."""
    return build(131)


CODED = ("blocks.0.linear.weight", "blocks.1.linear.weight", "blocks.2.linear.weight")


def values(make=build) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: parameter.detach().clone() for name, parameter in make().named_parameters()}


def expanded(weights: dict[str, Tensor], codec: str, precision: str) -> dict[str, Tensor]:
    """The weights with coded parameters as a gather makes them."""
    weights = dict(weights)
    for name in CODED:
        value = torch.empty(weights[name].numel(), dtype=DTYPES[precision])
        PACKED_FORMATS[codec].expand(PACKED_FORMATS[codec].encode(weights[name].view(-1)), value)
        weights[name] = value.view(weights[name].shape).float()
    return weights


def train(world, setting: Setting, weights: dict[str, Tensor], make=build, steps: int = 3):
    """The losses and norms of some steps, and the full state after them."""
    plan = setting.plan(world, make)
    state, step = zero.init(plan, zero.open_store(plan), weights=weights), zero.make_step(plan, small_loss)
    every = []
    for number in range(steps):
        batch = small_batch(number, 6 * world.size * setting.accumulate)
        state, metrics = step(state, slice_of(batch, world, setting.accumulate))
        every.append(metrics)
    actual = {
        f"{kind} {name}": value
        for kind in ("param", "compute", *plan.optimizer.moments)
        for name, value in full_state_dict(state, kind).items()
    }
    state.close()
    return every, actual


def assert_same(actual, expected):
    for (metrics, state), (metrics_of_expected, expected_state) in zip(actual, expected, strict=True):
        assert metrics == metrics_of_expected
        assert state.keys() == expected_state.keys()
        for name, value in state.items():
            assert torch.equal(value, expected_state[name]), name


def check(size: int, setting: Setting, others: list[Setting], codec: str = "nf4", make=build, **how) -> None:
    weights = values(make)
    expected = run_ranks(size, train, setting, expanded(weights, codec, setting.precision), make, **how)
    for other in others:
        assert_same(run_ranks(size, train, other.but(frozen=codec), weights, make, **how), expected)


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_stage_changes_a_bit(size, precision):
    setting = Setting(precision=precision, clip=0.5)
    check(size, setting, [setting.but(stage=stage) for stage in range(4)])


@pytest.mark.parametrize("stage", range(4))
def test_accumulation_has_the_bits_of_its_stage(stage):
    setting = Setting(stage=stage, precision="bf16", accumulate=2, optimizer=adamw_in_8bit)
    check(2, setting, [setting, setting.but(update="serial")])


@pytest.mark.parametrize("codec", PACKED_FORMATS)
@pytest.mark.parametrize("size", [1, 2])
def test_no_tier_changes_a_bit(size, codec):
    setting = Setting(precision="bf16", accumulate=2)
    others = [
        setting.but(offload=INFINITY, page_bytes=4 * KiB),
        setting.but(offload=(("preset", "nvme"),), update="serial"),
        setting.but(offload=(("preset", "none"), ("param", "nvme"))),
    ]
    check(size, setting, others, codec, large)


@pytest.mark.parametrize("size", [1, 3])
def test_no_unit_cut_and_no_schedule_changes_a_bit(size):
    setting = Setting(precision="bf16")
    others = [
        setting.but(bucket=64 * KiB),
        setting.but(units=("Linear", "auto")),
        setting.but(units=("Small",), stage=2),
        setting.but(prefetch=0, activations="remat"),
        setting.but(prefetch=3, keep=("blocks.1",), activations="selective"),
    ]
    check(size, setting, others)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("codec", PACKED_FORMATS)
@pytest.mark.parametrize(("fused", "width"), [(True, 256), (False, 1024)])
def test_launches_on_a_gpu_do_not_grow_with_the_values_of_a_parameter(codec, fused, width):
    def launches(width: int) -> Counter[str]:
        setting = Setting(precision="bf16", frozen=codec, optimizer=zero.sgd)
        state, step = setting.start(zero.open_world(), lambda: build(width))
        state, _ = step(state, [small_batch(0, 6)])
        return count_launches(lambda: step(state, [small_batch(1, 6)]))

    with simulated_gpu(fused=fused):
        small, large = launches(128), launches(width)
    assert sum(large.values()) == sum(small.values())
    assert (large["zero::expand"] > 0) == fused


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_one_launch_expands_all_parameters_of_a_unit():
    def launches(units: tuple[str, ...]) -> int:
        setting = Setting(precision="bf16", frozen="nf4", optimizer=zero.sgd, units=units)
        state, step = setting.start(zero.open_world(), build)
        state, _ = step(state, [small_batch(0, 6)])
        return count_launches(lambda: step(state, [small_batch(1, 6)]))["zero::expand"]

    with simulated_gpu(fused=True):
        assert launches(("Small",)) in (1, 2), "one for each gather of the only unit, which has three such parameters"


OFFLOADS = {
    "none": (),
    "cpu": (("preset", "cpu"), ("param", "cpu")),
    "infinity": INFINITY,
}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("size", [1, 2])
def test_on_a_gpu_no_tier_and_no_order_changes_a_bit(size, offload):
    setting, weights = Setting(precision="bf16", page_bytes=4 * KiB), values(large)
    with simulated_gpu():
        expected = run_ranks(size, train, setting, expanded(weights, "nf4", "bf16"), large)
    with simulated_gpu(races=True, order="late"):
        coded = setting.but(frozen="nf4", offload=OFFLOADS[offload])
        assert_same(run_ranks(size, train, coded, weights, large), expected)


@pytest.mark.parametrize("offload", ["none", "infinity"])
def test_the_kernel_of_a_gpu_changes_no_bit(offload):
    """Of parameters, from which the losses and gradients are made."""
    setting, weights = Setting(precision="bf16", frozen="nf4", offload=OFFLOADS[offload]), values(large)
    expected = expanded(weights, "nf4", "bf16")
    with simulated_gpu(fused=True, races=True, order="late"):
        for actual in run_ranks(2, first_values, setting, weights):
            for name in CODED:
                assert torch.equal(actual[name], expected[name]), name


def test_between_nodes_no_gather_changes_a_bit():
    setting = Setting(precision="bf16", between=("world", "node"))
    others = [
        setting.but(between=("node", "node")),
        setting.but(between=("node", "node"), stage=0),
        setting.but(between=("node", "node"), offload=INFINITY),
        setting.but(shard="node"),
    ]
    check(4, setting, others, make=large, nodes=2)


def held(world, setting: Setting):
    """The bytes that a plan counts, those that exist after a step, and the bytes of its codes."""
    state, step = setting.start(world, large)
    state, _ = step(state, slice_of(small_batch(0, 6 * world.size), world, 1))
    counted = {tier: {kind: n for kind, n in kinds.items() if n} for tier, kinds in state.plan.bytes.items()}
    return counted, measured(state), sum(unit.packed.stored.S for unit in state.plan.units if unit.packed)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("between", [("world", "exact"), ("node", "exact")])
def test_the_plan_counts_the_bytes_that_exist(stage, size, between):
    setting = Setting(stage=stage, precision="bf16", frozen="nf4", between=between)
    nodes = {"nodes": 2} if between[0] == "node" else {}
    for counted, actual, codes in run_ranks(2 * size if nodes else size, held, setting, **nodes):
        assert counted["device"] == actual["device"]
        assert codes * (2 * size if nodes else size) == pytest.approx(0.5167 * 3 * 131 * 131, rel=0.02)


def pages(world, setting: Setting) -> tuple[int, int, int]:
    """The bytes of parameters that a plan counts in host memory, those of their pages, and the bytes of codes."""
    plan = setting.plan(world, large)
    specs = [spec for page, spec in plan.pages.store_pages().items() if plan.kind(page) == "parameters"]
    codes = sum(spec.nbytes for page, spec in plan.pages.store_pages().items() if page.kind == "codes")
    return plan.bytes["host"]["parameters"], sum(spec.block_bytes for spec in specs), codes


@pytest.mark.parametrize("size", [1, 2])
def test_the_plan_counts_pages_of_codes(size):
    setting = Setting(precision="bf16", frozen="nf4", offload=OFFLOADS["cpu"])
    with simulated_gpu():
        for counted, actual, codes in run_ranks(size, pages, setting):
            assert counted == actual
            assert codes * size == pytest.approx(0.5167 * 3 * 131 * 131, rel=0.02)


@pytest.mark.parametrize(
    ("codec", "accumulate", "offload"), [("nf4", 1, "none"), ("int8", 3, "none"), ("nf4", 2, "infinity")]
)
def test_the_plan_counts_the_values_that_a_step_expands(codec, accumulate, offload, monkeypatch):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(12)))
    model[1:].requires_grad_(False)
    plan = zero.Plan(
        model,
        optimizer=zero.adamw(1e-3),
        precision=zero.Precision("bf16", frozen=codec),
        offload=offload,
        world=World.solo(),
        accumulate=accumulate,
    )
    expanded_numels, expand = list[int](), type(PACKED_FORMATS[codec]).expand

    def counting(codec: PackedFormat, codes: Tensor, values: Tensor, *chunk: int) -> None:
        expanded_numels.append(values.numel())
        expand(codec, codes, values, *chunk)

    with contextlib.closing(zero.open_store(plan)) as store:
        state = zero.init(plan, store)
        step = zero.make_step(plan, lambda model, batch: model(batch).float().square().mean())
        for _ in range(3):  # the third step knows which units the next one needs first
            expanded_numels.clear()
            with monkeypatch.context() as patch:
                patch.setattr(type(PACKED_FORMATS[codec]), "expand", counting)
                state, _ = step(state, [torch.randn(2, 64, dtype=torch.bfloat16)] * accumulate)
    expected = traffic(plan).of_step(accumulate).memory / PACKED_FORMATS[codec].moved_bytes
    # which units stay gathered between passes may differ by a unit from the simulation in the plan
    assert abs(sum(expanded_numels) - expected) <= accumulate * 64 * 64
    assert expected >= 2 * accumulate * 4 * 64 * 64


# -- which parameters, and bad input -----------------------------------------------------------------------------------


class Head(torch.nn.Module):
    """An embedding, a convolution, a norm, and a head that is not tied."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(29, 8)
        self.places = torch.nn.Embedding(5, 8)
        self.mix = torch.nn.Conv1d(8, 8, 3)
        self.norm = torch.nn.LayerNorm(8)
        self.middle = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 29, bias=False)


def planned(model: torch.nn.Module, coded: tuple[str, ...] = (), train: tuple[str, ...] = ("norm.bias",)) -> set[str]:
    """The names of the parameters that a plan stores as codes."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in train)
    precision = zero.Precision("bf16", frozen="nf4", coded=coded)
    plan = zero.Plan(model, optimizer=zero.adamw(1e-3), world=World.solo(), precision=precision)
    return {*plan.facts.splitting.packed_shapes()}


def test_matrices_are_coded_but_embeddings_heads_and_norms_are_not():
    assert planned(Head()) == {"mix.weight", "middle.weight"}
    assert planned(Head(), train=("norm.bias", "middle.weight")) == {"mix.weight"}
    wide = Head()
    wide.middle, wide.places = torch.nn.Linear(12, 29), torch.nn.Embedding(8, 8)  # rows of words; shape of a matrix
    wide.square = torch.nn.Linear(8, 8)
    assert planned(wide) == {"mix.weight", "middle.weight", "square.weight"}
    alike = Head()
    alike.middle = torch.nn.Linear(8, 29)  # the shape of the head, which comes later
    assert planned(alike) == {"mix.weight", "middle.weight"}
    alike.head.weight = next(module for module in alike.modules() if isinstance(module, torch.nn.Embedding)).weight
    assert planned(alike) == {"mix.weight", "middle.weight"}, "a tied head is the embedding"
    assert planned(Head(), coded=("middle.*", "head.weight")) == {"middle.weight", "middle.bias", "head.weight"}


def test_a_pattern_may_have_any_name_of_a_tied_parameter():
    tied = Head()
    tied.other = tied.middle
    assert planned(tied, coded=("other.weight",)) == {"middle.weight"}


@pytest.mark.parametrize(
    ("coded", "train", "message"),
    [
        (("midle.weight",), (), "precision.coded: no parameter is named midle.weight. Did you mean middle.weight?"),
        (
            ("middle.weight",),
            ("middle.weight",),
            "precision.coded: middle.weight would be stored as codes, but trains. Freeze it with "
            "requires_grad_(False), or remove the pattern.",
        ),
        (
            (),
            ("mix.weight", "middle.weight"),
            "precision.frozen=nf4: the model has no frozen matrix. Freeze the base with requires_grad_(False) or "
            "model.lora.rank=16, or set precision.frozen=compute.",
        ),
    ],
)
def test_what_cannot_be_coded_is_named_in_a_line(coded, train, message):
    with pytest.raises(PlanError) as caught:
        planned(Head(), coded, train)
    assert str(caught.value) == message


def as_codes(weights: dict[str, Tensor]) -> CodedWeights:
    """The weights with nf4 codes of the parameters that have them, as another library gives them."""
    nf4 = PACKED_FORMATS["nf4"]
    codes = {name: nf4.encode(weights[name].view(-1)) for name in CODED}
    others = {name: value for name, value in weights.items() if name not in CODED}
    return CodedWeights(nf4, codes, others, {name: tuple(weights[name].shape) for name in CODED})


@pytest.mark.parametrize("frozen", ["compute", "int8"])
def test_codes_that_the_plan_does_not_keep_are_refused_with_what_to_type(frozen):
    with pytest.raises(PlanError) as caught:
        train(World.solo(), Setting(frozen=frozen), as_codes(values()))
    assert str(caught.value) == (
        "weights have blocks.0.linear.weight, blocks.1.linear.weight, blocks.2.linear.weight in nf4, but the plan does "
        'not. Give zero.Plan precision=zero.Precision("bf16", frozen="nf4", coded=list(weights.codes)).'
    )


def test_weights_with_codes_are_read_by_range(monkeypatch):
    """A sample of each parameter expands one row of its codes and not all of them."""
    weights, numels = values(large), []
    coded, expected = as_codes(weights), expanded(weights, "nf4", "fp32")
    assert {*coded} == {*expected}
    assert all(torch.equal(coded[name], value) for name, value in expected.items())
    monkeypatch.setattr(PackedFormat, "expand", lambda self, codes, values: numels.append(values.numel()))
    assert [coded.read(name, 0, 64).numel() for name in CODED] == [64, 64, 64]
    assert numels == [16384, 16384, 16384]


def message_of(world, weights) -> str:
    with pytest.raises(ConfigError) as caught:
        train(world, Setting(precision="bf16", frozen="nf4"), weights, large)
    return str(caught.value)


@pytest.mark.parametrize("number", [float("nan"), float("-inf"), 3e38])
@pytest.mark.parametrize("size", [1, 2])
def test_a_base_that_has_no_codes_is_refused_by_name_on_every_rank(size, number):
    weights = values(large)
    weights[CODED[1]][130, 5:] = number  # in the shard of one rank
    for form in (weights, as_codes(weights)):
        assert run_ranks(size, message_of, form) == size * [
            "blocks.1.linear.weight has a value that is NaN, infinite or above 1e36, so it has no codes. Repair the "
            "weights, or name other parameters in precision.coded."
        ]


def test_a_damaged_page_of_codes_is_named_and_no_step_uses_it(tmp_path):
    setting, named = Setting(precision="bf16", frozen="nf4", offload=INFINITY), set()

    def train_on(disk: NvmeStore) -> float:
        plan = setting.plan(World.solo(), build)
        with contextlib.closing(zero.open_store(plan, disk=disk)) as store:
            step = zero.make_step(plan, small_loss)
            _, metrics = step(zero.init(plan, store), [small_batch(0, 6)])
            return metrics.loss

    expected = train_on(NvmeStore(tmp_path))
    for at in range(1, 40):
        files = FaultyFiles(flip(77), at=at, only="pread")
        try:
            assert train_on(NvmeStore(tmp_path, files=files)) == expected
        except StoreError as error:
            named.add(re.sub(r" of unit .*: the", ": the", str(error)))
    assert "page codes 0: the checksum differs, so the disk returned other data than was written" in named


def test_an_evaluation_in_inference_mode_computes_with_the_values():
    state, step = Setting(frozen="nf4").start(World.solo(), build)
    state, _ = step(state, [small_batch(0, 6)])
    state.model.eval()
    batch = small_batch(1, 6)
    with torch.no_grad():
        expected, _ = small_loss(state.model, batch)
    with torch.inference_mode():
        actual, _ = small_loss(state.model, batch)
    assert torch.equal(actual, expected)
    state.model.train()
    step(state, [small_batch(2, 6)])


def test_codes_cannot_be_edited():
    state, _ = Setting(frozen="nf4").start(World.solo(), build)
    before = full_state_dict(state)
    with pytest.raises(ConfigError, match=r"blocks.2.linear.weight cannot be edited, because it is kept as codes."):
        zero.set_full(state, CODED[2], torch.zeros(13, 13))
    with zero.gathered(state, modify=True) as full:
        full["blocks.2.linear.bias"].zero_()
    after = full_state_dict(state)
    assert all(torch.equal(before[name], after[name]) for name in CODED)
    assert not after["blocks.2.linear.bias"].any()


def test_a_closed_state_gives_the_values_back():
    weights = values()
    state = zero.init(plan := Setting(frozen="nf4").plan(World.solo(), build), zero.open_store(plan), weights=weights)
    state.close()
    expected = expanded(weights, "nf4", "fp32")
    for name, parameter in plan.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


# -- first values ------------------------------------------------------------------------------------------------------


def first_values(world, setting: Setting, weights) -> dict[str, Tensor]:
    plan = setting.plan(world, large)
    with contextlib.closing(zero.open_store(plan)) as store:
        return full_state_dict(zero.init(plan, store, weights=weights, seed=5))


@pytest.mark.parametrize("size", [1, 3])
def test_weights_of_a_folder_are_coded_as_they_are_read(size, tmp_path):
    weights = values(large)
    save_file({name: value.bfloat16() for name, value in weights.items()}, tmp_path / "model.safetensors")
    expected = expanded({name: value.bfloat16().float() for name, value in weights.items()}, "nf4", "fp32")
    for actual in run_ranks(size, first_values, Setting(frozen="nf4"), tmp_path / "model.safetensors"):
        for name, value in expected.items():
            assert torch.equal(actual[name], value), name


def test_initial_values_are_coded_alike_in_every_world():
    [plain] = run_ranks(1, first_values, Setting(), None)
    for size in (1, 3):
        for actual in run_ranks(size, first_values, Setting(frozen="nf4"), None):
            for name, value in expanded(plain, "nf4", "fp32").items():
                assert torch.equal(actual[name], value), name
