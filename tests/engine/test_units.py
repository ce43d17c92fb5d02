"""Any model splits into units: every parameter in exactly one, every reader covered, the user's model untouched."""

import copy
import io
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zero
from zero.engine.meta import is_meta
from zero.engine.model.split import split
from zero.engine.model.takeover import Takeover
from zero.engine.model.unit import Splitting
from zero.errors import OutsideUnitError, PlanError
from zero.testing import run_ranks
from zero.trainer.models.gpt import GPT
from zero.trainer.models.gpt_config import GPTConfig

WIDTH = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class HuggingFaceLike(nn.Module):
    """A transformer as a ModuleDict inside the model, blocks as its `h`, head beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(7, WIDTH),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(Block() for _ in range(3)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, 7, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight


class TwoLists(nn.Module):
    """Blocks two lists deep; nothing but lists above them."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))


class Bare(nn.Module):
    """Parameters that no callable module owns, and tables beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.rows = nn.ParameterList(torch.randn(WIDTH) for _ in range(2))
        self.named = nn.ParameterDict({"a": torch.randn(3)})
        self.register_buffer("table", torch.arange(4.0))
        self.attention = nn.MultiheadAttention(WIDTH, 1)
        self.norm = nn.BatchNorm1d(WIDTH)


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (deep, ["0", "2"]),
        (lambda: nn.Linear(3, 3), ["(root)"]),
        (HuggingFaceLike, ["transformer.wte", *(f"transformer.h.{n}" for n in range(3)), "transformer.ln_f"]),
        (TwoLists, [f"stages.{a}.{b}" for a in range(2) for b in range(2)]),
        (Bare, ["(root)", "attention", "norm"]),
        (
            lambda: GPT(GPTConfig(vocab=7, width=8, layers=2, heads=2, seq=4, tied=False)),
            ["embed", "blocks.0", "blocks.1", "norm", "head"],
        ),
    ],
    ids=["sequential", "one module", "hugging face", "two lists", "bare", "gpt"],
)
def test_default_units(build, names):
    """Each element of an outermost list, and what owns parameters beside the lists; the rest is the ancestors' own."""
    splitting = split(build(), world_size=2)
    assert sorted(unit.name for unit in splitting.units) == sorted(names)


MODELS = [deep, HuggingFaceLike, TwoLists, Bare]


@pytest.mark.parametrize("units", [None, ("Linear",), ("Block", "Linear", "Bare")], ids=str)
@pytest.mark.parametrize("build", MODELS)
def test_every_parameter_is_one_slot_and_every_place_is_bound(build, units):
    model = build()
    present = {type(module).__name__ for module in model.modules()}
    if units is not None:
        units = [name for name in units if name in present] or None
    splitting = split(model, world_size=3, class_names=units)
    slots = [slot.name for unit in splitting.units for layout in unit.layouts for slot in layout.slots]
    assert sorted(slots) == sorted(name for name, _ in model.named_parameters())
    for site in splitting.sites:
        module = model.get_submodule(site.path)
        for bound in site.bindings:
            unit = splitting.units[bound.unit]
            slot = (unit.trainable.slots if bound.trainable else unit.frozen_slots)[bound.slot]
            assert module.get_parameter(bound.local) is model.get_parameter(slot.name)
            assert module.get_parameter(bound.local).shape == slot.shape
    places = sum(len(module._parameters) - list(module._parameters.values()).count(None) for module in model.modules())
    assert sum(len(site.bindings) for site in splitting.sites) == places


def test_a_tied_weight_is_one_slot_with_two_sites():
    splitting = split(HuggingFaceLike(), world_size=2)
    sites = {site.path: site.units for site in splitting.sites}
    assert sites["lm_head"] == sites["transformer.wte"] == (0,)


