"""A model's loss in chunks of its vocabulary, through the engine: the GPT here and models of transformers."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

import zero
from tests.common.small import KiB, Setting, slice_of
from zero import losses
from zero.engine.meta import empty
from zero.engine.model import split
from zero.engine.whole.read import full_state_dict
from zero.testing import run_ranks
from zero.trainer.config import read
from zero.trainer.models import GPT, GPTConfig, hf, loss
from zero.trainer.planning.traces import tracing
from zero.trainer.planning.traces.tracing import trace
from zero.trainer.run.task import build_task

transformers = pytest.importorskip("transformers")

VOCAB = 97
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS = {
    "llama": SMALL | {"intermediate_size": 64},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "mixtral": SMALL | {"intermediate_size": 64, "num_local_experts": 4, "num_key_value_heads": 2},
    "phi": SMALL | {"intermediate_size": 64},
    "granite": SMALL | {"intermediate_size": 64, "logits_scaling": 3.0},
}


def build(kind: str) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(kind, **KINDS[kind], use_cache=False)
    for name in [name for name in vars(config) if "drop" in name or name.endswith("pdrop")]:
        setattr(config, name, 0.0)
    with empty():
        return transformers.AutoModelForCausalLM.from_config(config)


def rows(number: int, count: int) -> torch.Tensor:
    return torch.randint(VOCAB, (count, 17), generator=torch.Generator().manual_seed(number))


def trained(world, setting, make, loss_fn):
    """Losses of each step and all parameters after them."""
    with world.exclusive():
        model = make()
    plan = zero.Plan(
        model,
        optimizer=zero.sgd(0.1, clip=1.0),
        world=world,
        stage=setting.stage,
        offload=zero.Offload(setting.offload[0][1], page_bytes=8 * KiB),
        activations=setting.activations,
        units=setting.units,
    )
    store = zero.open_store(plan)
    state, step, step_losses = zero.init(plan, store), zero.make_step(plan, loss_fn), []
    for number in range(3):
        state, metrics = step(state, slice_of(rows(number, 4 * world.size), world, 1))
        step_losses.append(metrics.loss)
    values = full_state_dict(state)
    store.close()
    return step_losses, values


def same(first, second):
    (losses_a, values_a), (losses_b, values_b) = first, second
    assert losses_a == pytest.approx(losses_b, rel=2e-6)
    for name, value in values_a.items():
        assert (value - values_b[name]).abs().max() <= 2e-6, name


@pytest.mark.parametrize("kind", KINDS)
def test_only_logits_that_nothing_is_done_to_are_left_out(kind):
    assert hf.gives_logits(build(kind)) is (kind != "granite")
    model = build(kind)
    hf.gives_logits(model)
    assert not {"forward"} & {*vars(model.base_model), *vars(model.get_output_embeddings())}, "it is as it was"


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("kind", "stage", "preset", "activations", "units"),
    [
        ("llama", 0, "none", "keep", None),
        ("llama", 3, "infinity", "remat", None),
        ("llama", 3, "none", "remat", ("LlamaDecoderLayer", "Linear")),
        ("gpt2", 2, "none", "keep", None),
        ("mixtral", 3, "cpu", "keep", None),
        ("phi", 1, "nvme", "remat", None),
    ],
)
def test_models_of_transformers_train_as_with_the_plain_loss(kind, stage, preset, activations, units, monkeypatch):
    """Four logits at a time, in every unit that the head may be of, and computed again in backward."""
    setting = Setting(stage=stage, offload=(("preset", preset),), activations=activations, units=units)

    def chunked(model, batch):
        return hf.loss(model, batch, chunked=True)

    monkeypatch.setattr(losses, "CHUNK_NUMEL", 4)
    monkeypatch.setattr(losses, "LEAST_CHUNK", 4)
    plain = run_ranks(2, trained, setting, lambda: build(kind), hf.loss)
    same(plain[0], run_ranks(2, trained, setting, lambda: build(kind), chunked)[0])


@pytest.mark.parametrize("units", [None, ("LlamaDecoderLayer", "Linear"), ("LlamaForCausalLM",)])
def test_each_of_two_losses_of_a_microbatch_has_its_own_rows_when_activations_are_computed_again(units, monkeypatch):
    setting = Setting(stage=3, offload=(("preset", "none"),), activations="remat", units=units)

    def preference(model, batch, chunked=False):
        better, worse = batch.chunk(2)
        return hf.loss(model, better, chunked=chunked) - 0.5 * hf.loss(model, worse, chunked=chunked)

    monkeypatch.setattr(losses, "CHUNK_NUMEL", 4)
    monkeypatch.setattr(losses, "LEAST_CHUNK", 4)
    plain = run_ranks(1, trained, setting, lambda: build("llama"), preference)
    same(plain[0], run_ranks(1, trained, setting, lambda: build("llama"), partial(preference, chunked=True))[0])


@pytest.mark.parametrize("kind", ["llama", "granite"])
def test_a_run_says_when_all_logits_are_held_though_chunks_were_wanted(kind, tmp_path):
    transformers.AutoConfig.for_model(kind, **KINDS[kind] | {"vocab_size": 256}).save_pretrained(tmp_path)
    notes = {}
    for wanted in (True, False):
        model = {"name": "hf", "path": str(tmp_path), "seq": 1024, "chunked_loss": wanted}
        notes[wanted] = [note for note in build_task(read({"model": model})).notes if "logits" in note]
    assert notes[False] == []
    assert len(notes[True]) == (kind == "granite")
    assert all("GraniteForCausalLM" in note and "1.0 MiB for each row" in note for note in notes[True])


def test_logits_after_a_chunked_loss_are_logits():
    model = transformers.AutoModelForCausalLM.from_config(build("llama").config)
    batch = rows(0, 2)
    before = hf.logits(model, batch)
    hf.loss(model, batch, chunked=True)
    assert torch.equal(hf.logits(model, batch), before)
    hf.loss(model, batch, chunked=True)
    assert torch.equal(hf.loss(model, batch), hf.loss(model, batch))


@pytest.mark.parametrize(("stage", "activations"), [(0, "remat"), (3, "keep")])
def test_the_gpt_trains_as_with_the_plain_loss(stage, activations, monkeypatch):
    setting = Setting(stage=stage, offload=(("preset", "none"),), activations=activations)

    def make(chunked: bool) -> GPT:
        with empty():
            return GPT(GPTConfig(vocab=VOCAB, width=32, layers=2, heads=2, seq=16, chunked_loss=chunked))

    monkeypatch.setattr(losses, "CHUNK_NUMEL", 4)
    monkeypatch.setattr(losses, "LEAST_CHUNK", 4)
    plain, chunked = (run_ranks(2, trained, setting, lambda way=way: make(way), loss)[0] for way in (False, True))
    same(plain, chunked)


@pytest.mark.parametrize("vocab", [1024, 1000, 129, 64 * 4])
@pytest.mark.parametrize("backward", [True, False])
def test_a_trace_computes_one_of_equal_chunks_and_counts_all(vocab, backward, monkeypatch):
    """The same bytes, products and work as with every chunk computed, and fewer operators."""
    with empty():
        model = GPT(GPTConfig(width=32, layers=1, heads=2, seq=64, vocab=vocab))
    batch = torch.zeros(3, 65, dtype=torch.int64, device="meta")
    computed = []
    monkeypatch.setattr(losses, "CHUNK_NUMEL", 64)
    monkeypatch.setattr(losses, "_logits", lambda *args, logits=losses._logits: computed.append(1) or logits(*args))

    def traced():
        computed.clear()
        return trace(model, split(model, world_size=1), loss, batch, compute=torch.bfloat16, backward=backward)

    short = traced()
    count = len(computed)
    monkeypatch.setattr(tracing, "equal_chunks_once", lambda repeated: nullcontext())
    assert traced() == short
    assert len(computed) == -(-vocab // 64) * (1 + backward)
    assert count == min(3, -(-vocab // 64)) * (1 + backward)
