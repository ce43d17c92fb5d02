"""Models of transformers as they are: trained as plain torch trains them, loaded from their files, given back.

Tolerances. Both sides compute in fp32 and differ in the order in which gradients of rows are added; five steps of AdamW
make of that 1e-7 of a loss and up to 5e-5 in a parameter, where a gradient is so small that its sign hangs on the order
and the step is a whole one. Asked: 1e-5 of a loss, and 2e-4 in a parameter, a fiftieth of one step.
"""

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

import train  # noqa: E402
import zero  # noqa: E402
from zero.core.formats import PACKED_FORMATS  # noqa: E402
from zero.engine.meta import is_meta  # noqa: E402
from zero.engine.whole.read import full_state_dict  # noqa: E402
from zero.errors import CheckpointError, ConfigError, PlanError  # noqa: E402
from zero.formats import export_checkpoint, open_newest  # noqa: E402
from zero.platform.safetensors_files import StoredWeights  # noqa: E402
from zero.testing import run_ranks  # noqa: E402
from zero.trainer.checks import parse_config  # noqa: E402
from zero.trainer.compose import compose, settings_in  # noqa: E402
from zero.trainer.models import hf  # noqa: E402
from zero.trainer.models.hf_config import tuned_lr  # noqa: E402

STEPS, ROWS, RANKS, CLIP = 5, 4, 2, 0.5
SETTINGS = [(0, "none"), (0, "nvme"), (3, "none"), (3, "nvme")]


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


# -- the families ------------------------------------------------------------------------------------------------------


def sizes(**keys):
    return keys