@pytest.mark.parametrize(
    ("bucket_numel", "names"),
    [
        (0, ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]),
        (3700, ["embed", "blocks.0 to blocks.1", "blocks.2 to head"]),
        (10**6, ["embed", "blocks.0 to head"]),
    ],
)
def test_small_units_that_follow_each_other_are_merged(bucket_numel, names):
    """Never past the limit, and never with an embedding, which backward does not gather. Sites stay what they are."""
    model = GPT(GPTConfig(vocab=100, width=8, layers=3, heads=2, seq=4, tied=False))
    splitting, apart = (split(model, world_size=2, bucket_numel=numel) for numel in (bucket_numel, 0))
    assert [unit.name for unit in splitting.units] == names
    assert [site.name for site in splitting.sites] == [site.name for site in apart.sites]
    assert splitting.shapes() == apart.shapes()
    for unit in splitting.units:
        sites = [site for site in splitting.sites if unit.index in site.units]
        assert len(sites) == 1 or unit.trainable.numel <= bucket_numel
        slots = [slot for site in sites for slot in site.slots[unit.index, True]]
        assert sorted(slots) == [*range(len(unit.trainable.slots))]


def test_the_root_is_not_merged():
    names = [unit.name for unit in split(Bare(), world_size=2, bucket_numel=10**6).units]
    assert names == ["(root)", "attention to norm"]


def auto_plan(world: zero.World, stage: int, **settings) -> zero.Plan:
    with world.exclusive(), zero.empty():
        model = GPT(GPTConfig(vocab=32, width=16, layers=12, heads=2, seq=4))
    return zero.Plan(model, optimizer=zero.adamw(0.1), world=world, stage=stage, **settings)


@pytest.mark.parametrize("stage", range(4))
def test_auto_merges_up_to_a_quarter_of_the_model(stage):
    """Whatever the tiers, since moves change them. Never with one rank, which sends nothing, nor of named units."""
    merged = ["embed to blocks.1", *(f"blocks.{n} to blocks.{n + 2}" for n in (2, 5, 8)), "blocks.11 to norm"]

    def names(world, **settings):
        return [unit.name for unit in auto_plan(world, stage, **settings).units]

    for settings in ({}, {"bucket": "auto"}, {"offload": "cpu"}, {"precision": "bf16"}):
        assert run_ranks(2, partial(names, **settings)) == [merged] * 2, settings
    assert run_ranks(1, names) == [["embed", *(f"blocks.{n}" for n in range(12)), "norm"]]
    assert run_ranks(1, names) == run_ranks(2, partial(names, bucket=0))[:1]
    assert run_ranks(1, names) == run_ranks(2, partial(names, units=["auto", "Block"]))[:1]


def test_auto_adds_no_more_than_the_buffers_of_merged_units():
    """Six at most: two that are gathered, two gradients and the two sums that arrive for them."""

    def device_bytes(world, bucket):
        plan = auto_plan(world, 3, bucket=bucket)
        return sum(plan.bytes["device"].values()), max(unit.full_numel for unit in plan.units), plan.numel

    [apart, *_], [merged, *_] = (run_ranks(2, device_bytes, bucket) for bucket in (0, "auto"))
    assert merged[1] <= apart[2] / 4 + 64 * 20
    assert 0 < merged[0] - apart[0] <= 6 * 4 * merged[1]


def test_auto_merges_no_units_of_4_mib():
    with zero.empty():
        model = nn.Sequential(*(nn.Linear(1024, width, bias=False) for width in (100, 400, 600, 500, 525, 1024) * 2))

    def names(world):
        return [unit.name for unit in zero.Plan(copy.deepcopy(model), optimizer=zero.sgd(0.1), world=world).units]

    joined = [["0 to 1", "2", "3", "4", "5", "6 to 7", "8", "9", "10", "11"]] * 2
    assert run_ranks(2, names) == joined


def test_a_pattern_keeps_the_merged_unit_of_a_name():
    def kept(world, pattern):
        plan = auto_plan(world, 3, keep=[pattern])
        return [plan.units[index].name for index in plan.facts.kept_units]

    assert run_ranks(2, kept, "blocks.3") == [["blocks.2 to blocks.4"]] * 2
    with pytest.raises(PlanError, match=r"no unit is named blocks\.12\. There are embed, blocks\.0, blocks\.1"):
        run_ranks(2, kept, "blocks.12")


def test_frozen_parameters_have_their_own_flat():
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].bias.requires_grad_(False)
    (unit,) = split(model, world_size=2).units
    assert [slot.name for slot in unit.trainable.slots] == ["0.weight"]
    assert [slot.name for slot in unit.frozen_slots] == ["0.bias"]


