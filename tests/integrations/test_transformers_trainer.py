"""Hugging Face's Trainer on an engine: next to the plain Trainer, with the same model, rows and arguments.

With one microbatch a step, without clipping and with the fused AdamW no bit of a parameter differs. Clipping divides by
a number where torch multiplies, microbatches are added in another order where a weight is used twice, and ranks are
added in their order: 1e-7 of a loss.
"""

import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import zero  # noqa: E402
from tests.simulation import simulated_gpu  # noqa: E402
from zero.deepspeed.ops.muon import MuonWithAuxAdam  # noqa: E402
from zero.errors import CheckpointError, ConfigError  # noqa: E402
from zero.integrations.transformers import Trainer, ZeroTrainerMixin  # noqa: E402
from zero.testing import run_processes  # noqa: E402
from zero.trainer.models import hf  # noqa: E402

STEPS, ROWS = 8, 36
CLOSE = 1e-6
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def gpt2(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops, **ids))


def rows() -> list[dict[str, torch.Tensor]]:
    """Of 12 tokens, some of which are not predicted."""
    generator, made = torch.Generator().manual_seed(3), []
    for number in range(ROWS):
        tokens = torch.randint(1, 64, (12,), generator=generator)
        labels = torch.where(torch.arange(12) < number % 5, -100, tokens)
        made.append({"input_ids": tokens, "labels": labels})
    return made


def arguments(folder, kind=transformers.TrainingArguments, **changes):
    """Four microbatches a step, and two in the last one of an epoch; a schedule, decay and clipping."""
    told = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": STEPS}
    how = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5}
    schedule = {"warmup_steps": 2, "lr_scheduler_type": "cosine", "eval_strategy": "steps", "eval_steps": 4}
    return kind(str(folder), **(told | batch | how | schedule | changes))


def trainer(folder, settings=None, model=None, kind=None, **changes):
    """Of this library where there are `settings`, else transformers' own."""
    kind = kind or (transformers.Trainer if settings is None else Trainer)
    how = {} if settings is None else {"zero": settings}
    model = gpt2() if model is None else model
    args = arguments(folder, **changes)
    return kind(model=model, args=args, train_dataset=rows(), eval_dataset=rows()[:6], **how)


def trained(*args, **kwargs):
    made = trainer(*args, **kwargs)
    made.train()
    return made


def told(made, key="loss"):
    return [row[key] for row in made.state.log_history if key in row]


def values(made):
    if isinstance(made, ZeroTrainerMixin):
        return zero.full_state_dict(made.engine)
    return {name: parameter.detach() for name, parameter in made.model.named_parameters()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# -- next to the plain Trainer -----------------------------------------------------------------------------------------


def test_one_microbatch_without_clipping_has_every_bit_of_the_plain_trainer(tmp_path):
    """Dropout included: the engine draws no random number."""
    how = {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0}
    plain = trained(tmp_path, **how)
    generators = random.getstate(), torch.get_rng_state().tolist()
    ours = trained(tmp_path, {"stage": 3}, **how)
    assert (random.getstate(), torch.get_rng_state().tolist()) == generators  # both runs begin with the same seed
    assert told(ours) == told(plain)
    assert same(values(ours), values(plain))
    assert told(ours, "grad_norm") == pytest.approx(told(plain, "grad_norm"), rel=1e-6)


def test_accumulation_clipping_schedule_and_decay_groups_are_those_of_the_plain_trainer(tmp_path):
    plain, ours = trained(tmp_path), trained(tmp_path, {"stage": 2})
    assert len(told(ours)) == STEPS
    assert told(ours, "learning_rate") == told(plain, "learning_rate")
    for key in ("loss", "grad_norm", "eval_loss"):
        assert told(ours, key) == pytest.approx(told(plain, key), rel=CLOSE), key
    names = {id(parameter): name for name, parameter in ours.model.named_parameters()}
    theirs = {id(parameter): name for name, parameter in plain.model.named_parameters()}
    for group, wanted in zip(ours.optimizer.param_groups, plain.optimizer.param_groups, strict=True):
        assert [names[id(parameter)] for parameter in group["params"]] == [
            theirs[id(parameter)] for parameter in wanted["params"]
        ]
        assert (group["weight_decay"], group["lr"]) == (wanted["weight_decay"], wanted["lr"])
    for name, value in values(plain).items():
        torch.testing.assert_close(values(ours)[name], value, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_other_optimizers_of_torch_are_theirs(name, tmp_path):
    how = {"optim": name, "max_steps": 3, "eval_strategy": "no"}
    plain, ours = trained(tmp_path, **how), trained(tmp_path, {"stage": 3}, **how)
    assert told(ours) == pytest.approx(told(plain), rel=CLOSE)


def test_stages_and_tiers_change_no_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = trained(tmp_path, {"stage": 0}, max_steps=4)
    for settings in (
        {"stage": 1, "offload": "cpu"},
        {"stage": 3, "offload": "nvme"},
        {"stage": 3, "offload": zero.Offload("infinity", path=".", page_bytes=4096)},
    ):
        ours = trained(tmp_path, settings, max_steps=4)
        assert (told(ours), told(ours, "eval_loss")) == (told(first), told(first, "eval_loss")), settings
        assert same(values(ours), values(first)), settings
        ours.engine.destroy()


def test_a_backward_that_goes_by_the_accelerator_is_refused(tmp_path):
    class Mine(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model.train(), inputs)
            loss.backward()
            return loss.detach()

    with pytest.raises(ConfigError, match=r"self.accelerator.backward\(loss\)"):
        trained(tmp_path, {}, kind=Mine)


def test_a_passed_optimizer_and_scheduler_are_used(tmp_path):
    def run(settings):
        made = trainer(tmp_path, settings, max_steps=3, eval_strategy="no")
        made.optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-2, fused=True)
        made.lr_scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, gamma=0.5)
        made.train()
        return made

    plain, ours = run(None), run({"stage": 1})
    assert told(ours) == pytest.approx(told(plain), rel=CLOSE)
    assert told(ours, "learning_rate") == told(plain, "learning_rate") == [1e-2, 5e-3, 2.5e-3]


