"""Evaluations: a version's answers to its dev rows, for reports, lists of errors and comparisons. No torch.

A version that is compared with a newer one also answers the newer one's dev rows, if those differ: that is another
evaluation, with `rows_of` the newer version. Rows that one of the two versions was trained on are left out of a
comparison, since it may have memorised them. Labels are kept by name, so versions with different labels can be
compared.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inlay.errors import NotFinite, Unsupported
from inlay.store import Manifest

if TYPE_CHECKING:
    from inlay.data import ScoredRows, Split
    from inlay.training import SplitOutputs

MOST_ROWS = 5000
"""most dev rows of an evaluation; if there are more, this many are drawn"""
MOST_LETTERS = 16_000_000
"""most letters of their texts together"""
MOST_CELLS = 10_000_000
"""most rows times labels, if a row has a set of labels"""
_KEY_BYTES = 5  # of a row's digest: with a million training rows, one dev row of 200,000 is mistaken for one of them


@dataclass(frozen=True)
class EvaluatedRow:
    """A dev row and the answer to it; `target` and `given` are cells of the task's kind, with labels by name."""

    line: int
    text: str
    pair: str | None
    target: Any
    given: Any
    confidence: float | None
    is_right: bool | None
    """None for numbers, which are hardly ever exactly right"""


@dataclass(frozen=True)
class Evaluation:
    """A version's answers to dev rows; `evaluate_version` makes it."""

    version: int
    kind: str
    labels: tuple[str, ...]
    unseen: tuple[str, ...]
    """labels of these rows that do not occur in the version's training rows"""
    metric: str
    metrics: dict[str, dict[str, float | None]]
    """the version's scores, by side and metric"""
    dev_digest: str
    num_dev: int
    """number of all dev rows; `rows` has some of them if there are too many"""
    rows: tuple[EvaluatedRow, ...]
    trained: str = ""
    """digests of the rows that the version was trained on"""
    rows_of: int | None = None
    """the version whose dev rows these are, if they are not its own"""

    @property
    def texts(self) -> list[tuple[str, str | None]]:
        """The texts of its rows, for another version to answer."""
        return [(row.text, row.pair) for row in self.rows]


def describe_outputs(found: SplitOutputs, rows: Split, labels: Sequence[str], name: str = "") -> list[dict[str, Any]]:
    """Return the answers (as JSON objects) from a head's outputs on rows; refuse answers that are not finite."""
    from inlay.serving import Answer, describe_answer
    from inlay.training import read_outcomes

    answers, lost = [], []
    for row, outcome in enumerate(read_outcomes(found, labels)):
        if outcome is None:
            lost.append(row)
        else:
            answers.append(describe_answer(Answer(name, "", outcome)))
    if lost:
        raise NotFinite(
            f"the answers to {len(lost):,} of {len(rows):,} rows are not finite, the first on line "
            f"{rows.lines[lost[0]]}",
            "train again with a smaller `--lr`",
        )
    return answers


