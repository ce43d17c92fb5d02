"""One closed schema: every mistake is one line that names the key as typed and what to write."""

import math
import pickle

import pytest
from hypothesis import given, strategies as st

from zero.core.placement import Offload
from zero.core.schema import Section, walk
from zero.errors import ConfigError
from zero.trainer.config import Config, flat, keys, read
from zero.trainer.models import GPT, GPTConfig
from zero.trainer.models.gpt_config import UNIT_CLASSES

MISTAKES = [
    ({"zero": {"stage": 7}}, "zero.stage=7: must be 0, 1, 2 or 3, or auto"),
    ({"zero": {"stage": "three"}}, "zero.stage=three: must be 0, 1, 2 or 3, or auto"),
    ({"zero": {"stage": True}}, "zero.stage=true: must be 0, 1, 2 or 3, or auto"),
    ({"zero": {"stage": 2.0}}, "zero.stage=2.0: must be 0, 1, 2 or 3, or auto"),
    ({"zero": {"stge": 3}}, "unknown key zero.stge; did you mean zero.stage?"),
    ({"zero": 3}, "zero=3: zero is a section of keys; did you mean zero.stage=3?"),
    ({"zero": None}, "zero=null: zero is a section of keys; there are zero.stage, zero.units, "),
    ({"stage": 3}, "unknown key stage; did you mean zero.stage?"),
    ({"ofload": {}}, "unknown key ofload; did you mean offload?"),
    ({"zero": {"units": ["Blok"]}}, "zero.units=[Blok]: Blok is not a class of this model; did you mean Block?"),
    ({"zero": {"units": []}}, "zero.units=[]: must be auto or a list of class names, such as [Block]"),
    (
        {"zero": {"units": ["Block", "RMSNorm"]}, "model": {"norm": "layer"}},
        "model.norm=layer has no RMSNorm; write LayerNorm",
    ),
    ({"zero": {"prefetch": -1}}, "zero.prefetch=-1: must be at least 0"),
    (
        {"zero": {"activations": "remet"}},
        "zero.activations=remet: must be one of keep, remat, offload, auto; did you mean",
    ),
    ({"zero": {"update": "eager"}}, "zero.update=eager: must be lazy or serial"),
    ({"optim": {"name": "adamm"}}, "optim.name=adamm does not exist; did you mean adam"),
    ({"optim": {"name": "sgd", "beta1": 0.9}}, "optim.beta1 is not a key of the option chosen for optim"),
    ({"optim": {"name": "sgd", "momentum": 0, "nesterov": True}}, "optim.nesterov=true needs optim.momentum=0.9"),
    ({"optim": {"name": "adamw", "lr": -1}}, "optim.lr=-1: must be above 0"),
    ({"optim": {"name": "adamw", "lr": math.nan}}, "optim.lr=nan: must be a finite number"),
    ({"optim": {"name": "adamw", "lr": math.inf}}, "optim.lr=inf: must be a finite number"),
    ({"optim": {"name": "adamw", "lr": True}}, "optim.lr=true: must be a number"),
    ({"optim": {"name": "adamw", "clip": 0}}, "optim.clip=0: must be above 0"),
    ({"precision": {"compute": "fp8"}}, "precision.compute=fp8: must be one of fp32, bf16, fp16"),
    ({"precision": {"scale": {"initial": 0.5}}}, "precision.scale.initial=0.5 is not between minimum=1"),
    ({"offload": {"page": "-1GiB"}}, "offload.page=-1GiB: must be a size in bytes such as 8MiB or 80GiB"),
    ({"offload": {"page": -1}}, "offload.page=-1: must be a size in bytes"),
    ({"offload": {"page": "1e3"}}, "offload.page=1e3: must be a size in bytes"),
    ({"offload": {"page": 1000}}, "offload.page=1000: must be a positive multiple of 4KiB"),
    ({"offload": {"page": "6KiB"}}, "offload.page=6KiB: must be a positive multiple of 4KiB"),
    ({"offload": {"optimizer": "nvmee"}}, "offload.optimizer=nvmee: must be one of none, cpu, nvme, auto; did you"),
    ({"offload": {"optimizer": "infinity"}}, "offload.optimizer=infinity: must be one of none, cpu, nvme, auto"),
    ({"offload": {"grad": "cpu_if_sharded"}}, "offload.grad=cpu_if_sharded: must be one of none, cpu, nvme, auto"),
    ({"offload": "nvme"}, "offload=nvme: offload is a section of keys"),
    ({"offload": {"path": 3}}, "offload.path=3: must be text"),
    ({"offload": {"threads": 0}}, "offload.threads=0: must be a whole number from 1, or auto"),
    ({"offload": {"read_ahead": -1}}, "offload.read_ahead=-1: must be a whole number from 0, or auto"),
    ({"offload": {"page": "8MiB or so"}}, "offload.page=8MiB or so: must be a size in bytes such as 8MiB"),
    ({"offload": {"host_budget": "0.5"}}, "offload.host_budget=0.5: must be a size such as 8GiB, a share of what is"),
    ({"offload": {"host_budget": 0.5}}, "offload.host_budget=0.5: must be a size such as 8GiB, a share of what is"),
    ({"offload": {"host_budget": "0%"}}, "offload.host_budget=0%: must be a size such as 8GiB, a share of what is"),
    ({"offload": {"host_budget": "120%"}}, "offload.host_budget=120%: must be a size such as 8GiB, a share of what"),
    ({"offload": {"device_budget": "half"}}, "offload.device_budget=half: must be a size such as 8GiB"),
    ({"offload": {"device_budget": -1}}, "offload.device_budget=-1: must be a size such as 8GiB"),
    ({"offload": {"device_budget": None}}, "offload.device_budget=null: must be a size such as 8GiB"),
    ({"offload": {"verify": 1}}, "offload.verify=1: must be true or false"),
    ({"offload": {"compute": "gpu"}}, "offload.compute=gpu: must be device or host"),
    (
        {"zero": {"stage": 2}, "offload": {"optimizer": "nvme", "param": "nvme", "grad": "nvme"}},
        "offload=infinity keeps parameters on disk, which only zero.stage=3 can; use zero.stage=3, or offload=nvme",
    ),
    (
        {"zero": {"stage": 0}, "offload": {"param": "cpu"}},
        "offload.param=cpu keeps parameters on the host, which only zero.stage=3 can; "
        "use zero.stage=3, or offload.param=none",
    ),
    ({"mode": "paln"}, "mode=paln: must be one of train, eval, plan, doctor, explain; did you mean plan?"),
    ({"plan": {"device_memory": "80"}, "mode": "plan", "steps": 0}, "steps=0: must be at least 1"),
    ({"plan": {"host_memory": "lots"}}, "plan.host_memory=lots: must be a size such as 80GiB, or auto"),
    ({"steps": 1e6}, "steps=1000000.0: must be a whole number; write steps=1000000"),
    ({"launch": {"ranks": 4.0}}, "launch.ranks=4.0: must be a whole number from 1, or auto; write launch.ranks=4"),
    ({"launch": {"ranks": 0.0}}, "launch.ranks=0.0: must be a whole number from 1, or auto"),
    ({"steps": 10**400}, "steps=1000"),
    ({"seed": "two\nlines"}, "seed=two lines: must be a whole number"),
    ({"launch": {"ranks": 0}}, "launch.ranks=0: must be a whole number from 1, or auto"),
    ({"launch": {"timeout": 0.5}}, "launch.timeout=0.5: must be at least 1"),
    ({"launch": {"malloc": 1}}, "launch.malloc=1: must be one of raised, lean, default"),
    ({"model": {"width": 191}}, "model.width=191 does not split into model.heads=4"),
    ({"model": {"vocab": 100}}, "model.vocab=100 is smaller than the 256 tokens of data=text"),
    ({"data": {"name": "tokens"}}, "data=tokens needs data.path=FILE"),
    ({"data": {"name": "text", "holdout": 0}}, "data.holdout=0: must be above 0"),
    (
        {"schedule": {"name": "warmup_linear", "warmup": 1200}},
        "schedule.warmup=1200, schedule.hold=0: no step of steps=1200",
    ),
    (
        {"schedule": {"name": "warmup_cosine", "warmup": 5, "hold": 15, "total": 20}},
        "schedule.warmup=5, schedule.hold=15: no step of schedule.total=20",
    ),
    ({"schedule": {"name": "one_cycle", "momentum_min": 0.95}}, "schedule.momentum_min=0.95 is above"),
    (
        {"schedule": {"name": "one_cycle"}, "optim": {"name": "adagrad"}},
        "schedule.momentum=true: optim=adagrad has no momentum",
    ),
    ({"optim": {}}, "optim needs optim.name"),
]


