"""Laws of the GPT: causal, positions are relative, every dtype agrees with fp32, each owner can reset itself."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zero.errors import ConfigError
from zero.trainer.config import read
from zero.trainer.models import GPT, GPTConfig, generate, loss
from zero.trainer.models.gpt import Rotary
from zero.trainer.run.task import build_task

SIZES = {"vocab": 61, "width": 48, "layers": 2, "heads": 3, "seq": 24}
KINDS = [
    {"norm": norm, "mlp": mlp, "tied": tied}
    for norm, mlp, tied in [
        ("rms", "swiglu", True),
        ("layer", "gelu", False),
        ("rms", "gelu", True),
        ("layer", "swiglu", False),
    ]
]


def build(seed: int = 0, **keys) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**SIZES, **keys}))


def rows(count: int = 3, seq: int = 24, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 61, (count, seq + 1), generator=torch.Generator().manual_seed(seed))


def reference(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """The same network written down a second time, in fp64, with complex numbers and explicit attention."""
    weight = {name: value.detach().double() for name, value in model.state_dict().items()}
    config, x = model.config, weight["embed.weight"][tokens]

    def norm(x, name):
        if config.norm == "layer":
            x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
            return x * weight[f"{name}.weight"] + weight[f"{name}.bias"]
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight[f"{name}.weight"]

    def rotate(x):
        half = x.shape[-1] // 2
        pairs = torch.complex(x[..., :half], x[..., half:])
        angle = torch.outer(torch.arange(x.shape[-2]).double(), 10_000 ** -(torch.arange(half).double() / half))
        turned = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag), dim=-1)

    for layer in range(config.layers):
        block = f"blocks.{layer}"
        y = norm(x, f"{block}.attention_norm") @ weight[f"{block}.attention.qkv.weight"].T
        q, k, v = (rearrange(part, "b t (h d) -> b h t d", h=config.heads) for part in y.chunk(3, dim=-1))
        scores = rotate(q) @ rotate(k).mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -math.inf)
        y = rearrange(scores.softmax(-1) @ v, "b h t d -> b t (h d)")
        x = x + y @ weight[f"{block}.attention.out.weight"].T
        y = norm(x, f"{block}.mlp_norm") @ weight[f"{block}.mlp.up.weight"].T
        if config.mlp == "swiglu":
            gate, value = y.chunk(2, dim=-1)
            y = gate * gate.sigmoid() * value
        else:
            y = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
        x = x + y @ weight[f"{block}.mlp.down.weight"].T
    return norm(x, "norm") @ weight["head.weight"].T


def enliven(model: GPT) -> GPT:
    """Weights large enough that every part of the network shows in the output."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_model_is_the_textbook_network(kind):
    model, tokens = enliven(build(**kind)), rows()[:, :-1]
    # fp32 against fp64 over a few dozen sums of about 100 terms
    torch.testing.assert_close(model(tokens).double(), reference(model, tokens), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_loss_is_the_mean_negative_log_probability_of_the_next_token(kind):
    model, batch = enliven(build(**kind)), rows()
    chosen = reference(model, batch[:, :-1]).log_softmax(-1).gather(-1, batch[:, 1:, None])
    torch.testing.assert_close(loss(model, batch).double(), -chosen.mean(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_logit_depends_on_a_later_token(kind):
    model, tokens = build(**kind), rows()[:, :-1]
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 61
    before, after = model(tokens), model(changed)
    # equal inputs need not give equal bits: the matrix product may block differently
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize(("kind", "dtype"), list(zip(KINDS, 2 * [torch.bfloat16, torch.float16], strict=True)), ids=str)
def test_half_parameters_give_the_loss_and_gradients_of_full_ones(kind, dtype):
    full = build(**kind)
    half = copy.deepcopy(full).to(dtype)
    full.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    batch = rows()
    expected, actual = loss(full, batch), loss(half, batch)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=5e-3, atol=0)  # a few roundings to 8 bits, averaged over rows
    expected.backward()
    actual.backward()
    for (name, want), got in zip(full.named_parameters(), half.parameters(), strict=True):
        assert got.grad.dtype == dtype
        away = (got.grad.float() - want.grad).norm() / want.grad.norm()
        assert away < 0.05, f"{name}: {float(away):.3f}"  # 2^-8 a product, about ten products deep


def test_rotary_keeps_only_the_distance():
    """Shifting query and key together leaves their product alone."""
    rotary = Rotary(16, 64, base=10_000.0)
    q, k = torch.randn(1, 1, 1, 16).expand(1, 1, 64, 16), torch.randn(1, 1, 1, 16).expand(1, 1, 64, 16)
    scores = (rotary(q) @ rotary(k).mT)[0, 0]
    for distance in range(8):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotary(q).norm(dim=-1), q.norm(dim=-1))


def test_rotary_tables_stay_fp32_and_true_whatever_happens_to_the_model():
    """Casting would round them, `to_empty` would leave garbage; they are not in the checkpoint."""
    model = build()
    cos = model.blocks[0].attention.rotary.cos.clone()
    with torch.device("meta"):
        empty = GPT(model.config)
    for changed in (copy.deepcopy(model).to(torch.bfloat16).to(torch.float32), empty.to_empty(device="cpu").half()):
        tables = changed.blocks[1].attention.rotary
        assert tables.cos.dtype == torch.float32
        assert torch.equal(tables.cos, cos)
    assert not [name for name in model.state_dict() if "cos" in name or "sin" in name]
    assert model.blocks[0].attention.rotary is model.blocks[1].attention.rotary


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_owner_of_a_parameter_resets_it(kind):
    """So a model on meta can be filled one unit at a time: same distribution as a fresh one."""
    model = build(**kind)
    with torch.device("meta"):
        empty = GPT(model.config)
    for module in [module for module in empty.modules() if list(module.parameters(recurse=False))]:
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, math.nan)
        module.reset_parameters()
    filled = empty.state_dict()  # names both sites of a tied weight; `to_empty` above has parted them
    for name, fresh in model.state_dict().items():
        got = filled[name]
        assert torch.isfinite(got).all(), name
        assert got.shape == fresh.shape
        torch.testing.assert_close(got.std(correction=0), fresh.std(correction=0), rtol=0.15, atol=1e-8)
    residual = model.blocks[0].mlp.down.weight.std() / model.blocks[0].mlp.up.weight.std()
    assert float(residual.detach()) == pytest.approx(1 / math.sqrt(2 * model.config.layers), rel=0.1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_sizes_are_counted_without_building(kind):
    model = build(**kind)
    assert model.config.parameters_numel == sum(parameter.numel() for parameter in model.parameters())
    assert (model.head.weight is model.embed.weight) == kind["tied"]


def test_a_fresh_model_knows_nothing():
    """Uniform over the vocabulary: ln 61."""
    assert float(loss(build(), rows(8)).detach()) == pytest.approx(math.log(61), abs=0.05)


def test_a_model_learns_a_text_by_heart():
    """The network and its gradients fit together: 60 steps of plain AdamW drive one batch far below ln 61."""
    model, batch = build(), rows(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    assert float(loss(model, batch).detach()) < 0.5


def test_generate_calls_forward_once_per_token_with_at_most_seq_tokens():
    """Ranks that run it together must make the same calls."""
    seen = []

    def forward(tokens):
        seen.append(tokens.shape)
        following = (tokens + 1) % 7
        return 50.0 * nn.functional.one_hot(following, 7).to(torch.bfloat16)

    prompt = torch.tensor([[0, 1], [4, 5]])
    for temperature in (0.0, 1e-45, 1.0):
        seen.clear()
        tokens = generate(forward, prompt, 6, seq=4, temperature=temperature)
        assert tokens.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0], [4, 5, 6, 0, 1, 2, 3, 4]]
        assert [tuple(shape) for shape in seen] == [(2, 2), (2, 3), (2, 4), (2, 4), (2, 4), (2, 4)]