LM = sizes(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=24,
    max_position_embeddings=32,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
ENCODER = sizes(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
MOE = sizes(head_dim=8, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=8, decoder_sparse_step=1)
FAMILIES = {
    "llama": ("LlamaForCausalLM", LM),
    "qwen2": ("Qwen2ForCausalLM", LM | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", LM | {"head_dim": 8}),
    "mistral": ("MistralForCausalLM", LM | {"sliding_window": 4}),
    "gpt2": (
        "GPT2LMHeadModel",
        sizes(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0)
        | sizes(attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"),
    ),
    "gemma": ("GemmaForCausalLM", LM | {"head_dim": 8}),
    "mixtral": (
        "MixtralForCausalLM",
        LM | sizes(num_local_experts=4, num_experts_per_tok=1, output_router_logits=True),
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", LM | MOE),
    "bert": ("BertForMaskedLM", ENCODER | sizes(vocab_size=32, max_position_embeddings=16)),
    "vit": ("ViTForImageClassification", ENCODER | sizes(image_size=8, patch_size=4, num_labels=5)),
    "t5": (
        "T5ForConditionalGeneration",
        sizes(vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0)
        | sizes(decoder_start_token_id=0),
    ),
}


def new_model(family):
    architecture, keys = FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **keys)
    config.architectures = [architecture]
    return getattr(transformers, architecture)(config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Family to the folder that transformers saved a fresh model in."""
    root, made = tmp_path_factory.mktemp("saved"), {}

    def folder(family):
        if family not in made:
            torch.manual_seed(0)
            made[family] = root / family
            new_model(family).save_pretrained(made[family])
        return made[family]

    return folder


def batch_of(family, step):
    """ROWS rows; of tokens, some masked away at the end."""
    generator = torch.Generator().manual_seed(step)
    if family == "vit":
        labels = torch.randint(0, 5, (ROWS,), generator=generator)
        return {"pixel_values": torch.randn(ROWS, 3, 8, 8, generator=generator), "labels": labels}
    tokens = torch.randint(1, 32, (ROWS, 7), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def part_of(batch, rank, ranks):
    return {name: value.chunk(ranks)[rank] for name, value in batch.items()}


def loss_of(model, batch):
    return model(**batch).loss


def train_torch(model, family, ranks=RANKS):
    """Losses and last parameters of plain torch, which averages over the parts that ranks would have."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=1e-2), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(ranks):
            loss = loss_of(model, part_of(batch_of(family, step), rank, ranks)) / ranks
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(total)
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def train_zero(world, family, folder, tmp_path, stage, offload, change=lambda model: None, **how):
    """Losses, last parameters, logits, and the folder of a checkpoint where `tmp_path` is given."""
    with world.exclusive():
        model = hf.build(folder)
        change(model)
    where = zero.Offload(offload, path=str(folder), page_bytes=4096, threads=2)
    optimizer = zero.adamw(1e-2, clip=CLIP, weight_decay=0.1)
    plan = zero.Plan(model, optimizer=optimizer, world=world, stage=stage, offload=where, **how)
    store = zero.open_store(plan)
    state, step = zero.init(plan, store, weights=hf.weights(model, folder)), zero.make_step(plan, loss_of)
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, [part_of(batch_of(family, number), world.rank, world.size)])
        losses.append(metrics.loss)
    logits = zero.make_forward(plan, lambda model, batch: model(**batch).logits)(state, batch_of(family, 9))
    path = None if tmp_path is None else zero.save(state, tmp_path / "checkpoints")
    values = full_state_dict(state)
    store.close()
    return losses, values, logits, path


@pytest.mark.parametrize(("number", "family"), list(enumerate(FAMILIES)))
def test_five_steps_are_those_of_plain_torch_and_transformers_gets_the_model_back(number, family, saved, tmp_path):
    """Of a folder that transformers saved; two ranks, whose rows choose other experts; two of the four settings."""
    folder = saved(family)
    reference = new_model(family).from_pretrained(folder).train()
    losses, wanted = train_torch(reference, family)
    for stage, offload in (SETTINGS[number % 3], SETTINGS[-1]) if number < 3 else SETTINGS[-1:]:
        into = tmp_path if (stage, offload) == SETTINGS[-1] else None
        told, values, logits, path = run_ranks(RANKS, train_zero, family, folder, into, stage, offload)[0]
        assert told == pytest.approx(losses, rel=1e-5), (stage, offload)
        assert values.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")
    export_checkpoint(open_newest(path)[0], "hf", tmp_path / "out", shard_bytes=4000)
    hf.write_settings(folder, tmp_path / "out")
    again, report = type(reference).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert all(torch.equal(value, values[name]) for name, value in again.named_parameters())
    with torch.no_grad():
        assert torch.equal(again.eval()(**batch_of(family, 9)).logits, logits)
    back = hf.weights(hf.build(tmp_path / "out"), tmp_path / "out")
    assert all(torch.equal(back[name], value) for name, value in values.items())


def with_checkpoints(model):
    # Where transformers has this name, its older one warns
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()


@pytest.mark.parametrize(("family", "tolerance"), [("llama", 0.0), ("t5", 1e-6)])
def test_recomputed_activations_change_nothing_whoever_recomputes(family, tolerance, saved):
    """Ours around a unit, or transformers' inside it. T5's blocks share inputs, whose gradients are added otherwise."""
    plain = run_ranks(1, train_zero, family, saved(family), None, 3, "none")[0]
    for change, how in ((lambda model: None, {"activations": "remat"}), (with_checkpoints, {})):
        told = run_ranks(1, partial(train_zero, **how), family, saved(family), None, 3, "none", change)[0]
        assert told[0] == pytest.approx(plain[0], rel=tolerance, abs=0)
        for name, value in plain[1].items():
            torch.testing.assert_close(told[1][name], value, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_half_precision_trains(family, saved):
    losses, *_ = run_ranks(1, partial(train_zero, precision="bf16"), family, saved(family), None, 3, "cpu")[0]
    assert losses[-1] < losses[0] * 1.1


# -- adapters ----------------------------------------------------------------------------------------------------------


def with_adapters(model, family, **more):
    """Of peft, as a user has them, but for values that are not zero."""
    peft = pytest.importorskip("peft")
    gpt2 = family == "gpt2"
    keys = {"target_modules": ["c_attn"] if gpt2 else ["q_proj", "v_proj"], "fan_in_fan_out": gpt2, **more}
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **keys))


def train_adapters(world, family, folder, stage, offload):
    """The base goes from its files into shards, though peft has renamed it; losses, and what peft takes for a file."""
    from peft import get_peft_model_state_dict

    with world.exclusive():
        model = with_adapters(hf.build(folder), family)
    where = zero.Offload(offload, path=str(folder), page_bytes=4096, threads=2)
    optimizer = zero.adamw(1e-2, clip=CLIP, weight_decay=0.1)
    plan = zero.Plan(model, optimizer=optimizer, world=world, stage=stage, offload=where)
    with contextlib.closing(zero.open_store(plan)) as store:
        state = zero.init(plan, store, weights=hf.weights(model, folder))
        step, losses = zero.make_step(plan, loss_of), []
        for number in range(STEPS):
            state, metrics = step(state, [part_of(batch_of(family, number), world.rank, world.size)])
            losses.append(metrics.loss)
        with zero.gathered(state, ["*lora_*"]) as full:
            return losses, get_peft_model_state_dict(model, state_dict=full)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_of_peft_train_as_they_do_in_plain_torch(family, saved, tmp_path):
    folder = saved(family)
    reference = with_adapters(new_model(family).from_pretrained(folder).train(), family)
    began = {name: value.detach().clone() for name, value in reference.named_parameters() if value.requires_grad}
    losses, wanted = train_torch(reference, family)
    for stage, offload in SETTINGS[1:3]:
        told, adapter = run_ranks(RANKS, train_adapters, family, folder, stage, offload)[0]
        assert told == pytest.approx(losses, rel=1e-5), (stage, offload)
        assert len(adapter) == len(began) > 0
        for name, value in began.items():
            tensor = adapter[name.replace(".default", "")]
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")
            assert not torch.equal(tensor, value)


def train_on_codes(world, family, folder, began, frozen, stage, offload):
    """Losses and adapters of a base that is kept as nf4 codes, or as the values to which these expand."""
    with world.exclusive():
        base = hf.build(folder)
        stored, model = hf.weights(base, folder), with_adapters(base, family)
    precision, where = partial(zero.Precision, "bf16"), zero.Offload(offload, path=str(folder), page_bytes=4096)
    common = {"optimizer": zero.adamw(1e-2), "world": world, "stage": stage, "offload": where}
    plan = zero.Plan(model, precision=precision(frozen="nf4"), **common)
    coded = {*plan.facts.splitting.packed_shapes()}
    assert coded
    assert all("_proj" in name or "c_" in name for name in coded)
    if frozen == "compute":
        plan = zero.Plan(model, precision=precision(), **common)

    def fill(name, tensor):
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        tensor.copy_(stored[plain] if plain in stored else began[name])
        if frozen == "compute" and name in coded:
            codes = PACKED_FORMATS["nf4"].encode(tensor.view(-1))
            PACKED_FORMATS["nf4"].expand(codes, tensor.view(-1))

    with contextlib.closing(zero.open_store(plan)) as store:
        state, step, losses = zero.init(plan, store, weights=fill), zero.make_step(plan, loss_of), []
        for number in range(3):
            state, metrics = step(state, [part_of(batch_of(family, number), world.rank, world.size)])
            losses.append(metrics.loss)
        return losses, full_state_dict(state)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(("family", "stage", "offload"), [("llama", 3, "none"), ("gpt2", 3, "infinity")])
def test_adapters_train_on_a_base_in_4_bits(family, stage, offload, saved):
    folder = saved(family)
    model = with_adapters(new_model(family).from_pretrained(folder), family)
    began = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    expected, state = run_ranks(RANKS, train_on_codes, family, folder, began, "compute", 3, "none")[0]
    losses, adapter = run_ranks(RANKS, train_on_codes, family, folder, began, "nf4", stage, offload)[0]
    assert losses == expected
    assert adapter.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in adapter.items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(("ranks", "copied"), [(1, None), (2, ["embed_tokens", "lm_head"])])
def test_an_engine_trains_adapters_and_peft_saves_and_loads_them(ranks, copied, saved, tmp_path):
    """Rank 0 alone runs peft's code, which asks modules that peft copied for their state."""
    folder, tokens = saved("llama"), torch.arange(8).view(1, 8)
    settings = {"train_batch_size": ranks, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}

    def train(world):
        with world.exclusive():
            model = with_adapters(new_model("llama").from_pretrained(folder), "llama", modules_to_save=copied)
        engine, *_ = zero.initialize(model=model, config=settings, world=world)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.save_pretrained(tmp_path)
        with torch.no_grad():
            wanted = engine(input_ids=tokens).logits
        engine.destroy()
        return wanted

    wanted, *_ = run_ranks(ranks, train)
    from peft import PeftModel

    again = PeftModel.from_pretrained(new_model("llama").from_pretrained(folder), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).logits, wanted)


# -- building ----------------------------------------------------------------------------------------------------------


def test_a_model_type_is_built_without_memory_and_without_values():
    model = hf.build("gpt2")
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert all(is_meta(parameter) for parameter in model.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight


def test_what_transformers_cannot_build_is_one_line(tmp_path):
    for text in (None, "{", '{"model_type": "lama"}', '{"model_type": "llama", "architectures": ["LamaModel"]}'):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=re_path(tmp_path)) as refused:
            hf.build(tmp_path)
        assert "\n" not in str(refused.value)
    with pytest.raises(
        ConfigError, match=r"^/no/llama does not exist. Give a folder with config.json, or a model type.$"
    ):
        hf.build("/no/llama")
    with pytest.raises(ConfigError, match=r"^path is an int. Pass a folder with config.json, or a model type.$"):
        hf.build(3)


def re_path(path):
    return str(path).replace(".", r"\.")


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_fresh_values_are_spread_as_transformers_spreads_them(family):
    """Also those that a module around the owner gives it: GPT-2's scaled projections, all of T5's matrices."""
    torch.manual_seed(1)
    wanted = new_model(family)
    with zero.empty():
        model = new_model(family)
    plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=zero.open_world())
    state_dict = full_state_dict(zero.init(plan, zero.open_store(plan), seed=1))
    for name, value in wanted.state_dict().items():
        if name in state_dict and value.numel() > 100:
            assert float(state_dict[name].std()) == pytest.approx(float(value.std()), rel=0.3), name
        elif name in state_dict:
            assert bool(state_dict[name].count_nonzero()) == bool(value.count_nonzero()), name


class Outer(nn.Module):
    """A parameter that its own module cannot make, and one that has values of its own first."""

    def __init__(self, knows):
        super().__init__()
        self.inner, self.linear, self.knows = nn.Module(), nn.Linear(3, 3), knows
        self.inner.scale = nn.Parameter(torch.empty(3))
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if module is self.inner and self.knows:
            module.scale.data.fill_(2.0)
        if module is self:
            self.linear.weight[1].zero_()
            self.linear.bias.data.fill_(5.0)

    def forward(self, x):
        return self.linear(x) * self.inner.scale


def test_init_weights_has_the_last_word_and_whom_it_leaves_out_is_named():
    plan = zero.Plan(built(Outer, True), optimizer=zero.adamw(1e-2), world=zero.open_world())
    state_dict = full_state_dict(zero.init(plan, zero.open_store(plan)))
    assert state_dict["inner.scale"].tolist() == [2.0] * 3
    assert state_dict["linear.bias"].tolist() == [5.0] * 3
    assert state_dict["linear.weight"].count_nonzero() == 6
    plan = zero.Plan(built(Outer, False), optimizer=zero.adamw(1e-2), world=zero.open_world())
    with pytest.raises(PlanError, match=r"Module at inner holds inner\.scale and has no reset_parameters\(\)"):
        zero.init(plan, zero.open_store(plan))


def test_from_pretrained_keeps_the_files_values_and_makes_what_they_lack(tmp_path):
    torch.manual_seed(1)
    wanted = new_model("gpt2")
    wanted.save_pretrained(tmp_path)
    with zero.empty():
        model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=50)
    plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=zero.open_world())
    first = full_state_dict(zero.init(plan, zero.open_store(plan)))
    values = wanted.state_dict()
    assert [name for name in first if name not in values] == ["score.weight"]
    assert all(torch.equal(first[name], values[name]) for name in first if name in values)
    assert float(first["score.weight"].std()) == pytest.approx(model.config.initializer_range, rel=0.3)


