"""Equal blocks are traced a few times, and a trace counts what it does with every block traced."""

from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn

import zero
from zero.engine.model.split import split
from zero.trainer.config import read
from zero.trainer.models import GPT, hf, loss
from zero.trainer.planning import trace
from zero.trainer.planning.traces import equal_blocks

LAYERS = 9
SETTINGS = [
    {},
    {"policies": "remat"},
    {"policies": "offload"},
    {"policies": "selective"},
    {"policies": "remat", "rows": 1},
    {"backward": False},
]
ROWS = torch.empty(3, 513, dtype=torch.int64, device="meta")


@pytest.fixture
def repeated(monkeypatch):
    """The repeated parts of all traces."""
    laps, plain = [], equal_blocks.EqualBlocks._repeat
    monkeypatch.setattr(equal_blocks.EqualBlocks, "_repeat", lambda self, lap: (laps.append(lap), plain(self, lap)))
    return laps


def check(model, loss_of_model, microbatch=ROWS, **settings):
    splitting = split(model, world_size=1)
    run = partial(trace, model, splitting, loss_of_model, microbatch, compute=torch.bfloat16, **settings)
    assert run() == run(every=True)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_gpt_is_traced_as_if_every_block_were(settings, repeated):
    sizes = {"width": 64, "layers": LAYERS, "heads": 4, "seq": 512, "vocab": 300}
    with zero.empty():
        model = GPT(read({"model": sizes, "batch": {"global": 8}}).on(1).model)
    check(model, loss, **settings)
    assert repeated


def transformers_model(name, **sizes):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    small |= {"intermediate_size": 128, "num_key_value_heads": 2, "use_cache": False, "head_dim": 16}
    class_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    settings = getattr(transformers, class_name)(**small | sizes)
    with zero.empty():
        return getattr(transformers, f"{name}ForCausalLM")(settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_llama_is_traced_as_if_every_block_were(settings, repeated):
    check(transformers_model("Llama"), partial(hf.loss, chunked=True), **settings)
    assert repeated


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("name", "sizes", "repeats"),
    [
        ("Gemma3", {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 5}, False),
        ("Gemma3", {"sliding_window": 64, "layer_types": ["sliding_attention"] * 8 + ["full_attention"] * 2}, False),
        ("Qwen3Moe", EXPERTS, True),
        ("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 2}, False),
        ("Qwen3Moe", {**EXPERTS, "output_router_logits": True}, False),
        ("Llama", {"attention_dropout": 0.1}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["keep", "remat"])
def test_blocks_that_differ_are_told_apart(name, sizes, repeats, policy, repeated):
    layers = len(sizes.get("layer_types", range(LAYERS)))
    model = transformers_model(name, num_hidden_layers=layers, **sizes)
    check(model, partial(hf.loss, router=0.01), policies=policy)
    assert bool(repeated) == repeats


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.norm, self.up, self.down = index, nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, block=Block, layers=LAYERS):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(block(index) for index in range(layers))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class ByIndex(Block):
    def forward(self, x):
        return super().forward(x) if self.index != 7 else x * super().forward(x)


class ByIndexInBackward(Block):
    """A block that reads its number only when it is recomputed, or differentiated."""

    def forward(self, x):
        return OfIndex.apply(super().forward(x), self)


class OfIndex(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clone() if ctx.block.index == 5 else grad * 2 * 3, None


class HandingOn(Block):
    """A block that hands a tensor on without returning it."""

    handed: ClassVar[list[torch.Tensor]] = []

    def forward(self, x):
        self.handed.append(x.float().mean())
        return super().forward(x)


class Counting(Block):
    def forward(self, x):
        self.calls = self.index
        return super().forward(x)


class Summing(Model):
    def forward(self, tokens):
        HandingOn.handed.clear()
        return super().forward(tokens) + torch.stack(HandingOn.handed).sum()


class UNet(Model):
    def forward(self, tokens):
        x, kept = self.embed(tokens), []
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 6:
                kept.append(x)
        return (x + kept[0]).float().square().mean()


class Keeping(Model):
    """Returns the mean of the last layers' results, from `first` on, as some encoders do."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, tokens):
        x, kept = self.embed(tokens), []
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index >= self.first:
                kept.append(x)
        return sum(kept).float().square().mean()


class Between(Model):
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            x.mean()
        return x.float().square().mean()


class Biased(Model):
    """A bias with a gradient that all blocks get."""

    def forward(self, tokens):
        x = bias = self.embed(tokens)
        for block in self.blocks:
            x = block(x + bias)
        return x.float().square().mean()


def with_hook(model):
    model.blocks[6].up.register_forward_hook(lambda module, args, output: output * 2)
    return model


@pytest.mark.parametrize("policy", ["keep", "remat"])
@pytest.mark.parametrize(
    "build",
    [
        partial(Model, ByIndex),
        partial(Model, ByIndexInBackward),
        partial(Summing, HandingOn),
        partial(Model, Counting),
        UNet,
        *(partial(Keeping, first) for first in range(4, LAYERS)),
        Between,
        Biased,
        lambda: with_hook(Model()),
        partial(Model, lambda index: Block(index) if index != 6 else nn.Sequential(Block(index), Block(index))),
        partial(Model, lambda index: Block(index).requires_grad_(index > 6)),
    ],
)
def test_what_is_not_proven_equal_is_traced(build, policy):
    check(build(), lambda model, tokens: model(tokens), ROWS[:, 1:], policies=policy)
    check(build(), lambda model, tokens: model(tokens), ROWS[:, 1:], policies=policy, backward=False)


def test_blocks_that_only_know_their_number_are_equal(repeated):
    check(Model(), lambda model, tokens: model(tokens), ROWS[:, 1:])
    assert len(repeated) == 2 * (LAYERS - equal_blocks.TRACED - 1)
