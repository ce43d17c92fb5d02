"""The site and its notebook can be built and run, and the pages agree with the code."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import zero
from tests.common.browser import DARK, LIGHT, needs_chromium, shown
from tests.conftest import LONG_S

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)}: pip install -e '.[docs]'")


# -- the site ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The anchors, links and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(path.read_text())

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and tag != "link":
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. `--strict` makes an error of each warning: a link without a target, an unknown name."""
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", target],
        cwd=ROOT, capture_output=True, text=True, timeout=LONG_S, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return target


BUILT = needs("mkdocs", "material", "mkdocstrings_handlers", "nbconvert")


@BUILT
def test_every_link_of_the_site_leads_somewhere(site: Path):
    pages = {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 18
    for name, page in pages.items():
        for link in page.links:
            path, _, anchor = link.partition("#")
            if name == "404.html" or re.match(r"[a-z]+:", link):
                continue
            target = os.path.normpath(Path(name).parent / path) if path else name
            assert (site / target).exists(), f"{name}: {link}"
            assert not anchor or target not in pages or anchor in pages[target].anchors, f"{name}: {link}"


@BUILT
@needs_chromium
@pytest.mark.parametrize("scheme", [DARK, LIGHT], ids=["dark", "light"])
def test_nothing_of_the_site_is_cut_in_a_narrow_or_a_wide_window(site: Path, tmp_path: Path, scheme: str):
    names = {
        DARK: ["index", "tutorial", "own-loop", "config", "api"],
        LIGHT: ["coming-from-deepspeed", "benchmarks", "concepts"],
    }
    pages = [site / f"{name}.html" for name in names[scheme]]
    for seen in shown(pages, scheme, tmp_path, roots=[".md-content"]):
        assert (seen.scrolls, seen.cut, seen.split, seen.pale) == (0, [], [], []), seen
        assert (seen.paper == "rgb(255, 255, 255)") is (scheme == LIGHT)


@BUILT
def test_the_reference_has_every_public_name_with_its_docstring(site: Path):
    page = Page(site / "api.html")
    assert {f"zero.{name}" for name in zero.__all__} <= page.anchors
    for name in zero.__all__:
        first = getattr(zero, name).__doc__.split("\n\n")[0].replace("`", "")
        assert " ".join(first.split()) in page.text, name


@BUILT
def test_the_site_begins_with_the_readme(site: Path):
    assert "sharded data" in Page(site / "index.html").text
    assert "the same losses: True" in (site / "tutorial.html").read_text(), "the notebook with its outputs"


@BUILT
def test_the_site_has_deepspeeds_keys(site: Path):
    text = Page(site / "deepspeed-keys.html").text
    assert "zero_optimization.stage zero.stage" in text
    assert ".overlap_comm" in text


def test_every_public_name_is_in_the_reference():
    named = re.findall(r"^::: zero\.(\w+)$", (DOCS / "api.md").read_text(), flags=re.M)
    assert sorted(set(zero.__all__) - set(named)) == [], "give it a place in docs/api.md"
    assert len(named) == len(set(named))


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {path.name for path in DOCS.glob("*.md")} <= named


# -- the notebook ------------------------------------------------------------------------------------------------------


def printed(path: Path) -> list[str]:
    """Return the output of each cell, with # for each number, without text samples, which differ between machines."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run from top to bottom"
    outputs = [cell["outputs"] for cell in cells if "varies" not in cell["metadata"].get("tags", ())]
    texts = [[output.get("text") or output["data"]["text/plain"] for output in parts] for parts in outputs]
    return [re.sub(r"\d+(\.\d+)?", "#", "".join("".join(text) for text in parts)) for parts in texts]


@pytest.mark.slow
@needs("nbclient", "nbformat", "ipykernel")
def test_the_tutorial_runs_and_prints_what_it_shows(tmp_path: Path):
    target = tmp_path / "run.ipynb"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "tutorial", target],
        cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert printed(target) == printed(DOCS / "tutorial.ipynb"), "scripts/tutorial writes what it prints now"
    text = target.read_text()
    assert "the same losses: True" in text
    losses = [float(number) for number in re.findall(r"step +\d+  loss ([\d.]+)", text)]
    assert losses[-1] < losses[0] / 3


# -- what the pages say ------------------------------------------------------------------------------------------------


EXIT_CODES = ("getting-started.md", "troubleshooting.md")
"""Pages with a table of them."""


def test_every_message_in_troubleshooting_is_one_of_the_code():
    """Compare 70 % of each message with the package's texts; the rest is names, and numbers do not count."""
    texts = set[str]()
    for path in sorted((ROOT / "zero").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    code = "\0".join(texts)
    quoted = re.findall(r"^> (.+)$", (DOCS / "troubleshooting.md").read_text(), flags=re.M)
    assert len(quoted) > 20
    for message in quoted:
        words = [
            at for word in re.finditer(r"\S+", message) if not re.search(r"\d", word[0]) for at in range(*word.span())
        ]
        starts = [start for start in range(len(message) - 7) if message[start : start + 8] in code]
        covered = {at for start in starts for at in range(start, start + 8)}
        assert len(covered.intersection(words)) > 0.7 * len(words), message


def test_the_exit_codes_in_troubleshooting_are_those_of_the_errors():
    from zero import errors

    rows = re.findall(r"^\| (\d+) \|", (DOCS / "troubleshooting.md").read_text(), flags=re.M)
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    codes = {error.exit_code for error in classes if issubclass(error, errors.ZeroError)}
    assert {int(row) for row in rows} == codes
    for_one = [re.findall(r"^\| 1 \|.*", (DOCS / page).read_text(), flags=re.M) for page in EXIT_CODES]
    assert for_one[0] == for_one[1]


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys(), "what CFF 1.2 demands"
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", project["version"])
    assert citation["license"] == project["license"]
    assert citation["abstract"] == project["description"]
    assert citation["authors"] == [{"name": "The zero authors"}]
