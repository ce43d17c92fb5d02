"""A ds_config.json means here what it means in DeepSpeed, or is answered in one line.

`golden/` holds configurations and, beside each, the settings and lines that it is known to give: those of three guides
as they are printed there, and one for each way in which people write them.
"""

import copy
import importlib.machinery
import importlib.util
import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import train
from zero.core.setting_types import MOST
from zero.deepspeed import config_source
from zero.deepspeed.config import differing, overrides, translate
from zero.deepspeed.config_keys import (
    ALIASES,
    IGNORED,
    IGNORED_FEATURES,
    KEYS,
    OPTIMIZERS,
    REJECTED_FEATURES,
    SCHEDULERS,
)
from zero.errors import ConfigError
from zero.settings.build import build_optimizer, build_schedule
from zero.trainer import compose
from zero.trainer.config import keys as keys_here, read

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.json"))


def of(**changed: object) -> dict:
    """A small configuration, with some sections changed."""
    return {"train_batch_size": 8, "gradient_clipping": 1.0, **changed}


def scheduled(type_: str, optimizer: str = "AdamW", **params: object) -> dict:
    return of(
        optimizer={"type": optimizer, "params": {"lr": 0.5}},
        scheduler={"type": type_, "params": params},
    )


# What is translated


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_configuration_gives_the_settings_that_are_written_beside_it(path):
    told, expected = translate(path), yaml.safe_load(path.with_suffix(".yaml").read_text())
    assert told.settings == expected["settings"]
    assert list(told.notes) == expected["notes"]
    assert all("\n" not in note for note in told.notes)
    read(told.settings)


def test_there_is_a_golden_file_for_every_way_to_write_one():
    assert len(GOLDEN) == len(list((Path(__file__).parent / "golden").glob("*.yaml"))) == 8


def test_a_dict_a_path_and_a_text_are_one_configuration():
    text = GOLDEN[0].read_text()
    translated = [translate(raw) for raw in (GOLDEN[0], str(GOLDEN[0]), text, json.loads(text))]
    assert all(same.settings == translated[0].settings for same in translated)
    assert len({tuple(note.partition(": ")[2] for note in same.notes) for same in translated}) == 1


def test_what_is_not_changed_stays_as_it_was():
    raw = json.loads(GOLDEN[0].read_text())
    before = copy.deepcopy(raw)
    translate(raw)
    assert raw == before


def test_flags_for_nvme_win_over_the_device_beside_them():
    section = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    path = {"nvme_offload_path": "/fast"}
    for flags, kinds in {
        (): ("cpu", "cpu", "cpu"),
        ("offload_optimizer_nvme",): ("nvme", "cpu", "cpu"),
        ("offload_param_nvme",): ("cpu", "nvme", "cpu"),
        ("offload_optimizer_nvme", "offload_param_nvme"): ("nvme", "nvme", "nvme"),
    }.items():
        told = translate(of(zero_optimization={**section, **path, **dict.fromkeys(flags, True)}))
        assert tuple(told.settings["offload"][kind] for kind in ("optimizer", "param", "grad")) == kinds
        assert told.settings["offload"].get("path") == ("/fast" if flags else None)


