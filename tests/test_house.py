"""The rules of the house: which file may import which, and how files are written. Each rule gives its reason."""

import ast
import pkgutil
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import zero

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zero"

# From the bottom up: what is in a room imports only from rooms below it, and from its own.
ROOMS = [
    "errors",
    "progress",
    "core",
    "losses",
    "platform",
    "distributed",
    "attention",
    "sequence",
    "store",
    "engine",
    "checkpoint",
    "formats",
    "testing",
    "tracker",
    "settings",
    "user_loop",
    "deepspeed",
    "integrations",
    "trainer",
    "__main__",
]
MOST_FILES = 12
"""The limit of the files in a room of the engine, besides its `__init__`."""

MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_ARGUMENTS = 350, 60, 10
MOST_METHODS, MOST_ATTRIBUTES = 20, 15
"""The limits of a file, a function and a class."""

DEFENDED = {
    "engine.plan.plan __init__",
    "integrations.lightning __init__",
    "platform.device Device",
    "platform.tiles update",
}
"""Classes and functions beyond the limits. ARCHITECTURE.md says why."""

SHARED_NAMES = {
    "main arguments": r"__main__|trainer\.(cli|commands\.\w+)",
    "read write": r"formats\.\w+",
    "tile": r"core\.formats\.\w+",
    "loss": r"trainer\.models\.\w+",
    "Accelerator": r"deepspeed\.accelerator|integrations\.accelerate",
    "GATHER SUM": r"distributed\.routes\.\w+",
}
"""Names that several files have, because their callers choose a file: a command, a format, a model or a route."""

FILES = sorted(PACKAGE.rglob("*.py"))
PROGRAMS = [
    path
    for folder in ("benchmarks", "scripts", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix == ".py" or (path.is_file() and b"python" in path.read_bytes()[:32].split(b"\n")[0])
]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def room_of(path: Path) -> str:
    return name_of(path).split(".")[0]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> list[str]:
    """Return every module that a file imports, deferred imports and those for types included."""
    modules = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "zero":
            modules += [f"zero.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
    return modules


def zero_imports(path: Path) -> list[str]:
    return [name.removeprefix("zero.") for name in imports(path) if name.startswith("zero.")]


def docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the texts that stand alone in the body of a module, class or function: also those of attributes."""
    for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            yield str(statement.value.value)


def test_arrows_point_downward():
    upward = []
    for path in set(FILES) - {PACKAGE / "__init__.py"}:
        assert room_of(path) in ROOMS, f"zero/{room_of(path)} is no room: say in ARCHITECTURE.md what it is for"
        height = ROOMS.index(room_of(path))
        upward += [(name_of(path), other) for other in zero_imports(path) if ROOMS.index(other.split(".")[0]) > height]
    assert not upward, "a file that knows its users cannot be read alone"


def test_no_import_goes_in_a_circle():
    """The rule holds within a room, too. A folder's `__init__` may show what is inside."""
    graph = {name_of(path): {*zero_imports(path)} - {name_of(path)} for path in FILES if path.name != "__init__.py"}
    assert [*TopologicalSorter({name: others & set(graph) for name, others in graph.items()}).static_order()]


def test_rooms_of_the_engine_are_entered_by_their_doors():
    """A room's `__init__` hands on all that others may use. So a room never needs one that needs it."""
    rooms = [path.name for path in sorted((PACKAGE / "engine").iterdir()) if (path / "__init__.py").is_file()]
    inside = re.compile(rf"engine\.({'|'.join(rooms)})\.")
    around = [
        (name_of(path), other)
        for path in FILES
        for other in zero_imports(path)
        if (room := inside.match(other)) and not name_of(path).startswith(room[0].rstrip("."))
    ]
    assert not around, "import from the room, and let its __init__ hand on what others may use"
    for room in rooms:
        files = [*(PACKAGE / "engine" / room).glob("*.py")]
        assert len(files) - 1 <= MOST_FILES, f"zero/engine/{room} has {len(files) - 1} files: make two rooms of it"


def functions_of(node: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]


def beyond_limits(path: Path) -> Iterator[str]:
    """Yield what is too large in a file: its lines, or a class or function of it."""
    lines = len(path.read_text().splitlines())
    if lines > MOST_LINES:
        yield f"file has {lines} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            stored = {
                target.attr
                for target in ast.walk(node)
                if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
                if isinstance(target.value, ast.Name) and target.value.id == "self"
            }
            if len(methods := functions_of(node)) > MOST_METHODS or len(stored) > MOST_ATTRIBUTES:
                yield f"{node.name} has {len(methods)} methods and {len(stored)} attributes"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False) or ""
            length = (node.end_lineno or 0) - node.lineno + 1 - bool(text) * (text.count("\n") + 1)
            arguments = [*node.args.posonlyargs, *node.args.args]
            arguments += node.args.kwonlyargs if node.name.startswith("_") else []  # keywords of public ones are free
            if length > MOST_LINES_OF_A_FUNCTION or len(arguments) > MOST_ARGUMENTS:
                yield f"{node.name} has {length} lines and {len(arguments)} arguments"


