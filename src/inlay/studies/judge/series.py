"""Rows that are the points of one line: those of a kind by their numbers, those of a method by its samples.

Figures draw such lines and claims judge them; nothing here draws. Rows that were planned and have not been run can be
listed too, so that a line breaks where they would stand.
"""

from __future__ import annotations

import statistics

from inlay.studies.judge.rows import Scored, read_way


def series_keys(scored: Scored, kind: str) -> list[str]:
    """The rows of a kind, fewest parameters first."""
    found = [key for key in scored.rows if (way := read_way(key)) is not None and way.kind == kind]
    return sorted(found, key=lambda key: median_parameters(scored, key))


def median_parameters(scored: Scored, key: str) -> float:
    """The trained parameters of a row: the median over its tasks."""
    return statistics.median(cell.trained_parameters for cell in scored.rows[key].values())


def most_parameters(scored: Scored, key: str) -> int:
    """The trained parameters of a row's largest task."""
    return max(cell.trained_parameters for cell in scored.rows[key].values())


def planned_keys(scored: Scored, kind: str, task: str | None = None) -> list[str]:
    """The rows of a kind by their numbers, those that were planned (on a task) and have not been run too."""
    ways = map(read_way, series_keys(scored, kind))
    numbers = {way.number for way in ways if way is not None and way.number is not None}
    for name, arm in scored.study.arms.items():
        way = read_way(name)
        if way is not None and way.kind == kind and (task is None or task in getattr(arm, "tasks", (task,))):
            sizes = getattr(arm, "axes", {}).get("size", ()) if way.number is None else (way.number,)
            numbers |= {int(size) for size in sizes}
    return [kind] * (kind in scored.rows) + [f"{kind}-{number}" for number in sorted(numbers)]


def list_samples(scored: Scored) -> dict[str, dict[int, str]]:
    """Method -> number of samples -> its row: of rows called `METHOD-NUMBER`, numbers in order."""
    found: dict[str, dict[int, str]] = {}
    for key in scored.rows:
        method, _, number = key.rpartition("-")
        if method and number.isdigit():
            found.setdefault(method, {})[int(number)] = key
    return {method: dict(sorted(rows.items())) for method, rows in found.items()}