def test_pages_are_spread_over_the_disks_that_are_named():
    disks = {f"offload_{kind}": {"device": "nvme", "nvme_path": f"/{kind}"} for kind in ("optimizer", "param")}
    told = translate(of(zero_optimization={"stage": 3, **disks}))
    assert told.settings["offload"]["path"] == ["/optimizer", "/param"]
    assert any("pages of all kinds are spread over /optimizer and /param" in note for note in told.notes)
    assert "'offload.path=[/optimizer,/param]'" in " ".join(map(shlex.quote, overrides(told.settings)))
    same = {kind: section | {"nvme_path": "/fast"} for kind, section in disks.items()}
    assert translate(of(zero_optimization={"stage": 3, **same})).settings["offload"]["path"] == "/fast"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_for_host_memory_stay_on_the_device_below_stage_3_and_a_line_says_so(stage):
    """As in DeepSpeed: DeepSpeed-Chat writes one device for every stage."""
    section = {"stage": stage, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    told = translate(of(zero_optimization=section))
    assert told.settings["offload"] == {"optimizer": "cpu", "param": "none", "grad": "cpu"}
    (note,) = told.notes
    assert f"at stage {stage} parameters stay on the device" in note


def test_older_spellings_say_the_same():
    section = {"stage": 3, "cpu_offload": True, "cpu_offload_param": True, "cpu_offload_use_pin_memory": False}
    told = translate(of(zero_optimization=section, bfloat16={"enabled": True}, aio={"thread_count": 3}))
    assert told.settings["offload"] == {
        "optimizer": "cpu", "param": "cpu", "grad": "cpu", "threads": 3, "pin": False
    }  # fmt: skip
    assert told.settings["precision"] == {"compute": "bf16"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "Adam"}, ("adamw", 1e-3, 0.0, 0.9, 0.999)),
        ({"type": "Adam", "params": {"adam_w_mode": False, "lr": 1}}, ("adam", 1.0, 0.0, 0.9, 0.999)),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, ("adamw", 1e-3, 0.0, 0.9, 0.999)),
        ({"type": "AdamW", "params": {"torch_adam": True}}, ("adamw", 1e-3, 0.01, 0.9, 0.999)),
        ({"type": "lion", "params": {"betas": [0.5, 0.6]}}, ("lion", 1e-3, 0.0, 0.5, 0.6)),
        ({"type": "Lion"}, ("lion", 1e-3, 0.0, 0.9, 0.999)),
        ({"type": "Adagrad"}, ("adagrad", 1e-2, 0.0, None, None)),
        ({"type": "SGD", "params": {"lr": 2e-1, "weight_decay": 0.1}}, ("sgd", 0.2, 0.1, None, None)),
    ],
)
def test_optimizers_have_the_defaults_of_deepspeed(given, expected):
    """Decay is of all parameters there, and a schedule that is not given changes nothing."""
    settings = translate(of(optimizer=given)).settings
    optim = settings["optim"]
    assert tuple(optim.get(key) for key in ("name", "lr", "weight_decay", "beta1", "beta2")) == expected
    assert optim["decay"] == "all"
    config = read(settings)
    assert {build_schedule(config)(step) for step in (1, 50, 10_000)} == {optim["lr"]}
    build_optimizer(config)


def test_clipping_is_at_1_unless_it_is_said_or_ruled_out():
    assert translate({"train_batch_size": 1}).settings["optim"]["clip"] == 1.0
    assert "gradient_clipping is not given" in translate({"train_batch_size": 1}).notes[0]
    assert translate(of(gradient_clipping=0.0)).settings["optim"]["clip"] is None
    assert translate(of(gradient_clipping=0.5)).settings["optim"]["clip"] == 0.5
    assert not translate(of(gradient_clipping="auto")).notes


def test_a_loss_scale_is_that_of_deepspeed_but_for_one_step_before_it_grows():
    """The scale after each step, as the DynamicLossScaler of DeepSpeed 0.19.8 has it; X overflows.

    Without the first finite step after the start and after each overflow the two are the same.
    """
    steps = ".....X......XX..X......"
    theirs = [256, 256, 512, 512, 1024, 1024, 1024, 1024, 2048, 2048, 4096, 4096]
    theirs += [4096, 2048, 2048, 2048, 1024, 1024, 1024, 2048, 2048, 4096, 4096]
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    rule = read(translate(of(fp16=fp16)).settings).precision.scale
    kept = [step for step in range(len(steps)) if step and (steps[step] == "X" or steps[step - 1] != "X")]
    found, state = [], rule.start()
    for step in kept:
        state = rule.advance(state, steps[step] == ".")
        found.append(state.scale)
    assert found == [theirs[step] for step in kept]


def rates(raw: dict, steps: int = 60) -> list[float]:
    schedule = build_schedule(read(translate(raw).settings))
    return [schedule(step) for step in range(1, steps + 1)]