def test_files_classes_and_functions_keep_the_limits():
    """Anything larger has several ideas: cut it where both halves can be understood alone."""
    beyond = {f"{name_of(path)} {large}" for path in FILES for large in beyond_limits(path)}
    named = {what for what in beyond if " ".join(what.split()[:2]) in DEFENDED}
    assert beyond == named, "a file has at most 350 lines, a class 20 methods and 15 attributes, a function 60 lines"
    assert {" ".join(what.split()[:2]) for what in named} == DEFENDED, "these keep the limits: strike them out"


def test_every_folder_is_in_the_wheel():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in FILES}
    assert set(packages) == folders | {"zero.application"}, "see packages in pyproject.toml"


def test_every_mutant_names_one_place_in_the_code():
    mutants = tomllib.loads((ROOT / "benchmarks" / "mutants.toml").read_text())
    counts = {name: (ROOT / mutant["file"]).read_text().count(mutant["old"]) for name, mutant in mutants.items()}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_train_py_can_be_read_aloud():
    lines = (ROOT / "train.py").read_text().splitlines()
    assert len(lines) <= 100
    assert any("step(state, run.microbatches())" in line for line in lines)


def test_tests_stand_where_the_code_stands():
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert folders - {"common", "faults", "simulation"} <= set(ROOMS)


def test_arithmetic_touches_nothing_outside():
    outside = {"os", "time", "threading", "socket", "subprocess", "pathlib", "psutil", "torch.distributed"}
    users = {name_of(path): outside & {*imports(path)} for path in FILES if room_of(path) == "core"}
    expands_paths = PACKAGE / "core" / "setting_types.py"  # a path is expanded where it is read
    if re.findall(r"\bos\.[\w.]+", expands_paths.read_text()) == ["os.path.expanduser"]:
        users[name_of(expands_paths)] -= {"os"}
    assert not any(users.values()), "core is arithmetic: no ranks, no files, no clock, so that it needs no mock"


@pytest.mark.parametrize(
    ("module", "allowed", "why"),
    [
        (r"hydra|omegaconf", {"trainer.compose"}, "one file talks to Hydra"),
        (r"rich", {"platform.rich"}, "importing it draws from the user's generator, and one file undoes that"),
        (r"wandb", {"tracker.views.wandb"}, "one file talks to W&B"),
        (r"tensorboard|torch\.utils\.tensorboard", {"tracker.views.tensorboard"}, "one file talks to TensorBoard"),
        (
            r"torch\.distributed(?!\.checkpoint)",
            {
                "distributed.mesh",
                "distributed.operations",
                "distributed.process_group",
                "distributed.rendezvous",
                "testing.processes",
                "deepspeed.comm",
                "trainer.launch.ranks",
            },
            "few files talk to ranks",  # deepspeed.comm is torch's module, by another name
        ),
        (r"torch\.distributed\.checkpoint", {"formats.dcp"}, "one file knows DCP"),
        (r"numpy|jax|deepspeed", set(), "torch is enough"),
    ],
)
def test_one_file_owns_each_outside_thing(module, allowed, why):
    users = {name_of(path) for path in FILES for name in imports(path) if re.match(rf"({module})(\.|$)", name)}
    assert users <= allowed, f"{module} is imported in {sorted(users - allowed)}: {why}"


def test_a_store_knows_keys_and_bytes():
    below = (
        "store",
        "errors",
        "progress",
        "core.sizes",
        "platform.files",
        "platform.scratch_file",
        "platform.handle",
        "platform.threads",
    )
    pairs = [(name_of(path), other) for path in FILES if room_of(path) == "store" for other in zero_imports(path)]
    assert not [pair for pair in pairs if not pair[1].startswith(below)], "a store does not know what its pages mean"


def test_a_report_is_made_from_the_files_of_runs_alone():
    graph = {name_of(path): zero_imports(path) for path in FILES}
    needed, waiting = set(), [name for name in graph if name.startswith("tracker.report")]
    while waiting:
        if (name := waiting.pop()) not in needed:
            needed.add(name)
            waiting += graph.get(name, [])
    rooms = {name.split(".")[0] for name in needed}
    assert rooms <= {"errors", "progress", "core", "platform", "tracker"}, "a report needs neither engine nor ranks"


