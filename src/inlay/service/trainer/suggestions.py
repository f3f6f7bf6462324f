"""Rows worth labelling: those that a version is least sure of, some of every answer, and no text twice. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from inlay.reports import read_answer

if TYPE_CHECKING:
    from inlay.data import InputRow

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


def suggest_rows(
    rows: Sequence[InputRow],
    answers: Sequence[Mapping[str, Any]],
    limit: int = 20,
    known: Collection[str] = (),
) -> list[RowToLabel]:
    """Suggest rows to label, from described answers to each: the least sure first, of each answer its share at most.

    Texts in `known`, which have labels already, are left out; so is a row without an answer. Numbers have no
    confidence: theirs are spread over the whole range.
    """
    from inlay.data import group_keys
    from inlay.explore import spread_numbers, take_shares

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
        return [found[place] for place in spread_numbers([_as_number(row.answer) for row in found], limit)]
    found.sort(key=lambda row: (row.confidence or 0.0, row.line))
    return [found[place] for place in take_shares([row.answer for row in found], limit)]


def _show(given: Any) -> str:
    if isinstance(given, list):
        return "|".join(map(str, given))
    return f"{given:.6g}" if isinstance(given, float) else str(given)


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
