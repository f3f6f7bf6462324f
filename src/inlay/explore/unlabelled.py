"""Unlabelled rows: draws some of a file in constant memory, measures doubt, and spreads a choice. No torch."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inlay.data import InputRow, stream_rows
from inlay.errors import BadData, InlayError, UnknownName
from inlay.settings import DataConfig

MEASURES = ("margin", "entropy")


def draw_rows(
    path: str | Path, config: DataConfig = DataConfig(), *, most: int, joined: str | None = None
) -> tuple[list[InputRow], int]:
    """Draw up to `most` rows of a file, in constant memory and always the same; also return the number of all rows.

    `joined` names the text columns that the task was trained on, for a file that has them and no others named.
    Rows that cannot be read are left out; if no row can be read, the first error is raised.
    """
    generator, number = random.Random(0), 0
    kept: list[InputRow] = []
    fault: InlayError | None = None
    for chunk in stream_rows(path, config, joined=joined, isolate=True):
        for row in chunk:
            if row.error is not None:
                fault = fault or row.error
                continue
            number += 1
            if len(kept) < most:
                kept.append(row)
            elif (place := generator.randrange(number)) < most:
                kept[place] = row
    if not kept:
        raise fault or BadData("the file has no rows", "give a file with a row for each text", path=path)
    return sorted(kept, key=lambda row: row.line), number


def measure_doubt(answer: Mapping[str, Any], measure: str = "margin") -> float | None:
    """Return how unsure an answer is, from 0 to 1; None for an answer without probabilities.

    `margin` is one minus the lead of the likeliest label over the next; for a set of labels, that of its least sure
    decision. `entropy` is that of the distribution, relative to the largest possible; for a set, the mean over its
    labels. The doubt of tags and passages is one minus the probability of the least sure part.
    """
    if measure not in MEASURES:
        raise UnknownName("measure of doubt", measure, MEASURES)
    probabilities = list((answer.get("probabilities") or {}).values())
    if "labels" in answer:
        if measure == "margin":
            return 1 - min(abs(2 * value - 1) for value in probabilities)
        return sum(_entropy([value, 1 - value]) for value in probabilities) / len(probabilities)
    if probabilities:
        if measure == "entropy":
            return _entropy(probabilities)
        first, second = sorted([*probabilities, 0.0], reverse=True)[:2]
        return 1 - (first - second)
    if answer.get("words"):
        return 1 - min(float(word["probability"]) for word in answer["words"])
    return 1 - float(answer["probability"]) if "probability" in answer else None


def _entropy(probabilities: Sequence[float]) -> float:
    terms = [value * math.log(value) for value in probabilities if value > 0]
    return -sum(terms) / math.log(max(2, len(probabilities)))


def spread_numbers(values: Sequence[float], limit: int) -> list[int]:
    """Return positions of `limit` values, spread evenly over their sorted order; for answers that are numbers."""
    ordered = sorted(range(len(values)), key=lambda place: (values[place], place))
    if len(ordered) <= limit:
        return ordered
    step = (len(ordered) - 1) / max(1, limit - 1)
    return [ordered[round(index * step)] for index in range(limit)]


def take_shares(answers: Sequence[str], limit: int) -> list[int]:
    """Return the first `limit` positions, but of each answer at most twice an even share while there are others."""
    share = max(1, -(-2 * limit // max(1, len(set(answers)))))
    taken: dict[str, int] = defaultdict(int)
    first: list[int] = []
    rest: list[int] = []
    for place, answer in enumerate(answers):
        taken[answer] += 1
        (first if taken[answer] <= share else rest).append(place)
    return sorted([*first, *rest][:limit])