def built(make, *args):
    with zero.empty():
        return make(*args)


# -- weights out of files ----------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A head that is its embedding, and statistics."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def tied_values():
    names = {"head.weight": (5, 4), "norm.weight": (4,), "norm.bias": (4,), "norm.running_mean": (4,)}
    return {name: torch.randn(shape) for name, shape in names.items()}


def in_files(folder, values, index=True):
    """Each tensor in a file of its own."""
    folder.mkdir()
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(values)}
    for name, file in files.items():
        save_file({name: values[name]}, folder / file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def first_values(weights):
    plan = zero.Plan(built(Tied), optimizer=zero.adamw(1e-2), world=zero.open_world())
    state = zero.init(plan, zero.open_store(plan), weights=weights)
    return full_state_dict(state), dict(state.model.named_buffers())


@pytest.mark.parametrize("index", [True, False])
def test_a_folder_of_files_is_read_whichever_name_of_a_tie_it_has_statistics_too(index, tmp_path):
    values = tied_values()
    parameters, buffers = first_values(in_files(tmp_path / "model", values, index))
    assert parameters.keys() == {"embed.weight", "norm.weight", "norm.bias"}
    assert torch.equal(parameters["embed.weight"], values["head.weight"])
    (mean,) = (value for name, value in buffers.items() if name.endswith("running_mean"))
    assert torch.equal(mean, values["norm.running_mean"])


def test_each_file_is_opened_once_and_a_tensor_read_only_when_it_is_asked_for(tmp_path, monkeypatch):
    values = tied_values() | {"long": torch.arange(1000.0, dtype=torch.bfloat16), "none": torch.empty(0, 3)}
    in_files(tmp_path / "model", values)
    opened, read = [], []
    real_open, real_read = os.open, os.preadv
    monkeypatch.setattr(os, "open", lambda path, *how: opened.append(path) or real_open(path, *how))
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read.append(len(into[0])) or real_read(file, into, at))
    stored = StoredWeights(tmp_path / "model")
    assert len(opened) == len(set(opened)) == len(values)
    del read[:]
    assert "long" in stored
    assert not read
    assert torch.equal(stored["long"], values["long"])
    assert read == [2000]
    assert stored["none"].shape == (0, 3)


