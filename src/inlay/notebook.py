"""Results as HTML for notebooks: a title, facts, a table. Everything that comes from data is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_CELL = "padding:2px 10px;text-align:"


def show_html(
    title: str, facts: Mapping[str, Any] = {}, head: Sequence[str] = (), rows: Iterable[Sequence[Any]] = ()
) -> str:
    """Return a result as a piece of HTML that needs no style of the page's own and follows its colours."""
    parts = [f"<div><strong>{escape(title)}</strong>"]
    known = [f"{escape(name)} <code>{escape(_spell(value))}</code>" for name, value in facts.items()]
    parts += [f"<div>{' · '.join(known)}</div>"] if known else []
    body = ["".join(_cell("td", value) for value in row) for row in rows]
    if body:
        top = "".join(_cell("th", name) for name in head)
        parts.append(f"<table><thead><tr>{top}</tr></thead><tbody><tr>{'</tr><tr>'.join(body)}</tr></tbody></table>")
    return "".join(parts) + "</div>"


def show_metrics(title: str, facts: Mapping[str, Any], metrics: Mapping[str, Mapping[str, float]]) -> str:
    """Return scores by side (train, dev, test) and metric as a piece of HTML, a row for each side."""
    names = list(dict.fromkeys(name for values in metrics.values() for name in values))
    rows = [[side, *(values.get(name) for name in names)] for side, values in metrics.items()]
    return show_html(title, facts, ["", *names], rows)


def _cell(tag: str, value: Any) -> str:
    side = "right" if isinstance(value, int | float) else "left"
    return f'<{tag} style="{_CELL}{side}">{escape(_spell(value))}</{tag}>'


def _spell(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