def test_depth_counts_what_is_gathered_beside_one_unit():
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.zeros(1))
            self.blocks = nn.ModuleList([Block(), Block()])

    assert split(deep(), world_size=1).depth == 0
    assert split(Root(), world_size=1).depth == 1
    assert split(Root(), world_size=1, class_names=["Block", "Linear"]).depth == 1  # a block owns nothing itself
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    assert split(tied, world_size=1).depth == 1


def test_depth_counts_every_place_of_a_module():
    """The second place is in a module with a parameter of its own."""

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.gain, self.inner = nn.Parameter(torch.zeros(1)), inner

    shared = nn.Linear(3, 3)
    splitting = split(nn.Sequential(shared, Around(shared)), world_size=1, class_names=["Linear", "Around"])
    assert [(site.path, site.contains_sites) for site in splitting.sites] == [("0", False), ("1", True)]
    assert splitting.depth == 1


@pytest.mark.parametrize(
    ("name", "near"), [("Lienar", ". Did you mean Linear?"), ("block", ". Did you mean Block?"), ("Zzz", "")]
)
def test_an_unknown_class_gets_the_nearest_name(name, near):
    with pytest.raises(PlanError) as caught:
        split(HuggingFaceLike(), world_size=1, class_names=[name])
    assert str(caught.value) == f"zero.units: no module of class {name} in the model{near}"


def test_a_model_without_parameters_is_refused():
    with pytest.raises(PlanError, match=r"^ReLU has no parameters: there is nothing to train or to shard$"):
        zero.Plan(nn.ReLU(), optimizer=zero.sgd(0.1), world=zero.open_world())


class Params4bit(nn.Parameter):
    """A class of the name and home of bitsandbytes' own, whose values are in whatever dtype it stores."""

    __module__ = "bitsandbytes.nn.modules"


class Packed(Tensor):
    """A tensor of another library, which keeps values in a way of its own."""

    __module__ = "torchao.dtypes"


def frozen(values: Tensor, kind: type[nn.Parameter] = nn.Parameter) -> nn.Parameter:
    return kind(values, requires_grad=False)


PARAMETERS = {
    "int8": (lambda: frozen(torch.zeros(3, dtype=torch.int8)), "is torch.int8. Load the model in bf16 or fp32"),
    "packed": (lambda: frozen(torch.zeros(3, dtype=torch.uint8)), "is torch.uint8. Load the model in bf16 or fp32"),
    "float8": (lambda: nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn)), "is torch.float8_e4m3fn. Load the model"),
    "complex": (
        lambda: nn.Parameter(torch.zeros(3, dtype=torch.complex64)),
        "is torch.complex64, which zero cannot train. Keep",
    ),
    "float64": (lambda: nn.Parameter(torch.zeros(3).double()), r"is torch\.float64, .*\. Write model\.float\(\) first"),
    "sparse": (lambda: nn.Parameter(torch.eye(3).to_sparse()), "is torch.sparse_coo. Make it dense"),
    "packed by torchao": (
        lambda: nn.Parameter(torch.zeros(3).as_subclass(Packed)),
        r"is a Packed of torchao, .*\. Load",
    ),
    "4 bits in uint8": (
        lambda: frozen(torch.zeros(3, dtype=torch.uint8), Params4bit),
        r"has codes of bitsandbytes\. Write from zero\.formats import from_bitsandbytes; weights = from_bitsandbytes",
    ),
}


@pytest.mark.parametrize(("make", "said"), PARAMETERS.values(), ids=PARAMETERS)
def test_a_parameter_that_cannot_be_sharded_is_rejected_by_name_with_what_to_do(make, said):
    model = Block()
    model.inner[0].codes = make()
    with pytest.raises(PlanError, match=rf"^parameter inner\.0\.codes of a Linear {said}"):
        zero.Plan(model, optimizer=zero.sgd(0.1), world=zero.open_world())


@pytest.fixture
def one_rank_group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


