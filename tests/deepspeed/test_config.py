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
from torch import nn

import train
import zero
from zero.core import schema
from zero.core.setting_types import MOST
from zero.deepspeed.config import overrides, source, translate
from zero.deepspeed.config.keys import Keys
from zero.deepspeed.config.optimizer_keys import OPTIMIZER_KEYS
from zero.deepspeed.config.schedule_keys import SCHEDULER_KEYS
from zero.deepspeed.config.unsupported_keys import IGNORED_KEYS, REJECTED
from zero.errors import ConfigError
from zero.settings.build import build_optimizer, build_schedule
from zero.trainer import compose
from zero.trainer.config import keys as keys_here, read

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.json"))
OBSERVED = json.loads(Path(__file__).with_name("schedules.json").read_text())
"""Rates of DeepSpeed 0.19.8, see test_names.py."""


def of(**changed: object) -> dict:
    """A small configuration, with some sections changed."""
    return {"train_batch_size": 8, "gradient_clipping": 1.0, **changed}


def scheduled(type_: str, optimizer: str = "AdamW", **params: object) -> dict:
    return of(
        optimizer={"type": optimizer, "params": {"lr": 0.5}},
        scheduler={"type": type_, "params": params},
    )


def sgd(**params: object) -> dict:
    return {"type": "SGD", "params": {"lr": 0.5, **params}}