def choose_rows(split: Split, num_labels: int) -> Split:
    """Return the rows of a split that an evaluation keeps: all, or as many as allowed, drawn by a fixed seed."""
    most = MOST_ROWS
    if split.targets is not None and split.targets.ndim == 2:
        most = max(1, min(most, MOST_CELLS // max(num_labels, 1)))
    drawn = split if len(split) <= most else split.draw(most, 0)
    sizes = [sum(map(len, texts)) for texts in drawn.rows()]
    if sum(sizes) <= MOST_LETTERS:
        return drawn
    kept, total = [], 0
    for row, size in enumerate(sizes):
        if total + size <= MOST_LETTERS:
            kept.append(row)
            total += size
    return drawn.take(kept)


def evaluate_version(
    version: int, manifest: Manifest, dev: Split, answers: Sequence[Mapping[str, Any]], train: Split
) -> Evaluation:
    """Return the evaluation of a version from its answers to `dev`, the chosen ones of its dev rows."""
    found = evaluate_rows(describe_version(version, manifest), dev, answers)
    return dataclasses.replace(found, trained=digest_rows(manifest.kind, train.texts, train.pairs))


def evaluate_rows(empty: Evaluation, rows: Split, answers: Sequence[Mapping[str, Any]]) -> Evaluation:
    """Return an evaluation from the answers to some labelled rows."""
    from inlay.data import KINDS

    form, labels = KINDS[empty.kind].targets, (*empty.labels, *rows.unseen)
    assert rows.targets is not None
    pairs: Sequence[str | None] = rows.pairs or [None] * len(rows)
    found = [
        EvaluatedRow(line, text, pair, form.make_cell(target, labels), None, None, None)
        for line, text, pair, target in zip(rows.lines, rows.texts, pairs, rows.targets, strict=True)
    ]
    filled = dataclasses.replace(empty, unseen=rows.unseen, num_dev=len(rows), rows=tuple(found))
    return _fill_in(filled, answers)


def describe_version(version: int, manifest: Manifest) -> Evaluation:
    """Return the evaluation of a version, still without rows."""
    about: dict[str, Any] = {name: getattr(manifest, name) for name in ("kind", "labels", "metric")}
    # A score that is not a number becomes None, as JSON has no NaN.
    about["metrics"] = {
        side: {name: value if math.isfinite(value) else None for name, value in scores.items()}
        for side, scores in manifest.metrics.items()
    }
    return Evaluation(version=version, unseen=(), dev_digest=manifest.dev_digest, num_dev=0, rows=(), **about)


def answer_again(owner: Evaluation, other: Evaluation, answers: Sequence[Mapping[str, Any]]) -> Evaluation:
    """Return the evaluation of `other`'s version on the rows of `owner`, from its answers to them."""
    check_comparable(owner, other)
    known = (*owner.labels, *owner.unseen)
    same_rows: dict[str, Any] = {name: getattr(owner, name) for name in ("dev_digest", "num_dev", "rows", "metric")}
    unseen = tuple(label for label in known if label not in other.labels)
    moved = dataclasses.replace(other, **same_rows, unseen=unseen, rows_of=owner.version)
    return _fill_in(moved, answers)


def check_comparable(first: Evaluation, second: Evaluation) -> None:
    """Refuse to compare versions of different kinds, or with different levels."""
    from inlay.data import KINDS

    both = f"versions {first.version} and {second.version}"
    if first.kind != second.kind:
        raise Unsupported(
            f"{both} answer different kinds of task: `{first.kind}` and `{second.kind}`",
            "look at each one's own report",
        )
    if KINDS[first.kind].targets.is_ordered and first.labels != second.labels:
        raise Unsupported(f"{both} have different levels", "look at each one's own report")


def _fill_in(empty: Evaluation, answers: Sequence[Mapping[str, Any]]) -> Evaluation:
    """Put answers into an evaluation's rows, and judge each."""
    from inlay.data import find_right

    rows = []
    for row, answer in zip(empty.rows, answers, strict=True):
        given, confidence = read_answer(answer)
        rows.append(dataclasses.replace(row, given=given, confidence=confidence))
    judged = collect_targets(empty.kind, list_labels([empty]), rows)
    right = find_right(judged, decide_rows(judged, rows))
    verdicts: list[bool | None] = [None] * len(rows) if right is None else right.tolist()
    judged_rows = [dataclasses.replace(row, is_right=verdict) for row, verdict in zip(rows, verdicts, strict=True)]
    return dataclasses.replace(empty, rows=tuple(judged_rows))


def read_answer(answer: Mapping[str, Any]) -> tuple[Any, float | None]:
    """Return the cell that an answer (as `inlay.serving.describe_answer` makes it) gives, and its confidence.

    The confidence is the probability of the label; for a set or tags, that of the least sure part; None for numbers.
    """
    if "error" not in answer:
        if "words" in answer:
            probabilities = [entity["probability"] for entity in answer.get("entities") or ()]
            return [word["tag"] for word in answer["words"]], min(probabilities, default=1.0)
        if "labels" in answer:
            given = list(answer["labels"])
            chosen = set(given)
            return given, min(p if label in chosen else 1 - p for label, p in answer["probabilities"].items())
        if "value" in answer:
            return answer["value"], None
        if "answer" in answer:
            return answer["answer"], answer.get("probability")
        if "label" in answer:
            return answer["label"], answer["probabilities"][answer["label"]]
    raise NotFinite("a dev row has no answer", "train the task again with a smaller `--lr`")


# Rows as arrays


def list_labels(evaluations: Sequence[Evaluation]) -> tuple[str, ...]:
    """Return the labels of all evaluations: first those of the first one, then the others."""
    found: dict[str, None] = {}
    for evaluation in evaluations:
        found |= dict.fromkeys((*evaluation.labels, *evaluation.unseen))
    return tuple(found)


def collect_targets(kind: str, labels: tuple[str, ...], rows: Sequence[EvaluatedRow]) -> ScoredRows:
    """Return the rows' targets as arrays."""
    from inlay.data import Scheme, ScoredRows

    scheme = Scheme(kind, labels)
    return ScoredRows(kind, labels, scheme.collect([scheme.read(_to_tuples(row.target)) for row in rows]))


def decide_rows(judged: ScoredRows, rows: Sequence[EvaluatedRow]) -> Any:
    """Return the answers in the form that metrics take: an array of classes, sets or numbers; or tags, or texts."""
    from inlay.data import KINDS, Scheme

    if KINDS[judged.kind].decide is None:
        return [_to_tuples(row.given) for row in rows]
    scheme = Scheme(judged.kind, judged.labels)
    return scheme.collect([scheme.read(row.given) for row in rows])


def _to_tuples(cell: Any) -> Any:
    """Return a cell with tuples, of which JSON made lists; the outer list of a set of labels becomes a tuple too."""
    if isinstance(cell, list):
        return tuple(tuple(item) if isinstance(item, list) else item for item in cell)
    return cell


def digest_rows(kind: str, texts: Sequence[str], pairs: Sequence[str] | None) -> str:
    """Return short digests of rows, sorted, as text: they only tell whether a given row is among them."""
    from inlay.data import row_keys

    digests = sorted({_digest_key(key) for key in row_keys(kind, texts, pairs)})
    return base64.b64encode(b"".join(digests)).decode()


def _digest_key(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf8", "surrogatepass"), digest_size=_KEY_BYTES).digest()


def find_trained(evaluation: Evaluation, rows: Sequence[EvaluatedRow]) -> list[bool]:
    """Tell for each row whether the version was trained on it."""
    packed = base64.b64decode(evaluation.trained)
    known = {packed[start : start + _KEY_BYTES] for start in range(0, len(packed), _KEY_BYTES)}
    return [_digest_key(key) in known for key in _list_keys(evaluation.kind, rows)]


def _list_keys(kind: str, rows: Sequence[EvaluatedRow]) -> list[str]:
    from inlay.data import row_keys

    pairs = None if any(row.pair is None for row in rows) else [str(row.pair) for row in rows]
    return row_keys(kind, [row.text for row in rows], pairs)


def leave_out(evaluation: Evaluation, other: Evaluation) -> Evaluation:
    """Return an evaluation without the rows that are training or dev rows of the other version."""
    is_trained, theirs = find_trained(other, evaluation.rows), set(_list_keys(other.kind, other.rows))
    keys = _list_keys(evaluation.kind, evaluation.rows)
    kept = [
        row for row, key, gone in zip(evaluation.rows, keys, is_trained, strict=True) if not gone and key not in theirs
    ]
    return dataclasses.replace(evaluation, rows=tuple(kept))


def has_same_rows(first: Evaluation, second: Evaluation) -> bool:
    """Tell whether two evaluations have the same rows with the same targets."""
    if len(first.rows) != len(second.rows):
        return False
    pairs = zip(first.rows, second.rows, strict=True)
    return all((a.text, a.pair, a.target) == (b.text, b.pair, b.target) for a, b in pairs)
