"""Evaluations of versions: their files, and the comparison of two versions on the same rows. No torch.

There is a file for each version that the trainer published, and one for each version that answered another's rows.
What always holds: a file is complete and says its own checksum; a damaged one is an error and never half read. A
comparison is computed from evaluations alone (`inlay.reports`), so it needs no backbone and no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from inlay.errors import BadConfig, StoreDamaged, Unsupported
from inlay.reports import (
    EvaluatedRow,
    Evaluation,
    answer_again,
    check_comparable,
    collect_targets,
    decide_rows,
    describe_version,
    find_trained,
    has_same_rows,
    list_labels,
    spell_row,
)
from inlay.service.state import SharedFolder
from inlay.store import Manifest

MOST_CHANGED = 100
"""rows of a comparison that are listed"""
_FORMAT = 1


class _EvaluationFile(msgspec.Struct):
    format: int
    sha256: str
    evaluation: msgspec.Raw


def write_evaluation(folder: SharedFolder, evaluation: Evaluation) -> None:
    """Write an evaluation into the folder of its task; the file appears complete."""
    content = msgspec.json.encode(evaluation)
    sealed = _EvaluationFile(_FORMAT, hashlib.sha256(content).hexdigest(), msgspec.Raw(content))
    folder.write(_find_name(evaluation.version, evaluation.rows_of), msgspec.json.encode(sealed))


def read_evaluation(folder: SharedFolder, version: int, rows_of: int | None = None) -> Evaluation | None:
    """Read a version's evaluation on its own dev rows, or on those of version `rows_of`; None if there is none.

    A damaged file raises StoreDamaged.
    """
    try:
        content = folder.read(_find_name(version, rows_of))
    except FileNotFoundError:
        return None
    try:
        sealed = msgspec.json.decode(content, type=_EvaluationFile)
        if sealed.format != _FORMAT:
            raise ValueError(f"format {sealed.format}")
        if hashlib.sha256(sealed.evaluation).hexdigest() != sealed.sha256:
            raise ValueError("it is not what was written")
        evaluation = msgspec.json.decode(sealed.evaluation, type=Evaluation)
        if (evaluation.version, evaluation.rows_of) != (version, rows_of):
            raise ValueError("it is another version's")
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise StoreDamaged(
            f"the evaluation of version {version} is damaged: {error}",
            "its task answers as before; train it again to get a new report",
        ) from None
    return evaluation


def _find_name(version: int, rows_of: int | None) -> str:
    return f"{version}.json" if rows_of is None else f"{version}-on-{rows_of}.json"


def compare(first: Evaluation, second: Evaluation, seed: int = 0) -> dict[str, Any]:
    """Compare two versions' answers to the same rows, as the API shows it; `verdict` is about the second version.

    Rows that one of the two was trained on are left out. Evaluations of different kinds or rows are refused
    (`answer_again` moves one to the other's rows).
    """
    from inlay.data import compare_answers

    check_comparable(first, second)
    if not has_same_rows(first, second):
        raise BadConfig(
            f"versions {first.version} and {second.version} were not evaluated on the same rows",
            "have one of them answer the other's rows first",
        )
    newer = max(first, second, key=lambda each: (each.rows_of is None, each.version))
    own = [find_trained(each, each.rows) for each in (first, second)]
    kept = [row for row in range(len(first.rows)) if not (own[0][row] or own[1][row])]
    if not kept:
        raise Unsupported(
            f"no dev row is left to compare versions {first.version} and {second.version} on",
            "one of the two was trained on each row: add new rows",
        )
    sides = [[each.rows[row] for row in kept] for each in (first, second)]
    judged = collect_targets(first.kind, list_labels([newer, first, second]), sides[0])
    found = compare_answers(
        judged, newer.metric, decide_rows(judged, sides[0]), decide_rows(judged, sides[1]), seed=seed
    )
    changed = [pair for pair in zip(*sides, strict=True) if pair[0].given != pair[1].given]
    # Rows that one version has right and the other wrong come first.
    changed.sort(key=lambda pair: pair[0].is_right == pair[1].is_right)
    return {
        "a": first.version,
        "b": second.version,
        "metric": newer.metric,
        "num_rows": found.num_rows,
        "num_left_out": len(first.rows) - len(kept),
        "score_a": found.score_a,
        "score_b": found.score_b,
        "difference": found.difference,
        "gain": found.gain,
        "interval": [found.low, found.high],
        "p_value": found.p_value,
        "verdict": found.verdict,
        "num_changed": len(changed),
        "changed": [_describe_change(first.kind, *pair) for pair in changed[:MOST_CHANGED]],
        "same_rows": first.rows_of is None and second.rows_of is None,
    }


def _describe_change(kind: str, before: EvaluatedRow, after: EvaluatedRow) -> dict[str, Any]:
    (expected, first), (_, second) = spell_row(kind, before), spell_row(kind, after)
    shown = {"line": after.line, "text": after.text, "pair": after.pair, "expected": expected}
    return {**shown, "a": first, "b": second, "a_is_right": before.is_right, "b_is_right": after.is_right}


def find_comparison(
    folder: SharedFolder, a: int, b: int, read_manifest: Callable[[int], Manifest]
) -> tuple[Evaluation, Evaluation] | NeedsAnswers:
    """Find two versions' evaluations on the same rows, or the rows that one of the two has still to answer.

    These are the dev rows of the later version, or of the only one that was evaluated.
    """
    own = {number: read_evaluation(folder, number) for number in (a, b)}
    first, second = own[a], own[b]
    if first is not None and second is not None and has_same_rows(first, second):
        check_comparable(first, second)
        return first, second
    owners = [evaluation for evaluation in (first, second) if evaluation is not None]
    if not owners:
        raise Unsupported(
            f"neither version {a} nor version {b} was trained by this service, so it has no answers of them",
            "train the task here once, then compare",
        )
    owner = max(owners, key=lambda evaluation: evaluation.version)
    number = a if owner.version == b else b
    other = own[number] or describe_version(number, read_manifest(number))
    check_comparable(owner, other)
    moved = read_evaluation(folder, number, owner.version)
    if moved is None or not has_same_rows(owner, moved):
        return NeedsAnswers(owner, other)
    return (moved, owner) if number == a else (owner, moved)


@dataclass(frozen=True)
class NeedsAnswers:
    """Two versions of which `other` must answer the rows of `owner` before they can be compared."""

    owner: Evaluation
    other: Evaluation

    def fill_in(self, answers: Sequence[Mapping[str, Any]]) -> Evaluation:
        """Return the other version's evaluation on the owner's rows, to be written for the next time."""
        return answer_again(self.owner, self.other, answers)