def there(kind: str, *, low: float, high: float, warmup: int, total: int = 0, log: bool = True, final: float = 0.0):
    """The n-th rate, from what DeepSpeed's schedules are documented to be; one count of its first rate is left out."""

    def rate(done: int) -> float:
        if done < warmup:
            return low + (high - low) * (math.log(done + 1) / math.log(warmup) if log else done / warmup)
        if kind == "WarmupDecayLR":
            return low + (high - low) * max(0.0, (total - done) / (total - warmup))
        if kind == "WarmupCosineLR":
            along = min(1.0, (done - warmup + 1) / (total - warmup))
            return final + (high - final) * (1 + math.cos(math.pi * along)) / 2
        return high

    return [rate(done) for done in range(60)]


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_a_warmup_and_its_linear_decay_have_the_rates_of_deepspeed(kind, log):
    total = {"total_num_steps": 40} if kind == "WarmupDecayLR" else {}
    for low in (0.0, 0.05):
        how = {"warmup_min_lr": low, "warmup_max_lr": 0.2, "warmup_num_steps": 10}
        expected = there(kind, low=low, high=0.2, warmup=10, total=40, log=log)
        raw = scheduled(kind, **how, **total, warmup_type="log" if log else "linear")
        assert rates(raw) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("log", [True, False])
def test_a_cosine_has_the_rates_of_deepspeed(log):
    how = {"warmup_num_steps": 10, "total_num_steps": 40, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05}
    expected = there("WarmupCosineLR", low=0.05, high=0.5, warmup=10, total=40, log=log, final=0.025)
    assert rates(scheduled("WarmupCosineLR", **how, warmup_type="log" if log else "linear")) == pytest.approx(expected)
    four = {"warmup_num_steps": 4, "total_num_steps": 20, "warmup_min_ratio": 0.1, "warmup_type": "linear"}
    observed = [0.3e-3, 0.975e-3, 1.65e-3, 2.325e-3]  # by DeepSpeed 0.19.8
    given = {**scheduled("WarmupCosineLR", **four), "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
    assert rates(given)[:4] == pytest.approx(observed)


def test_a_range_test_has_the_rates_of_deepspeed():
    how = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 5, "lr_range_test_step_rate": 2}
    assert rates(scheduled("LRRangeTest", **how)) == pytest.approx([0.1 * (1 + 2 * n / 5) for n in range(60)])
    stairs = rates(scheduled("LRRangeTest", **how, lr_range_test_staircase=True))
    assert stairs == pytest.approx([0.1 * (1 + 2 * (n // 5)) for n in range(60)])


def test_one_cycle_rises_falls_and_decays_and_takes_both_betas():
    how = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 10, "cycle_second_step_size": 20}
    raw = scheduled("OneCycle", **how, decay_step_size=5, decay_lr_rate=0.5)
    up = [0.01 + 0.09 * n / 10 for n in range(10)]
    down = [0.1 - 0.09 * n / 20 for n in range(20)]
    after = [0.01 / (1 + 0.5 * n / 5) for n in range(30)]
    assert rates(raw) == pytest.approx(up + down + after)
    settings = translate(raw).settings
    assert settings["optim"]["beta2"] == 0.99
    assert translate(scheduled("OneCycle", "SGD", **how)).settings["schedule"]["momentum"] is False
    moved = read(translate(scheduled("OneCycle", **how, cycle_min_mom=0.85, cycle_max_mom=0.95)).settings)
    momenta = [build_optimizer(moved).groups[0](step).betas[0] for step in (1, 2, 11, 21, 31)]
    assert momenta == pytest.approx([0.85, 0.94, 0.85, 0.9, 0.95])  # the first is the lowest there


def test_a_momentum_that_would_pass_1_is_refused_before_it_trains():
    how = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "decay_step_size": 5, "decay_mom_rate": 0.1}
    with pytest.raises(ConfigError, match=r"decay_mom_rate=0\.1: beta1 grows with every step of the decay, and past 1"):
        translate(scheduled("OneCycle", **how))
    translate(scheduled("OneCycle", **how, cycle_momentum=False))


def test_a_schedule_without_a_peak_takes_the_one_that_deepspeed_takes():
    assert max(rates(scheduled("WarmupLR", warmup_num_steps=10))) == 0.5
    told = translate(scheduled("WarmupDecayLR", warmup_num_steps=10, total_num_steps=40))
    assert told.settings["optim"]["lr"] == 1e-3
    assert "scheduler.params.warmup_max_lr is 0.001, and wins over optimizer.params.lr" in told.notes[-1]


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ({"train_batch_size": 32}, 4, (32, 8, 1)),
        ({"train_micro_batch_size_per_gpu": 2}, 4, (8, 2, 1)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, 4, (32, 2, 4)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 4, (32, 4, 2)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 4, (24, 2, 3)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 1}, 5, (5, 1, 1)),
        (
            {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
            4,
            (24, 2, 3),
        ),
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 3},
            4,
            (24, 2, 3),
        ),
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"},
            4,
            (24, 2, 3),
        ),
    ],
)
def test_two_of_the_batch_give_the_third(given, ranks, expected):
    for world_size in (None, ranks):
        config = read(translate(given, world_size=world_size).settings).on(ranks)
        assert config.batch.numbers() == expected