SHARDED = {
    "fully_shard": (
        lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
        r"^the model is a FSDPBlock, .* Pass the model as it is before FSDP\.$",
    ),
    "DistributedDataParallel": (
        nn.parallel.DistributedDataParallel,
        r"^the model is a Distributed.* Pass its \.module\.$",
    ),
}


@pytest.mark.parametrize(("shard", "said"), SHARDED.values(), ids=SHARDED)
def test_a_model_that_torch_distributed_has_already_is_rejected(one_rank_group, shard, said):
    model = shard(Block())
    with pytest.raises(PlanError, match=said):
        zero.Plan(model, optimizer=zero.sgd(0.1), world=zero.open_world())


BUFFERS = [
    torch.zeros(3, dtype=torch.complex128),
    torch.eye(3).to_sparse(),
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    torch.zeros(3, dtype=torch.uint8).view(torch.float8_e8m0fnu),
]


@pytest.mark.parametrize("buffer", BUFFERS, ids=["complex128", "sparse", "jagged", "float8_e8m0fnu"])
def test_a_buffer_that_no_checkpoint_holds_is_rejected_unless_it_is_not_saved(buffer):
    model = Block()
    model.inner[0].register_buffer("table", buffer)
    with pytest.raises(PlanError, match=r"^buffer inner\.0\.table is .*Register it with persistent=False"):
        split(model, world_size=1)
    model.inner[0].register_buffer("table", buffer, persistent=False)
    split(model, world_size=1)


@pytest.mark.parametrize("name", ["a\n", "\ud800"], ids=ascii)
def test_a_name_that_no_checkpoint_holds_is_rejected(name):
    parameter, buffer, module = Block(), Block(), Block()
    parameter.inner[0].register_parameter(name, nn.Parameter(torch.zeros(1)))
    buffer.inner[0].register_buffer(name, torch.zeros(1))
    module.add_module(name, nn.Linear(1, 1))
    for model in (parameter, buffer, module):
        with pytest.raises(PlanError, match=r"^'.*' has a character that cannot be printed, .*Rename it\.$"):
            split(model, world_size=1)


# -- empty -------------------------------------------------------------------------------------------------------------


def test_empty_sends_parameters_to_meta_and_nothing_else():
    with zero.empty():
        model = Bare()
    assert all(is_meta(parameter) for parameter in model.parameters())
    assert torch.equal(model.table, torch.arange(4.0))
    assert torch.equal(model.norm.running_var, torch.ones(WIDTH))
    assert not any(is_meta(parameter) for parameter in Bare().parameters())


def test_empty_keeps_ties_whichever_way_they_are_made():
    class Ties(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            real = nn.Parameter(torch.zeros(3))
            self.a, self.b = nn.Module(), nn.Module()
            self.a.weight = self.b.weight = real
            self.b.again = self.a.weight

    with zero.empty():
        model, tied = Ties(), HuggingFaceLike()
    assert model.a.weight is model.b.weight is model.b.again
    assert tied.lm_head.weight is tied.transformer["wte"].weight
    assert [slot.name for unit in split(model, world_size=1).units for slot in unit.trainable.slots] == ["a.weight"]


def test_empty_keeps_requires_grad_and_dtype():
    with zero.empty():
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)
    assert not module.weight.requires_grad
    assert module.weight.dtype == torch.bfloat16


def test_empty_never_holds_two_parameters_at_once():
    """Each real parameter is dropped as soon as it is registered."""
    alive: list[weakref.ref[Tensor]] = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            assert not any(ref() is not None for ref in alive)
            value = torch.zeros(1000)
            alive.append(weakref.ref(value))
            self.weight = nn.Parameter(value)

    with zero.empty():
        nn.Sequential(*(Counted() for _ in range(3)))


def test_a_buffer_without_values_is_refused_by_name():
    with torch.device("meta"):
        model = Bare()
    with pytest.raises(
        PlanError, match=r"buffer .*table is on meta and has no values\. Build the model under zero\.empty"
    ):
        split(model, world_size=1)


