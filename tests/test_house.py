"""The house: who may know whom. Each rule says why in its failure message."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zero"

# From the bottom up: what is in a room imports only from rooms below it, and from its own.
ROOMS = [
    "errors",
    "progress",
    "renamed",
    "core",
    "losses",
    "platform",
    "distributed",
    "store",
    "engine",
    "checkpoint",
    "formats",
    "testing",
    "tracker",
    "settings",
    "deepspeed",
    "integrations",
    "trainer",
    "__main__",
]
FILES = sorted(PACKAGE.rglob("*.py"))
DEVICES = ("platform/device.py", "platform/cuda.py", "testing/simulated_gpu.py", "testing/operators.py")


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


def room_of(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("path", [p for p in FILES if p != PACKAGE / "__init__.py"], ids=name_of)
def test_arrows_point_downward(path):
    name = name_of(path)
    assert room_of(name) in ROOMS, (
        f"zero/{room_of(name)} is no room of the house: say in ARCHITECTURE.md what it is for"
    )
    for other in zero_imports(path):
        assert ROOMS.index(room_of(other)) <= ROOMS.index(room_of(name)), (
            f"zero/{name} imports zero/{other}, which stands above it: a file that knows its users cannot be read alone"
        )


def test_no_import_goes_in_a_circle():
    """Not within a room either. A folder's own list of names may show what is inside."""
    graph = {
        name_of(path): {other for other in zero_imports(path) if other != name_of(path)}
        for path in FILES
        if path.name != "__init__.py"
    }
    order = list(TopologicalSorter({name: others & set(graph) for name, others in graph.items()}).static_order())
    assert len(order) == len(graph)


def test_every_folder_is_in_the_wheel():
    import tomllib

    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in FILES}
    assert set(packages) == folders | {"zero.application"}, "see packages in pyproject.toml"


def test_train_py_can_be_read_aloud():
    lines = (ROOT / "train.py").read_text().splitlines()
    assert len(lines) <= 100
    assert any("step(state, run.microbatches(number))" in line for line in lines)


def test_tests_stand_where_the_code_stands():
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert folders - {"common", "faults"} <= set(ROOMS)


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").glob("*.py")), ids=name_of)
def test_arithmetic_touches_nothing_outside(path):
    outside = {"os", "time", "threading", "socket", "subprocess", "pathlib", "psutil", "torch.distributed"}
    assert not outside & set(imports(path)), (
        f"zero/{name_of(path)} is arithmetic: no ranks, no files, no clock, so that it needs no mock"
    )


@pytest.mark.parametrize(
    ("module", "allowed", "why"),
    [
        (r"hydra|omegaconf", {"trainer.compose"}, "one file talks to Hydra"),
        (r"rich", {"platform.rich"}, "importing it draws from the user's generator, and one file undoes that"),
        (r"wandb", {"tracker.wandb"}, "one file talks to W&B"),
        (r"tensorboard|torch\.utils\.tensorboard", {"tracker.tensorboard"}, "one file talks to TensorBoard"),
        (
            r"torch\.distributed(?!\.(elastic|launcher|checkpoint))",
            {"distributed.world", "testing.processes"},
            "one file talks to ranks",
        ),
        (r"torch\.distributed\.(elastic|launcher)", {"trainer.launch.ranks"}, "one file starts ranks"),
        (r"torch\.distributed\.checkpoint", {"formats.dcp"}, "one file knows DCP"),
        (r"numpy|jax|deepspeed", set(), "torch is enough"),
    ],
)
def test_one_file_owns_each_outside_thing(module, allowed, why):
    users = {name_of(path) for path in FILES for name in imports(path) if re.match(rf"({module})(\.|$)", name)}
    assert users <= allowed, f"{module} is imported in {sorted(users - allowed)}: {why}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "store").glob("*.py")), ids=name_of)
def test_a_store_knows_keys_and_bytes(path):
    below = ("store", "errors", "core.sizes", "platform.files", "platform.handle", "platform.threads")
    known = [other for other in zero_imports(path) if not other.startswith(below)]
    assert not known, f"zero/{name_of(path)} imports {known}: a store does not know what its pages mean"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_stage_is_three_booleans(path):
    if name_of(path) in (
        "core.stage",
        "core.settings",
        "settings.sections",
        "trainer.config",
        "core.schema",
    ):
        return
    text = path.read_text()
    asked = re.findall(r"(?:level|stage)\s*(?:==|>=|<=|!=|>|<|in)\s*[\[({]?\d", text)
    assert not asked, f"{asked}: ask stage.moments, .gradients or .parameters; only stage.py knows the numbers"


def test_threads_that_may_be_inside_torch_are_waited_for():
    without_torch = {"platform.threads", "distributed.failure", "platform.memory_watch", "platform.device"}
    without_torch |= {"store.nvme", "checkpoint.open", "trainer.launch.request", "trainer.launch.ranks"}
    users = {name_of(path) for path in FILES if re.search(r"\bThread[()]", path.read_text())}
    own = {name for name in users - without_torch if not name.startswith("testing.")}
    assert not own, (
        f"{sorted(own)} starts a thread: a zero.platform.threads.Beside does not abort the process when Python ends"
    )


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


@pytest.mark.parametrize("path", [path for path in FILES if room_of(name_of(path)) != "trainer"], ids=name_of)
def test_a_library_advises_nothing_that_only_a_checkout_has(path):
    """What `trainer` prints goes through `as_called`; an error of the library is seen as it was written."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    texts = [node.value for node in texts if id(node) not in alone]
    found = [text for text in texts if re.search(r"\bscripts/|\bdocs/|\btrain\.py\b", text)]
    if name_of(path) not in ("platform.installed", "core.suggest"):  # the place that knows, and a command for it
        assert not found, "say `zero-train export`, and zero.platform.installed.page() for a page"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_rest_of_the_arguments_has_an_entry_of_its_own(path):
    """The site looks the name of each entry up in the signature, and `args, kwargs` is not there."""
    for node in ast.walk(ast.parse(path.read_text())):
        made = node.body if isinstance(node, ast.ClassDef) else [node]  # a class documents its __init__
        for function in made:
            if isinstance(function, ast.FunctionDef) and (function is node or function.name == "__init__"):
                groups = re.findall(r"^ +(\w+(?:, \w+)+): ", ast.get_docstring(node, clean=False) or "", re.MULTILINE)
                rest = {one.arg for one in (function.args.vararg, function.args.kwarg) if one is not None}
                found = [group for group in groups if rest & set(group.split(", "))]
                assert not found, f"{node.name}: one entry for each, with its stars"


def test_the_top_level_is_what_the_readme_says():
    import subprocess

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    allowed = {"zero", "conf", "train.py", "tests", "scripts", "docs", "pyproject.toml", "README.md", "ARCHITECTURE.md"}
    allowed |= {"CHANGELOG.md", "LICENSE", ".ci", ".github", ".gitignore", ".pre-commit-config.yaml"}
    allowed |= {"benchmarks", "examples", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "mkdocs.yml"}
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
        assert not found, "ask zero.platform.device.Device instead"