def test_what_is_wrong_with_files_is_said_by_name(tmp_path):
    values = tied_values()
    with pytest.raises(PlanError, match="there is no such file or folder"):
        first_values(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PlanError, match=r"holds no file that ends in \.safetensors"):
        first_values(tmp_path / "empty")
    without = {name: value for name, value in values.items() if name != "norm.weight"}
    with pytest.raises(PlanError, match=r"weights have no norm.weight. Did you mean"):
        first_values(in_files(tmp_path / "without", without))
    with pytest.raises(PlanError, match=r"weights have no embed.weight, norm.weight, norm.bias$"):
        first_values({})
    with pytest.raises(PlanError, match=r"weights have norm.running_mean in shape \(3,\), but the model has \(4,\)"):
        first_values(in_files(tmp_path / "other", values | {"norm.running_mean": torch.zeros(3)}))
    for dtype in (torch.int8, torch.float8_e4m3fn):
        rounded = values | {"norm.weight": values["norm.weight"].to(dtype)}
        with pytest.raises(PlanError, match=rf"weights have norm.weight in {dtype}\. .* scales applied"):
            first_values(in_files(tmp_path / str(dtype), rounded))
    folder = in_files(tmp_path / "cut", values)
    whole = (folder / "model-0.safetensors").read_bytes()
    for kept in (whole[:-1], whole[:20], whole[:3], b"\xff" * 8 + whole[8:], whole.replace(b"F32", b"F8x")):
        (folder / "model-0.safetensors").write_bytes(kept)
        with pytest.raises(CheckpointError, match=r"model-0\.safetensors"):
            first_values(folder)
    shutil.copy(folder / "model-1.safetensors", folder / "model-0.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 'head.weight', which model.safetensors.index.json lists"):
        first_values(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(CheckpointError, match=r"'\.\./b' is not the name of a safetensors file in this folder"):
        first_values(folder)


def test_an_export_and_a_file_of_transformers_are_the_same_weights(saved):
    """Mixtral's experts are one by one in the file."""
    folder = saved("mixtral")
    assert any("experts.0.w1" in name for name in load_file(folder / "model.safetensors"))
    model = hf.build(folder)
    weights = hf.weights(model, folder)
    whole = new_model("mixtral").from_pretrained(folder).state_dict()
    assert set(weights) == set(whole)
    assert len(weights) == len(whole)
    assert all(torch.equal(weights[name], value) for name, value in whole.items())
    assert "nothing" not in weights
    assert not weights.unused


def test_weights_say_what_they_are_and_what_the_model_has_no_use_for(saved, tmp_path):
    """Not what transformers passes over as well, as masks that GPT-2's old files have."""
    folder = shutil.copytree(saved("gpt2"), tmp_path / "gpt2")
    values = load_file(folder / "model.safetensors")
    more = {"transformer.h.0.attn.bias": torch.zeros(1), "transformer.h.7.ln_1.weight": torch.zeros(16)}
    save_file(values | more, folder / "model.safetensors", {"format": "pt"})
    weights = hf.weights(hf.build(folder), folder)
    assert weights.unused == ("transformer.h.7.ln_1.weight",)
    nbytes = sum(value.nbytes for value in values.values())
    assert str(weights) == f"weights of {folder}: {len(values)} tensors, {nbytes:,} bytes"
    _, report = new_model("gpt2").from_pretrained(folder, output_loading_info=True)
    assert list(report["unexpected_keys"]) == list(weights.unused)


# -- train.py ----------------------------------------------------------------------------------------------------------


def run(*words):
    return train.main(["data=synthetic", "data.vocab=32", "model=hf", "model.seq=8", "batch.global=2", *words])


def test_train_py_takes_a_folder_and_scripts_export_gives_one_back(saved, here, monkeypatch, capsys):
    folder = saved("qwen3_moe")
    words = ["steps=2", "val.rows=2", "sample.tokens=0", "checkpoint.every=2", "offload=infinity", "hydra.run.dir=run"]
    assert run(f"model.path={folder}", *words) == 0
    told = capsys.readouterr()
    assert "model=hf" not in told.err
    assert f"weights of {folder}: " in told.out
    assert "\noptim.lr=2e-05, the default for trained weights\n" in told.out
    assert "suits random weights" not in told.out
    export_script = loaded("scripts/export")
    monkeypatch.setattr("sys.argv", ["export", "run", "--to", "hf"])
    assert export_script.main() == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(here / "run" / "exported-hf")
    assert type(again).__name__ == "Qwen3MoeForCausalLM"
    began = dict(new_model("qwen3_moe").from_pretrained(folder).named_parameters())
    moved = [float((value - began[name]).detach().abs().max()) for name, value in again.named_parameters()]
    assert 0 < max(moved) < 0.1, "it went on from the weights of the folder"


def config_of(*words):
    return parse_config(settings_in(compose(["data=synthetic", "model=hf", *words])))


def test_the_default_learning_rate_is_that_of_the_weights(saved, tmp_path):
    """A rate that is set stays, also where it is the default of other weights."""
    path, fresh = f"model.path={saved('llama')}", "model.path=llama"
    assert config_of(path).optim.lr == 2e-5
    assert config_of(path, "optim=adam").optim.lr == 2e-5
    assert config_of(path, "model.lora.rank=4").optim.lr == 2e-4
    assert tuned_lr("some-org/some-model", adapts=False) == 2e-5
    assert config_of(fresh).optim.lr == 1e-3
    assert config_of(path, "optim=sgd").optim.lr == 0.1
    assert config_of(path, "optim.lr=1e-3").optim.lr == 1e-3
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "fast.yaml").write_text("# @package _global_\noptim:\n  lr: 1.0e-3\n")
    experiment = f"hydra.searchpath=[{folder.parent}]", "experiment=fast"
    assert config_of(path, "model.lora.rank=4", *experiment).optim.lr == 1e-3
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}'
    )
    assert config_of(path, f"ds_config={tmp_path / 'ds.json'}").optim.lr == 1e-3