def test_a_buffer_computed_from_empty_parameters_is_rejected_and_its_module_may_be_built_outside():
    def normed() -> nn.Module:
        return nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))

    with zero.empty():
        model = nn.Sequential(nn.Linear(3, 3), normed())
    with pytest.raises(
        PlanError, match=r"_u is computed from parameters, .*\. Build its module without zero\.empty\(\)"
    ):
        split(model, world_size=1)
    model[1] = normed()
    split(model, world_size=1)


# -- a model that was taken over ---------------------------------------------------------------------------------------


class Looks(nn.Module):
    """A model that looks at and sets things on its blocks from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.own = nn.Parameter(torch.zeros(WIDTH))
        self.captured = [self.own]


def taken(model: nn.Module) -> tuple[nn.Module, Splitting]:
    splitting = split(model, world_size=1)
    takeover = Takeover(model, splitting, torch.bfloat16, torch.device("cpu"))
    takeover.attach(lambda site: lambda body, args, kwargs: (site.path, args, kwargs))
    return model, splitting


def test_an_absent_parameter_tells_its_metadata():
    """As the gathered one will have them: models ask for dtype and device to make their inputs."""
    weight = taken(Looks())[0].blocks[0].weight
    assert weight.shape == (WIDTH, WIDTH)
    assert weight.numel() == WIDTH * WIDTH
    assert len(weight) == WIDTH
    assert weight.dtype == torch.bfloat16
    assert weight.device == torch.device("cpu")
    assert weight.is_cpu
    assert not weight.is_cuda
    assert not weight.is_meta
    assert weight.requires_grad
    assert torch.arange(3, device=weight.device).tolist() == [0, 1, 2]


READS = [
    lambda model: model.blocks[0].weight + 1,
    lambda model: model.blocks[0].weight.sum(),
    lambda model: torch.cat([torch.zeros(WIDTH), model.own]),
    lambda model: torch.stack(tensors=[model.own]),
    lambda model: torch.zeros(WIDTH).add_(model.own),
    lambda model: model.blocks[0].weight[0],
    lambda model: model.own.data + 1,
    lambda model: model.own.detach().clone(),
    lambda model: model.own.tolist(),
    lambda model: nn.functional.linear(torch.zeros(WIDTH), model.blocks[0].weight),
    lambda model: copy.deepcopy(model.state_dict()["own"]).add(1),
    lambda model: model.captured[0] * 2,
    lambda model: float(model.own[0]),
]


@pytest.mark.parametrize("read", READS, ids=range(len(READS)))
def test_reading_a_parameter_that_has_no_values_is_refused_by_name(read):
    model, _ = taken(Looks())
    with pytest.raises(OutsideUnitError, match=r"parameter (own|blocks\.0\.weight) has no values yet"):
        read(model)


def grown(parameter: Tensor) -> None:
    parameter += 1


def written(parameter: Tensor) -> None:
    parameter[0] = 1


def put(parameter: Tensor) -> None:
    parameter.data = torch.zeros(WIDTH)


WRITES = [
    lambda own: own.copy_(torch.zeros(WIDTH)),
    lambda own: own.data.clamp_(0, 1),
    lambda own: nn.init.zeros_(own),
    lambda own: nn.init.normal_(own),
    lambda own: torch.add(torch.zeros(WIDTH), 1, out=own.detach()),
    grown,
    written,
    put,
]


@pytest.mark.parametrize("write", WRITES, ids=range(len(WRITES)))
def test_writing_to_a_parameter_outside_its_unit_is_refused_by_name(write):
    model, _ = taken(Looks())
    with torch.no_grad(), pytest.raises(OutsideUnitError, match=r"parameter own was written to by .*zero\.gathered"):
        write(model.own)


def test_a_site_is_what_it_was_but_for_its_call():
    model, _ = taken(Looks())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in Looks().named_modules()]
    site = model.blocks[0]
    assert isinstance(site, nn.Linear)
    assert repr(site) == repr(Looks().blocks[0])
    assert site(1, key=2) == ("blocks.0", (1,), {"key": 2})
    assert [site][0](3) == ("blocks.0", (3,), {})


def test_one_module_at_two_places_is_one_unit():
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(2, 2)
            self.blocks = nn.ModuleList([shared, nn.Linear(2, 2), shared])
            self.last = shared

    model, splitting = taken(Places())
    assert [unit.name for unit in splitting.units] == ["blocks.0", "blocks.1"]
    assert model.blocks[0] is model.blocks[2] is model.last
    assert model.last(1) == ("blocks.0", (1,), {})


# -- first values ------------------------------------------------------------------------------------------------------


def test_a_parameter_under_two_names_of_one_owner_keeps_its_value():
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(3))
            self.b = self.a
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.ones_(self.a)

    def values(world: zero.World) -> dict[str, Tensor]:
        with zero.empty():
            model = nn.Sequential(Owner())
        plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=world)
        return zero.full_state_dict(zero.init(plan, zero.open_store(plan)))

    (made,) = run_ranks(1, values)
    assert made.keys() == {"0.a"}
    assert torch.equal(made["0.a"], torch.ones(3))


class Stuck(Tensor):
    def to(self, *_args, **_kwargs):
        raise RuntimeError("no memory there")


@pytest.mark.parametrize("stuck", [False, True])
def test_a_model_that_could_not_be_taken_over_is_what_it_was(stuck):
    """The second buffer cannot move; or everything is taken over already, and then there are no weights."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    last = nn.BatchNorm1d(WIDTH)
    if stuck:
        last.running_var = last.running_var.as_subclass(Stuck)
    model.append(last)
    before, values = dict(model.named_buffers()), copy.deepcopy(nn.Sequential(*model[:2]).state_dict())
    plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=zero.open_world(), precision="bf16", units=["Linear"])
    with pytest.raises(RuntimeError if stuck else PlanError, match="no memory there" if stuck else "weights have no"):
        zero.init(plan, zero.open_store(plan), weights={})
    assert all(buffer is before[name] for name, buffer in model.named_buffers())
    assert all(type(parameter) is nn.Parameter and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())


