"""Rows that ranks of train.py share: the same losses and updates as whole rows, in smaller activations.

Tolerances. Ranks add the gradients of tokens in another order, which AdamW may make a part of a step of: see
tests/engine/test_transformers.py.
"""

import contextlib
import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

import train  # noqa: E402
import zero  # noqa: E402
from tests.trainer.test_planning import gpu, peak_of  # noqa: E402
from zero.attention import Scoring, causal_attention  # noqa: E402
from zero.engine.model import split  # noqa: E402
from zero.engine.whole.read import full_state_dict  # noqa: E402
from zero.errors import ConfigError  # noqa: E402
from zero.settings.build import build_plan  # noqa: E402
from zero.testing import run_processes, run_ranks  # noqa: E402
from zero.trainer.config import read  # noqa: E402
from zero.trainer.data import open_data  # noqa: E402
from zero.trainer.data.windows import slice_of  # noqa: E402
from zero.trainer.planning import ActivationTraces, Machine, PaperWorld, choices, plan_text  # noqa: E402
from zero.trainer.planning.cost import compute_seconds  # noqa: E402
from zero.trainer.planning.rates import assumed  # noqa: E402
from zero.trainer.planning.traces.operators import OperatorWork  # noqa: E402
from zero.trainer.planning.traces.tracing import trace  # noqa: E402
from zero.trainer.run.evaluate import validation_loss  # noqa: E402
from zero.trainer.run.task import build_task  # noqa: E402

