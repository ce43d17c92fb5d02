"""conf/ holds what differs from the declared defaults, and every choice in it composes, validates and builds."""

from functools import cache
from pathlib import Path

import pytest
import yaml

import zero
from zero.core.offload import PRESETS, Offload
from zero.core.placement import NO_LIMIT
from zero.errors import ConfigError
from zero.settings import optimizers as optim
from zero.settings.build import build_optimizer, build_plan, build_precision
from zero.trainer.compose import compose, settings_in
from zero.trainer.config import Config, keys, kinds, read
from zero.trainer.models import GPT, GPTConfig
from zero.trainer.models.hf_config import HFConfig
from zero.trainer.option_files import CONF
from zero.trainer.planning import PaperWorld

OPTIONS = sorted(f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml"))
NEEDS = {
    "model=hf": ["model.path=gpt2"],
    "data=tokens": ["data.path=tokens.bin", "model.vocab=50304"],
    "data=chat": ["model=hf", "model.path=gpt2", "data.path=chats.jsonl"],
    **{f"experiment=sft_{kind}": ["model.path=gpt2", "data.path=chats.jsonl"] for kind in ("full", "lora", "qlora")},
    "experiment=pretrain": ["model.path=gpt2", "data.path=texts"],
    "experiment=long_context": ["model.path=gpt2", "data.path=texts"],
    "data=hf": ["data.path=texts", "data.tokenizer=tokenizer.json"],
}


@cache
def composed(*overrides: str) -> dict:
    return settings_in(compose(overrides))


def settled(*overrides: str) -> Config:
    return read(composed(*overrides))


def dotted(node: dict, prefix: str = "") -> set[str]:
    dotted_keys = set()
    for key, value in node.items():
        dotted_keys |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key}
    return dotted_keys


def test_the_composed_default_is_the_default_of_the_schema():
    assert settled() == Config()


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_builds(option):
    config = settled(option, *NEEDS.get(option, []))
    config = config.on(config.zero.sequence)
    precision, optimizer = build_precision(config), build_optimizer(config)
    if option != "schedule=lr_range":
        assert all(
            0 <= optimizer.groups[0](step).lr <= config.optim.lr for step in (1, 2, config.warmup + 1, config.steps)
        )
    with zero.empty():
        model = GPT(GPTConfig(width=8, layers=1, heads=2, seq=4))
    if config.precision.frozen != "compute":
        model.blocks.requires_grad_(False)
    ranks = config.zero.sequence
    plan = build_plan(config, model, PaperWorld(ranks, local_size=ranks, device="cpu"), room=NO_LIMIT)
    assert plan.precision == precision
    assert plan.facts.stage == zero.Stage(config.zero.stage)


@pytest.mark.parametrize("option", [option for option in OPTIONS if "experiment" not in option])
def test_a_composed_run_has_every_key(option):
    """So that each can be overridden, and `--cfg job` shows it."""
    config = settled(option, *NEEDS.get(option, []))
    assert dotted(composed(option, *NEEDS.get(option, []))) == dotted(config.plain())


@pytest.mark.parametrize("option", OPTIONS)
def test_no_yaml_repeats_a_declared_default(option):
    """A reader of a file of conf/ sees what it changes. `name` chooses the option."""
    group, name = option.split("=")
    given = yaml.safe_load((CONF / group / f"{name}.yaml").read_text()) or {}
    if group in ("experiment", "debug"):  # other sections may come from other options, which these stand above
        assert set(given) <= {"defaults", *Config().plain()}
        return
    kind = kinds(group).get(given.get("name"))
    declared = Config().plain()[group] if kind is None else kind.model_construct().model_dump(mode="json")
    assert [key for key in given if key != "name" and given[key] == declared[key]] == []


def test_the_default_run_names_options_only():
    given = yaml.safe_load((CONF / "config.yaml").read_text())
    assert set(given) == {"defaults", "ds_config", "hydra"}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("stage", range(4))
def test_an_offload_option_is_the_preset_of_its_name_at_every_stage(preset, stage):
    """A preset applies the kinds that exist at the stage; only infinity needs the last one."""
    overrides = (f"offload={preset}", f"zero.stage={stage}")
    if preset == "infinity" and stage < 3:
        with pytest.raises(ConfigError, match=r"offload=infinity keeps parameters on disk, which only zero.stage=3"):
            settled(*overrides)
        return
    sharded = {"parameters_sharded": stage == 3}
    assert settled(*overrides).offload == Offload(preset)
    kinds = Offload(preset).at(**sharded).kinds
    assert settled(*overrides).offload.at(**sharded).kinds == kinds
    assert stage == 3 or kinds[1] == "none"


@pytest.mark.parametrize("stage", range(3))
def test_parameters_explicitly_off_the_device_need_the_last_stage(stage):
    for preset in ("none", "cpu", "nvme"):
        with pytest.raises(ConfigError, match=r"offload.param=cpu keeps parameters on the host, which only"):
            settled(f"offload={preset}", "offload.param=cpu", f"zero.stage={stage}")
    assert settled("offload=infinity", "offload.param=none", f"zero.stage={stage}").offload.grad == "nvme"


def test_a_billion_is_a_billion():
    config = settled("experiment=offload_1b")
    assert config.model.parameters_numel == pytest.approx(1e9, rel=0.01)
    assert config.offload.kinds == Offload("infinity").kinds


def test_every_key_of_the_schema_is_in_some_composed_run():
    shown = set()
    for option in OPTIONS:
        shown |= dotted(composed(option, *NEEDS.get(option, [])))
    assert shown == set(keys())


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt_nano", 0.67), ("gpt_124m", 85), ("gpt_340m", 303), ("gpt_1b", 925)]
)
def test_a_model_is_as_large_as_its_name(name, millions):
    """Byte vocabularies have small tables: the names count the GPT-2 ones."""
    numel = settled(f"model={name}").model.parameters_numel
    assert numel / 1e6 == pytest.approx(millions, rel=0.05)


def test_a_choice_on_the_command_line_wins_over_an_experiment():
    config = settled("experiment=cpu_smoke", "data=text", "steps=7", "optim=sgd", "schedule=constant")
    assert (config.data.name, config.steps, config.optim.name) == ("text", 7, "sgd")
    assert settled("debug=tiny", "experiment=cpu_smoke").model.width == 32


def test_an_experiment_says_nothing_of_a_kind_that_was_not_chosen():
    """A toy's width means nothing to model=hf, nor gpt_1b's beta2 to SGD; what is left of them holds."""
    tiny = settled("debug=tiny", "model=hf", "model.path=gpt2")
    assert (tiny.steps, tiny.model) == (4, HFConfig(path="gpt2", seq=32))
    assert settled("experiment=gpt_1b", "optim=sgd").optim == optim.SgdSection(lr=2e-4, weight_decay=0.1, clip=1.0)


def test_conf_has_no_machine_in_it():
    for path in CONF.rglob("*.yaml"):
        assert "/home" not in path.read_text(), path
        assert path.read_text().startswith("#"), f"{path.relative_to(Path.cwd())} does not begin with its idea"
