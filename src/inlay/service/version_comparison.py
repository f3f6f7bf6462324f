"""Two versions side by side, and the rows that one of them has yet to answer. No torch.

All of it is computed from evaluations (`inlay.reports`), so that it takes no backbone and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.errors import BadConfig, Unsupported
from inlay.reports import (
    EvaluatedRow,
    Evaluation,
    answer_again,
    check_comparable,
    decide_rows,
    describe_version,
    find_trained,
    has_same_rows,
    list_labels,
    make_judged,
    spell_row,
)
from inlay.service.evaluation_files import read_evaluation
from inlay.service.state import SharedFolder
from inlay.store import Manifest

MOST_CHANGED = 100
"""rows of a comparison that are listed"""


def compare(first: Evaluation, second: Evaluation, seed: int = 0) -> dict[str, Any]:
    """Compare two versions' answers to the same rows, as the API shows it; `verdict` is about the second.

    Rows that one of the two was trained on are left out. Refuses evaluations of different rows (`answer_again` makes
    them the same) and kinds.
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
            "each row trained one of the two: add rows that are new",
        )
    sides = [[each.rows[row] for row in kept] for each in (first, second)]
    judged = make_judged(first.kind, list_labels([newer, first, second]), sides[0])
    found = compare_answers(
        judged, newer.metric, decide_rows(judged, sides[0]), decide_rows(judged, sides[1]), seed=seed
    )
    changed = [pair for pair in zip(*sides, strict=True) if pair[0].given != pair[1].given]
    # What one has right and the other wrong comes first.
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
    """Find two versions' evaluations on the same rows, or the rows that one of the two has yet to answer.

    The rows are the later version's own; where only one of the two was evaluated, they are that one's.
    """
    own = {number: read_evaluation(folder, number) for number in (a, b)}
    first, second = own[a], own[b]
    if first is not None and second is not None and has_same_rows(first, second):
        check_comparable(first, second)
        return first, second
    owners = [evaluation for evaluation in (first, second) if evaluation is not None]
    if not owners:
        raise Unsupported(
            f"neither version {a} nor version {b} was trained by this service, which has no answers of theirs",
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
    """The rows of one version that another one has to answer before the two can be compared."""

    owner: Evaluation
    other: Evaluation

    def fill_in(self, answers: Sequence[Mapping[str, Any]]) -> Evaluation:
        """Return the other version's evaluation on these rows, to be written for the next time."""
        return answer_again(self.owner, self.other, answers)
