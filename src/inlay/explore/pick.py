"""Picks rows worth labelling: rows that a version is unsure of, far from each other and from its training rows.

The least sure rows are the candidates. Of these, rows are picked one after the other, each time the one whose doubt
times its distance from the nearest picked row is largest (a greedy k-center, weighted by doubt; the distance is one
minus the cosine of the task's own vectors). Near duplicates of picked rows and of training rows are never picked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from inlay.data import InputRow, Split, group_keys
from inlay.explore.even_samples import find_firsts
from inlay.explore.unlabelled import measure_doubt
from inlay.explore.version_reader import OnRows, VersionReader, split_of
from inlay.notebook import show_html
from inlay.serving import answer_words

_LEAST_CANDIDATES, _CANDIDATES_EACH = 200, 10
NEAR = 0.05
"""rows that are nearer than this share of the mean distance of two rows are near duplicates"""


@dataclass(frozen=True)
class PickSettings:
    """Settings of the picking."""

    count: int = 20
    measure: str = "margin"
    on_rows: OnRows = lambda _: None


@dataclass(frozen=True)
class PickedRow:
    """A row to label, the version's answer, its doubt, and the row's distance from its nearest neighbour."""

    line: int
    text: str
    pair: str | None
    answer: str
    doubt: float | None
    distance: float
    """from the nearest row that was picked before it or trained on: 0 for the same direction, 2 at most"""
    record: dict[str, Any] = field(default_factory=dict, repr=False)
    """the row's own columns"""


@dataclass(frozen=True)
class PickedRows:
    """The picked rows, the most valuable first, and the numbers of others."""

    reference: str
    measure: str | None
    """None if its answers have no probability, and rows were picked by their distance alone"""
    num_pool: int
    """number of rows that were looked at"""
    num_known: int
    """number of these that were left out, as another row or a training row has the same text"""
    rows: tuple[PickedRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Return them as data."""
        return asdict(self)

    def __repr__(self) -> str:
        return f"PickedRows({self.reference}: {len(self.rows):,} of {self.num_pool:,} rows)"

    def _repr_html_(self) -> str:
        rows = [[row.line, row.text, row.answer, row.doubt] for row in self.rows]
        return show_html(repr(self), {}, ["line", "text", "answer", self.measure or "doubt"], rows)


def pick_rows(
    reader: VersionReader,
    pool: Sequence[InputRow],
    settings: PickSettings = PickSettings(),
    train: Split | None = None,
) -> PickedRows:
    """Pick rows of a pool that are worth labelling; `train` are the rows that are already labelled."""
    # 1. each text once, without texts that have a label
    known = set() if train is None else set(group_keys(train.texts, train.pairs))
    whole = split_of(pool)
    keys = group_keys(whole.texts, whole.pairs)
    rows = [pool[place] for key, place in find_firsts(keys).items() if key not in known]
    split = split_of(rows)
    reader.make_split(split.texts, split.pairs)  # refuses rows that the task cannot read
    # 2. the doubt of each answer
    answers = reader.describe(reader.outputs(split, settings.on_rows))
    doubts = [measure_doubt(answer, settings.measure) for answer in answers]
    has_doubts = any(doubt is not None for doubt in doubts)
    weights = np.array([1.0 if doubt is None else doubt for doubt in doubts])
    # 3. the least sure rows, and of these some that differ
    most = max(_LEAST_CANDIDATES, _CANDIDATES_EACH * settings.count) if has_doubts else len(rows)
    candidates = np.argsort(-weights, kind="stable")[:most]
    vectors = reader.vectors(split.take(candidates), settings.on_rows)
    labelled = None if train is None else reader.vectors(train, settings.on_rows)
    taken = choose_diverse(vectors, weights[candidates], settings.count, labelled)
    chosen = [(int(candidates[place]), distance) for place, distance in taken]
    return PickedRows(
        reference=reader.version.reference,
        measure=settings.measure if has_doubts else None,
        num_pool=len(pool),
        num_known=len(pool) - len(rows),
        rows=tuple(
            PickedRow(
                line=rows[place].line,
                text=rows[place].text,
                pair=rows[place].pair,
                answer=answer_words(answers[place]),
                doubt=doubts[place],
                distance=distance,
                record=dict(rows[place].record or {}),
            )
            for place, distance in chosen
        ),
    )


def choose_diverse(
    vectors: np.ndarray, weights: np.ndarray, count: int, known: np.ndarray | None = None
) -> list[tuple[int, float]]:
    """Choose up to `count` vectors with large weights, far from each other and from `known`; also their distances."""
    unit = _to_unit(vectors)
    near = NEAR * _usual_distance(unit)
    distances = np.full(len(unit), 2.0)
    if known is not None and len(known):
        others = _to_unit(known)
        for start in range(0, len(unit), 1024):
            distances[start : start + 1024] = 1 - (unit[start : start + 1024] @ others.T).max(1)
    chosen: list[tuple[int, float]] = []
    while len(chosen) < min(count, len(unit)):
        gains = np.where(distances > near, weights * distances, -1.0)
        best = int(gains.argmax())
        if gains[best] < 0:
            break
        chosen.append((best, float(distances[best])))
        distances = np.minimum(distances, 1 - unit @ unit[best])
        distances[best] = 0.0
    return chosen


def _to_unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _usual_distance(unit: np.ndarray) -> float:
    """Return the mean distance of two rows: one minus the mean cosine, without each row's own."""
    if len(unit) < 2:
        return 0.0
    total = float((unit.sum(0) ** 2).sum()) - len(unit)
    return 1 - total / (len(unit) * (len(unit) - 1))
