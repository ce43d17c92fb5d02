"""Models of transformers on rows that ranks share: the loss and gradients of whole rows, or one line that refuses."""

import os
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

import zero  # noqa: E402
from tests.common.architectures import VOCAB, sizes  # noqa: E402
from zero.errors import ConfigError  # noqa: E402
from zero.testing import run_processes, run_ranks  # noqa: E402

ROWS, TOKENS = 2, 16
IDS = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(5))
BATCHES = {
    "whole": {},
    "packed": {"position_ids": torch.tensor([[*range(5), *range(11)], [*range(12), *range(3), 0]])},
    "padded": {"attention_mask": (torch.arange(TOKENS) < torch.tensor([[16], [9]])).long()},
    "padded before": {"attention_mask": (torch.arange(TOKENS) >= torch.tensor([[0], [6]])).long()},
}
TRAINED = ["llama", "qwen2", "qwen3", "gpt2", "gemma", "mistral", "olmo2", "phi3", "gpt_neox", "deepseek_v3"]
SIZES = {"num_attention_heads": 4, "n_head": 4, "head_dim": 8, "hidden_size": 32, "n_embd": 32}
ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"]}
WINDOWED = {
    "mistral": {},
    "ministral": {},
    "gemma2": ALTERNATE,
    "gemma3_text": ALTERNATE,
    "gpt_oss": ALTERNATE,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_next": {"layer_types": ["full_attention"] * 2},
    "cohere2": ALTERNATE,
    "olmo3": ALTERNATE,
    "vaultgemma": ALTERNATE,
}
"""Models whose attention has windows, sinks or caps, or layers of several kinds -> their settings."""
CONVOLVED = {"layer_types": ["conv", "full_attention"]}
REFUSED = {
    "bloom": r"transformer\.h\.0\.self_attention does not call the attention function",
    "falcon": r"transformer\.h\.0\.self_attention does not call the attention function",
    "mamba": r"backbone\.layers\.0\.mixer is a layer of \w+, which mixes tokens",
    "roberta": r"roberta\.embeddings\.position_embeddings counts positions from its padding token on",
    "lfm2": r"model\.layers\.0\.conv is a layer of conv, which mixes tokens",
    "llama4_text": r"model\.layers\.0\.self_attn is a layer of chunked_attention, which mixes tokens",
    "qwen3_next": r"model\.layers\.0\.linear_attn is a layer of linear_attention, which mixes tokens",
    "nemotron": r"model\.layers\.0\.self_attn (got no shared_rows|does not call the attention function)",
}


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def new_model(family, **own):
    """A small model; windows of its attention are longer than a row."""
    usual = transformers.AutoConfig.for_model(family)
    own = {"sliding_window": 64, **own}
    if family in (*TRAINED, *WINDOWED) and family != "deepseek_v3":
        own = {**SIZES, **own}
    config = transformers.AutoConfig.for_model(family, **sizes(usual, own))
    config.is_decoder = True
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def batch_of(extra):
    """No label is that of padding, or of a token after padding, which transformers would predict from padding."""
    mask = extra.get("attention_mask", torch.ones_like(IDS))
    labels = IDS.masked_fill((mask == 0) | (mask.roll(1, dims=1) == 0), -100)
    return {"input_ids": IDS, "labels": labels, **extra}


def in_slices(world, family, extra, **own):
    with world.exclusive():
        model = new_model(family, **own)
    parallel = zero.sequence_parallel(model, world)
    inputs, targets = parallel.slice(batch_of(extra))
    logits = model(**inputs, use_cache=False).logits
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    loss = parallel.loss(total, targets)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(model, extra, ranks, kind):
    """Ranks have the loss and gradients of transformers, without a cache, which would hide packed rows from it."""
    expected = model(**batch_of(extra), use_cache=False).loss
    expected.backward()
    compare_with(expected.detach(), {name: value.grad for name, value in model.named_parameters()}, ranks, kind)


def compare_with(expected, right, ranks, kind):
    losses, gradients = zip(*ranks, strict=True)
    torch.testing.assert_close(torch.stack(losses).mean(), expected, atol=2e-6, rtol=0, msg=kind)
    for name, gradient in right.items():
        if gradient is not None:
            mean = sum(rank[name] for rank in gradients) / len(ranks)
            torch.testing.assert_close(mean, gradient, atol=2e-6, rtol=1e-4, msg=f"{kind}: {name}")


