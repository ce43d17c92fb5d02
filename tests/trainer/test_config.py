"""One closed schema: every mistake is one line that names the key as typed and what to write."""

import pickle

import pytest
from hypothesis import given, strategies as st

from zero.core.offload import Offload
from zero.core.schema import walk
from zero.errors import ConfigError
from zero.trainer.config import Config, flat, read
from zero.trainer.models import GPT, GPTConfig
from zero.trainer.models.gpt_config import UNIT_CLASSES

MISTAKES = [
    ({"zero": {"stage": "three"}}, "zero.stage=three: must be 0, 1, 2 or 3, or auto"),
    ({"zero": {"stage": True}}, "zero.stage=true: must be 0, 1, 2 or 3, or auto"),
    ({"zero": {"stge": 3}}, "zero.stge is not a setting. Did you mean zero.stage?"),
    ({"ofload": {}}, "ofload is not a setting. Did you mean offload?"),
    ({"optim": {"name": "adamm"}}, "optim.name=adamm does not exist. Did you mean adam?"),
    ({"optim": {"name": "sgd", "beta1": 0.9}}, "optim.beta1 is not a key of the option chosen for optim"),
    ({"optim": {}}, "optim needs optim.name"),
    ({"offload": "nvme"}, "offload=nvme: offload is a section of keys"),
    ({"steps": 10**400}, "steps=1000"),
    ({"seed": "two\nlines"}, "seed=two lines: must be a whole number"),
    ({"seed": "\x1b[31mred"}, "seed=?[31mred: must be a whole number"),
]
"""Of Python; messages.txt has those of a command line."""


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
        "ahead": "8GiB", "device_budget": "12.5%", "host_budget": "2GiB", "verify": False, "pin": False,
        "compute": "host",
    }  # fmt: skip
    config = read({"offload": raw})
    assert config.offload == Offload(
        optimizer="nvme", param="cpu", grad="auto", path="/mnt/nvme", page_bytes=8192, threads=2, ahead=8 * 2**30,
        device_budget=0.125, host_budget=2 * 2**30, verify=False, pin=False, compute="host",
    )  # fmt: skip
    assert read(config.plain()) == config


def test_every_key_says_what_it_means():
    declared = [*walk(Config)]
    assert len(declared) > 100
    assert [key.name for key in declared if not key.field.description] == []


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