def test_the_code_of_a_step_asks_for_facts_and_for_no_stage_or_tier():
    planning = {
        f"engine.plan.{name}"
        for name in ("facts", "handshake", "held", "page_table", "placing", "plan", "settings", "traffic")
    }
    planning |= {"engine.init", "engine.lower", "engine.move", "engine.pressure", "engine.whole.measured"}
    asks = re.compile(r"\bstage\.(?:moments|gradients|parameters)\b|\b(?:param|grad)_tier\b|\.placement\b")
    users = {name_of(path) for path in FILES if room_of(path) == "engine" and asks.search(path.read_text())}
    assert users <= planning, "ARCHITECTURE.md, One step: add a fact to zero.engine.plan.facts"


def test_threads_that_may_be_inside_torch_are_waited_for():
    without_torch = {
        "platform.threads",
        "distributed.failure",
        "store.nvme",
        "checkpoint.open",
        "trainer.launch.request",
    }
    users = {name_of(path) for path in FILES if re.search(r"\bThread[()]", path.read_text())}
    others = {name for name in users - without_torch if not name.startswith("testing.")}
    assert not others, (
        f"{sorted(others)} starts a thread: a BackgroundThread does not abort the process when Python ends"
    )


@pytest.mark.parametrize(
    ("pattern", "exempt", "why"),
    [
        (
            r"(?:level|stage)\s*(?:==|>=|<=|!=|>|<|in)\s*[\[({]?\d",
            ("core.stage",),
            "ask stage.moments, .gradients or .parameters; only core/stage.py knows the numbers",
        ),
        (r"hasattr\(", (), "decide once from data, then act"),
        (
            r"(==|!=|\bin) ?[\[({]?[\"'](keep|selective|remat|offload)\b|\b(selective|remat|offload)[\"'] (not )?in\b",
            (),
            "ask the record of a policy of activations, see core/activations",
        ),
        (
            r"\bdevice\.type\b|\bis_cuda\b(?!\")|torch\.cuda\.(Stream|Event|stream|synchronize|mem_get_info)\b",
            ("platform.device", "platform.host_memory", "platform.cuda"),
            "ask zero.platform.device.Device, which a simulated GPU can stand for",
        ),
    ],
)
def test_no_file_decides_for_itself(pattern, exempt, why):
    users = [(name_of(path), re.findall(pattern, path.read_text())) for path in FILES if name_of(path) not in exempt]
    assert not [user for user in users if user[1]], why


