"""Writes docs/map.md, the list of every file of the code, from the modules' docstrings: `python docs/draw_map.py`."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "inlay"
INTRODUCTION = """\
# Every file of the code

The first sentence of each module's docstring, room by room. [architecture.md](architecture.md) says how the rooms \
work together, [reading.md](reading.md) where to begin. This page is written by `python docs/draw_map.py`; a test \
holds it equal to the code.
"""


def main() -> None:
    Path(__file__).with_name("map.md").write_text(render(), encoding="utf8")


def render() -> str:
    """Return the page as Markdown: a section for each folder, a row for each file."""
    sections = [INTRODUCTION]
    for folder in [SOURCE, *sorted(path.parent for path in SOURCE.rglob("*/__init__.py"))]:
        files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        rows = [f"| [{path.name}]({link_to(path)}) | {first_sentence(path)} |" for path in files]
        table = ["", "| file | |", "|---|---|", *rows] if rows else []
        name = folder.relative_to(SOURCE.parent).as_posix()
        sections.append("\n".join([f"## {name}", "", first_sentence(folder / "__init__.py"), *table, ""]))
    return "\n".join(sections)


def link_to(path: Path) -> str:
    return "../" + path.relative_to(SOURCE.parents[1]).as_posix()


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring on one line, safe inside a table."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf8"))) or ""
    lines = []
    for line in docstring.splitlines():
        lines.append(line.strip())
        if line.endswith(".") or not line.strip():
            break
    return " ".join(lines).strip().replace("|", "\\|")


if __name__ == "__main__":
    main()
