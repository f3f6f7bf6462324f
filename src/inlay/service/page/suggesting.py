"""Rows worth labelling: those that the live version is least sure of, and those where it is sure but wrong.

They are dev rows, which it did not learn from. Where it is sure but wrong, the label in the data is often wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inlay.reports import EvaluatedRow, Evaluation
from inlay.service.state import Workspace
from inlay.service.version_evaluations import read_evaluation
from inlay.service.views import find_version

_LEAST_SURE = 2 / 3  # share of the rows that are chosen for being unsure


def suggest_rows(workspace: Workspace, name: str, most: int) -> list[dict[str, Any]]:
    """Return the rows of a task that are most worth labelling, without those that have a correction."""
    evaluation = _read_live(workspace, name)
    if evaluation is None:
        return []
    done = {(item.correction.text.strip(), item.correction.pair) for item in workspace.feedback(name, 200).items}
    rows = [row for row in _distinct(evaluation.rows) if (row.text.strip(), row.pair) not in done]
    unsure = sorted((row for row in rows if row.confidence is not None), key=lambda row: row.confidence or 0.0)
    chosen = unsure[: round(most * _LEAST_SURE)] or rows[:most]
    near = {id(row) for row in chosen}
    wrong = [row for row in reversed(unsure) if row.is_right is False and id(row) not in near]
    chosen = [*chosen, *wrong[: most - len(chosen)]]
    return [_describe(row) for row in chosen]


def sample_rows(workspace: Workspace, name: str, number: int) -> list[dict[str, Any]]:
    """Return a few short dev rows of a task's live version, evenly spread."""
    evaluation = _read_live(workspace, name)
    rows = [] if evaluation is None else [row for row in _distinct(evaluation.rows) if len(row.text) < 500]
    step = max(1, len(rows) // number)
    return [_describe(row) for row in rows[step // 2 :: step][:number]]


def _distinct(rows: Iterable[EvaluatedRow]) -> list[EvaluatedRow]:
    """Return the first row of each text."""
    return list({(row.text.strip(), row.pair): row for row in reversed(list(rows))}.values())[::-1]


def _read_live(workspace: Workspace, name: str) -> Evaluation | None:
    place = find_version(workspace, name)
    return read_evaluation(workspace.db.files.evaluations(workspace.name, name), place.row.number)


def _describe(row: EvaluatedRow) -> dict[str, Any]:
    return {
        "text": row.text,
        "pair": row.pair,
        "answer": _write(row.given),
        "confidence": row.confidence,
        "expected": _write(row.target),
        "line": row.line,
        "source": "errors" if row.is_right is False else "dev",
    }


def _write(cell: Any) -> str:
    """Write a target or an answer in the way in which a correction is written."""
    if isinstance(cell, list | tuple):
        return "|".join(str(item) for item in cell)
    return f"{cell:g}" if isinstance(cell, float) else str(cell)