def test_a_learning_rate_for_random_weights_is_warned_of(saved, here, capsys):
    small = ["steps=1", "val.rows=2", "sample.tokens=0", "optim.lr=1e-3"]
    assert run(f"model.path={saved('llama')}", *small) == 0
    said = capsys.readouterr().out
    assert "warning: optim.lr=0.001 suits random weights and may destroy these trained ones. " in said
    assert "A usual value is optim.lr=2e-05." in said


@pytest.mark.parametrize(
    ("family", "words", "told"),
    [
        (None, ["model.path=./no/such"], "model.path=./no/such does not exist"),
        (None, [], "model=hf needs model.path=FOLDER"),
        ("llama", ["data.vocab=64"], "knows 32 tokens, fewer than the 64 of data=synthetic"),
        ("llama", ["model.seq=64"], "model.seq=64 is more than the 32 tokens of model.path={path}. Set model.seq=32."),
        ("bert", [], "is a BertForMaskedLM, but train.py trains only causal language models"),
    ],
)
def test_what_train_py_cannot_train_is_one_line(family, words, told, saved, here, capsys):
    path = [f"model.path={saved(family)}"] if family else []
    assert run(*path, *words) == 2
    assert told.format(path=path and saved(family)) in capsys.readouterr().err


# -- the example -------------------------------------------------------------------------------------------------------