@pytest.fixture(scope="module")
def script():
    """scripts/from_deepspeed as a module."""
    loader = importlib.machinery.SourceFileLoader("from_deepspeed", str(ROOT / "scripts/from_deepspeed"))
    spec = importlib.util.spec_from_loader("from_deepspeed", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


# What is translated


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_configuration_gives_the_settings_that_are_written_beside_it(path, script):
    """By its path, its text and as a dict, which stays as it is; and by the command line that is printed of it."""
    told, expected = translate(path), yaml.safe_load(path.with_suffix(".yaml").read_text())
    plain = json.loads(json.dumps(told.settings))
    assert (plain, list(told.notes)) == (expected["settings"], expected["notes"])
    raw = json.loads(path.read_text())
    before = copy.deepcopy(raw)
    for same in (translate(str(path)), translate(path.read_text()), translate(raw)):
        assert same.settings == told.settings
        assert [note.partition(": ")[2] for note in same.notes] == [note.partition(": ")[2] for note in told.notes]
    assert raw == before
    line, _, rest = script.translated(str(path), None).partition("\n")
    words = shlex.split(line)
    assert words[:2] == ["python", "train.py"]
    assert read(compose.settings_in(compose.compose(words[2:]))) == read(told.settings)
    assert yaml.safe_load(rest) == plain
    assert rest.count("\n# ") == len(told.notes)


def test_there_is_a_golden_file_for_every_way_to_write_one():
    assert len(GOLDEN) == len(list((Path(__file__).parent / "golden").glob("*.yaml"))) == 8


CPU, NVME_FLAGS = {"device": "cpu"}, ("offload_optimizer_nvme", "offload_param_nvme")
DISKS = {f"offload_{kind}": {"device": "nvme", "nvme_path": f"/{kind}"} for kind in ("optimizer", "param")}
PLACES = [
    ({"offload_param": CPU, "offload_optimizer": CPU}, {"optimizer": "cpu", "param": "cpu", "grad": "cpu"}),
    *(
        (
            {
                "offload_param": CPU,
                "offload_optimizer": CPU,
                "nvme_offload_path": "/fast",
                **dict.fromkeys(flags, True),
            },
            dict(zip(("optimizer", "param", "grad"), tiers, strict=True), path="/fast"),
        )
        for flags, tiers in (
            (NVME_FLAGS[:1], ("nvme", "cpu", "cpu")),
            (NVME_FLAGS[1:], ("cpu", "nvme", "cpu")),
            (NVME_FLAGS, ("nvme", "nvme", "nvme")),
        )
    ),
    (DISKS, {"optimizer": "nvme", "param": "nvme", "grad": "nvme", "path": ["/optimizer", "/param"]}),
    (
        {kind: section | {"nvme_path": "/fast"} for kind, section in DISKS.items()},
        {"optimizer": "nvme", "param": "nvme", "grad": "nvme", "path": "/fast"},
    ),
    ({"cpu_offload": True, "cpu_offload_param": True}, {"optimizer": "cpu", "param": "cpu", "grad": "cpu"}),
    (
        {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
        {"optimizer": "cpu", "param": "none", "grad": "cpu", "pin": False},
    ),
]


@pytest.mark.parametrize(("section", "expected"), PLACES, ids=range(len(PLACES)))
def test_a_state_is_offloaded_to_where_the_section_says(section, expected):
    """Flags for NVMe win over the device beside them, and pages are spread over all disks that are named."""
    told = translate(of(zero_optimization={"stage": 3, **section}, aio={"thread_count": 3}))
    assert told.settings["offload"] == {**expected, "threads": 3}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_for_host_memory_stay_on_the_device_below_stage_3_and_a_line_says_so(stage):
    """As in DeepSpeed: DeepSpeed-Chat writes one device for every stage."""
    section = {"stage": stage, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    told = translate(of(zero_optimization=section))
    assert told.settings["offload"] == {"optimizer": "cpu", "param": "none", "grad": "cpu"}
    (note,) = told.notes
    assert f"at stage {stage} parameters stay on the device" in note


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
        ({"type": "Muon"}, ("muon", 0.02, 0.0, 0.9, 0.95)),
        ({"type": "Muon", "params": {"lr": 0.01, "muon_lr": 0.05}}, ("muon", 0.05, 0.0, 0.9, 0.95)),
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
    scales, state = [], rule.start()
    for step in kept:
        state = rule.advance(state, steps[step] == ".")
        scales.append(state.scale)
    assert scales == [theirs[step] for step in kept]


@pytest.mark.parametrize("case", OBSERVED, ids=lambda case: case["type"])
def test_settings_have_the_rates_of_deepspeed_0_19_8(case):
    """`train.py` begins a warm-up with one update at the first rate, DeepSpeed with two. A decay without a step and a
    cycle without a second half are schedules of `initialize` alone."""
    params = case["params"]
    first, second = params.get("cycle_first_step_size"), params.get("cycle_second_step_size")
    raw = scheduled(case["type"], "SGD", **params)
    if params.get("total_num_steps", 99) <= params.get("warmup_num_steps", 0) or (first and second == 0):
        with pytest.raises(ConfigError, match=r"schedule\.(total|fall)="):
            build_schedule(read(translate(raw).settings))
        return
    schedule = build_schedule(read(translate(raw).settings))
    left_out = int(case["type"].startswith("Warmup"))
    expected = [rates[0] for rates, *_ in case["rows"][left_out:10]]
    assert [schedule(step) for step in range(1, len(expected) + 1)] == pytest.approx(expected)


def test_one_cycle_moves_both_betas_of_adam_and_no_other_momentum():
    how = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 10, "cycle_second_step_size": 20}
    assert translate(scheduled("OneCycle", "SGD", **how)).settings["schedule"]["momentum"] is False
    moved = read(translate(scheduled("OneCycle", **how, cycle_min_mom=0.85, cycle_max_mom=0.95)).settings)
    betas = [build_optimizer(moved).groups[0](step).betas for step in (1, 2, 11, 21, 31)]
    assert [first for first, _ in betas] == pytest.approx(
        [0.85, 0.94, 0.85, 0.9, 0.95]
    )  # the first is the lowest there
    assert {second for _, second in betas} == {0.99}


def test_a_schedule_without_a_peak_takes_the_one_that_deepspeed_takes():
    assert translate(scheduled("WarmupLR", warmup_num_steps=10)).settings["optim"]["lr"] == 0.5
    assert translate(scheduled("WarmupLR", warmup_max_lr=0.25)).settings["optim"]["lr"] == 0.25
    without = translate(scheduled("WarmupLR", warmup_max_lr=0.25), schedule=False)
    assert without.settings["optim"]["lr"] == 0.5, "another scheduler starts from the optimizer's rate"
    told = translate(scheduled("WarmupDecayLR", warmup_num_steps=10, total_num_steps=40))
    assert told.settings["optim"]["lr"] == 1e-3
    assert "scheduler.params.warmup_max_lr is 0.001, and wins over optimizer.params.lr" in told.notes[-1]


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
BATCHES = [
    ({"train_batch_size": 32}, (32, 8, 1)),
    ({"train_micro_batch_size_per_gpu": 2}, (8, 2, 1)),
    ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, (32, 2, 4)),
    ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, (32, 4, 2)),
    ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (24, 2, 3)),
    (dict(zip(BATCH, ("auto", 1, None), strict=True)), (4, 1, 1)),
    *((dict(zip(BATCH, rows, strict=True)), (24, 2, 3)) for rows in (("auto", 2, 3), (24, "auto", 3), (24, 2, "auto"))),
]


