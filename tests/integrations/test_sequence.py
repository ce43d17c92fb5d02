"""Models of transformers on rows that ranks share: the loss and gradients of whole rows, or one line that refuses."""

import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

import zero  # noqa: E402
from tests.common.architectures import VOCAB, sizes  # noqa: E402
from zero.errors import ConfigError  # noqa: E402
from zero.testing import run_ranks  # noqa: E402

ROWS, TOKENS = 2, 16
IDS = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(5))
BATCHES = {
    "whole": {},
    "packed": {"position_ids": torch.tensor([[*range(5), *range(11)], [*range(12), *range(3), 0]])},
    "padded": {"attention_mask": (torch.arange(TOKENS) < torch.tensor([[16], [9]])).long()},
    "padded before": {"attention_mask": (torch.arange(TOKENS) >= torch.tensor([[0], [6]])).long()},
}
TRAINED = ["llama", "qwen2", "qwen3", "gpt2", "gemma", "mistral", "olmo2", "phi3", "gpt_neox", "deepseek_v3"]
REFUSED = {
    "bloom": "does not call the attention function",
    "falcon": "does not call the attention function",
    "mamba": "does not call the attention function",
    "roberta": "counts positions from its padding token on",
    "lfm3": "layers of conv, which mix tokens",
    "llama4_text": "layers of chunked_attention, which mix tokens",
    "gemma2": "does not honour softcap of Gemma2Attention",
    "gpt_oss": "does not honour s_aux of GptOssAttention",
}


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def new_model(family, **own):
    """A small model; windows of its attention are longer than a row."""
    usual = transformers.AutoConfig.for_model(family)
    own = {"sliding_window": 64, **own}
    if family in TRAINED and family != "deepseek_v3":
        own = {"num_attention_heads": 4, "n_head": 4, "head_dim": 8, "hidden_size": 32, "n_embd": 32, **own}
    config = transformers.AutoConfig.for_model(family, **sizes(usual, own))
    config.is_decoder = True
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).float().train()


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
    logits = model(**inputs).logits
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    loss = parallel.loss(total, targets)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", TRAINED)
def test_loss_and_gradients_are_those_of_whole_rows(family):
    """Of transformers' own loss, without a cache, which would hide from it that rows are packed."""
    sizes_of_groups = (2, 2, 2 if family == "deepseek_v3" else 4, 2)
    for size, (kind, extra) in zip(sizes_of_groups, BATCHES.items(), strict=True):
        model = new_model(family)
        expected = model(**batch_of(extra), use_cache=False).loss
        expected.backward()
        losses, gradients = zip(*run_ranks(size, in_slices, family, extra), strict=True)
        torch.testing.assert_close(torch.stack(losses).mean(), expected.detach(), atol=2e-6, rtol=0, msg=kind)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                mean = sum(rank[name] for rank in gradients) / size
                torch.testing.assert_close(mean, parameter.grad, atol=2e-6, rtol=1e-4, msg=f"{kind}: {name}")


@pytest.mark.parametrize("family", REFUSED)
def test_models_whose_result_would_differ_are_one_line(family):
    with pytest.raises(ConfigError, match=REFUSED[family]) as refusal:
        run_ranks(2, in_slices, family, {})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            r"length of a row \(dynamic\)",
        ),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "3 attention heads do not divide over 2 ranks"),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, "no sliding_window=8"),
    ],
)
def test_settings_whose_result_would_differ_are_one_line(own, why):
    with pytest.raises(ConfigError, match=why):
        run_ranks(2, partial(in_slices, **own), "qwen2", {})


@pytest.mark.parametrize(
    ("family", "own", "why"),
    [
        ("phimoe", {"sliding_window": 8}, "no sliding_window=8"),
        ("nemotron", {}, "NemotronAttention got no shared_rows"),
    ],
)
def test_models_that_hide_their_window_or_the_rows_are_one_line(family, own, why):
    with pytest.raises(ConfigError, match=why):
        run_ranks(2, partial(in_slices, **own), family, {})


def test_calls_that_are_not_of_slices_are_one_line():
    model = new_model("llama")
    parallel = zero.sequence_parallel(model, zero.open_world(device="cpu"))
    with pytest.raises(ConfigError, match="LlamaAttention got no shared_rows"):
        model(input_ids=IDS)
    inputs, _ = parallel.slice(batch_of({}))
    with pytest.raises(ConfigError, match="attention got a mask"):
        model(**inputs, attention_mask=torch.ones(ROWS, 1, TOKENS, TOKENS))
    with pytest.raises(ConfigError, match="is not a model of transformers"):
        zero.sequence_parallel(torch.nn.Linear(2, 2), parallel.group)
