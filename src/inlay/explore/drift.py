"""Drift: whether new data look like the rows a version was trained on, by a two-sample test on frozen vectors.

A classifier is trained to tell new rows from training rows (Lopez-Paz and Oquab 2017): a logistic regression on the
plain backbone's vectors, scored by cross-validation. Its AUC is 0.5 if both look alike, and 1 if they can be told apart
without error. A permutation test, which repeats this with the sides shuffled, tells whether the AUC may be due to
chance.

Each side has a text only once, and a text of both sides is in one fold; otherwise the classifier would memorise copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from inlay.data import WHOLE_ROW, Reading, Split, group_keys
from inlay.errors import BadData
from inlay.explore.even_samples import find_firsts
from inlay.explore.version_reader import OnRows, VersionReader
from inlay.notebook import show_html
from inlay.serving import answer_words

FEWEST_ROWS = 20
MOST_ROWS = 1000
"""most rows of each side that are looked at; they are drawn at random"""
SLIGHT, CLEAR = 0.6, 0.75
"""the AUC from which on new rows look slightly different, and clearly different"""
LEAST_P = 0.01
_FOLDS, _COMPONENTS, _DRAWS, _ENOUGH = 5, 32, 99, 5
_MOST_LISTED = 5
ALIKE, SLIGHTLY, CLEARLY = "alike", "slightly different", "clearly different"


@dataclass(frozen=True)
class Shift:
    """A quantity in the training rows and in the new rows, and the p-value of the difference."""

    name: str
    train: float
    new: float
    p: float | None


@dataclass(frozen=True)
class OddRow:
    """A new row that is unlike every training row, with its cosine to the nearest of them."""

    line: int
    text: str
    pair: str | None
    cosine: float
    answer: str


@dataclass(frozen=True)
class DriftReport:
    """The verdict, and the numbers behind it."""

    reference: str
    verdict: str
    auc: float
    interval: tuple[float, float]
    """95% interval, by bootstrap over rows"""
    p: float
    """p-value, by permutation"""
    num_train: int
    num_new: int
    num_repeated: int
    """number of new rows that were left out, as another new row has the same text"""
    share_known: float
    """share of new texts that are training texts"""
    labels: tuple[Shift, ...]
    """share of each answer; the mean if answers are numbers"""
    texts: tuple[Shift, ...]
    """length in tokens, the share of tokens the backbone does not know, the share of texts that are cut"""
    odd: tuple[OddRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as data."""
        return asdict(self)

    def __repr__(self) -> str:
        return f"DriftReport({self.reference}: {self.verdict}, AUC {self.auc:.2f}, p {self.p:.2f})"

    def _repr_html_(self) -> str:
        facts = {"AUC": self.auc, "p": self.p, "training rows": self.num_train, "new rows": self.num_new}
        rows = [[item.name, item.train, item.new] for item in (*self.labels, *self.texts)]
        return show_html(f"{self.reference}: {self.verdict}", facts, ["", "training rows", "new rows"], rows)


def find_drift(reader: VersionReader, new: Split, train: Split, *, on_rows: OnRows = lambda _: None) -> DriftReport:
    """Compare new rows with the training rows of a version."""
    generator = np.random.default_rng(0)
    reader.make_split(new.texts, new.pairs)
    old, fresh = (_draw_once(rows, generator) for rows in (train, new))
    for rows, what in ((old, "training"), (fresh, "new")):
        if len(rows) < FEWEST_ROWS:
            raise BadData(
                f"{len(rows)} different {what} rows are too few to compare", f"at least {FEWEST_ROWS} are needed"
            )
    # 1. how well a classifier can tell them apart
    vectors = [reader.frozen_vectors(rows, on_rows) for rows in (old, fresh)]
    keys = [group_keys(rows.texts, rows.pairs) for rows in (old, fresh)]
    auc, interval, p = tell_apart(vectors[0], vectors[1], [*keys[0], *keys[1]], generator)
    # 2. how answers and texts differ
    answers = [reader.describe(reader.outputs(rows, on_rows)) for rows in (old, fresh)]
    known = set(group_keys(train.texts, train.pairs))
    return DriftReport(
        reference=reader.version.reference,
        verdict=judge(auc, interval[0], p),
        auc=auc,
        interval=interval,
        p=p,
        num_train=len(old),
        num_new=len(fresh),
        num_repeated=len(new) - len(set(group_keys(new.texts, new.pairs))),
        share_known=sum(key in known for key in keys[1]) / len(fresh),
        labels=_compare_answers(reader, *answers),
        texts=_compare_texts(reader, old, fresh),
        odd=_find_odd(fresh, vectors[1], vectors[0], answers[1]),
    )


def judge(auc: float, low: float, p: float) -> str:
    """Return the verdict: a difference must be large enough to matter, and unlikely to be chance."""
    if p > LEAST_P or auc < SLIGHT or low <= 0.5:
        return ALIKE
    return CLEARLY if auc >= CLEAR else SLIGHTLY