@pytest.mark.parametrize(
    ("written", "same"),
    [
        ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
        ({"zero_optimization": False}, {"zero_optimization": {"stage": 0}}),
        (
            {"_note": 1, "//": "why", "zero_optimization": {"stage": 1, "_was": 3, "#stage": 2}},
            {"zero_optimization": {"stage": 1}},
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "_lr": 1}}},
            {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}},
        ),
        ({"steps_per_print": math.inf}, {"steps_per_print": MOST}),
    ],
)
def test_older_spellings_comments_and_never_are_read(written, same):
    for raw in (of(**written), json.dumps(of(**written))):
        translated, expected = translate(raw), translate(of(**same))
        assert (translated.settings, translated.notes) == (expected.settings, expected.notes)


def test_comments_in_the_text_need_hjson_and_the_line_names_it(monkeypatch):
    text = '{\n  "train_batch_size": 8, // rows\n  "gradient_clipping": 1.0,\n}'
    monkeypatch.setattr(config_source, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not JSON: .*line 2 column 26.* need hjson: pip install hjson"):
        translate(text)


def nested(name: str, value: object) -> dict:
    for section in reversed(name.split(".")):
        value = {section: value}
    return of(**value)


def test_every_ignored_key_is_noted_once():
    for name, why in IGNORED.items():
        raw = nested(name, 1)
        if name.startswith("optimizer."):
            raw["optimizer"]["type"] = "Adam"
        assert translate(raw).notes == (f"ds_config: {name} is ignored: {why}",)
        assert not translate(
            {**raw, **nested(name, "auto")} | ({"optimizer": {"type": "Adam"}} if "optimizer" in raw else {})
        ).notes


def test_torch_adam_is_a_boolean_of_adam():
    with pytest.raises(ConfigError, match=r"optimizer\.params\.torch_adam"):
        translate(of(optimizer={"type": "Adam", "params": {"torch_adam": "false"}}))
    with pytest.raises(ConfigError, match=r"optimizer\.params\.torch_adam"):
        translate(of(optimizer={"type": "SGD", "params": {"torch_adam": True}}))


@pytest.mark.parametrize("name", [*IGNORED_FEATURES, *REJECTED_FEATURES])
def test_a_feature_that_is_on_is_noted_or_rejected(name):
    for switched_on in ({"enabled": True}, {"a_key": 1}):
        raw = nested(name, switched_on)
        if name in REJECTED_FEATURES:
            with pytest.raises(ConfigError, match=f"{name} is not supported: {REJECTED_FEATURES[name]}"):
                translate(raw)
        else:
            assert translate(raw).notes == (f"ds_config: {name} is ignored: {IGNORED_FEATURES[name]}",)
    for switched_off in ({"enabled": False, "a_key": 1}, {"enabled": "auto"}, {}, None, "auto"):
        assert not translate(nested(name, switched_off)).notes


def test_the_table_names_our_keys_and_no_key_twice():
    kinds = [*OPTIMIZERS.values(), *SCHEDULERS.values()]
    for table in (KEYS, *(kind.keys for kind in kinds)):
        assert len({key.name for key in table}) == len(table)
        assert all(bool(key.only) == bool(key.why) != bool(key.to or key.here) for key in table)
        assert {key.to for key in table if key.to} <= set(keys_here())
    names = {key.name for key in KEYS}
    assert not names & IGNORED.keys()
    assert set(ALIASES.values()) <= names | IGNORED.keys() | {"bf16"}


# What is refused

STAGE3 = {"stage": 3}
NVME = {"device": "nvme", "nvme_path": "/fast"}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}

