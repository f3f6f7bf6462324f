"""Documents as blocks, written as one self-contained HTML page or as Markdown.

Text is plain, with `code` in backticks and **bold** words; everything else is escaped. The page contains its styles and
pictures.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from inlay.studies.report.chart import Drawing
from inlay.studies.report.tables import ReportTable


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the page's title."""

    level: int
    text: str
    anchor: str = ""


@dataclass(frozen=True)
class Text:
    """A paragraph; `is_warning` sets it apart."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class Points:
    """A list."""

    items: tuple[str, ...]
    title: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure, and the path of its files (without suffix) beside the Markdown."""

    drawing: Drawing
    path: str
    caption: str


@dataclass(frozen=True)
class Folded:
    """Blocks that a page shows on request."""

    title: str
    blocks: tuple[Block, ...]


Block = Heading | Text | Points | Picture | ReportTable | Folded


def write_html(title: str, blocks: Sequence[Block]) -> str:
    """Write blocks as one HTML page."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    body = "\n".join(_html(block) for block in blocks)
    contents = [block for block in blocks if isinstance(block, Heading) and block.level == 2]
    links = "".join(f'<a href="#{block.anchor}">{html.escape(block.text)}</a>' for block in contents if block.anchor)
    navigation = f"<nav>{links}</nav>" if links else ""
    first, _, rest = body.partition("\n")
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n'
        f"<body><main>\n{first}\n{navigation}\n{rest}\n</main></body></html>\n"
    )


def write_markdown(blocks: Sequence[Block]) -> str:
    """Write blocks as Markdown, with pictures as files beside it."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        anchor = f' id="{block.anchor}"' if block.anchor else ""
        return f"<h{block.level}{anchor}>{_inline(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p{' class=warning' if block.is_warning else ''}>{_inline(block.text)}</p>"
    if isinstance(block, Points):
        title = f"<p class=lead>{_inline(block.title)}</p>" if block.title else ""
        return f"{title}<ul>{''.join(f'<li>{_inline(item)}</li>' for item in block.items)}</ul>"
    if isinstance(block, Picture):
        data = base64.b64encode(block.drawing.svg).decode()
        image = f'<img alt="{html.escape(block.caption)}" src="data:image/svg+xml;base64,{data}">'
        return f"<figure>{image}<figcaption>{_inline(block.caption)}</figcaption></figure>"
    if isinstance(block, Folded):
        inner = "".join(_html(item) for item in block.blocks)
        return f"<details><summary>{_inline(block.title)}</summary>{inner}</details>"
    return _html_table(block)


def _html_table(table: ReportTable) -> str:
    # Text is aligned left, numbers right.
    texts = [
        any(cell and not re.match(r"[\d+−–≈]", cell) for cell in cells) for cells in zip(*table.lines, strict=True)
    ]
    kinds = [" class=words" if is_text else "" for is_text in texts] or [""] * len(table.columns)
    head = "".join(f"<th{kind}>{_inline(column)}</th>" for column, kind in zip(table.columns, kinds, strict=True))
    lines = []
    for number, line in enumerate(table.lines):
        cells = ""
        for cell, kind in zip(line, kinds, strict=True):
            status = {"confirmed": "yes", "not confirmed": "no", "open": "open"}.get(cell.strip("*"))
            text = _inline(cell)
            cells += f'<td{kind}><span class="{status}">{text}</span></td>' if status else f"<td{kind}>{text}</td>"
        lines.append(f"<tr{' class=published' if number in table.published else ''}>{cells}</tr>")
    notes = "".join(f"<p class=note>{_inline(note)}</p>" for note in table.notes)
    caption = f"<caption>{_inline(table.title)}</caption>" if table.title else ""
    body = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="wide">{body}</div>{notes}'


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Text):
        return f"> {block.text}" if block.is_warning else block.text
    if isinstance(block, Points):
        title = f"**{block.title}**\n\n" if block.title else ""
        return title + "\n".join(f"- {item}" for item in block.items)
    if isinstance(block, Picture):
        return f"![{block.caption.replace('[', '(').replace(']', ')')}]({block.path}.svg)"
    if isinstance(block, Folded):
        inner = "\n\n".join(_markdown(item) for item in block.blocks)
        return f"<details><summary>{block.title}</summary>\n\n{inner}\n\n</details>"
    return _markdown_table(block)


def _markdown_table(table: ReportTable) -> str:
    lines = [table.columns, ("---",) * len(table.columns)]
    for number, line in enumerate(table.lines):
        cells = [cell.replace("|", "\\|") for cell in line]
        is_set_apart = number in table.published
        lines.append(tuple(f"*{cell}*" if is_set_apart and cell not in ("", "–") else cell for cell in cells))
    title = f"**{table.title}**\n\n" if table.title else ""
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n".join(f"- {note}" for note in table.notes)
    return f"{title}{body}" + (f"\n\n{notes}" if notes else "")


def _inline(text: str) -> str:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text)


_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #fbf9f4; color: #26323c; font: 16px/1.55 "DejaVu Sans", Verdana, sans-serif; }
main { max-width: 74rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 0.6rem; } h2 { font-size: 1.3rem; margin: 3rem 0 0.5rem; padding-top: 1rem;
border-top: 1px solid #ddd6c6; } h3 { font-size: 1.05rem; margin: 1.8rem 0 0.4rem; }
p { margin: 0.5rem 0; max-width: 48rem; } ul { margin: 0.3rem 0 0.8rem; padding-left: 1.2rem; max-width: 48rem; }
p.lead { margin-bottom: 0; font-weight: bold; } p.note { font-size: 0.8rem; color: #5b6670; margin: 0.15rem 0; }
p.warning { background: #fff3d6; border-left: 4px solid #E69F00; padding: 0.5rem 0.8rem; }
nav { display: flex; flex-wrap: wrap; gap: 0.3rem 0.9rem; font-size: 0.85rem; margin: 1rem 0; }
a { color: #0b5c8e; } code { font-family: "DejaVu Sans Mono", monospace; font-size: 0.92em; }
.wide { overflow-x: auto; margin: 0.9rem 0 0.4rem; }
table { border-collapse: collapse; font-size: 0.75rem; background: white; min-width: 30rem; }
caption { text-align: left; font-weight: bold; padding: 0 0 0.35rem; }
th, td { padding: 0.3rem 0.45rem; text-align: right; border-bottom: 1px solid #ebe7dc; }
th { border-bottom: 1.5px solid #26323c; font-weight: bold; vertical-align: bottom; }
td { white-space: nowrap; font-variant-numeric: tabular-nums; }
th.words, td.words { text-align: left; }
tr.published td { color: #6b767e; font-style: italic; }
figure { margin: 1.2rem 0; background: white; border: 1px solid #ebe7dc; padding: 0.8rem; max-width: 48rem; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figcaption { font-size: 0.85rem; color: #44505a; margin-top: 0.5rem; }
details { margin: 0.7rem 0; font-size: 0.92rem; } summary { cursor: pointer; color: #0b5c8e; }
.yes, .no, .open { padding: 0.05rem 0.45rem; border-radius: 0.6rem; white-space: nowrap; }
.yes { background: #d5efe6; color: #00553e; } .no { background: #fadfd0; color: #7a2f00; }
.open { background: #e8ebee; color: #44505a; }
@media print { body { background: white; } figure { break-inside: avoid; } nav { display: none; } }
"""
