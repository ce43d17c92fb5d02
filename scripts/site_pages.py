"""Pages of the site that mkdocs does not find in docs/; mkdocs.yml names this file under `hooks`.

README.md and its like stand at the top of the repository, where they are looked for, and the tutorial is a notebook.
Links are those of the repository. Where a page points to a file that the site does not have, such as an example, only
the text of the link is left.
"""

import os.path
import re
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
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    names = {page: name for name, page in PAGES.items()}
    folder = Path(names.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def on_the_site(link: re.Match[str]) -> str:
        path = os.path.normpath(folder / link[2])
        target = PAGES.get(path, path.removeprefix("docs/"))
        return f"[{link[1]}]({target}{link[3] or ''})" if files.get_file_from_path(target) else link[1]

    return _IMAGE.sub(r"\1", _LINK.sub(on_the_site, markdown))