@pytest.mark.parametrize(("given", "expected"), BATCHES, ids=str)
def test_two_of_the_batch_give_the_third(given, expected):
    for world_size in (None, 4):
        config = read(translate(given, world_size=world_size).settings).on(4)
        assert config.batch.numbers() == expected


@pytest.mark.parametrize(
    ("written", "same"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        (
            {"_note": 1, "//": "why", "zero_optimization": {"stage": 1, "_was": 3, "#stage": 2}},
            {"zero_optimization": {"stage": 1}},
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "_lr": 1}}},
            {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}},
        ),
        ({"steps_per_print": math.inf}, {"steps_per_print": MOST}),
        (
            {
                "sequence_parallel_size": 1,
                "gradient_allreduce_op": "mean",
                "optimizer": sgd(dampening=0, maximize=False),
            },
            {"optimizer": sgd()},
        ),
        (scheduled("WarmupDecayLR", total_num_steps=1e5), scheduled("WarmupDecayLR", total_num_steps=100_000)),
        ({"fp16": None, "zero_optimization": {}}, {}),
    ],
)
def test_older_spellings_comments_and_never_are_read(written, same):
    for raw in (of(**written), json.dumps(of(**written))):
        translated, expected = translate(raw), translate(of(**same))
        assert (translated.settings, translated.notes) == (expected.settings, expected.notes)


def test_comments_and_commas_are_read_with_hjson_and_the_line_names_it(tmp_path, monkeypatch):
    text = '{\n  "train_batch_size": 8, // rows\n  "bf16": {"enabled": true,},\n}\n'
    with monkeypatch.context() as without:
        without.setattr(source, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"not JSON: .*line 2 column 26.* need hjson: pip install hjson"):
            translate(text)
    pytest.importorskip("hjson")
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    assert translate(path).settings == translate({"train_batch_size": 8, "bf16": {"enabled": True}}).settings


def nested(name: str, value: object) -> dict:
    for section in reversed(name.split(".")):
        value = {section: value}
    return of(**value)


@pytest.mark.parametrize("value", [1, {"enabled": True}, {"a_key": 1}], ids=str)
def test_a_key_without_a_meaning_is_noted_or_rejected_where_it_is_on(value):
    for name in (*sorted(IGNORED_KEYS), *REJECTED):
        raw = nested(name, value)
        if name in REJECTED:
            with pytest.raises(ConfigError, match=f"^ds_config: {name} is not supported: {REJECTED[name]}$"):
                translate(raw)
        elif name.partition(".")[0] not in ("optimizer", "scheduler"):
            assert translate(raw).notes == (
                f"ds_config: ignored, because they set how bytes move or what is printed: {name}",
            )
        for off in (False, {"enabled": False, "a_key": 1}, {"enabled": "auto"}, {}, None, "auto"):
            assert not translate(nested(name, off)).notes