# -- what a constructor writes -----------------------------------------------------------------------------------------


class Writes(nn.Module):
    """Into its own parameters and into those of its children, in every way that constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.words = nn.Embedding(7, WIDTH)
        self.own = nn.Parameter(torch.arange(3.0))
        self.gain = nn.Parameter(torch.empty(2))
        nn.init.constant_(self.up.weight, 0.5)
        self.up.bias.data.fill_(2).mul_(3)
        self.down.weight.data[1].zero_()
        with torch.no_grad():
            self.down.bias[0] = 7.0
            self.words.weight[2:4].copy_(torch.ones(2, WIDTH))
            self.gain.copy_(torch.tensor([1.0, -1.0]))
        nn.init.normal_(tensor=self.words.weight.data[0], std=0.0)


class Corrected(nn.Module):
    """The last word is another's: what was written before it is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.linear.weight)
        self.linear.reset_parameters()
        self.apply(self._init_weights)
        nn.init.ones_(self.linear.bias)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, 5.0)


class Half(nn.Module):
    """One of its own that its reset_parameters does not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.empty(3)), nn.Parameter(torch.ones(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 4.0)


class Scratch(nn.Module):
    """Its parameter lies where something lay that was never written, and is gone."""

    def __init__(self) -> None:
        super().__init__()
        torch.empty(3)
        self.gain = nn.Parameter(torch.ones(3))


def first_values(build) -> dict[str, Tensor]:
    def values(world: zero.World) -> dict[str, Tensor]:
        with world.exclusive(), zero.empty():
            model = nn.Sequential(build())
        assert all(is_meta(parameter) for parameter in model.parameters())
        plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=world)
        return zero.full_state_dict(zero.init(plan, zero.open_store(plan)))

    state_dict, other = run_ranks(2, values)
    assert all(torch.equal(state_dict[name], other[name]) for name in state_dict)
    return state_dict


def test_what_a_constructor_writes_into_empty_parameters_is_written_again():
    made, whole = first_values(Writes), nn.Sequential(Writes()).state_dict()
    for name in ("0.own", "0.gain", "0.up.weight", "0.up.bias"):
        assert torch.equal(made[name], whole[name]), name
    assert not made["0.down.weight"][1].any()
    assert made["0.down.weight"][0].any()
    assert made["0.down.bias"][0] == 7
    assert bool((made["0.words.weight"][2:4] == 1).all())
    assert not made["0.words.weight"][0].any()
    assert made["0.words.weight"][5].any()


class Padded(nn.Linear):
    """Its bias is set to itself with nothing added, as `transformers` does with a head that is tied."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        nn.init.ones_(self.bias)
        self.bias.data = nn.functional.pad(self.bias.data, (0, 0), "constant", 0)


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 4)
        self.weight.data = self.weight.data * 0.5