MISTAKES = [
    # misspelt
    (of(zero_optimisation=STAGE3), "zero_optimisation is not a setting. Did you mean zero_optimization?"),
    (of(train_batch=3), "train_batch is not a setting. Did you mean train_batch_size?"),
    (of(micro_batch_size_per_gpu=1), "Did you mean train_micro_batch_size_per_gpu?"),
    (of(gradient_accumulation=2), "Did you mean gradient_accumulation_steps?"),
    (of(gradient_cliping=1.0), "Did you mean gradient_clipping?"),
    (of(fp_16={"enabled": True}), "Did you mean fp16?"),
    (of(bf16={"enable": True}), "bf16.enable is not a setting. Did you mean bf16.enabled?"),
    (of(fp16={"enabled": True, "loss_scale_windows": 5}), "Did you mean fp16.loss_scale_window?"),
    (of(zero_optimization={"stge": 3}), "Did you mean zero_optimization.stage?"),
    (of(zero_optimization={"stage": 3, "offload_optimiser": NVME}), "mean zero_optimization.offload_optimizer?"),
    (of(zero_optimization={"stage": 3, "offload_param": {"devices": "cpu"}}), "offload_param.device?"),
    (of(zero_optimization={"stage": 3, "offload_param": {"nvme_paths": "/x"}}), "offload_param.nvme_path?"),
    (of(offload_optimizer=NVME), "Did you mean zero_optimization.offload_optimizer?"),
    (of(stage=3), "Did you mean zero_optimization.stage?"),
    (of(zero_optimization={"aio": {"queue_depth": 8}}), "zero_optimization.aio is not a setting. Did you mean aio?"),
    (of(aio={"threads_count": 8}), "aio.threads_count is not a setting"),
    (of(wandb={"enabled": True, "projects": "x"}), "Did you mean wandb.project?"),
    (of(activation_checkpointing={"partition_activation": True}), "mean activation_checkpointing.partition_act"),
    (of(optimizer={"type": "Adamw", "params": {"learning_rate": 1}}), "optimizer.params.learning_rate is not"),
    (of(optimizer={"type": "AdamW", "params": {"weight_decy": 1}}), "Did you mean optimizer.params.weight_decay?"),
    (of(optimizer={"kind": "AdamW"}), "optimizer.kind is not a setting"),
    (of(optimizer={"type": "AdmW"}), "optimizer.type=AdmW does not exist here. Did you mean adamw?"),
    (of(optimizer={"type": "OneBitAdam"}), "optimizer.type=OneBitAdam does not exist here"),
    (of(optimizer={"type": "Muon"}), "does not exist here. Choose from adam, adamw, lion, adagrad, sgd"),
    (of(optimizer={"type": "SGD", "params": {"betas": [0.9, 0.99]}}), "optimizer.params.betas is not a setting"),
    (scheduled("WarmupLr"), "scheduler.type=WarmupLr does not exist here. Did you mean WarmupLR?"),
    (scheduled("WarmupLR", warmup_steps=5), "Did you mean scheduler.params.warmup_num_steps?"),
    (scheduled("WarmupLR", total_num_steps=5), "scheduler.params.total_num_steps is not a setting"),
    # no value of this kind
    (of(zero_optimization={"stage": 4}), "zero_optimization.stage=4: must be 0, 1, 2 or 3"),
    (of(zero_optimization={"stage": "3"}), 'zero_optimization.stage="3": must be 0, 1, 2 or 3'),
    (of(zero_optimization=2), 'zero_optimization=2: must be a section of keys, such as {"stage": ...}'),
    (of(zero_optimization={"offload_optimizer": True}), 'must be a section of keys, such as {"device": ...}'),
    (of(bf16=True), 'bf16=true: must be a section of keys, such as {"enabled": ...}'),
    (of(optimizer="AdamW"), 'optimizer="AdamW": must be a section of keys, such as {"type": ...}'),
    (of(flops_profiler=True), "flops_profiler=true: must be a section of keys"),
    (of(train_batch_size=0), "train_batch_size=0: must be a whole number from 1"),
    (of(train_batch_size=1.5), "train_batch_size=1.5: must be a whole number from 1"),
    (of(gradient_clipping=-1), "gradient_clipping=-1: must be a number from 0"),
    (of(fp16={"enabled": "yes"}), 'fp16.enabled="yes": must be true or false'),
    (of(fp16={"enabled": 1}), "fp16.enabled=1: must be true or false"),
    (of(zero_optimization={"offload_optimizer": {"device": "disk"}}), 'device="disk": must be none or cpu or nvme'),
    (of(optimizer={"type": "AdamW", "params": {"betas": [0.9]}}), "must be a list of two numbers from 0, below 1"),
    (of(optimizer={"type": "AdamW", "params": {"betas": [0.9, 1]}}), "must be a list of two numbers from 0, below 1"),
    (of(optimizer={"type": "AdamW", "params": [1e-3]}), "optimizer.params=[0.001]: must be a section of keys"),
    (scheduled("WarmupLR", warmup_type="cosine"), 'warmup_type="cosine": must be log or linear'),
    # contradictions
    (of(fp16={"enabled": True}, bf16={"enabled": True}), "fp16.enabled and bf16.enabled are both true"),
    (of(bf16={"enabled": True}, bfloat16={"enabled": True}), "bf16.enabled appears twice, in two spellings"),
    ({"gradient_accumulation_steps": 2}, "train_batch_size and train_micro_batch_size_per_gpu are both missing"),
    (of(train_micro_batch_size_per_gpu=3), "train_batch_size=8 does not divide by train_micro_batch_size_per_gpu=3"),
    (of(zero_optimization={"stage": 2, "offload_param": NVME}), "on nvme needs zero_optimization.stage=3"),
    (of(zero_optimization={"stage": 3, "offload_optimizer": {"device": "nvme"}}), "on nvme needs"),
    (of(zero_optimization={"stage": 3, "offload_param_nvme": True}), "offload_param on nvme needs"),
    (of(zero_optimization={"cpu_offload": True, "offload_optimizer": NVME}), "is the older spelling of"),
    (of(fp16={"enabled": True, "initial_scale_power": 1, "min_loss_scale": 4}), "is above the first scale"),
    (of(communication_data_type="fp16"), "has no loss scale while the model computes in fp32"),
    (of(optimizer={"params": {"lr": 1}}), "optimizer.params without optimizer.type; there are adam"),
    (scheduled("WarmupDecayLR"), "scheduler.type=WarmupDecayLR needs scheduler.params.total_num_steps"),
    (scheduled("OneCycle", cycle_min_lr=0.1), "scheduler.type=OneCycle needs scheduler.params.cycle_max_lr"),
    (scheduled("OneCycle", cycle_min_lr=0.2, cycle_max_lr=0.1), "cycle_min_lr=0.2 is above cycle_max_lr=0.1"),
    (scheduled("WarmupLR", warmup_min_lr=1), "the warm-up begins at 1, above its peak of 0.5"),
    (scheduled("WarmupDecayLR", total_num_steps=10), "total_num_steps=10 leaves no step for the decay"),
    # what would change the numbers
    (of(amp={"enabled": True, "opt_level": "O1"}), "amp is not supported: Apex is not used; write bf16 or fp16"),
    (of(gradient_allreduce_op="sum"), 'gradient_allreduce_op="sum" is not supported: gradients are averaged'),
    (of(optimizer={"type": "AdamW", "params": {"max_grad_norm": 1}}), "gradient_clipping, a key beside"),
    (of(max_grad_norm=1.0), "ds_config: max_grad_norm: unknown key; gradient_clipping limits the norm"),
    (scheduled("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_second_step_size=0), "must be 1 or more"),
    (of(optimizer={"type": "AdamW", "params": {"amsgrad": True}}), "amsgrad=true is not supported"),
    (of(zero_optimization={"legacy_stage1": True}), "legacy_stage1=true is not supported"),
    # no configuration at all
    ("nowhere.json", "ds_config=nowhere.json is not a file"),
    ('{"train_batch_size": 8, "train_batch_size": 8}', "the key train_batch_size appears twice in one section"),
    ('{"fp16": {"enabled": true, "enabled": false}}', "the key enabled appears twice in one section"),
    ('{"train_batch_size": 8', "ds_config: not JSON: "),
    ('{"train_batch_size": 1' + "0" * 5000 + "}", "ds_config: not JSON: "),
    ('{"train_batch_size": 1' + "0" * 400 + "}", "must be a whole number from 1"),
    ('{"two\\nlines": 1}', "two lines is not a setting"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "said"), MISTAKES, ids=[str(number) for number in range(len(MISTAKES))])
def test_a_mistake_is_one_line_that_says_where(raw, said):
    with pytest.raises(ConfigError) as refused:
        read(translate(raw).settings)
    text = str(refused.value)
    assert said in text
    assert "\n" not in text
    assert text.startswith("ds_config")


NONSENSE = [None, True, -1, 0, 1e400, 0.5, 10**20, "auto", "", "x\n", "none", [], [1, 2], {}, {"enabled": 1}, {"a": {}}]


def test_nonsense_in_any_place_is_one_line_or_a_meaning():
    """Every value of every golden file in turn becomes each of these."""

    def spoiled(node: dict) -> Iterator[dict]:
        for key, value in node.items():
            yield from ({**node, key: bad} for bad in NONSENSE)
            if isinstance(value, dict):
                yield from ({**node, key: inner} for inner in spoiled(value))

    for path in GOLDEN:
        for raw in spoiled(json.loads(path.read_text())):
            assert not any("\n" in line for line in said_of(raw)), raw


def said_of(raw: dict) -> tuple[str, ...]:
    try:
        told = translate(raw)
        read(told.settings)
    except ConfigError as refused:
        return (str(refused),)
    return told.notes


def test_a_file_is_called_by_its_name(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(of(zero_optimization={"stage": 3, "overlap_comm": True})))
    assert translate(path).notes[0].startswith("mine.json: zero_optimization.overlap_comm is ignored")
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"^mine.json: holds \[\]; it must be an object of keys"):
        translate(path)


def test_a_batch_is_checked_against_the_ranks_where_they_are_known():
    raw = of(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2)
    assert read(translate(raw, world_size=2).settings).on(2).batch.numbers() == (8, 2, 2)
    said = r"train_batch_size=8 is not train_micro_batch_size_per_gpu=2 x gradient_accumulation_steps=2 x 3 ranks = 12"
    with pytest.raises(ConfigError, match=said):
        translate(raw, world_size=3)


# On the command line


@pytest.fixture
def script():
    """scripts/from_deepspeed as a module."""
    loader = importlib.machinery.SourceFileLoader("from_deepspeed", str(ROOT / "scripts/from_deepspeed"))
    spec = importlib.util.spec_from_loader("from_deepspeed", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_command_line_that_is_printed_gives_the_same_settings(path, script):
    line, _, rest = script.translated(str(path), None).partition("\n")
    words = shlex.split(line)
    expected = read(translate(path).settings)
    assert words[:2] == ["python", "train.py"]
    assert read(compose.settings_in(compose.compose(words[2:]))) == expected
    shown = yaml.safe_load(rest)
    assert shown == differing(translate(path).settings)
    assert rest.count("\n# ") == len(translate(path).notes)


def test_train_takes_it_before_its_own_words():
    def settled(*words: str):
        return read(compose.settings_in(compose.compose([f"ds_config={GOLDEN[-1]}", *words])))

    translated = read(translate(GOLDEN[-1]).settings)
    assert settled() == translated
    changed = settled("optim.lr=0.5", "offload.threads=2")
    assert (changed.optim.lr, changed.offload.threads) == (0.5, 2)
    assert changed.schedule == translated.schedule
    other = settled("optim=lion")
    assert other.optim == read(compose.settings_in(compose.compose(["optim=lion"]))).optim, "an option is whole"
    assert other.zero == translated.zero


def test_train_says_what_has_no_meaning_once_and_refuses_a_mistake_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(of(zero_optimization={"stage": 2, "overlap_comm": True})))
    assert train.main(["ds_config=ds.json", "mode=explain", "explain.key=zero.stage"]) == 0
    told = capsys.readouterr().err
    assert told == f"warning: {translate(tmp_path / 'ds.json').notes[0]}\n"
    (tmp_path / "ds.json").write_text(json.dumps(of(zero_optimisation={"stage": 2})))
    assert train.main(["ds_config=ds.json"]) == 2
    assert capsys.readouterr().err == (
        "ds.json: zero_optimisation is not a setting. Did you mean zero_optimization?\n"
    )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["ds.json"]


def test_words_are_read_back_as_they_were():
    settings = {
        "tracker": {"name": "wandb", "project": "it's, a {name}", "group": "true"},
        "offload": {"path": "/a b=c"},
    }
    words = overrides(settings)
    assert words[0] == "tracker=wandb"
    composed = compose.settings_in(compose.compose(words))
    assert composed["tracker"]["project"] == settings["tracker"]["project"]
    assert composed["tracker"]["group"] == "true"
    assert composed["offload"]["path"] == "/a b=c"


def test_leaf_modules_are_units_beside_those_of_the_default_policy():
    leaves = {"stage": 3, "leaf_module": {"classes": ["models.moe.Experts"]}}
    assert translate(of(zero_optimization=leaves)).settings["zero"]["units"] == ["auto", "Experts"]
    assert translate(of(zero_optimization={"stage": 3, "units": ["Block"]})).settings["zero"]["units"] == ["Block"]


def test_ways_between_nodes_are_said_in_the_section_of_zero():
    ways = {"gather": "world", "reduce": "node", "shard": "node"}
    told = translate(of(zero_optimization={"stage": 3, **ways})).settings["zero"]
    assert {key: told[key] for key in ways} == ways


def test_comments_and_commas_are_read_as_deepspeed_reads_them(tmp_path):
    pytest.importorskip("hjson")
    path = tmp_path / "ds_config.json"
    path.write_text(
        '{\n  // rows of a step\n  "train_batch_size": 8, # all of them\n  "bf16": {"enabled": true,},\n}\n'
    )
    assert translate(path).settings == translate({"train_batch_size": 8, "bf16": {"enabled": True}}).settings
    path.write_text('{"bf16": {}, /* again */ "bf16": {}}')
    with pytest.raises(ConfigError, match="the key bf16 appears twice"):
        translate(path)


def test_the_script_refuses_in_one_line(script, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["from_deepspeed", '{"train_batch_size": 0}'])
    assert script.main() == 2
    assert capsys.readouterr().err == (
        "from_deepspeed: ds_config: train_batch_size=0: must be a whole number from 1\n"
    )  # fmt: skip