def test_muon_trains_the_matrices_at_every_stage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(settings):
        model = gpt2()
        blocks = [value for value in model.transformer.h.parameters() if value.ndim == 2]
        others = [value for value in model.parameters() if all(value is not other for other in blocks)]
        groups = [{"params": blocks, "use_muon": True}, {"params": others, "use_muon": False, "lr": 1e-2}]
        args, optimizer = arguments(tmp_path, max_steps=4), MuonWithAuxAdam(groups)
        made = Trainer(
            model=model,
            args=args,
            train_dataset=rows(),
            eval_dataset=rows()[:6],
            optimizers=(optimizer, None),
            zero=settings,
        )
        made.train()
        return made

    made, other = run({"stage": 3}), run({"stage": 3, "offload": "nvme"})
    assert told(made) == told(other)
    assert same(values(made), values(other))
    assert told(made)[-1] < told(made)[0]
    matrices = {name for name, value in made.model.named_parameters() if ".h." in name and value.ndim == 2}
    assert matrices
    assert set(zero.full_state_dict(made.engine, "nu")) == set(values(made)) - matrices


def test_callbacks_see_gradients_before_the_step_and_steps_after_it(tmp_path):
    class Watch(transformers.TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            self.seen.append(float(model.get_parameter("transformer.ln_f.weight").grad.norm()))

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 3

    def run(settings):
        made, watch = trainer(tmp_path, settings, max_grad_norm=0.0), Watch()
        made.add_callback(watch)
        made.train()
        assert made.state.global_step == 3
        return watch.seen

    assert run({"stage": 1}) == pytest.approx(run(None), rel=1e-5)


def test_steps_that_overflow_in_fp16_leave_the_schedule(tmp_path):
    scaling = zero.LossScaling(initial=2.0**18, maximum=2.0**24, hysteresis=1)
    precision = zero.Precision("fp16", scale=scaling)
    ours = trained(tmp_path, {"stage": 3, "precision": precision}, gpt2(dropout=0.0), warmup_steps=0)
    skipped = STEPS - ours.engine.state.step
    assert 0 < skipped < STEPS
    rates = told(ours, "learning_rate")
    assert rates[: skipped + 1] == [1e-2] * (skipped + 1)
    assert rates[-1] < 1e-2


def test_bf16_is_the_precision_of_the_engine_and_counts_of_tokens_keep_their_digits(tmp_path):
    counted = []

    class Counting(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            counted.append(num_items_in_batch)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def spied(settings, **changes):
        seen, model = [], gpt2()
        forward = model.loss_function
        model.loss_function = lambda *args, **kwargs: (
            seen.append(kwargs["num_items_in_batch"]) or forward(*args, **kwargs)
        )
        how = {"per_device_train_batch_size": 9, "eval_strategy": "no", "max_steps": 2}
        return trained(tmp_path, settings, model, Counting, **how, **changes), seen

    (first, seen), (second, _) = spied({"stage": 3, "precision": "bf16"}), spied({"stage": 0}, bf16=True)
    assert first.engine.plan.precision.compute == second.engine.plan.precision.compute == torch.bfloat16
    assert told(first) == told(second)
    assert max(seen) > 256, "more than bf16 can count one by one"
    assert seen == counted[: len(seen)]


def test_the_precision_of_accelerate_launch_is_the_engines(tmp_path, monkeypatch):
    """`accelerate launch` sets it in the environment; the plain Trainer follows it, too."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert trainer(tmp_path, {}).open_engine().plan.precision.compute == torch.bfloat16


# -- out of memory -----------------------------------------------------------------------------------------------------


class Short(Trainer):
    """A trainer that is out of memory in a step's third microbatch until the optimizer's state is in host memory."""

    short_in = -1

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        there, offload = (self.state.global_step, self.engine.current.step.microbatches), self.engine.plan.offload
        if there == (self.short_in, 3) and offload.optimizer == "none":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("short_in", [0, 3])
def test_a_step_out_of_memory_is_made_again_lower(tmp_path, short_in, caplog):
    """Dropout, accumulation and clipping included."""
    with simulated_gpu(limited=True, fused=True):
        expected = trained(tmp_path, {"stage": 3}, kind=Short, eval_strategy="no")
        made = trainer(tmp_path, {"stage": 3}, kind=Short, eval_strategy="no")
        made.short_in = short_in
        made.train()
    assert made.engine.plan.offload.optimizer == "cpu"
    assert told(made) == told(expected)
    assert told(made, "grad_norm") == told(expected, "grad_norm")
    assert same(values(made), values(expected))
    notes = [record.message for record in caplog.records if record.message.startswith(f"step {short_in + 1}:")]
    assert "Made again with an empty cache" in notes[0]
    assert "Moved to offload.optimizer=cpu" in notes[-1]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", range(6))
def test_any_allocation_of_a_step_may_fail_once(tmp_path, seed):
    """In forward, backward, or at the end of the step."""

    class Failing(transformers.TrainerCallback):
        used, fails_at = 0, 0

        def on_step_begin(self, args, state, control, **kwargs):
            memory = made.engine.plan.world.compute.memory
            if state.global_step == 2:
                Failing.used, memory.fails_at = memory.allocations, self.fails_at and memory.allocations + self.fails_at

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                Failing.used = made.engine.plan.world.compute.memory.allocations - Failing.used

    results = []
    with simulated_gpu(limited=True, fused=True):
        for fails in (False, True):
            if fails:
                Failing.fails_at = random.Random(seed).randrange(1, Failing.used)
                print(f"allocation {Failing.fails_at} of {Failing.used}")
            made = trainer(tmp_path, {"stage": 3}, eval_strategy="no", max_steps=4)
            made.add_callback(Failing())
            made.train()
            results.append((told(made), values(made)))
            assert made._again._retry.again == fails
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


def test_a_callback_parks_the_state_between_steps(tmp_path):
    """For an inference engine on the same GPU; the next forward brings the state back."""

    class Parking(transformers.TrainerCallback):
        parked = 0

        def on_step_end(self, args, state, control, **kwargs):
            made.engine.offload_states()
            assert made.engine.state.is_parked
            Parking.parked += 1

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step % 2:
                made.engine.reload_states()

    with simulated_gpu(limited=True):
        expected = trained(tmp_path, {"stage": 3})
        made = trainer(tmp_path, {"stage": 3})
        made.add_callback(Parking())
        made.train()
    assert Parking.parked == STEPS
    assert told(made) == told(expected)
    assert told(made, "eval_loss") == told(expected, "eval_loss")
    assert same(values(made), values(expected))


# -- evaluation --------------------------------------------------------------------------------------------------------


def test_evaluation_and_prediction_before_and_after_training_are_those_of_the_plain_trainer(tmp_path):
    how = {"max_steps": 4}
    plain, ours = trainer(tmp_path, model=gpt2(0.0), **how), trainer(tmp_path, {"stage": 3}, gpt2(0.0), **how)
    for _ in range(2):
        assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=CLOSE)
        actual, expected = ours.predict(rows()[:5]), plain.predict(rows()[:5])
        assert actual.predictions == pytest.approx(expected.predictions, abs=1e-4)
        assert (actual.label_ids == expected.label_ids).all()
        ours.train()
        plain.train()
    assert told(ours) == pytest.approx(told(plain), rel=CLOSE), "training twice goes on with the moments"


def test_a_trainer_that_only_evaluates_has_no_optimizer(tmp_path):
    ours = Trainer(model=gpt2(), args=arguments(tmp_path), eval_dataset=rows()[:6], zero={"stage": 3})
    assert ours.evaluate()["eval_loss"] == trainer(tmp_path).evaluate()["eval_loss"]
    assert not ours.engine.plan.facts.trains
    ours.train_dataset = rows()
    with pytest.raises(ConfigError, match="has no train_dataset"):
        ours.train()


class Seq2SeqTrainer(ZeroTrainerMixin, transformers.Seq2SeqTrainer):
    """Another subclass of Trainer, as users make of it."""


def t5():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    )


def test_evaluation_generates_text_between_steps(tmp_path):
    def run(kind, **how):
        seen = []
        texts = {"predict_with_generate": True, "generation_max_length": 6, "max_steps": 2, "eval_steps": 1}
        made = kind(
            model=t5(),
            args=arguments(tmp_path, transformers.Seq2SeqTrainingArguments, gradient_accumulation_steps=1, **texts),
            train_dataset=rows(),
            eval_dataset=rows()[:4],
            compute_metrics=lambda prediction: seen.append(prediction.predictions.tolist()) or {"n": 1.0},
            **how,
        )
        made.train()
        return seen

    seen = run(Seq2SeqTrainer, zero={"stage": 3})
    assert len(seen) == 2
    assert seen == run(transformers.Seq2SeqTrainer)


# -- folders -----------------------------------------------------------------------------------------------------------


class Stop(transformers.TrainerCallback):
    """Ends a run in the middle of its second epoch, as whoever stops it."""

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 7


def test_a_resumed_run_ends_as_one_that_never_stopped(tmp_path, monkeypatch):
    """Bit by bit, with dropout, though it goes on at another stage."""
    monkeypatch.chdir(tmp_path)
    how = {"save_strategy": "steps", "save_steps": 3}
    whole = trained(tmp_path / "whole", {"stage": 3, "offload": "nvme"}, **how)
    stopped = trainer(tmp_path / "run", {"stage": 3, "offload": "nvme"}, **how)
    stopped.add_callback(Stop())
    stopped.train()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-3", "checkpoint-6"]
    resumed = trainer(tmp_path / "run", {"stage": 1}, **how)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS
    for key in ("loss", "learning_rate", "grad_norm", "eval_loss"):
        assert told(resumed, key) == told(whole, key), key
    assert same(values(resumed), values(whole))


def test_a_second_run_into_the_same_folder_replaces_the_first(tmp_path):
    how = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    trained(tmp_path, {}, **how)
    second = trained(tmp_path, {}, learning_rate=1e-3, **how)
    resumed = trainer(tmp_path, {}, learning_rate=1e-3, **how)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert told(resumed) == told(second)
    assert same(values(resumed), values(second))


def test_a_saved_model_is_loaded_by_from_pretrained_with_the_same_values(tmp_path):
    """In the dtype that it came in, which is what the plain Trainer saves too."""
    ours = trained(tmp_path, {"stage": 3, "precision": "bf16"}, max_steps=2)
    ours.save_model(str(tmp_path / "saved"))
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values()), report
    assert again.dtype == torch.float32
    assert same(values(ours), dict(again.named_parameters()))


@pytest.mark.parametrize("weights_only", [False, True])
def test_the_best_model_is_loaded_at_the_end(weights_only, tmp_path):
    how = {"save_strategy": "steps", "save_steps": 4, "load_best_model_at_end": True, "greater_is_better": True}
    how |= {"metric_for_best_model": "eval_loss", "save_only_model": weights_only}
    ours = trained(tmp_path, {"stage": 3}, **how)
    assert ours.state.best_model_checkpoint.endswith("checkpoint-4")
    saved = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in values(ours).items())
    if weights_only:
        with pytest.raises(CheckpointError, match=r"checkpoint-8 has no folder 'zero'.*from_pretrained"):
            ours.train(resume_from_checkpoint=True)


def test_a_model_without_memory_gets_its_values_from_a_folder(tmp_path):
    gpt2().save_pretrained(tmp_path / "given")
    model = hf.build(tmp_path / "given")
    settings = {"stage": 3, "weights": hf.weights(model, tmp_path / "given")}
    assert told(trained(tmp_path, settings, model, max_steps=2)) == told(trained(tmp_path, {}, max_steps=2))


def test_another_model_of_model_init_gets_another_engine(tmp_path):
    ours = Trainer(
        model_init=lambda: gpt2(),
        args=arguments(tmp_path, max_steps=2),
        train_dataset=rows(),
        eval_dataset=rows()[:2],
        zero={},
    )
    ours.train()
    first, engine = told(ours), ours.engine
    ours.train()
    assert told(ours) == first
    assert ours.engine is not engine


def lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    how = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(model, peft.LoraConfig(r=4, **how))


def test_adapters_of_peft_train_and_are_saved_as_by_the_plain_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    how = {"save_strategy": "steps", "save_steps": 3}
    plain = trained(tmp_path / "plain", model=lora(gpt2()), **how)
    ours = trained(tmp_path / "ours", {"stage": 3, "offload": "nvme"}, lora(gpt2()), **how)
    assert told(ours) == pytest.approx(told(plain), rel=CLOSE)
    files = {path.name for path in (tmp_path / "plain/checkpoint-6").iterdir()}
    assert {path.name for path in (tmp_path / "ours/checkpoint-6").iterdir()} == files | {"zero"}
    wanted, actual = (
        load_file(tmp_path / name / "checkpoint-8/adapter_model.safetensors") for name in ("plain", "ours")
    )
    assert wanted.keys() == actual.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-5)
    resumed = trainer(tmp_path / "ours", {"stage": 1}, lora(gpt2()))
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours/checkpoint-6"))
    assert told(resumed) == told(ours)
    assert same(values(resumed), values(ours))


def second_adapter(base, peft, how):
    """One that rests, as the reference of DPO does."""
    model = peft.get_peft_model(base, peft.LoraConfig(**how))
    model.add_adapter("reference", peft.LoraConfig(**how))
    model.set_adapter("default")
    return model


def half_of_an_adapter(base, peft, how):
    """LoRA-FA: A stays as it is drawn."""
    model = peft.get_peft_model(base, peft.LoraConfig(**how))
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    return model


def resized_embedding(base, peft, how):
    """Tokens that the base does not have: peft saves the frozen embedding, too."""
    base.resize_token_embeddings(66)
    return peft.get_peft_model(base, peft.LoraConfig(**how))


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize("make", [second_adapter, half_of_an_adapter, resized_embedding])
def test_frozen_parameters_that_peft_saves_are_saved(make, tmp_path):
    """Nothing of a base that did not change: rank 0 need not hold it."""
    peft = pytest.importorskip("peft")
    gpt2().save_pretrained(tmp_path / "base")
    how = {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}

    def saved(settings, folder):
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        torch.manual_seed(1)
        made = trained(folder, settings, make(base, peft, how), max_steps=2, eval_strategy="no")
        made.save_model(str(folder))
        return {path.relative_to(folder): load_file(path) for path in folder.rglob("adapter_model.safetensors")}

    wanted, actual = saved(None, tmp_path / "plain"), saved({"stage": 3}, tmp_path / "ours")
    assert wanted.keys() == actual.keys()
    for path, values in wanted.items():
        assert values.keys() == actual[path].keys()
        for name, value in values.items():
            torch.testing.assert_close(actual[path][name], value, rtol=1e-5, atol=1e-5)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "changes", "line"),
    [
        ({"stge": 3}, {}, r"zero=\{'stge': ...\} is not a setting of the engine. Did you mean stage\?"),
        ({"accumulate": 2}, {}, "or write it in TrainingArguments"),
        (
            {},
            {"torch_compile": True},
            r"TrainingArguments\(torch_compile=...\): not supported. Write zero=\{'compile': True\}",
        ),
        ({}, {"auto_find_batch_size": True}, "Set per_device_train_batch_size"),
        ({}, {"bf16_full_eval": True}, r"Write zero=\{'precision': 'bf16'\}"),
        ({}, {"debug": "underflow_overflow"}, r"TrainingArguments\(debug=...\): "),
        ({}, {"save_on_each_node": True}, "a disk that all ranks share"),
        ({}, {"fsdp": "full_shard"}, r"write zero=\{'stage': 3\}"),
        (
            {"precision": "fp32"},
            {"bf16": True},
            r"bf16=True\), .* and zero=\{'precision': 'fp32'\} have different values. Leave out one",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_refused_in_one_line(settings, changes, line, tmp_path):
    with pytest.raises(ConfigError, match=line) as caught:
        trainer(tmp_path, settings, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("ACCELERATE_DYNAMO_BACKEND", "inductor", r"a compiler, .*zero=\{'compile': True\} to compile"),
        (
            "ACCELERATE_MIXED_PRECISION",
            "bf16",
            r"accelerate launch, and zero=\{'precision': 'fp32'\} have different values. Leave out one",
        ),
    ],
)
def test_what_accelerate_launch_was_told_is_not_passed_over(key, value, line, tmp_path, monkeypatch):
    monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=line):
        trainer(tmp_path, {"precision": "fp32"})


def test_accelerates_own_configuration_of_fsdp_is_refused(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    monkeypatch.setattr(
        "accelerate.Accelerator.__init__", fsdp_by_environment(transformers.trainer.Accelerator.__init__)
    )
    with pytest.raises(ConfigError, match="accelerate launch was told to use DeepSpeed, FSDP"):
        Trainer(model=gpt2(), args=args, train_dataset=rows(), eval_dataset=rows())


def fsdp_by_environment(made):
    """As where `accelerate launch` sets ACCELERATE_USE_FSDP."""

    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        plugin = SimpleNamespace(activation_checkpointing=False, limit_all_gathers=True)
        self.state._shared_state["fsdp_plugin"] = plugin

    return init


def test_what_comes_too_late_or_without_moments_is_refused(tmp_path):
    ours = trained(tmp_path, {}, max_steps=1)
    for call in (ours.accelerator.save_state, ours.accelerator.load_state):
        with pytest.raises(ConfigError, match=r"leave out moments.*trainer.engine.save_checkpoint\(folder\)"):
            call(str(tmp_path / "state"))
    with pytest.raises(ConfigError, match="a closure is not supported"):
        ours.optimizer.step(lambda: None)
    ours.args.max_grad_norm = 0.25
    with pytest.raises(ConfigError, match=r"max_norm=0.25.*made with max_grad_norm=0.5"):
        ours.train()


# -- two processes -----------------------------------------------------------------------------------------------------


def on_two_ranks(world, folder):
    """Losses of the plain Trainer and of ours; of ours resumed; what was saved, and generated."""
    os.chdir(folder)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"2 ranks were started, but Trainer sees 1\. .*use_cpu=True"):
            trained(folder, {}, use_cpu=False)
    how = {"save_strategy": "steps", "save_steps": 4, "max_steps": 6, "gradient_accumulation_steps": 2}
    trainers = {"plain": trained(folder / "plain", model=gpt2(0.0), ddp_find_unused_parameters=False, **how)}
    trainers["infinity"] = trained(folder / "infinity", {"stage": 3, "offload": "infinity"}, gpt2(0.0), **how)
    resumed = trainer(folder / "infinity", {"stage": 2}, gpt2(0.0), **how)
    resumed.train(resume_from_checkpoint=str(folder / "infinity/checkpoint-4"))
    resumed.save_model(str(folder / "saved"))
    trainers["resumed"] = resumed
    evaluating = trainer(folder / "zero", {"stage": 3}, gpt2(0.0))
    evaluating.evaluate()
    lengths = [3, 8]  # of other lengths on each rank
    with torch.no_grad():
        text = evaluating.model.eval().generate(
            torch.tensor([[1, 2, 3]]), max_new_tokens=lengths[world.rank], do_sample=False, eos_token_id=None
        )
    keys = ("loss", "eval_loss", "grad_norm")
    return {name: [told(run, key) for key in keys] for name, run in trainers.items()}, text, values(resumed)


@pytest.mark.process
def test_two_processes_learn_what_the_plain_trainer_learns_in_two(tmp_path):
    (metrics, text, kept), (_, longer, _) = run_processes(2, on_two_ranks, tmp_path)
    for ours, resumed, plain in zip(metrics["infinity"], metrics["resumed"], metrics["plain"], strict=True):
        assert ours == pytest.approx(plain, rel=CLOSE)
        assert ours == pytest.approx(resumed, rel=CLOSE)
        assert len(ours) > 0
    again = transformers.AutoModelForCausalLM.from_pretrained(Path(tmp_path) / "saved")
    assert same(kept, dict(again.named_parameters()))
    assert text.shape == (1, 6)
    assert longer.shape == (1, 11)
    assert torch.equal(longer[:, :6], text)
