"""Add the pages of the site that are not in docs/: mkdocs.yml names this file under `hooks`.

README.md and its like are at the top of the repository, the tutorial is a notebook, and DeepSpeed's keys are printed by
scripts/from_deepspeed. A link to a file that the site does not have, such as an example, becomes plain text.
"""

import os.path
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent

PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "docs/tutorial.ipynb": "tutorial.md",
}
"""File of the repository -> page of the site."""

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
_IMAGE = re.compile(r'(<img src=")docs/')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        path = ROOT / name
        text = path.read_text() if path.suffix == ".md" else MarkdownExporter().from_filename(path)[0]
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "deepspeed-keys.md", content=deepspeed_keys()))
    return files


def deepspeed_keys() -> str:
    """Return the page of DeepSpeed's keys, as scripts/from_deepspeed prints them."""
    command = [sys.executable, ROOT / "scripts" / "from_deepspeed", "--keys"]
    tables = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    about = "[Coming from DeepSpeed](coming-from-deepspeed.md) explains `ds_config.json`."
    return f"# DeepSpeed's keys\n\n`scripts/from_deepspeed --keys` prints this page. {about}\n\n{tables}"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    names = {page: name for name, page in PAGES.items()}
    folder = Path(names.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def on_the_site(link: re.Match[str]) -> str:
        path = os.path.normpath(folder / link[2])
        target = PAGES.get(path, path.removeprefix("docs/"))
        return f"[{link[1]}]({target}{link[3] or ''})" if files.get_file_from_path(target) else link[1]

    return _IMAGE.sub(r"\1", _LINK.sub(on_the_site, markdown))
