"""The explanation of a setting is the schema's, and is complete."""

import copy
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.conftest import LONG_S
from zero.core.schema import walk
from zero.core.setting_types import Reads, words
from zero.errors import ConfigError
from zero.trainer.compose import compose, settings_in
from zero.trainer.config import Config, keys, read
from zero.trainer.explain import FIRST, LINE_WIDTH, explain, explanations, overview, sections
from zero.trainer.option_files import CONF

ROOT = Path(__file__).resolve().parents[2]
PARSER = OverridesParser.create()
ENTRIES = {entry.key: entry for entry in explanations()}


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(LINE_WIDTH))


@functools.cache
def composed(*options: str) -> dict:
    return settings_in(compose(options))


def test_every_key_is_an_entry_except_the_names_of_options():
    assert set(ENTRIES) == {key for key in keys() if not key.endswith(".name")}
    assert [entry.key for section in sections(CONF) for entry in section.entries if entry.key not in ENTRIES] == []
    assert sum(len(section.entries) for section in sections(CONF)) == len(ENTRIES)


@pytest.mark.parametrize("key", ENTRIES)
def test_a_key_is_explained_with_kind_default_and_example(key):
    told = explain(key, CONF)
    first, rest = told.split("\n", 1)
    assert first == key
    assert all(len(line) <= LINE_WIDTH for line in told.splitlines())
    assert re.search(r"^    takes    \S", rest, re.MULTILINE)
    assert re.search(r"^    default  \S", rest, re.MULTILINE)
    assert f"example python train.py {ENTRIES[key].example}" in " ".join(rest.split())


@pytest.mark.parametrize("key", ENTRIES)
def test_an_example_is_a_run_that_differs_from_the_default(key):
    example = ENTRIES[key].example
    assert f"{key}=" in example
    parsed = [PARSER.parse_override(text) for text in example.split()]
    options = [override.input_line for override in parsed if (CONF / override.key_or_group).is_dir()]
    raw = copy.deepcopy(composed(*options))
    for override in parsed:
        if override.input_line not in options:
            *above, last = override.key_or_group.split(".")
            functools.reduce(dict.__getitem__, above, raw)[last] = override.value()
    assert read(raw) != Config()


PATHS = ("a path", "a path, or null", "a path, a list of paths, or null", "text")
"""Types whose error says that it must be text."""


def test_the_words_of_a_kind_are_those_that_a_mistake_is_told():
    own = [declared for declared in walk(Config) if any(isinstance(note, Reads) for note in declared.field.metadata)]
    assert len(own) > 20
    for declared in own:
        raw = functools.reduce(lambda value, part: {part: value}, reversed(declared.name.split(".")), object())
        if "name" in declared.option.model_fields:
            raw[declared.name.partition(".")[0]]["name"] = declared.option.model_fields["name"].default
        with pytest.raises(ConfigError) as caught:
            read(raw)
        text = words(declared.field)
        assert f"must be {text}" in str(caught.value) or text in PATHS


def test_a_key_that_only_some_options_have_says_so():
    assert "only     with optim=muon" in explain("optim.adjust", CONF)
    assert "only     with optim=muon or sgd" in explain("optim.momentum", CONF)
    assert "only" not in explain("optim.lr", CONF)
    assert "0.001 (adamw, adam); 0.1 (sgd); 0.0003 (lion)" in explain("optim.lr", CONF)


def test_a_section_lists_its_options_and_keys():
    told = explain("offload", CONF)
    for option in (CONF / "offload").glob("*.yaml"):
        assert re.search(rf"^  {option.stem} ", told, re.MULTILINE)
    for key in keys():
        assert (f"\n  {key} " in told) == key.startswith("offload.")
    assert "precision.scale.window" in explain("precision.scale", CONF)
    assert "cpu_smoke" in explain("experiment", CONF)
    assert explain("optim.name", CONF) == explain("optim", CONF)


def test_without_a_key_the_sections_are_listed():
    told = explain(None, CONF)
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    for name in groups | {key.split(".")[0] for key in keys() if "." in key}:
        assert re.search(rf"^  {name} ", told, re.MULTILINE)
    assert "explain.key=" in told


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("zero.stge", "Did you mean zero.stage?"),
        ("offlod", "Did you mean offload?"),
        ("lr", "Did you mean optim.lr?"),
        ("optimizer.lr", "Did you mean optim.lr?"),
        ("learning_rate", "Did you mean optim.lr?"),
        ("page", "Did you mean offload.page?"),
        ("ranks", "Did you mean launch.ranks or plan.ranks?"),
        ("qqqq", "mode=explain lists the sections."),
    ],
)
def test_an_unknown_key_is_one_line_with_the_nearest(asked, said):
    with pytest.raises(ConfigError) as caught:
        explain(asked, CONF)
    assert str(caught.value) == f"explain.key={asked} is not a setting or a section. {said}"


