"""Reports on versions: scores with intervals, scores of labels, confusion, calibration, and the wrong rows.

Everything is computed from evaluations, without a backbone or an engine. No torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inlay.reports.evaluations import EvaluatedRow, Evaluation, collect_targets, decide_rows, list_labels

if TYPE_CHECKING:
    from inlay.data import Report

SHOWN_LABELS = 20
"""most labels of a confusion matrix that a page shows"""


def score_rows(evaluation: Evaluation) -> Report:
    """Return every metric of an evaluation with its interval, the scores of labels, and the confusion."""
    from inlay.data import evaluate_report

    labels = list_labels([evaluation])
    judged = collect_targets(evaluation.kind, labels, evaluation.rows)
    decisions = decide_rows(judged, evaluation.rows)
    unseen = labels[len(evaluation.labels) :]
    return evaluate_report(evaluation.kind, evaluation.labels, judged.targets, decisions, unseen=unseen)


def make_report(evaluation: Evaluation, scored: Report | None = None) -> dict[str, Any]:
    """Return the report on a version as the API has it: intervals, scores of labels, confusion and calibration.

    `scored` is the result of `score_rows`, if it is known already.
    """
    import numpy as np

    from inlay.data import KINDS, bin_confidences

    report = score_rows(evaluation) if scored is None else scored
    found = report.metrics.get(evaluation.metric)
    sure = [row for row in evaluation.rows if row.confidence is not None and row.is_right is not None]
    confidences = np.array([row.confidence for row in sure], dtype=np.float64)
    bins = bin_confidences(confidences, np.array([row.is_right for row in sure], dtype=np.float64))
    return {
        "version": evaluation.version,
        "kind": evaluation.kind,
        "metric": evaluation.metric,
        "metrics": evaluation.metrics,
        "interval": None if found is None else [found.low, found.high],
        "num_rows": len(evaluation.rows),
        "num_dev": evaluation.num_dev,
        "labels": [dataclasses.asdict(label) for label in report.labels],
        "confusion": _find_confusion(evaluation, report),
        "calibration": [dataclasses.asdict(each) for each in bins],
        "has_errors": not KINDS[evaluation.kind].is_number,
    }


def _find_confusion(evaluation: Evaluation, report: Report) -> dict[str, Any] | None:
    """Return how often each label was given for each right label; None unless every row has exactly one label."""
    from inlay.data import KINDS

    labels = list_labels([evaluation])
    if report.confusion is not None:
        return {"labels": list(labels), "counts": [list(row) for row in report.confusion]}
    form = KINDS[evaluation.kind].targets
    if not (form.is_one_label and form.is_ordered and len(labels) <= SHOWN_LABELS):
        return None
    place, counts = {label: number for number, label in enumerate(labels)}, [[0] * len(labels) for _ in labels]
    for row in evaluation.rows:  # the metrics of levels do not compute the confusion
        counts[place[row.target]][place[row.given]] += 1
    return {"labels": list(labels), "counts": counts}


def list_errors(
    evaluation: Evaluation, *, expected: str | None = None, answer: str | None = None
) -> list[dict[str, Any]]:
    """Return the rows a version got wrong, the surest first; for numbers all rows, the worst first.

    `expected` and `answer` select the rows whose target, or answer, is that label (or has it, for sets). If both are
    the same label, the right rows are returned: those of a cell on the confusion's diagonal.
    """
    from inlay.data import KINDS

    wants_right = expected is not None and expected == answer
    found = []
    for number, row in enumerate(evaluation.rows):
        is_wanted = row.is_right is None or row.is_right == wants_right
        if is_wanted and _has(row.target, expected) and _has(row.given, answer):
            found.append((number, row))
    if KINDS[evaluation.kind].is_number:
        found.sort(key=lambda item: -abs(item[1].given - item[1].target))
    else:
        found.sort(key=lambda item: -(item[1].confidence or 0.0))
    return [_describe_row(evaluation.kind, number, row) for number, row in found]


def list_unsure(evaluation: Evaluation, most: int) -> list[dict[str, Any]]:
    """Return the rows that a version was least sure of, and whether it got each right."""
    rows = [(number, row) for number, row in enumerate(evaluation.rows) if row.confidence is not None]
    rows.sort(key=lambda item: item[1].confidence or 0.0)
    return [_describe_row(evaluation.kind, number, row) | {"is_right": row.is_right} for number, row in rows[:most]]


def _has(cell: Any, label: str | None) -> bool:
    if label is None:
        return True
    if isinstance(cell, list):
        return any(label == (item[-1] if isinstance(item, list) else item) for item in cell)
    return str(cell) == label


def _describe_row(kind: str, number: int, row: EvaluatedRow) -> dict[str, Any]:
    expected, answer = spell_row(kind, row)
    return {
        "row": number,
        "line": row.line,
        "text": row.text,
        "pair": row.pair,
        "expected": expected,
        "answer": answer,
        "confidence": row.confidence,
    }


def spell_row(kind: str, row: EvaluatedRow) -> tuple[str, str]:
    """Return the target and the answer of a row in words."""
    from inlay.data import KINDS

    form, text = KINDS[kind].targets, row.text
    if KINDS[kind].decide is not None:
        return form.spell(row.target, text), form.spell(row.given, text)
    if form.has_labels:  # tags, one for each word of the target
        words = [[start, end, tag] for (start, end, _), tag in zip(row.target, row.given, strict=True)]
        return form.spell(row.target, text), form.spell(words, text)
    return form.spell(row.target, text), row.given


def choose_labels(report: Mapping[str, Any]) -> list[str]:
    """Return the labels of a confusion matrix that are shown, in order: if they are many, the most confused ones."""
    labels, counts = report["confusion"]["labels"], report["confusion"]["counts"]
    if len(labels) <= SHOWN_LABELS:
        return list(labels)
    rows = {label: sum(counts[n]) + sum(row[n] for row in counts) for n, label in enumerate(labels)}
    wrong = {label: rows[label] - 2 * counts[n][n] for n, label in enumerate(labels)}
    kept = set(sorted(labels, key=lambda label: (-wrong[label], -rows[label]))[:SHOWN_LABELS])
    return [label for label in labels if label in kept]