@pytest.mark.parametrize("family", TRAINED)
def test_loss_and_gradients_are_those_of_whole_rows(family):
    sizes_of_groups = (2, 2, 2 if family == "deepseek_v3" else 4, 2)
    for size, (kind, extra) in zip(sizes_of_groups, BATCHES.items(), strict=True):
        compare(new_model(family), extra, run_ranks(size, in_slices, family, extra), kind)


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_sinks_and_caps_are_those_of_transformers(family):
    """Rows of 16 tokens are longer than the window of 5; the source is the model's own eager attention."""
    own = {"sliding_window": 5, **WINDOWED[family]}
    for size, (kind, extra) in zip((2, 2, 4, 2), BATCHES.items(), strict=True):
        if family == "gpt_oss" and kind == "packed":
            continue  # transformers' GptOss does not look where documents begin, see below
        model = new_model(family, **own)
        model.set_attn_implementation("eager")
        compare(model, extra, run_ranks(size, partial(in_slices, **own), family, extra), kind)


def test_windows_and_caps_matter_to_these_models():
    """Otherwise the test above would pass without them."""

    def differ(family, *settings):
        models = [new_model(family, **own) for own in settings]
        for model in models:
            model.set_attn_implementation("eager")
        return not torch.allclose(*(model(input_ids=IDS).logits for model in models), atol=1e-5)

    for family, own in WINDOWED.items():
        if family != "qwen3_next":
            assert differ(family, {"sliding_window": 5, **own}, own), family
    assert differ("gemma2", {"attn_logit_softcapping": 1e-2}, {})


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_packed_documents_see_themselves_alone(family):
    """Also in a model that does not tell documents apart on its own. The source is one document at a time."""
    own, extra = {"sliding_window": 5, **WINDOWED[family]}, BATCHES["packed"]
    model, total = new_model(family, **own), torch.zeros(())
    model.set_attn_implementation("eager")
    for row, positions in zip(IDS, extra["position_ids"], strict=True):
        begins = [*(positions == 0).nonzero().flatten().tolist(), TOKENS]
        for begin, end in pairwise(begins):
            # the first token of the next document is a label of the last token, as in transformers
            inputs, targets = row[begin:end], row[begin + 1 : end + 1]
            logits = model(input_ids=inputs[None], use_cache=False).logits[0, : len(targets)]
            total = total + F.cross_entropy(logits, targets, reduction="sum")
    expected = total / (ROWS * (TOKENS - 1))
    expected.backward()
    right = {name: value.grad for name, value in model.named_parameters()}
    for size in (1, 2, 4):
        ranks = run_ranks(size, partial(in_slices, **own), family, extra)
        compare_with(expected.detach(), right, ranks, f"{size} ranks")


@pytest.mark.slow(keep=1)
@pytest.mark.process
@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_processes_have_the_bits_of_threads(family):
    run = partial(in_slices, sliding_window=5, **WINDOWED[family])
    for kind in ("whole", "packed"):
        processes, threads = (ranks(2, run, family, BATCHES[kind]) for ranks in (run_processes, run_ranks))
        for ours, theirs in zip(processes, threads, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert all(gradient is None or torch.equal(gradient, theirs[1][name]) for name, gradient in ours[1].items())


@pytest.mark.parametrize("family", REFUSED)
def test_models_whose_result_would_differ_are_one_line(family):
    with pytest.raises(ConfigError, match=REFUSED[family]) as refusal:
        run_ranks(2, partial(in_slices, **CONVOLVED if family == "lfm2" else {}), family, {})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            r"model\.rotary_emb rotates positions by the length of a row \(dynamic\)",
        ),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "3 attention heads do not divide over 2 ranks"),
        (
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0, "attention_dropout": 0.1},
            r"model\.layers\.0\.self_attn: attention has no dropout=0.1 with a window",
        ),
    ],
)
def test_settings_whose_result_would_differ_are_one_line(own, why):
    with pytest.raises(ConfigError, match=why):
        run_ranks(2, partial(in_slices, **own), "qwen2", {})


def test_a_model_that_hides_its_window_is_one_line():
    why = r"model\.layers\.0\.self_attn has sliding_window=8 in its masks alone. Use rows of at most 8 tokens."
    with pytest.raises(ConfigError, match=why):
        run_ranks(2, partial(in_slices, sliding_window=8), "phimoe", {})


def test_calls_that_are_not_of_slices_are_one_line():
    model = new_model("llama")
    parallel = zero.sequence_parallel(model, zero.open_world(device="cpu"))
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn got no shared_rows"):
        model(input_ids=IDS)
    inputs, _ = parallel.slice(batch_of({}))
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn got a mask"):
        model(**inputs, attention_mask=torch.ones(ROWS, 1, TOKENS, TOKENS))
    with pytest.raises(ConfigError, match="is not a model of transformers"):
        zero.sequence_parallel(torch.nn.Linear(2, 2), parallel.group)