@pytest.mark.parametrize("columns", [80, 300])
def test_every_answer_fits_the_terminal(columns, monkeypatch):
    whole = overview(CONF).split()
    monkeypatch.setenv("COLUMNS", str(columns))
    names = [None, *ENTRIES, *(section.name for section in sections(CONF) if section.name)]
    answers = [overview(CONF), *(explain(name, CONF) for name in names)]
    lines = [line for told in answers for line in told.splitlines()]
    assert max(map(len, lines)) <= min(columns, LINE_WIDTH)
    assert overview(CONF).split() == whole


def test_the_overview_fits_two_screens_and_names_every_option():
    told = overview(CONF)
    assert len(told.splitlines()) <= 60
    assert max(map(len, told.splitlines())) <= LINE_WIDTH
    rows = re.sub(r",\n +", ", ", told).splitlines()  # long lists of options are wrapped
    for option in CONF.glob("*/*.yaml"):
        row = next(line for line in rows if line.startswith(f"  {option.parent.name} "))
        assert option.stem in re.split(r",? +", row)
    assert set(FIRST) <= set(ENTRIES)
    defaults = [re.split(r",? +", line)[2] for line in told.splitlines() if re.match(r"  (optim|model|offload) ", line)]
    assert defaults == ["gpt_nano", "adamw", "none"]


def test_the_commands_of_the_overview_are_settings():
    for line in re.findall(r"^  python train.py((?: [a-z_.]+=[\w,]+)+) ", overview(CONF), re.MULTILINE):
        assert read(settings_in(compose(line.split())))


def test_the_reference_is_what_its_script_writes():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "config_reference"],
        capture_output=True, text=True, timeout=LONG_S, check=True,
    )  # fmt: skip
    assert (ROOT / "docs" / "config.md").read_text() == done.stdout, (
        "docs/config.md is old: scripts/config_reference > docs/config.md"
    )


UNITS = [
    "`plan.disk` (auto; bytes): Disk of one node for offload, such as 4TB",
    "`plan.ranks` (auto; processes): Ranks in all",
    "`precision.scale.hysteresis` (2; steps): Overflows before the scale halves",
    "`debug.replay` (0; steps): Make each step twice whose number is a multiple of this",
    "`model.rotary_base` (10000.0; 2 pi tokens): Longest rotary wavelength",
    "`val.every` (100): Steps between two validations; 0: only after the last step",
    "`val.rows` (64): Rows of model.seq tokens per validation",
    "`sample.tokens` (240): Length of the sample, in tokens; 0: none",
    "`launch.timeout` (300.0): Longest wait for another rank, in seconds",
    "`launch.threads` (auto): CPU threads per rank",
    "`precision.scale.window` (1000): Finite steps before the scale doubles",
    "`checkpoint.keep` (2): Newest valid checkpoints to keep, 2 or more",
    "`zero.bucket` (auto): Bytes of parameters up to which small units that follow each other are merged",
]


def test_the_reference_names_the_unit_of_a_setting_once_in_its_text_or_beside_the_default():
    lines = (ROOT / "docs" / "config.md").read_text().splitlines()
    assert [text for text in UNITS if sum(line.startswith(f"* {text}") for line in lines) != 1] == []
    units = {entry.key: entry.unit for entry in explanations() if entry.unit}
    assert len(units) > 30
    for line in lines:
        key, unit = re.match(r"(?:\* `([\w.]+)`)?", line)[1], None
        if unit := units.get(key):
            beside = f"; {unit}): " in line
            assert beside != (unit in line.partition("): ")[2].lower()), line


def test_an_answer_needs_no_torch():
    watch = (
        "import sys\nfrom pathlib import Path\nfrom zero.trainer.explain import explain, overview\n"
        f"explain('zero.stage', Path({str(CONF)!r})), overview(Path({str(CONF)!r}))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", watch], cwd=ROOT, timeout=LONG_S, check=True)