def test_generate_is_a_function_of_its_seed():
    model, prompt = build(), rows(2)[:, :5]
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    first = generate(model, prompt, 12, seq=24, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first, generate(model, prompt, 12, seq=24, seed=1))
    assert not torch.equal(first, generate(model, prompt, 12, seq=24, seed=2))
    assert torch.equal(first[:, :5], prompt)


def test_a_text_longer_than_the_tables_is_refused():
    with pytest.raises(ConfigError, match="25 tokens do not fit"):
        build()(rows()[:, :25])


def test_code_in_the_folder_of_a_model_is_not_run(tmp_path, monkeypatch):
    """transformers would ask at the terminal whether to run it."""
    pytest.importorskip("transformers")
    from zero.trainer.models import hf

    (tmp_path / "config.json").write_text('{"model_type": "theirs", "auto_map": {"AutoConfig": "code_.Config"}}')
    (tmp_path / "code_.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Config: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match="transformers cannot read this model"):
        hf.settings(tmp_path)
    assert not (tmp_path / "was_run").exists()


def test_a_folder_without_a_configuration_is_refused_in_words(tmp_path):
    from zero.trainer.models.hf_config import HFConfig

    with pytest.raises(ConfigError, match=r"there is no config\.json in it$"):
        HFConfig(path=str(tmp_path)).check()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"no readable config\.json in it \(.*line 1"):
        HFConfig(path=str(tmp_path)).check()


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def made(kind: str, **more):
    """A small model of transformers with values, its matrices multiplied by operators that a counter knows."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **SMALL | more)
    config.use_cache = False
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if "experts" in "".join(name for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
        ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    ],
)
def test_the_operations_of_a_token_are_those_that_torch_counts(kind, more):
    """A mixture of experts computes with some of its weights, and heads may be wider than the hidden size says."""
    from zero.trainer.models import hf

    model, tokens = made(kind, **more), torch.randint(0, 64, (1, 33))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        hf.loss(model, tokens).backward()
    norms_and_biases = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    counted = counter.get_total_flops() / 32
    assert counted <= hf.flops_per_token(model, 32) <= counted + 6 * norms_and_biases


def test_attention_costs_what_its_window_sees_and_unknown_experts_are_not_guessed(monkeypatch):
    from zero.trainer.models import hf

    whole, window = (made("mistral", num_key_value_heads=4, sliding_window=seen) for seen in (None, 8))
    assert hf.flops_per_token(whole, 32) - hf.flops_per_token(window, 32) == 12 * 2 * 32 * (32 - 8)
    assert hf.flops_per_token(window, 8) == hf.flops_per_token(whole, 8)
    experts = made("mixtral", num_key_value_heads=4, num_local_experts=4)
    monkeypatch.setattr(hf, "EXPERTS_OF_A_TOKEN", ("another_word",))
    assert hf.flops_per_token(experts, 32) is None


def test_what_sees_later_tokens_is_no_causal_model(tmp_path):
    """BERT has a class for it, which predicts from the whole row unless its settings say that it is a decoder."""
    transformers = pytest.importorskip("transformers")
    from zero.trainer.models import hf

    for decoder in (False, True):
        model = made("bert", is_decoder=decoder).eval()
        rows = torch.randint(0, 64, (2, 1, 16))
        rows[1] = rows[0]
        rows[1, :, -1] += 1
        with torch.no_grad():
            first, second = (hf.logits(model, batch.remainder(64))[:, :-1] for batch in rows)
        assert torch.equal(first, second) == decoder == (hf.not_causal(model) is None)
    assert hf.not_causal(made("gpt_neox")) is None  # has the setting, which means nothing to it
    settings = transformers.BertConfig(**SMALL, architectures=["BertLMHeadModel"])
    settings.save_pretrained(tmp_path)
    words = {"model": {"name": "hf", "path": str(tmp_path), "seq": 16}, "data": {"name": "synthetic", "vocab": 64}}
    with pytest.raises(ConfigError, match="sees later tokens too, because its settings say is_decoder=false"):
        build_task(read(words))


def test_a_validation_measures_the_cross_entropy_alone(tmp_path):
    """A mixture of experts is trained on more, which no perplexity has in it."""
    from zero.trainer.models import hf

    weighed = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = made("mixtral", num_key_value_heads=4, num_local_experts=4, **weighed)
    model.config.architectures = ["MixtralForCausalLM"]
    model.config.save_pretrained(tmp_path)
    words = {"model": {"name": "hf", "path": str(tmp_path), "seq": 16}, "data": {"name": "synthetic", "vocab": 64}}
    task, rows = build_task(read(words)), torch.randint(0, 64, (2, 17))
    with torch.no_grad():
        expected = F.cross_entropy(hf.logits(model, rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        torch.testing.assert_close(task.cross_entropy(model, rows), expected)
        assert task.loss(model, rows) > expected + 0.1
