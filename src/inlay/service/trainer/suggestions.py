"""Rows worth labelling: those that a version is least sure of, some of every answer, and no text twice. No torch."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inlay.reports import read_answer

MOST_READ = 2000
"""rows of a dataset that are answered to find the ones to suggest"""


@dataclass(frozen=True)
class RowToLabel:
    """A row, what a version answers to it, and how sure it is."""

    line: int
    text: str
    pair: str | None
    answer: str
    confidence: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the row as the API shows it."""
        return asdict(self)


@dataclass(frozen=True)
class UnlabelledRow:
    """A row of a dataset, without its label if it has one."""

    line: int
    text: str
    pair: str | None = None


def draw_rows(path: Path, text: str | None = None, pair: str | None = None, *, seed: int = 0) -> list[UnlabelledRow]:
    """Draw rows of a file, evenly over all of it, in constant memory; rows that cannot be read are left out."""
    from inlay.data import stream_rows
    from inlay.settings import DataConfig

    generator, number = random.Random(seed), 0
    kept: list[UnlabelledRow] = []
    for chunk in stream_rows(path, DataConfig(text=text, pair=pair), isolate=True):
        for row in chunk:
            if row.error is not None:
                continue
            found = UnlabelledRow(row.line, row.text, row.pair)
            place = number if number < MOST_READ else generator.randrange(number + 1)
            number += 1
            if place == len(kept):
                kept.append(found)
            elif place < MOST_READ:
                kept[place] = found
    return sorted(kept, key=lambda row: row.line)


def suggest_rows(
    rows: Sequence[UnlabelledRow],
    answers: Sequence[Mapping[str, Any]],
    limit: int = 20,
    known: Collection[str] = (),
) -> list[RowToLabel]:
    """Suggest rows to label, from described answers to each: the least sure first, of each answer its share at most.

    Texts in `known`, which have labels already, are left out; so is a row without an answer. Numbers have no
    confidence: theirs are spread over the whole range.
    """
    from inlay.data import group_keys

    seen = set(group_keys(list(known), None))
    found: list[RowToLabel] = []
    for row, answer in zip(rows, answers, strict=True):
        key = group_keys([row.text], None if row.pair is None else [row.pair])[0]
        if "error" in answer or key in seen or group_keys([row.text], None)[0] in seen:
            continue
        seen.add(key)
        given, confidence = read_answer(answer)
        shown = _show(given)
        found.append(RowToLabel(row.line, row.text, row.pair, shown, confidence))
    if any(row.confidence is None for row in found):
        return _spread(found, limit)
    return _take_shares(sorted(found, key=lambda row: (row.confidence, row.line)), limit)


def _show(given: Any) -> str:
    if isinstance(given, list):
        return "|".join(map(str, given))
    return f"{given:.6g}" if isinstance(given, float) else str(given)


def _spread(rows: Sequence[RowToLabel], limit: int) -> list[RowToLabel]:
    """Return rows at even distances in the order of their answers."""
    ordered = sorted(rows, key=lambda row: (_as_number(row.answer), row.line))
    if len(ordered) <= limit:
        return ordered
    step = (len(ordered) - 1) / max(1, limit - 1)
    return [ordered[round(index * step)] for index in range(limit)]


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _take_shares(rows: Sequence[RowToLabel], limit: int) -> list[RowToLabel]:
    """Return the first rows, of one answer at most twice its even share while others have any."""
    share = max(1, -(-2 * limit // max(1, len({row.answer for row in rows}))))
    taken: dict[str, int] = defaultdict(int)
    first: list[RowToLabel] = []
    rest: list[RowToLabel] = []
    for row in rows:
        taken[row.answer] += 1
        (first if taken[row.answer] <= share else rest).append(row)
    chosen = [*first, *rest][:limit]
    return sorted(chosen, key=lambda row: (row.confidence or 0.0, row.line))