def test_what_is_computed_from_empty_parameters_is_computed_from_their_values():
    made = first_values(Padded)
    assert bool((made["0.bias"] == 1).all())
    assert made["0.weight"].any()
    assert torch.equal(first_values(Scaled)["0.weight"] * 2, first_values(partial(nn.Linear, 3, 4))["0.weight"])


def test_who_writes_last_counts():
    made = first_values(Corrected)
    assert made["0.linear.weight"].any(), "reset_parameters came after zeros_"
    assert bool((made["0.linear.bias"] == 1).all())
    half = first_values(Half)
    assert bool((half["0.weight"] == 4).all())
    assert bool((half["0.scale"] == 1).all())


def test_a_value_where_an_empty_tensor_lay_is_kept():
    assert bool((first_values(Scratch)["0.gain"] == 1).all())


def test_an_owner_whose_reset_leaves_something_out_is_refused_by_name():
    class Forgets(Half):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Parameter(torch.empty(2))

    with pytest.raises(PlanError, match=r"Forgets at 0 holds 0\.more and its reset_parameters\(\) does not set it"):
        first_values(Forgets)


@pytest.mark.parametrize("build", [Scratch, Half])
def test_a_real_value_beside_empty_parameters_is_kept_whether_or_not_its_owner_can_reset_itself(build):
    with zero.empty():
        model = build()
    model.extra = nn.Parameter(torch.arange(3.0))
    with zero.open_world() as world:
        plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=world)
        made = zero.full_state_dict(zero.init(plan, zero.open_store(plan)))
    assert torch.equal(made.pop("extra"), torch.arange(3.0))
    whole = build().state_dict()
    assert made.keys() == whole.keys()
    assert all(torch.equal(made[name], whole[name]) for name in made)


# -- what is written after the constructor -----------------------------------------------------------------------------


def _init_weights(module: nn.Module) -> None:
    """A function of the script, which no model knows."""
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.25)
        module.bias.data.zero_()


def replace_data(model: nn.Module) -> None:
    model.up.weight.data = torch.full((WIDTH, WIDTH), 3.0)
    model.up.weight.data = model.up.weight.data.t() / 3


def round_to_half(model: nn.Module) -> None:
    nn.init.constant_(model.up.weight, 0.1)
    model.half().to("cpu").cpu()


def compute(model: nn.Module) -> None:
    nn.init.eye_(model.down.weight)
    with torch.no_grad():
        model.up.weight.copy_(model.down.weight * torch.arange(float(WIDTH)))
        torch.add(model.up.weight, 1, out=model.up.weight)
        first, last = model.up.weight.split([1, WIDTH - 1])
        last += first


def through_scratch(model: nn.Module) -> None:
    scratch = torch.full((WIDTH, WIDTH), 6.0)
    model.up.weight.data.copy_(scratch)
    scratch.zero_()


FIRST_WRITES = [
    lambda model: nn.init.ones_(model.up.weight),
    lambda model: model.up.weight.data.fill_(2.0).mul_(3),
    lambda model: model.load_state_dict(
        {name: torch.full_like(value, 4.0) for name, value in Writes().state_dict().items()}
    ),
    lambda model: model.apply(_init_weights),
    replace_data,
    round_to_half,
    compute,
    through_scratch,
]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("write", FIRST_WRITES)
def test_what_is_written_into_empty_parameters_is_what_training_begins_with(write, inside, recwarn):
    def build() -> nn.Module:
        model = Writes()
        if inside:
            write(model)
        return model

    def values(world: zero.World) -> dict[str, Tensor]:
        with world.exclusive(), zero.empty():
            model = build()
        if not inside:
            write(model)
        plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=world)
        return zero.full_state_dict(zero.init(plan, zero.open_store(plan)))

    plain = Writes()
    write(plain)
    for made in run_ranks(2, values):
        for name in ("up.weight", "up.bias", "own"):
            assert torch.equal(made[name], plain.state_dict()[name].float()), name
    assert not recwarn.list