def loaded(name):
    """A script as a module."""
    path = Path(__file__).resolve().parents[2] / name
    loader = importlib.machinery.SourceFileLoader(path.name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(path.name, loader))
    loader.exec_module(module)
    return module


def test_the_example_trains_a_llama_from_folder_to_folder(tmp_path, capsys):
    example = loaded("benchmarks/llama.py")
    assert example.main(["--small", "--offload", "infinity", "--folder", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "in 6 files" in told
    assert "peak of resident memory" in told
    assert "32,768 logits are the same to the last bit" in told


def test_text_is_generated_between_steps_by_an_engine():
    """With transformers' own loop and its cache of keys and values, on ranks that hold shards."""
    tokens = torch.arange(8).view(1, 8)

    def llama():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LM))

    def generated(model):
        with torch.no_grad():
            return model.generate(tokens, max_new_tokens=6, do_sample=False)

    def run(world):
        with world.exclusive():
            model = llama()
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
        settings = {"train_batch_size": RANKS, "gradient_clipping": 0, "optimizer": optimizer}
        settings["zero_optimization"] = {"stage": 3}
        engine, *_ = zero.initialize(model=model, config=settings, world=world)
        told = []
        for _ in range(2):
            model.eval()
            told.append(generated(engine))
            model.train()
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.destroy()
        return told

    model, wanted = llama(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        wanted.append(generated(model.eval()))
        model.train()(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for told in run_ranks(RANKS, run):
        assert all(torch.equal(sequence, other) for sequence, other in zip(told, wanted, strict=True))