def test_the_tables_name_our_keys_and_no_key_twice(script):
    declared = [key for kind in (Keys, *OPTIMIZER_KEYS.values(), *SCHEDULER_KEYS.values()) for key in schema.walk(kind)]
    extras = [key.field.json_schema_extra for key in declared]
    assert {extra["to"] for extra in extras if isinstance(extra, dict)} <= set(keys_here())
    assert all(key.field.description for key in declared)
    assert not set(schema.schema_keys(Keys)) & {*IGNORED_KEYS, *REJECTED}
    stage3 = ("module_granularity_threshold", "use_all_reduce_for_fetch_params")
    known = {f"zero_optimization.{prefix}{name}" for prefix in ("", "stage3_") for name in stage3}
    assert {*known, "optimizer.legacy_fusion", "data_types.param_dtype", "log_level"} <= IGNORED_KEYS
    printed = "\n".join(script.tables())
    assert all(key.rpartition(".")[2] in printed for key in (*schema.schema_keys(Keys), *IGNORED_KEYS, *REJECTED))


# What is refused

STAGE3 = {"stage": 3}
NVME = {"device": "nvme", "nvme_path": "/fast"}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}

MISTAKES = [
    # misspelt
    (of(zero_optimisation=STAGE3), "zero_optimisation is not a setting. Did you mean zero_optimization?"),
    (of(micro_batch_size_per_gpu=1), "Did you mean train_micro_batch_size_per_gpu?"),
    (of(bf16={"enable": True}), "bf16.enable is not a setting. Did you mean bf16.enabled?"),
    (of(zero_optimization={"stge": 3}), "Did you mean zero_optimization.stage?"),
    (of(zero_optimization={"stage": 3, "offload_optimiser": NVME}), "mean zero_optimization.offload_optimizer?"),
    (of(offload_optimizer=NVME), "Did you mean zero_optimization.offload_optimizer?"),
    (of(zero_optimization={"aio": {"queue_depth": 8}}), "zero_optimization.aio is not a setting"),
    (of(optimizer={"type": "Adamw", "params": {"learning_rate": 1}}), "optimizer.params.learning_rate is not"),
    (of(optimizer={"kind": "AdamW"}), "optimizer.kind is not a setting"),
    (of(optimizer={"type": "AdmW"}), "optimizer.type=AdmW does not exist here. Did you mean AdamW?"),
    (of(optimizer={"type": "OneBitAdam"}), "does not exist here. Choose from Adam, AdamW, Lion, Adagrad, SGD, Muon"),
    (of(optimizer={"type": "SGD", "params": {"betas": [0.9, 0.99]}}), "optimizer.params.betas is not a setting"),
    (scheduled("WarmupLR", warmup_steps=5), "Did you mean scheduler.params.warmup_num_steps?"),
    # no value of this kind
    (of(zero_optimization={"stage": 4}), "zero_optimization.stage=4: must be at most 3"),
    (of(zero_optimization={"stage": "3"}), "zero_optimization.stage=3: must be a whole number"),
    (of(zero_optimization=2), "zero_optimization is a section of keys. Choose from"),
    (of(zero_optimization={"offload_optimizer": True}), "offload_optimizer is a section of keys. Choose"),
    (of(bf16=True), "bf16 is a section of keys. Choose from bf16.enabled"),
    (of(optimizer="AdamW"), "optimizer is a section of keys. Choose from optimizer.type"),
    (of(train_batch_size=0), "train_batch_size=0: must be a whole number from 1"),
    (of(train_batch_size=1.5), "train_batch_size=1.5: must be a whole number from 1"),
    (of(gradient_clipping=-1), "gradient_clipping=-1: must be at least 0"),
    (of(fp16={"enabled": "yes"}), 'fp16.enabled=yes: must be true or false'),
    (of(fp16={"enabled": 1}), "fp16.enabled=1: must be true or false"),
    (of(zero_optimization={"offload_optimizer": {"device": "disk"}}), "device=disk: must be one of none, cpu, nvme"),
    (of(optimizer={"type": "AdamW", "params": {"betas": [0.9]}}), "must be two numbers from 0, below 1"),
    (of(optimizer={"type": "AdamW", "params": {"betas": [0.9, 1]}}), "must be two numbers from 0, below 1"),
    (of(optimizer={"type": "AdamW", "params": [1e-3]}), "optimizer.params=[0.001]: must be a section of keys"),
    (scheduled("WarmupLR", warmup_max_lr=[0.1, 0.2]), "warmup_max_lr=[0.1, 0.2]: lists are for zero.initialize"),
    # contradictions
    (of(fp16={"enabled": True}, bf16={"enabled": True}), "fp16.enabled and bf16.enabled are both true"),
    ({"gradient_accumulation_steps": 2}, "train_batch_size and train_micro_batch_size_per_gpu are both missing"),
    (of(train_micro_batch_size_per_gpu=3), "train_batch_size=8 does not divide by train_micro_batch_size_per_gpu=3"),
    (of(train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=3), "accumulation_steps=3. Set one of the three"),
    (of(zero_optimization={"cpu_offload": True, "offload_optimizer": {"device": "none"}}), "Remove the older flag."),
    (of(aio={"intra_op_parallelism": 2, "thread_count": 8}), "are different numbers of threads. Keep one."),
    (of(scheduler={"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4}}), "warmup_min_lr needs warmup_max_lr"),
    (of(zero_optimization={"stage": 2, "offload_param": NVME}), "on nvme needs stage=3"),
    (of(zero_optimization={"stage": 3, "offload_optimizer": {"device": "nvme"}}), "on nvme needs"),
    (of(zero_optimization={"stage": 3, "offload_param_nvme": True}), "offload_param on nvme needs"),
    (of(fp16={"enabled": True, "initial_scale_power": 1, "min_loss_scale": 4}), "initial=2 is not between"),
    (of(communication_data_type="fp16"), "has no loss scale while the model computes in fp32"),
    (of(optimizer={"params": {"lr": 1}}), "optimizer.params: optimizer.type is missing. Choose from Adam, AdamW"),
    (scheduled("WarmupDecayLR"), "scheduler.params.total_num_steps is missing"),
    (scheduled("OneCycle", cycle_min_lr=0.1), "scheduler.params.cycle_max_lr is missing"),
    (scheduled("OneCycle", cycle_min_lr=0.2, cycle_max_lr=0.1), "schedule.start=2.0: must be at most 1"),
    (scheduled("WarmupLR", warmup_min_lr=1), "schedule.start=2.0: must be at most 1"),
    (scheduled("WarmupDecayLR", total_num_steps=10), "no step of schedule.total=11 is left for the decay"),
    # what would change the numbers
    (of(amp={"enabled": True, "opt_level": "O1"}), "amp is not supported: write bf16 or fp16"),
    (of(optimizer={"type": "AdamW", "params": {"max_grad_norm": 1}}), "max_grad_norm is not supported: write"),
    (of(max_grad_norm=1.0), "max_grad_norm is not supported: write gradient_clipping"),
    (scheduled("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_second_step_size=0), "schedule.fall=0: must be"),
    (of(optimizer={"type": "AdamW", "params": {"amsgrad": True}}), "optimizer.params.amsgrad=true: must be False"),
    (of(zero_optimization={"legacy_stage1": True}), "legacy_stage1 is not supported"),
    (of(optimizer=sgd(dampening=0.1)), "optimizer.params.dampening is not supported"),
    (of(sequence_parallel_size=2), "sequence_parallel_size=2: must be 1"),
    (scheduled("WarmupLR", last_batch_iteration=500), "last_batch_iteration=500: must be -1"),
    # no configuration at all
    ("nowhere.json", "ds_config=nowhere.json is not a file"),
    ('{"train_batch_size": 8', "ds_config: not JSON: "),
    ('{"train_batch_size": 1' + "0" * 5000 + "}", "ds_config: not JSON: "),
    ('{"train_batch_size": 1' + "0" * 400 + "}", "must be at most"),
    ('{"two\\nlines": 1}', "two lines is not a setting"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "said"), MISTAKES, ids=[str(number) for number in range(len(MISTAKES))])
def test_a_mistake_is_one_line_that_says_where(raw, said):
    with pytest.raises(ConfigError) as refused:
        read(translate(raw).settings)
    text = str(refused.value)
    assert said in text
    assert "\n" not in text
    assert text.startswith(("ds_config", "schedule.", "precision.scale."))


NONSENSE = [None, True, -1, 0, 1e400, 0.5, 10**20, "auto", "", "x\n", "none", [], [1, 2], {}, {"enabled": 1}, {"a": {}}]


def test_nonsense_in_any_place_is_one_line_or_a_meaning():
    """Every value of three golden files in turn becomes each of these."""

    def spoiled(node: dict) -> Iterator[dict]:
        for key, value in node.items():
            yield from ({**node, key: bad} for bad in NONSENSE)
            if isinstance(value, dict):
                yield from ({**node, key: inner} for inner in spoiled(value))

    for name in ("fp16_scale", "stage2_cpu", "stage3_nvme"):
        for raw in spoiled(json.loads((GOLDEN[0].parent / f"{name}.json").read_text())):
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
    assert translate(path).notes[0].startswith("mine.json: ignored, because they set")
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"^mine.json: must be an object of keys, .*, not \[\]$"):
        translate(path)


def test_a_batch_is_checked_against_the_ranks_where_they_are_known():
    raw = of(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2)
    assert read(translate(raw, world_size=2).settings).on(2).batch.numbers() == (8, 2, 2)
    said = r"train_batch_size=8 is not train_micro_batch_size_per_gpu=2 x gradient_accumulation_steps=2 x 3 ranks = 12"
    with pytest.raises(ConfigError, match=said):
        translate(raw, world_size=3)


# On the command line


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


def test_units_and_ways_between_nodes_are_said_in_the_section_of_zero():
    leaves = {"stage": 3, "leaf_module": {"classes": ["models.moe.Experts"]}}
    assert translate(of(zero_optimization=leaves)).settings["zero"]["units"] == ["auto", "Experts"]
    ways = {"gather": "world", "reduce": "node", "shard": "node"}
    told = translate(of(zero_optimization={"stage": 3, "units": ["Block"], **ways})).settings["zero"]
    assert told == {"stage": 3, "units": ("Block",), **ways}


def test_frozen_parameters_are_codes_by_deepspeeds_key_and_by_ours():
    frozen = {"zero_quantized_nontrainable_weights": True}
    assert translate(of(zero_optimization=frozen)).settings["precision"] == {"compute": "fp32", "frozen": "int8"}
    both = {**frozen, "frozen": "nf4"}
    config = of(zero_optimization=both, bf16={"enabled": True}, optimizer=sgd())
    assert translate(config).settings["precision"] == {"compute": "bf16", "frozen": "nf4"}
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    model[0].requires_grad_(False)
    engine, *_ = zero.initialize(model=model, config=config)
    assert [*engine.state.plan.facts.splitting.packed_shapes()] == ["0.weight"]
    engine.destroy()
    config["zero_optimization"] = frozen
    engine, *_ = zero.initialize(model=nn.Linear(4, 4), config=config)
    assert engine.state.plan.precision.frozen is None, "nothing is frozen"
    engine.destroy()


def test_the_script_refuses_in_one_line(script, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["from_deepspeed", '{"train_batch_size": 0}'])
    assert script.main() == 2
    assert capsys.readouterr().err == (
        "from_deepspeed: ds_config: train_batch_size=0: must be a whole number from 1, or auto\n"
    )  # fmt: skip