STEPS, ROWS, SEQ, RANKS, LR = 3, 8, 16, 4, 1e-2
LLAMA = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32}
GPT2 = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 0}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": 0}
FAMILIES = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"head_dim": 8, "num_key_value_heads": 1}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folders of small models that transformers saved, by family."""
    transformers.utils.logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("saved")
    for family, (architecture, sizes) in FAMILIES.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **sizes)
        config.architectures = [architecture]
        getattr(transformers, architecture)(config).save_pretrained(root / family)
    return root


def settings(model, sequence, **more):
    return read(
        {
            "steps": STEPS,
            "model": {"seq": SEQ, **model},
            "data": {"name": "synthetic", "vocab": 32},
            "zero": {"sequence": sequence, **more},
            "batch": {"global": ROWS, "accumulate": 2},
            "optim": {"name": "adamw", "lr": LR, "clip": 0.5},
            "schedule": {"name": "constant"},
        }
    )


def trained(world, config):
    """Losses, last values, and the last validation loss, with the rows that a run takes."""
    config, sequence = config.on(world.size), config.zero.sequence
    with world.exclusive():
        task = build_task(config, world)
    data, (_, micro, accumulate) = open_data(config.source(), SEQ, config.seed), config.batch.numbers()
    plan, (group, place) = build_plan(config, task.model, world), divmod(world.rank, sequence)
    with contextlib.closing(zero.open_store(plan)) as store:
        state, losses = zero.init(plan, store, seed=config.seed, weights=task.weights), []
        step = zero.make_step(plan, task.loss)
        for number in range(1, STEPS + 1):
            first = micro * accumulate * ((number - 1) * (world.size // sequence) + group)
            rows = data.rows(first, first + micro * accumulate)
            state, metrics = step(state, slice_of(rows, place, sequence).split(micro))
            losses.append(metrics.loss)
        forward = zero.make_forward(plan, task.cross_entropy)
        last = validation_loss(lambda rows: forward(state, rows), data, world, rows=5, sequence=sequence)
        logits = zero.make_forward(plan, task.logits)(state, data.validation(0, 1)[:, :7])
        return losses, full_state_dict(state), last, logits


@pytest.mark.parametrize("family", ["gpt", *FAMILIES])
def test_losses_and_updates_are_those_of_whole_rows(family, saved, monkeypatch):
    """Keys and values of one head are repeated; the loss is in chunks; samples are generated from whole rows."""
    chunks, forward = [], zero.losses._LinearCrossEntropy.forward

    def counted(ctx, hidden, weight, bias, targets, chunk, *others):
        chunks.append(chunk)
        return forward(ctx, hidden, weight, bias, targets, chunk, *others)

    monkeypatch.setattr(zero.losses._LinearCrossEntropy, "forward", staticmethod(counted))
    model = {"name": "gpt", "vocab": 32, "width": 32, "layers": 2, "heads": 4}
    if family != "gpt":
        model = {"name": "hf", "path": str(saved / family)}
    losses, values, last, logits = run_ranks(RANKS, trained, settings(model, 1))[0]
    assert not chunks
    monkeypatch.setattr("zero.losses.CHUNK_NUMEL", 64)
    monkeypatch.setattr("zero.losses.LEAST_CHUNK", 8)
    for sequence, activations in ((2, "keep"), (4, "remat")):
        outcome = run_ranks(RANKS, trained, settings(model, sequence, activations=activations))
        assert outcome[0][0] == pytest.approx(losses, rel=1e-5)
        assert outcome[0][2] == pytest.approx(last, rel=1e-5)
        assert {rank[2] for rank in outcome} == {outcome[0][2]}
        torch.testing.assert_close(outcome[0][3], logits, atol=2e-4, rtol=1e-4)
        for name, value in values.items():
            torch.testing.assert_close(outcome[0][1][name], value, rtol=1e-5, atol=LR / 50)
    assert set(chunks) == {8}


ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8, "sliding_window": 5}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWED = {
    "mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": 5}),
    "gemma2": ("Gemma2ForCausalLM", LLAMA | ALTERNATE | {"attn_logit_softcapping": 0.5}),
    "gpt_oss": ("GptOssForCausalLM", LLAMA | ALTERNATE | EXPERTS),
}


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_caps_and_sinks_train_as_in_whole_rows(family, tmp_path):
    """With sharded parameters, in recomputed units too; the bits are the same at each stage and policy."""
    architecture, sizes = WINDOWED[family]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **sizes)
    config.architectures = [architecture]
    getattr(transformers, architecture)(config).save_pretrained(tmp_path)
    model = {"name": "hf", "path": str(tmp_path)}
    losses, values, last, _ = run_ranks(RANKS, trained, settings(model, 1))[0]
    made = []
    for sequence, stage, activations in ((4, 3, "remat"), (2, 2, "keep"), (2, 3, "remat"), (2, 3, "offload")):
        outcome = run_ranks(RANKS, trained, settings(model, sequence, activations=activations, stage=stage))
        assert outcome[0][0] == pytest.approx(losses, rel=1e-5)
        assert outcome[0][2] == pytest.approx(last, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(outcome[0][1][name], value, rtol=1e-5, atol=LR / 50)
        made.append(outcome[0])
    for other in made[2:]:
        assert other[0] == made[1][0]
        assert all(torch.equal(value, made[1][1][name]) for name, value in other[1].items())


TINY = ["debug=tiny", "val.every=3", "tracker.console=none", "launch.device=cpu", "checkpoint.every=3", "steps=6"]
TINY += ["batch.global=4", "sample.tokens=3"]


def rows_of(folder: Path) -> dict[int, tuple[float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["train/loss"], row["val/loss"] or 0.0) for row in lines}


@pytest.mark.process
def test_a_run_goes_on_with_other_slices_with_the_same_rows_and_tokens(here):
    """Steps 1 to 3 in two slices, 4 to 6 in whole rows; a run of one rank has the same, and each token counts once."""
    assert train.main([*TINY, "hydra.run.dir=a", "launch.ranks=2", "zero.sequence=2", "debug.stop_at=3"]) == 0
    assert train.main([*TINY, "hydra.run.dir=a", "launch.ranks=2", "resume=latest"]) == 0
    assert train.main([*TINY, "hydra.run.dir=b"]) == 0
    ours, theirs = rows_of(here / "a"), rows_of(here / "b")
    assert [*ours] == [*theirs] == [1, 2, 3, 4, 5, 6]
    for step, numbers in ours.items():
        assert numbers == pytest.approx(theirs[step], rel=1e-4)
    tokens = [json.loads((here / folder / "summary.json").read_text())["tokens"] for folder in ("a", "b")]
    assert tokens == [6 * 4 * 32] * 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"sequence": 3}, "zero.sequence=3 does not divide model.seq=128. Choose a divisor."),
        ({"sequence": 8}, "zero.sequence=8 does not divide model.heads=4. Choose a divisor."),
        ({"sequence": 0}, "zero.sequence=0: must be at least 1"),
    ],
)
def test_slices_that_do_not_divide_are_one_line(words, why):
    with pytest.raises(ConfigError) as refusal:
        read({"zero": words})
    assert str(refusal.value) == why


def test_groups_that_do_not_divide_are_one_line():
    config = read({"zero": {"sequence": 2}, "batch": {"global": 3}})
    with pytest.raises(ConfigError, match=r"^launch.ranks=3 does not divide into groups of zero.sequence=2\."):
        config.on(3)
    with pytest.raises(ConfigError, match=r"^batch.global=3 does not divide by 2 groups. Choose a multiple.$"):
        config.on(4)
    assert config.on(2).batch.numbers() == (3, 3, 1)


# -- memory ------------------------------------------------------------------------------------------------------------

LONG = {"vocab": 256, "width": 64, "layers": 4, "heads": 4, "seq": 1024}


def long_rows(sequence):
    return read(
        {
            "model": LONG,
            "zero": {"sequence": sequence, "stage": 0},
            "batch": {"global": 1},
            "launch": {"malloc": "lean"},
        }
    )


def peak_of_a_step(world, config):
    """The most bytes that live at once in a step on this rank, beside the bytes at its begin; and those planned."""
    config = config.on(world.size)
    task = build_task(config, world)
    plan = build_plan(config, task.model, world)
    rows = torch.zeros(1, LONG["seq"] + 1, dtype=torch.int64)
    own = slice_of(rows, world.rank, world.size)
    state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, task.loss)
    state, _ = step(state, [own])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(state, [own])
    return peak_of(profiled)


@pytest.mark.process
def test_activations_of_a_slice_are_those_that_are_planned_a_share_of_those_of_a_row():
    planned, measured = {}, {}
    for sequence in (1, 2, 4):
        config = long_rows(sequence)
        world = PaperWorld(sequence, local_size=sequence, device="cpu")
        planned[sequence] = ActivationTraces(config, build_task(config, world).model).of(1, "cpu").peak_bytes
        measured[sequence] = max(run_processes(sequence, peak_of_a_step, config))
        assert measured[sequence] == pytest.approx(planned[sequence], rel=0.1)
    for share in (planned, measured):
        assert share[2] <= 0.55 * share[1]
        assert share[4] <= 0.30 * share[1]


class Attending(nn.Module):
    """Attention of whole rows in a layer, with settings of scoring."""

    def __init__(self, scoring: Scoring) -> None:
        super().__init__()
        self.qkv, self.out, self.scoring = nn.Linear(64, 192), nn.Linear(64, 64), scoring

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(rows).unflatten(-1, (3, 8, 8)).permute(2, 0, 3, 1, 4)
        return self.out(causal_attention(q, k, v, None, self.scoring).transpose(1, 2).flatten(2)).sum()


@pytest.mark.parametrize(
    "scoring", [Scoring(window=256), Scoring(softcap=5.0), Scoring(window=256, sinks=torch.ones(8))], ids=str
)
def test_the_memory_of_attention_in_blocks_is_that_which_is_planned(scoring):
    model, rows = Attending(scoring), torch.randn(1, 4096, 64)
    planned = scoring._replace(sinks=None if scoring.sinks is None else scoring.sinks.to("meta"))
    splitting = split(Attending(planned), world_size=1)
    traced = trace(
        Attending(planned), splitting, lambda model, rows: model(rows), rows.to("meta"), compute=torch.float32
    )
    model(rows).backward()
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model(rows).backward()
    assert peak_of(profiled) == pytest.approx(traced.peak_bytes, rel=0.05)


LIMITED = [
    "model.width=64",
    "model.layers=4",
    "model.heads=4",
    "model.seq=2048",
    "val.rows=1",
    "steps=2",
    "val.every=0",
]
LIMITED += ["batch.global=1", "sample.tokens=0", "offload.host_budget=50MiB", "launch.malloc=lean"]
LIMITED += ["launch.device=cpu", "tracker.console=none"]


@pytest.mark.process
def test_a_row_that_does_not_fit_the_memory_of_a_rank_trains_on_two(here, capfd):
    assert train.main(LIMITED) == 2
    assert "50.0 MiB" in capfd.readouterr().err
    assert train.main([*LIMITED, "launch.ranks=2", "zero.sequence=2"]) == 0


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("sequence", [1, 2])
@pytest.mark.parametrize("activations", ["keep", "remat", "auto"])
def test_the_longest_row_that_is_printed_fits_and_a_longer_one_does_not(sequence, activations):
    words = {"model": LONG, "zero": {"sequence": sequence, "activations": activations}, "batch": {"global": 2}}
    words |= {"mode": "plan", "plan": {"ranks": 2, "device_memory": "512MiB", "host_memory": "1GiB", "disk": "1GiB"}}
    text, fits = plan_text(read(words))
    assert fits
    shared = f", shared by {sequence} ranks" * (sequence > 1)
    tokens = int(re.search(rf"longest row that fits: ([\d,]+) tokens{shared}\n", text)[1].replace(",", ""))
    assert tokens > 1024
    if activations == "keep":
        text, fits = plan_text(read({**words, "model": {**LONG, "seq": 16 * 4096}}))
        assert not fits
        longest = int(re.search(rf"longest row that fits: ([\d,]+) tokens{shared}\n", text)[1].replace(",", ""))
        assert longest == pytest.approx(tokens, rel=0.1), "also if the row of the settings does not fit"
    assert tokens % sequence == 0
    least = "remat" if activations == "auto" else activations
    for length, expected in ((tokens, True), (round(1.1 * tokens) // 64 * 64, False)):
        zero_ = {"sequence": sequence, "activations": least}
        longer = read({**words, "model": {**LONG, "seq": length}, "zero": zero_})
        candidates = choices(longer, Machine.described(longer), *_traces_and_rates(longer))
        assert any(choice.fits for choice in candidates if choice.preset == "none") == expected


def _traces_and_rates(config):
    machine = Machine.described(config)
    return ActivationTraces(config, build_task(config, machine.world).model), assumed(config, machine)


def test_exchanges_are_predicted_to_take_time():
    """Each exchange brings this rank the other ranks' half of q, k, v or the result."""
    config = long_rows(2)
    traced = ActivationTraces(config, build_task(config, PaperWorld(2, local_size=2, device="cpu")).model).of(1, "cpu")
    slice_bytes = 512 * 64 * 4
    assert traced.forward.exchanged_bytes == 4 * 4 * slice_bytes / 2
    assert traced.backward.exchanged_bytes == traced.forward.exchanged_bytes
    rates = assumed(config, gpu(2))
    assert compute_seconds(OperatorWork(exchanged_bytes=rates.link_bytes), rates) == 1