def test_no_module_holds_mutable_state():
    for path in FILES:
        for node in tree_of(path).body:
            value = getattr(node, "value", None)
            names = [t.id for t in getattr(node, "targets", [getattr(node, "target", None)]) if isinstance(t, ast.Name)]
            if isinstance(value, ast.List | ast.Dict | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
                constant = all(name.strip("_").isupper() or name == "__all__" for name in names)
                assert constant, f"{names} in zero/{name_of(path)} is module state: pass it as an argument"


def test_one_word_for_each_thing():
    others = ["partition", "swap", "manager", "helper", "utils", "swapper", "engine_"]
    of_deepspeed = {"deepspeed", "user_loop.settings"}  # scripts for DeepSpeed use their names
    ours = [path for path in FILES if not {room_of(path), name_of(path)} & of_deepspeed]
    names = {
        node.name
        for path in (*ours, ROOT / "train.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    } | {path.stem for path in ours}
    used = [name for name in names if any(word in name.lower() for word in others)]
    assert not used, f"{used}: see the vocabulary in ARCHITECTURE.md"


def public_names(path: Path) -> Iterator[str]:
    """Yield the public functions and classes of a file, and its constants and types that begin with a capital."""
    for node in tree_of(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stored = (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
            names = [part.id for part in stored if part.id[0].isupper()]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def test_every_public_name_has_one_home():
    """A reader who meets a name searches for it, and a name with two homes has two meanings."""
    homes: dict[str, set[str]] = {}
    for path in FILES:
        for name in public_names(path):
            homes.setdefault(name, set()).add(name_of(path))
    shapes = {name: shape for names, shape in SHARED_NAMES.items() for name in names.split()}
    several = {
        name: sorted(files)
        for name, files in homes.items()
        if len(files) > 1 and not all(re.fullmatch(shapes.get(name, ""), file) for file in files)
    }
    assert not several, "name a thing after what sets it apart, or import it from its one home"


def test_a_file_begins_with_its_idea():
    silent = [name_of(path) for path in FILES if not ast.get_docstring(tree_of(path))]
    assert not silent, "the first line of a file says what it is"


def test_docstrings_and_names_are_plain():
    headless = re.compile(r"\s*(What|Those|Whoever|That|Which|Where|It)\b(?!')")
    broken = {}
    for path in (*FILES, *PROGRAMS, *TESTS):
        nodes = list(ast.walk(tree_of(path)))
        lines = [text.strip().split("\n")[0] for node in nodes for text in docstrings(node) if headless.match(text)]
        names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        if lines or names & {"one", "found"}:
            broken[str(path.relative_to(ROOT))] = [*lines, *(names & {"one", "found"})]
    assert not broken, (
        "begin a function's docstring with a verb and any other with a noun, not with a headless clause, and name a "
        "binding after what it holds, not `one` or `found`"
    )


def test_a_library_advises_nothing_that_only_a_checkout_has():
    """The output of `trainer` goes through `as_called`; an error of the library is seen as it was written."""
    advice = []
    for path in FILES:
        if room_of(path) == "trainer" or name_of(path) in ("platform.installed", "core.suggest"):
            continue
        nodes = list(ast.walk(tree_of(path)))
        alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in alone]
        advice += [text for text in texts if re.search(r"\bscripts/|\bdocs/|\btrain\.py\b", str(text))]
    assert not advice, "say `zero-train export`, and zero.platform.installed.docs_page() for a page"


def test_the_rest_of_the_arguments_has_an_entry_of_its_own():
    """The site looks the name of each entry up in the signature, and `args, kwargs` is not there."""
    for node in (node for path in FILES for node in ast.walk(tree_of(path))):
        made = node.body if isinstance(node, ast.ClassDef) else [node]  # a class documents its __init__
        for function in made:
            if isinstance(function, ast.FunctionDef) and (function is node or function.name == "__init__"):
                groups = re.findall(r"^ +(\w+(?:, \w+)+): ", ast.get_docstring(node, clean=False) or "", re.MULTILINE)
                rest = {arg.arg for arg in (function.args.vararg, function.args.kwarg) if arg is not None}
                assert not [group for group in groups if rest & {*group.split(", ")}], f"{node.name}: an entry for each"


def test_the_top_level_is_what_the_readme_says():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    allowed = {"zero", "conf", "train.py", "tests", "scripts", "benchmarks", "docs", "pyproject.toml", "README.md"}
    allowed |= {"ARCHITECTURE.md", "CHANGELOG.md", "LICENSE", ".ci", ".github", ".gitignore", ".pre-commit-config.yaml"}
    allowed |= {"CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "mkdocs.yml", "examples"}
    assert {line.split("/")[0] for line in listed.stdout.splitlines()} <= allowed


def test_public_names_tell_the_story():
    assert set(zero.__all__) == set(zero._HOME)
    for name in zero.__all__:
        assert getattr(zero, name).__doc__, f"zero.{name} has no docstring"


def test_the_python_reference_has_what_the_other_pages_call():
    text = (ROOT / "docs" / "api.md").read_text()
    entries = dict(re.findall(r"^::: ([\w.]+)\n((?:    .*\n)*)", text, re.MULTILINE))
    formats = [f"zero.formats.{name}" for name in ("export_checkpoint", "open_newest", "from_bitsandbytes")]
    assert entries.keys() >= {*formats, "zero.trainer.models.hf.build", "zero.trainer.models.hf.weights"}
    members = re.search(r"members: \[(.*)\]", entries["zero.World"])
    assert members is not None
    assert {"from_mesh", "from_group", "barrier", "all_reduce"} <= {*members[1].split(", ")}
    assert all(pkgutil.resolve_name(name) for name in entries if ".integrations." not in name), "these are optional"


def test_a_step_is_understood_from_a_few_files_that_name_no_feature():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    order = text[text.index("From these files, in this order") : text.index("## One step")]
    folder, files = PACKAGE, list[Path]()
    for name in re.findall(r"`([\w/]+\.py)`", order):
        path = PACKAGE / name if "/" in name else folder / name
        folder = path.parent
        files.append(path)
    assert 12 <= len(files) <= 15
    assert sum(len(path.read_text().splitlines()) for path in files) <= 3500
    features = re.compile(
        r"\b(muon|adamw?|adagrad|lion|sgd|replay|stream_weights|sequence_parallel|device_mesh|ema|deepspeed|codes|nf4)\b",
        re.I,
    )
    named = {name_of(path): words for path in files if (words := features.findall(path.read_text()))}
    assert not named, "a feature has a record and a hook, so that a step is read without it"
