"""Rows that may be labelled wrongly: a model that was not trained on them confidently predicts another label.

Confident learning (Northcutt, Jiang & Chuang 2021): a class's threshold is its mean self-confidence, the mean
probability of the label over the rows that have it. A row is suspicious if the probability of its own label is below
that label's threshold, and the likeliest label is another one, above its threshold. Each class has its own threshold,
so that rows of a class of which the model is never sure are not suspected by chance. In sets of labels every label is a
question of its own, with two answers.

All probabilities [n, L] must come from models that were not trained on these rows; targets are classes [n], or 0 and 1
[n, L].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from inlay.data.calibration import is_right, likeliest_temperature
from inlay.data.metrics import score

if TYPE_CHECKING:
    from inlay.data.tasks import Split

FEWEST_ROWS = 50
"""fewest rows from which errors are looked for"""
_NEAR_CHANCE = 0.2  # Matthews' correlation with the given labels: a model below it knows too little
_DEVIATIONS = 3.0  # least distance above chance, in standard deviations of a model under random labels
_KNOWN = 0.5  # least share of a class's rows that must be predicted as given: else the model does not know the class


@dataclass(frozen=True)
class LabelError:
    """A row that may be labelled wrongly."""

    line: int
    path: str
    text: str
    pair: str | None
    given: str
    likely: str
    probability: float  # of the likely label; for a set, of the likely decision on the label most in doubt
    margin: float  # how far that is above the probability of the given label; rows are ranked by it


@dataclass(frozen=True)
class LabelErrors:
    """The rows that may be labelled wrongly, the most suspicious first."""

    num_rows: int  # rows looked at
    errors: tuple[LabelError, ...]
    silence: str = ""  # the reason why no errors can be found, if so

    def to_json(self) -> dict[str, Any]:
        """Return all of them as plain data."""
        return asdict(self)


def find_label_errors(
    rows: Split, labels: Sequence[str], probabilities: np.ndarray, paths: Sequence[str] | None = None
) -> LabelErrors:
    """Find the rows for which a model not trained on them confidently predicts another label.

    `paths` has the file of each row.
    """
    targets = rows.targets
    assert targets is not None
    if len(rows) < FEWEST_ROWS:
        return LabelErrors(len(rows), (), f"{len(rows)} rows are too few: from {FEWEST_ROWS} on")
    find = _find_in_sets if targets.ndim == 2 else _find_in_classes
    found = find(np.asarray(probabilities, dtype=np.float64), targets)
    if found is None:
        return LabelErrors(len(rows), (), "the model is hardly better than chance on rows left out")
    errors = []
    for row, (likely, probability, margin) in sorted(found.items(), key=lambda item: (-item[1][2], item[0])):
        given = np.flatnonzero(targets[row]).tolist() if targets.ndim == 2 else [int(targets[row])]
        errors.append(
            LabelError(
                line=rows.lines[row],
                path=rows.path if paths is None else paths[row],
                text=rows.texts[row],
                pair=None if rows.pairs is None else rows.pairs[row],
                given="|".join(labels[label] for label in given) or "(no label)",
                likely="|".join(labels[label] for label in likely) or "(no label)",
                probability=probability,
                margin=margin,
            )
        )
    return LabelErrors(len(rows), tuple(errors))


def as_probabilities(logits: np.ndarray, targets: np.ndarray, fitted_on: np.ndarray | None = None) -> np.ndarray:
    """Turn logits into probabilities, after dividing them by the temperature that makes `targets` likeliest.

    `fitted_on` are the logits that belong to `targets`, where those are of other rows. If all of them are right, no
    temperature can be fitted, and it is 1.
    """
    fitted_on = logits if fitted_on is None else fitted_on
    temperature = 1.0 if is_right(fitted_on, targets).all() else likeliest_temperature(fitted_on, targets)
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    if targets.ndim == 2:
        return np.asarray(0.5 * (1 + np.tanh(scaled / 2)))
    shares = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))


_Suspects = dict[int, tuple[list[int], float, float]]  # row -> the labels it should have, probability and margin


def _find_in_classes(probabilities: np.ndarray, targets: np.ndarray) -> _Suspects | None:
    """Find suspicious rows of classes; None if the predictions are hardly better than chance."""
    # Unlike accuracy, Matthews' correlation is not high because one class is rare.
    least = max(_NEAR_CHANCE, _DEVIATIONS / math.sqrt(len(targets)))
    if not score("matthews", probabilities, targets) >= least:
        return None
    # 1. how sure the model is of each class where it is given, and whether it knows the class
    num_labels = probabilities.shape[1]
    counts = np.bincount(targets, minlength=num_labels)
    own, likeliest = probabilities[np.arange(len(targets)), targets], probabilities.argmax(axis=1)
    thresholds = np.full(num_labels, np.inf)
    is_known = np.zeros(num_labels, dtype=bool)
    for label in np.flatnonzero(counts):
        is_given = targets == label
        thresholds[label] = own[is_given].mean()
        is_known[label] = (likeliest[is_given] == label).mean() >= _KNOWN
    # 2. the rows that it would give another label, and is sure of
    best = probabilities.max(axis=1)
    is_other = (likeliest != targets) & is_known[targets]
    is_sure = (own < thresholds[targets]) & (best >= thresholds[likeliest])
    return {
        int(row): ([int(likeliest[row])], float(best[row]), float(best[row] - own[row]))
        for row in np.flatnonzero(is_other & is_sure)
    }


def _find_in_sets(probabilities: np.ndarray, targets: np.ndarray) -> _Suspects | None:
    """Find suspicious rows of sets of labels, each with all doubtful labels; None if every label is near chance."""
    doubts: dict[int, dict[int, tuple[float, float]]] = {}  # row -> label -> probability and margin
    has_known = False
    for label in range(targets.shape[1]):
        both = np.stack([1 - probabilities[:, label], probabilities[:, label]], axis=1)
        found = _find_in_classes(both, (targets[:, label] > 0).astype(np.int64))
        has_known |= found is not None
        for row, (_, probability, margin) in (found or {}).items():
            doubts.setdefault(row, {})[label] = probability, margin
    if not has_known:
        return None
    suspects = {}
    for row, own in doubts.items():
        is_likely = targets[row] > 0
        is_likely[list(own)] ^= True
        probability, margin = max(own.values(), key=lambda item: item[1])
        suspects[row] = np.flatnonzero(is_likely).tolist(), probability, margin
    return suspects
