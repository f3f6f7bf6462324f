"""What the site does with links that leave `docs/`: files beside it become pages, code is named and not linked.

mkdocs calls these functions (`hooks` in mkdocs.yml). The Markdown files themselves are written to be read in a clone.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
"""files of the root that are pages of the site; its README is the home page"""
HOMES = {"README.md": "index.md"}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_PICTURES = (".svg", ".png")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie in the root of the repository, and the pictures of results that pages show."""
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf8")
        files.append(File.generated(config, name, content=text))
    shown = {
        posixpath.normpath(posixpath.join(posixpath.dirname(f"docs/{file.src_uri}"), path))
        for file in files.documentation_pages()
        if file.src_uri not in PAGES
        for mark, _, path, _ in _LINK.findall(file.content_string)
        if mark and path.startswith("../")
    }
    for path in sorted(shown):
        if not path.startswith("docs/"):
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead every link to a page of the site, or leave its text without a link."""
    source = page.file.src_uri
    folder = "" if source in PAGES else posixpath.dirname(f"docs/{source}")

    def lead(found: re.Match[str]) -> str:
        mark, text, path, anchor = found[1], found[2], found[3], found[4] or ""
        if not path or re.match(r"[a-z]+:", path):
            return found[0]
        target = posixpath.normpath(posixpath.join(folder, path))
        target = HOMES.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(target) is None:
            return text
        anchor = "" if target == "index.md" else anchor
        here = posixpath.dirname(source) or "."
        return f"{mark}[{text}]({posixpath.relpath(target, here)}{anchor})"

    return _LINK.sub(lead, markdown)
