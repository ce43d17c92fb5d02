"""The house: who may know whom. Each rule says why in its failure message."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zero"

# From the bottom up: a file may import from zero only what stands in an earlier line.
LAYERS = [
    ("arithmetic", "errors nested progress secret peak refusal schedule stage layout precision optim placement"),
    ("arithmetic", "order turns"),
    (
        "doors",
        "beside failure stalled written timeline device cuda world store.base store.memory store.files store.nvme",
    ),
    ("doors", "store.paging store.schedule store.traffic store.crew store.prefetch store.tiers store"),
    ("engine", "activation compiled unit meta absent functions copyable copied pool unit_state plan transfer gradient"),
    ("engine", "reduce update fetch residency recompute gather state weights initialise passes step full"),
    ("edges", "checkpoint.hashes checkpoint.manifest checkpoint.disk checkpoint.shard checkpoint.publish"),
    ("edges", "checkpoint.contents checkpoint.save checkpoint.load checkpoint"),
    ("edges", "exchange.stream exchange.hf exchange.pickled exchange.dcp exchange.deepspeed"),
    ("edges", "exchange.export exchange.converted exchange.adopt exchange.shown exchange"),
    ("edges", "data.order data.tokenizer data.source data.windows data.text data.tokens data.synthetic data.hf"),
    ("edges", "data"),
    ("edges", "models.gpt_config models.gpt models.hf_config models.hf models"),
    ("edges", "config.values config.sections config build task evaluate"),
    ("edges", "ds_config.keys ds_config.source ds_config"),
    ("edges", "planning.papers planning.machine planning.shapes planning.activations planning.cost planning.rates"),
    ("edges", "planning.measured planning.choices planning.exhausted planning.settle planning.table planning"),
    ("edges", "tracker.view tracker.behind tracker.jsonl tracker.console tracker.wandb tracker"),
    ("edges", "explain meter doctor watch launch.process launch.ending launch.board launch.request launch.ranks"),
    ("edges", "launch resumed saver training"),
    (
        "edges",
        "elsewhere interop.grads interop.optimizers interop.schedulers interop.classes interop.loader interop.plain",
    ),
    ("edges", "interop.precompiled interop.checkpoints interop.original interop.watched interop.whole interop.answers"),
    ("edges", "interop.accelerator interop.aside"),
    (
        "edges",
        "interop.saved interop.parameters interop.throughput interop.engine interop.begin interop",
    ),
    ("edges", "report.scale report.chart report.page report.folder report.run report.sweep report"),
    ("edges", "testing.threads testing.operators testing.races testing.streams testing.watching testing.simulated"),
    ("edges", "testing.processes testing.contract testing.faults testing.crash"),
    ("edges", "testing.damage testing"),
]
RANK = {name: place for place, name in enumerate(name for _, names in LAYERS for name in names.split())}
ARITHMETIC = LAYERS[0][1].split()
DOORS = LAYERS[1][1].split() + LAYERS[2][1].split()

FILES = sorted(PACKAGE.rglob("*.py"))
DEVICES = ("device.py", "cuda.py", "testing/simulated.py", "testing/operators.py")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> list[str]:
    """Every module that a file imports, deferred imports and those for types included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "zero":
            found += [f"zero.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


def zero_imports(path: Path) -> list[str]:
    return [name.removeprefix("zero.") for name in imports(path) if name.startswith("zero.")]


@pytest.mark.parametrize("path", [p for p in FILES if p != PACKAGE / "__init__.py"], ids=name_of)
def test_arrows_point_downward(path):
    name = name_of(path)
    assert name in RANK, f"zero/{name} is not in the table of layers: say which sentence describes it, then add it"
    for other in zero_imports(path):
        if (other + ".").startswith(f"{name}.") and path.name == "__init__.py":
            continue  # a family's front door shows what is inside
        assert RANK[other] < RANK[name], (
            f"zero/{name} imports zero/{other}, which stands above it: a file that knows its users cannot be read alone"
        )


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_touches_nothing_outside(name):
    found = imports(PACKAGE / f"{name}.py")
    outside = {"os", "time", "threading", "socket", "subprocess", "pathlib", "psutil", "torch.distributed"}
    assert not outside & set(found), (
        f"zero/{name} is arithmetic: no ranks, no files, no clock, so that it needs no mock"
    )
    assert not set(DOORS) & set(zero_imports(PACKAGE / f"{name}.py")), f"zero/{name} is arithmetic and opens no door"


@pytest.mark.parametrize(
    ("module", "allowed", "why"),
    [
        (r"hydra|omegaconf", set(), "the library works without Hydra"),
        (r"wandb", {"tracker.wandb"}, "one file talks to W&B"),
        (
            r"torch\.distributed(?!\.(elastic|launcher|checkpoint))",
            {"world", "testing.processes"},
            "one file talks to ranks",
        ),
        (r"torch\.distributed\.(elastic|launcher)", {"launch.ranks"}, "one file starts ranks"),
        (r"torch\.distributed\.checkpoint", {"exchange.dcp"}, "one file knows DCP"),
        (r"numpy|jax|deepspeed", set(), "torch is enough"),
    ],
)
def test_one_file_owns_each_outside_thing(module, allowed, why):
    users = {name_of(path) for path in FILES for name in imports(path) if re.match(rf"({module})(\.|$)", name)}
    assert users <= allowed, f"{module} is imported in {sorted(users - allowed)}: {why}"


@pytest.mark.parametrize("name", [name for name in RANK if name.startswith("store")])
def test_a_store_knows_keys_and_bytes(name):
    path = PACKAGE / (name.replace(".", "/") + ".py")
    path = path if path.exists() else PACKAGE / name / "__init__.py"
    known = [other for other in zero_imports(path) if not other.startswith(("store", "errors", "beside"))]
    assert not known, f"zero/{name} imports {known}: a store does not know what its pages mean"


def test_the_optimizer_does_not_know_where_its_moments_sleep():
    assert not {"store", "world", "device"} & set(zero_imports(PACKAGE / "optim.py"))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_stage_is_three_booleans(path):
    if name_of(path) in ("stage", "config.values", "config.sections", "config", "refusal"):
        return
    text = path.read_text()
    asked = re.findall(r"(?:level|stage)\s*(?:==|>=|<=|!=|>|<|in)\s*[\[({]?\d", text)
    assert not asked, f"{asked}: ask stage.moments, .gradients or .parameters; only stage.py knows the numbers"


def test_threads_that_may_be_inside_torch_are_waited_for():
    without_torch = {"beside", "failure", "watch", "device", "store.nvme", "checkpoint.load"}
    without_torch |= {"launch.request", "launch.ranks"}
    users = {name_of(path) for path in FILES if re.search(r"\bThread[()]", path.read_text())}
    own = {name for name in users - without_torch if not name.startswith("testing.")}
    assert not own, f"{sorted(own)} starts a thread: a zero.beside.Beside does not abort the process when Python ends"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_asked_by_hasattr(path):
    assert "hasattr(" not in path.read_text(), "decide once from data, then act"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_module_holds_mutable_state(path):
    for node in ast.parse(path.read_text()).body:
        value = getattr(node, "value", None)
        names = [t.id for t in getattr(node, "targets", [getattr(node, "target", None)]) if isinstance(t, ast.Name)]
        if isinstance(value, ast.List | ast.Dict | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
            constant = all(name.strip("_").isupper() or name == "__all__" for name in names)
            assert constant, f"{names} in zero/{name_of(path)} is module state: pass it as an argument"


@pytest.mark.parametrize("path", [*FILES, ROOT / "train.py"], ids=str)
def test_one_word_for_each_thing(path):
    others = ["partition", "swap", "manager", "helper", "utils", "swapper", "engine_"]
    names = {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    } | {path.stem}
    used = [name for name in names if any(word in name.lower() for word in others)]
    assert not used, f"{used}: see the vocabulary in ARCHITECTURE.md"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_begins_with_its_idea(path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"zero/{name_of(path)} does not say what it is"


def test_the_top_level_is_what_the_readme_says():
    import subprocess

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    allowed = {"zero", "conf", "train.py", "tests", "scripts", "docs", "pyproject.toml", "README.md", "ARCHITECTURE.md"}
    allowed |= {"CHANGELOG.md", "LICENSE", ".ci", ".gitignore", ".pre-commit-config.yaml"}
    assert top <= allowed


def test_public_names_tell_the_story():
    import zero

    assert set(zero.__all__) == set(zero._HOME)
    for name in zero.__all__:
        assert getattr(zero, name).__doc__, f"zero.{name} has no docstring"


ASKED_OF_THE_DOOR = re.compile(
    r"\bdevice\.type\b|\bis_cuda\b(?!\")|torch\.cuda\.(Stream|Event|stream|synchronize|mem_get_info)\b"
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_what_the_device_is_only_its_doors_know(file):
    """Streams, events and what a decision depends on are asked of `Device`, which a simulated GPU can stand for."""
    if file.relative_to(PACKAGE).as_posix() not in DEVICES:
        found = [line.strip() for line in file.read_text().splitlines() if ASKED_OF_THE_DOOR.search(line)]
        assert not found, "ask zero.device.Device instead"