@pytest.mark.parametrize(("raw", "said"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_is_one_line_with_the_key_as_typed(raw, said):
    with pytest.raises(ConfigError) as caught:
        read(raw)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_defaults_are_a_run():
    assert read({}) == Config()


def test_plain_values_read_back_as_the_same_settings():
    config = read(
        {"zero": {"units": ["Block", "Embedding"]}, "offload": {"page": "1.5MiB"}, "tracker": {"name": "wandb"}}
    )
    assert read(config.plain()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert flat(config)["offload.page"] == str(3 * 2**19)


def test_offload_is_what_the_engine_reads():
    assert read({}).offload == Offload()
    raw = {
        "optimizer": "nvme", "param": "cpu", "grad": "auto", "path": "/mnt/nvme", "page": "8KiB", "threads": 2,
        "read_ahead": 0, "device_budget": "12.5%", "host_budget": "2GiB", "verify": False, "pin": False,
        "compute": "host",
    }  # fmt: skip
    config = read({"offload": raw})
    assert config.offload == Offload(
        optimizer="nvme", param="cpu", grad="auto", path="/mnt/nvme", page_bytes=8192, threads=2, read_ahead=0,
        device_budget=0.125, host_budget=2 * 2**30, verify=False, pin=False, compute="host",
    )  # fmt: skip
    assert read(config.plain()) == config


def test_every_key_says_what_it_means():
    def undescribed(section):
        for name, field in section.model_fields.items():
            if not field.description and not isinstance(field.get_default(), Section):
                yield name

    sections = {key.section for key in walk(Config)}
    assert len(sections) > 20
    assert {f"{section.__name__}.{name}" for section in sections for name in undescribed(section)} == set()


def test_the_model_has_the_keys_and_defaults_of_its_own_record():
    assert Config().model == GPTConfig()


def test_unit_classes_are_the_owners_of_the_models_parameters():
    owners = set()
    for norm in ("rms", "layer"):
        model = GPT(GPTConfig(width=8, heads=2, layers=1, seq=4, norm=norm, tied=False))
        owners |= {type(module).__name__ for module in model.modules() if list(module.parameters())}
    assert owners - {"GPT", "ModuleList"} == set(UNIT_CLASSES)


# The batch triangle


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 50))
def test_any_two_of_the_batch_give_the_third(micro, accumulate, ranks):
    rows = micro * accumulate * ranks
    whole = (rows, micro, accumulate)
    for missing in (None, "global", "micro", "accumulate"):
        given_ = dict(zip(("global", "micro", "accumulate"), whole, strict=True))
        if missing:
            given_[missing] = "auto"
        config = read({"batch": given_}).on(ranks)
        assert config.batch.numbers() == whole
        assert config.launch.ranks == ranks
        assert config.on(ranks) == config


@pytest.mark.parametrize(
    ("batch", "ranks", "said"),
    [
        ({"global": 32, "micro": 5, "accumulate": 2}, 1, "batch.micro=5 x batch.accumulate=2 x 1 rank = 10"),
        ({"global": 32, "micro": 4, "accumulate": 4}, 3, "x 3 ranks = 48"),
        ({"global": 10}, 3, "batch.global=10 does not divide by 3 ranks"),
        ({"global": 10, "micro": 4}, 2, "batch.global=10 does not divide by batch.micro=4 x 2 ranks"),
        ({"global": 2}, 3, "batch.global=2 does not divide by 3 ranks"),
        ({"global": "auto"}, 2, "batch.global and batch.micro are both auto"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_its_numbers(batch, ranks, said):
    settings = read({"batch": batch})
    with pytest.raises(ConfigError) as caught:
        settings.on(ranks)
    assert said in str(caught.value)


def test_only_the_global_batch_matters_without_other_wishes():
    assert read({"batch": {"global": 12}}).on(3).batch.numbers() == (12, 4, 1)


# Generated nonsense: whatever is put in place of a value, the answer is a Config or one line

NONSENSE = [
    None,
    "",
    "x",
    -1,
    0,
    1.5,
    True,
    math.nan,
    math.inf,
    -math.inf,
    10**400,
    [],
    {},
    [[]],
    {"a": 1},
    "9" * 400,
    "\x00",
]


@pytest.mark.parametrize("key", keys())
def test_nonsense_is_refused_in_one_line_or_is_a_value(key):
    section, _, name = key.rpartition(".")
    for value in NONSENSE:
        raw: dict = {name: value}
        for part in reversed(section.split(".")):
            raw = {part: raw} if part else raw
        top = raw.get(key.split(".")[0])
        defaults = Config().plain().get(key.split(".")[0])
        if isinstance(top, dict) and isinstance(defaults, dict) and "name" in defaults:
            top.setdefault("name", defaults["name"])
        said = _answer(raw)
        assert "\n" not in said
        assert len(said) < 300


def _answer(raw) -> str:
    try:
        return type(read(raw)).__name__
    except ConfigError as refused:
        return str(refused)
