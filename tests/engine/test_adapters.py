"""Adapters of peft, also for fused experts: the bits of plain torch and peft, in training and in merged weights."""

import contextlib
import copy
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import zero  # noqa: E402
from zero.core.formats import PACKED_FORMATS  # noqa: E402
from zero.errors import ConfigError, PlanError  # noqa: E402
from zero.formats import export_checkpoint, open_newest  # noqa: E402
from zero.testing import run_ranks  # noqa: E402
from zero.trainer.models import hf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "use_cache": False}
SIZES |= {"num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": None}
ROUTED = SIZES | {"num_experts_per_tok": 2, "head_dim": 8}
MADE = {
    "llama": SIZES,
    "mixtral": ROUTED | {"num_local_experts": 4},
    "qwen3_moe": ROUTED | {"num_experts": 4, "moe_intermediate_size": 8},
    "gpt_oss": ROUTED | {"num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
ROWS = [torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(number)) for number in range(3)]


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()


def built(family, implementation="eager"):
    """A base of transformers."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **MADE[family])
    config._experts_implementation = implementation
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    return model.train()


def adapted(family, *, implementation="eager", form=None, **lora):
    """A base with an adapter that is not zero. With `form` its matrices are the values that their codes expand to."""
    model = built(family, implementation)
    torch.manual_seed(1)
    settings = {"r": 2, "lora_alpha": 3, "init_lora_weights": False} | copy.deepcopy(lora)  # peft changes lists
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        is_table = "embed" in name or "lm_head" in name
        if form is not None and parameter.dim() > 1 and not parameter.requires_grad and not is_table:
            flat = parameter.data.view(-1)
            PACKED_FORMATS[form].expand(PACKED_FORMATS[form].encode(flat), flat)
    return model


def loss_of(model, rows):
    logits = model(input_ids=rows[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def train_torch(model):
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-2, weight_decay=0, fused=True)
    losses = []
    for rows in ROWS:
        loss = loss_of(model, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@contextlib.contextmanager
def trained(world, make, folder=None, offload="none", **plan):
    """The losses and the state after training."""
    with world.exclusive():
        model = make()
    where = zero.Offload(offload, path=None if folder is None else str(folder), page_bytes=4096, threads=2)
    plan = zero.Plan(model, optimizer=zero.adamw(1e-2, weight_decay=0.0), world=world, offload=where, **plan)
    with contextlib.closing(zero.open_store(plan)) as store:
        state, losses, part = zero.init(plan, store), [], len(ROWS[0]) // world.size
        step = zero.make_step(plan, loss_of)
        for rows in ROWS:
            state, metrics = step(state, [rows[world.rank * part :][:part]])
            losses.append(metrics.loss)
        yield losses, state


def run(ranks, make, folder=None, **settings):
    """The losses and the last values of a run, as rank 0 has them."""

    def rank(world):
        with trained(world, make, folder, **settings) as (losses, state):
            return losses, zero.full_state_dict(state)

    return run_ranks(ranks, rank)[0]


def same(first, second):
    return first[0] == second[0] and all(torch.equal(value, second[1][name]) for name, value in first[1].items())


# -- training ----------------------------------------------------------------------------------------------------------

SETTINGS = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "offload": "nvme"},
    {"stage": 3, "activations": "remat", "check_writes": True},
]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("family", "implementation"),
    [("mixtral", "eager"), ("qwen3_moe", "grouped_mm"), ("gpt_oss", "eager"), ("mixtral", "batched_mm")],
)
def test_experts_have_the_bits_of_torch_and_peft_at_every_stage(family, implementation, tmp_path):
    make = partial(adapted, family, implementation=implementation, **EXPERTS)
    expected = train_torch(make())
    began = dict(make().named_parameters())
    changed = {name for name, value in expected[1].items() if not torch.equal(value, began[name])}
    assert changed == {name for name in began if "lora_" in name}
    assert sum(".experts." in name for name in changed) == 8
    for settings in SETTINGS:
        assert same(expected, run(1, make, tmp_path, **settings)), settings
    on_two = run(2, make, stage=0)
    assert on_two[0] == pytest.approx(expected[0], rel=1e-6)
    for name, value in expected[1].items():
        torch.testing.assert_close(on_two[1][name], value, rtol=1e-5, atol=2e-6)
    for settings in SETTINGS[1:]:
        assert same(on_two, run(2, make, tmp_path, **settings)), settings


@pytest.mark.parametrize(
    "settings",
    [{"units": ["MixtralExperts"]}, {"units": ["ParamWrapper"]}, {"compile": "eager"}, {"bucket": 10**6}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler reads it
def test_experts_train_as_units_of_their_own_and_compiled(settings):
    make = partial(adapted, "mixtral", **EXPERTS)
    assert same(train_torch(make()), run(1, make, stage=3, **settings))


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_experts_train_on_codes_as_peft_does_on_the_values_of_the_codes(form):
    expected = train_torch(adapted("mixtral", form=form, **EXPERTS))
    precision = zero.Precision("fp32", frozen=form)
    coded = partial(adapted, "mixtral", **EXPERTS)
    losses, values = run(1, coded, stage=3, precision=precision)
    assert losses == expected[0]
    assert any("experts" in name and not torch.equal(value, values[name]) for name, value in coded().named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in expected[1].items())


@pytest.mark.parametrize("form", ["compute", "nf4", "int8"])
def test_experts_in_bf16_have_the_same_bits_at_every_stage(form, tmp_path):
    precision, make = zero.Precision("bf16", frozen=form), partial(adapted, "mixtral", **EXPERTS)
    first = run(2, make, stage=0, precision=precision)
    losses, _ = train_torch(adapted("mixtral", form=None if form == "compute" else form, **EXPERTS).bfloat16())
    assert first[0] == pytest.approx(losses, rel=2e-3)
    for settings in ({"stage": 3}, {"stage": 3, "offload": "infinity"}):
        assert same(first, run(2, make, tmp_path, precision=precision, **settings)), settings


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["q_proj", "up_proj"], "use_dora": True},
        {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True, "use_rslora": True},
        {"target_modules": ["q_proj", "up_proj"], "use_rslora": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", [None, "nf4"])
def test_dora_and_rslora_have_the_bits_of_torch_and_peft(lora, form):
    expected = train_torch(adapted("llama", form=form, **lora))
    precision, make = zero.Precision("fp32", frozen=form or "compute"), partial(adapted, "llama", **lora)
    for stage in (0, 3):
        assert same(expected, run(1, make, stage=stage, precision=precision))
    on_two = run(2, make, stage=3, precision=precision)
    assert on_two[0] == pytest.approx(expected[0], rel=1e-6)


# -- merging -----------------------------------------------------------------------------------------------------------


def streamed(world, make, dtype, folder, **settings):
    with trained(world, make, folder, **settings) as (_, state):
        weights = list(zero.stream_weights(state, merged=True, device="cpu"))
        again = dict(zero.stream_weights(state, merged=True))
        assert all(torch.equal(again[name], value) for name, value in weights), "a stream changes nothing"
        adapter = {name: value.to(dtype) for name, value in zero.full_state_dict(state, "compute").items()}
    return weights, adapter


ADAPTERS = {
    "mixtral": ("mixtral", EXPERTS),
    "gpt_oss": ("gpt_oss", EXPERTS),
    "down_proj alone": ("qwen3_moe", {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
    "linear": ("llama", {"target_modules": ["q_proj", "up_proj", "lm_head"]}),
    "embedding": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    "dora": ("llama", {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
    "rslora": ("llama", {"target_modules": "all-linear", "use_rslora": True}),
    "copies": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}),
}


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("form", ["compute", "nf4", "int8"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_merged_weights_have_the_bits_of_merge_and_unload(kind, dtype, form, tmp_path):
    """In the dtype of compute, from values that the codes expand to outside of the engine."""
    family, lora = ADAPTERS[kind]
    precision, make = zero.Precision(dtype, frozen=form), partial(adapted, family, **lora)
    plain = adapted(family, form=None if form == "compute" else form, **lora).to(precision.compute)
    stream = partial(streamed, stage=3, offload="nvme", precision=precision)
    weights, trained_values = run_ranks(2, stream, make, precision.compute, tmp_path)[0]
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(trained_values[name])
    expected = dict(plain.merge_and_unload().named_parameters())
    assert expected.keys() == dict(built(family).named_parameters()).keys()
    assert len(weights) == len(expected)
    for name, value in weights:
        assert value.dtype == precision.compute
        assert torch.equal(value, expected[name]), name


def test_only_the_active_adapters_are_merged():
    def make():
        model = adapted("mixtral", **EXPERTS)
        model.add_adapter("second", peft.LoraConfig(r=3, init_lora_weights=False, **copy.deepcopy(EXPERTS)))
        model.base_model.set_adapter(["default", "second"])
        return model

    def stream(world):
        with trained(world, make, stage=3) as (losses, state):
            both = dict(zero.stream_weights(state, merged=True))
            state.model.base_model.set_adapter("second")
            second = dict(zero.stream_weights(state, merged=True))
            return losses, zero.full_state_dict(state), both, second

    losses, values, both, second = run_ranks(1, stream)[0]
    expected = train_torch(make())
    assert same(expected, (losses, values))
    for merged, active in ((both, ["default", "second"]), (second, "second")):
        plain = make()
        for name, parameter in plain.named_parameters():
            parameter.data.copy_(values[name])
        plain.base_model.set_adapter(active)
        wanted = dict(plain.merge_and_unload().named_parameters())
        assert merged.keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in merged.items())


def test_what_cannot_be_merged_is_one_line():
    def refused(world, make, **arguments):
        with trained(world, make, stage=3) as (_, state), pytest.raises(ConfigError) as caught:
            zero.stream_weights(state, merged=True, **arguments)
        return str(caught.value)

    plain, lora = partial(built, "llama"), partial(adapted, "llama", target_modules=["q_proj"])
    assert run_ranks(1, refused, plain)[0].startswith("merged=True: the model has no adapters of peft.")
    assert run_ranks(1, partial(refused, keep=True), lora)[0] == (
        "merged=True yields all weights. Call it without keep and changed_since."
    )

    def tied():
        base = built("llama")
        base.lm_head.weight = base.model.embed_tokens.weight
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["lm_head"]))

    told = run_ranks(1, refused, tied)[0]
    assert told.startswith(
        "merged=True: base_model.model.lm_head is tied to base_model.model.model.embed_tokens.weight"
    )


# -- around training ---------------------------------------------------------------------------------------------------


def beside_its_base(model, rows):
    with torch.no_grad(), model.disable_adapter():
        reference = model(input_ids=rows[:, :-1]).logits
    logits = model(input_ids=rows[:, :-1]).logits
    return F.mse_loss(logits, reference) + loss_of(model, rows)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_adapter_of_experts_is_disabled_saved_loaded_by_peft_and_merged_at_the_end(stage, tmp_path):
    built("mixtral").save_pretrained(tmp_path / "base")
    with zero.empty():
        model = adapted_from_files(tmp_path / "base")
    plan = zero.Plan(model, optimizer=zero.adamw(1e-2, weight_decay=0.0), stage=stage, world=zero.open_world())
    state = zero.init(plan, zero.open_store(plan), weights=hf.weights(model, tmp_path / "base"))
    began, step, losses = zero.full_state_dict(state), zero.make_step(plan, beside_its_base), []
    for rows in ROWS:
        state, metrics = step(state, [rows])
        losses.append(metrics.loss)
    tokens = ROWS[0][:, :-1]
    logits = zero.make_forward(plan, lambda model: model(input_ids=tokens).logits)(state)

    plain = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), peft.LoraConfig(r=2, **EXPERTS)
    ).train()
    for name, parameter in plain.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter, began[name])
        parameter.data.copy_(began[name])
    optimizer = torch.optim.AdamW((p for p in plain.parameters() if p.requires_grad), 1e-2, weight_decay=0, fused=True)
    expected = []
    for rows in ROWS:
        loss = beside_its_base(plain, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == expected

    checkpoint = open_newest(zero.save(state, tmp_path / "checkpoints"))[0]
    export_checkpoint(checkpoint, "peft", tmp_path / "adapter")
    model.peft_config["default"].save_pretrained(tmp_path / "adapter")
    wanted = peft.get_peft_model_state_dict(plain)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    written = peft.get_peft_model_state_dict(loaded)
    assert written.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in written.items())
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, logits)
        state.close()
        assert not any("_activate_lora" in vars(module) for module in model.modules())
        assert torch.equal(model(input_ids=tokens).logits, logits), "an ordinary model of peft again"
        torch.testing.assert_close(model.merge_and_unload()(input_ids=tokens).logits, logits)


def adapted_from_files(folder):
    return peft.get_peft_model(hf.build(folder), peft.LoraConfig(r=2, **copy.deepcopy(EXPERTS)))


def test_dora_needs_the_values_of_its_base(tmp_path):
    built("llama").save_pretrained(tmp_path)
    with zero.empty():
        model = peft.get_peft_model(hf.build(tmp_path), peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj"]))
    plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=zero.open_world())
    lacking = pytest.raises(PlanError, match=r"magnitude_vector.* was computed from a parameter .*Build the model with")
    with contextlib.closing(zero.open_store(plan)) as store, lacking:
        zero.init(plan, store, weights=hf.weights(model, tmp_path))


def test_an_export_of_dora_has_the_names_of_peft(tmp_path):
    lora = {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True, "use_rslora": True}

    def export(world):
        with trained(world, partial(adapted, "llama", **lora), stage=3) as (_, state):
            checkpoint = open_newest(zero.save(state, tmp_path / "checkpoints"))[0]
            export_checkpoint(checkpoint, "peft", tmp_path / "adapter")
            state.model.peft_config["default"].save_pretrained(tmp_path / "adapter")
            return zero.make_forward(state.plan, lambda model: model(input_ids=ROWS[0]).logits)(state)

    logits = run_ranks(1, export)[0]
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(adapted("llama", **lora), save_embedding_layers=False)
    assert written.keys() == expected.keys()
    assert sum(name.endswith("lora_magnitude_vector") for name in written) == 3
    loaded = peft.PeftModel.from_pretrained(built("llama"), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ROWS[0]).logits, logits)


def test_experts_reject_dora_as_in_peft():
    with pytest.raises(ValueError, match="does not work with use_dora=True"):
        adapted("mixtral", use_dora=True, **EXPERTS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_trains_experts_and_peft_saves_and_loads_them(ranks, tmp_path):
    """Rank 0 alone runs peft's code."""
    built("mixtral").save_pretrained(tmp_path / "base")
    tokens = ROWS[0][:, :-1]
    config = {"train_batch_size": ranks, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}

    def train(world):
        with world.exclusive():
            model = adapted("mixtral", **EXPERTS)
        engine, *_ = zero.initialize(model=model, config=config, world=world)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.save_pretrained(tmp_path / "adapter")
        merged = dict(zero.stream_weights(engine, merged=True))
        with torch.no_grad():
            logits = engine(input_ids=tokens).logits
        engine.destroy()
        return logits, merged

    logits, merged = run_ranks(ranks, train)[0]
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, logits)
    expected = dict(loaded.merge_and_unload().named_parameters())
    assert merged.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in merged.items())


def test_experts_are_adapted_in_the_dtype_of_the_base_under_autocast():
    make, tokens = partial(adapted, "mixtral", **EXPERTS), ROWS[0][:, :-1]

    def under_autocast(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=tokens).logits

    plan = zero.Plan(make(), optimizer=zero.adamw(1e-2), world=zero.open_world())
    with contextlib.closing(zero.open_store(plan)) as store, torch.no_grad():
        logits = zero.make_forward(plan, under_autocast)(zero.init(plan, store))
        assert torch.equal(logits, under_autocast(make().eval()))


def test_an_adapted_parameter_that_is_parametrized_is_one_line():
    base = built("mixtral")
    torch.nn.utils.parametrize.register_parametrization(
        base.model.layers[0].mlp.experts, "down_proj", torch.nn.Identity(), unsafe=True
    )
    targets = {"target_modules": [], "target_parameters": ["model.layers.0.mlp.experts.down_proj"]}
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, **targets))
    parametrized = pytest.raises(
        PlanError, match=r"layers\.0\.mlp\.experts is a ParamWrapper of peft for down_proj, which"
    )
    with parametrized:
        zero.Plan(model, optimizer=zero.adamw(1e-2), world=zero.open_world())