VALUE_READS = [
    lambda weight: float(weight.sum()),
    lambda weight: weight.tolist(),
    lambda weight: bool((weight > 0).all()),
    lambda weight: weight.detach().cpu().numpy(),
    lambda weight: torch.zeros(WIDTH, WIDTH).copy_(weight),
    lambda weight: torch.save(weight, io.BytesIO()),
]


@pytest.mark.parametrize("read", VALUE_READS)
def test_reading_an_empty_parameter_says_when_there_are_values(read):
    with zero.empty():
        model = Writes()
    with pytest.raises(OutsideUnitError, match=r"of a parameter that has no values yet, .* Read it after zero\.init"):
        read(model.up.weight.data)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("said", "backward"),
    [
        ("backward", lambda layer: layer(torch.ones(2, 3)).sum().backward()),
        ("backward", lambda layer: torch.autograd.backward(layer(torch.ones(2, 3)).sum())),
        ("grad", lambda layer: torch.autograd.grad(layer(torch.ones(2, 3)).sum(), layer.weight)),
        ("an update", lambda layer: setattr(layer.weight, "grad", torch.ones(1, 3, device="meta"))),
    ],
)
def test_a_step_of_plain_torch_on_empty_parameters_raises(said, backward, inside):
    """An update without an effect: the model has no values."""

    def step() -> None:
        backward(layer)
        optimizer.step()

    def check() -> None:
        optimizer.step()  # as schedulers want it, without a gradient
        with pytest.raises(OutsideUnitError, match=f"^{said} of a parameter that has no values yet"):
            step()

    with zero.empty():
        layer = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        if inside:
            check()
    if not inside:
        check()


def test_an_empty_parameter_is_the_object_that_was_registered():
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            held = nn.Parameter(torch.empty(3))
            held.mark = "kept"
            self.weight = held
            nn.init.constant_(held, 3.0)
            assert self.weight is held

    with zero.empty():
        assert Holds().weight.mark == "kept"
    assert bool((first_values(Holds)["0.weight"] == 3).all())


class Copies(nn.Module):
    """Layers that begin alike: a copy of a module, and of the values of another one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(WIDTH, WIDTH)
        self.online, self.target = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])
        self.target.load_state_dict(self.online.state_dict())
        nn.init.zeros_(self.online.bias)


def test_layers_that_begin_alike_in_torch_begin_alike():
    made = first_values(Copies)
    assert torch.equal(made["0.online.weight"], made["0.target.weight"])
    assert torch.equal(made["0.layers.0.weight"], made["0.layers.1.weight"])
    assert not torch.equal(made["0.layers.0.weight"], made["0.online.weight"])
    assert made["0.target.bias"].any()
    assert not made["0.online.bias"].any()


class Special(nn.Module):
    """A module that is initialised by functions that read values and skip tensors on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.turned = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, WIDTH)
        nn.init.trunc_normal_(self.cut.weight, a=-0.5, b=0.5)
        nn.init.trunc_normal_(self.cut.bias, a=2.0, b=3.0)
        nn.init.orthogonal_(self.turned.weight)


def test_initialisers_that_look_at_values_are_recorded_whole():
    made = first_values(Special)
    assert 0.1 < float(made["0.cut.weight"].std()) < 0.5
    assert float(made["0.cut.weight"].abs().max()) <= 0.5
    assert bool(((made["0.cut.bias"] >= 2) & (made["0.cut.bias"] <= 3)).all())
    turned = made["0.turned.weight"]
    torch.testing.assert_close(turned @ turned.t(), torch.eye(WIDTH))


def test_a_model_that_is_named_as_a_unit_is_one():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plan = zero.Plan(model, optimizer=zero.adamw(1e-3), world=zero.open_world(), units=["auto", "Sequential"])
    assert [unit.numel for unit in (unit.trainable for unit in plan.units)] == [12]