def tell_apart(
    old: np.ndarray, new: np.ndarray, keys: Sequence[str], generator: np.random.Generator
) -> tuple[float, tuple[float, float], float]:
    """Return the AUC of a classifier between two sets of vectors, its 95% interval, and p by permutation."""
    sides = np.repeat([0, 1], [len(old), len(new)])
    features = _reduce(np.concatenate([old, new]))
    groups = np.unique(keys, return_inverse=True)[1]
    folds = generator.permutation(groups.max() + 1)[groups] % _FOLDS  # a text and its copy are in one fold
    scores = _score_left_out(features, sides, folds)
    auc = _mean_auc(scores, sides, folds)
    exceeded = drawn = 0
    for _ in range(_DRAWS):
        shuffled = generator.permutation(sides)
        drawn += 1
        exceeded += _mean_auc(_score_left_out(features, shuffled, folds), shuffled, folds) >= auc
        if exceeded == _ENOUGH:  # p is large, and need not be known more exactly
            break
    p = (1 + exceeded) / (1 + drawn)
    places = [np.flatnonzero(sides == side) for side in (0, 1)]
    draws = []
    for _ in range(500):
        rows = np.concatenate([generator.choice(own, len(own)) for own in places])
        draws.append(_mean_auc(scores[rows], sides[rows], folds[rows]))
    low, high = np.quantile(draws, [0.025, 0.975])
    return auc, (float(low), float(high)), p


def _reduce(vectors: np.ndarray) -> np.ndarray:
    """Return the first principal components of vectors, each scaled to variance one."""
    centred = vectors - vectors.mean(0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    kept = sizes[:_COMPONENTS] > 1e-9 * max(float(sizes[0]), 1e-300)
    return np.asarray(left[:, :_COMPONENTS][:, kept] * np.sqrt(len(vectors)))


def _score_left_out(features: np.ndarray, sides: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Return each row's score by a classifier that was fitted to the other folds."""
    from sklearn.linear_model import LogisticRegression

    scores = np.zeros(len(sides))
    for fold in range(_FOLDS):
        left = folds == fold
        if left.any() and len(np.unique(sides[~left])) == 2:
            model = LogisticRegression(C=0.1, class_weight="balanced", max_iter=200)
            scores[left] = model.fit(features[~left], sides[~left]).decision_function(features[left])
    return scores


def _mean_auc(scores: np.ndarray, sides: np.ndarray, folds: np.ndarray) -> float:
    """Return the mean AUC of the folds, as scores of different models are not on one scale."""
    found, weights = [], []
    for fold in range(_FOLDS):
        own = folds == fold
        new, old = scores[own & (sides == 1)], scores[own & (sides == 0)]
        if len(new) and len(old):
            order = np.sort(old)
            below = np.searchsorted(order, new, "left") + np.searchsorted(order, new, "right")
            found.append(float(below.mean()) / (2 * len(old)))
            weights.append(len(new) * len(old))
    return float(np.average(found, weights=weights)) if found else 0.5


def _draw_once(rows: Split, generator: np.random.Generator) -> Split:
    """Return each text once, and at most MOST_ROWS of them."""
    keys = group_keys(rows.texts, rows.pairs)
    firsts = np.array(sorted(find_firsts(keys).values()), dtype=np.int64)
    if len(firsts) > MOST_ROWS:
        firsts = np.sort(generator.choice(firsts, MOST_ROWS, replace=False))
    return rows.take(firsts)


def _compare_answers(
    reader: VersionReader, old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]
) -> tuple[Shift, ...]:
    """Compare how often the version gives each label, or the mean of its numbers; empty for other answers."""
    from scipy import stats

    if "value" in old[0]:
        values = [np.array([answer["value"] for answer in side]) for side in (old, new)]
        p = float(stats.ks_2samp(*values).pvalue)
        return (Shift("mean of the answers", float(values[0].mean()), float(values[1].mean()), p),)
    if "probabilities" not in old[0]:
        return ()
    given = [[answer.get("labels") or [answer.get("label")] for answer in side] for side in (old, new)]
    labels, shifts = reader.manifest.labels, []
    for label in labels:
        counts = [sum(label in own for own in side) for side in given]
        table = [[counts[0], len(old) - counts[0]], [counts[1], len(new) - counts[1]]]
        p = float(stats.fisher_exact(table).pvalue)
        shifts.append(Shift(label, counts[0] / len(old), counts[1] / len(new), min(1.0, p * len(labels))))
    return tuple(shifts)


def _compare_texts(reader: VersionReader, old: Split, new: Split) -> tuple[Shift, ...]:
    """Compare the lengths, the shares of unknown tokens, and the shares of texts longer than the version reads."""
    from scipy import stats

    unknown = reader.backbone.tokenizer.unk_token_id
    found = []
    for rows in (old, new):
        encoded = reader.encode(rows, Reading(WHOLE_ROW, reader.backbone.max_length))
        is_unknown = float((encoded.flat_ids == unknown).mean()) if unknown is not None else 0.0
        found.append((encoded.lengths, is_unknown, float((encoded.lengths > reader.manifest.max_length).mean())))
    (lengths, unknown_old, cut_old), (new_lengths, unknown_new, cut_new) = found
    return (
        Shift("median tokens", float(np.median(lengths)), float(np.median(new_lengths)),
              float(stats.ks_2samp(lengths, new_lengths).pvalue)),
        Shift("share of unknown tokens", unknown_old, unknown_new, None),
        Shift("share of texts that are cut", cut_old, cut_new, None),
    )  # fmt: skip


def _find_odd(
    rows: Split, vectors: np.ndarray, others: np.ndarray, answers: Sequence[dict[str, Any]]
) -> tuple[OddRow, ...]:
    """Return the rows whose nearest training row is furthest away, the furthest first."""
    unit, known = (each / np.maximum(np.linalg.norm(each, axis=1, keepdims=True), 1e-12) for each in (vectors, others))
    nearest = (unit @ known.T).max(1)
    return tuple(
        OddRow(
            line=rows.lines[place],
            text=rows.texts[place],
            pair=None if rows.pairs is None else rows.pairs[place],
            cosine=float(nearest[place]),
            answer=answer_words(answers[place]),
        )
        for place in map(int, np.argsort(nearest, kind="stable")[:_MOST_LISTED])
    )
