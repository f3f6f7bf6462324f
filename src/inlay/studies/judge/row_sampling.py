"""Standard errors of metrics from the scored rows: how far a score may be from the score on new rows.

There are two ways. Where the answers of two runs to the same rows are known, the covariances of their scores are
measured and kept in the records, so that the error of a difference takes into account that both answered the same rows.
Where only metrics were kept, an error is computed from them (`score_error`), and two runs are taken as independent. As
two runs tend to make the same mistakes, the true error of their difference is then smaller, never larger.

For covariances, a study with `paired_rows` keeps in each run's folder how much every dev row influences the run's
metrics (`influence`). When a session ends, the covariances of all runs of a task are put into their records. The
results contain no rows, labels or answers, so they can be shared without the data sets.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from inlay.data import KINDS
from inlay.store import write_atomically
from inlay.studies.run.records import FINISHED, Record

if TYPE_CHECKING:
    from inlay.model import Backbone
    from inlay.training import Result, Run

FILE = "dev_rows.npz"
METRICS = ("accuracy", "f1", "matthews", "spearman", "pearson")
DIGITS = 6
"""significant digits of a covariance: more are noise"""

Floats = NDArray[np.float64]


def num_rows(record: Record, split: str) -> int | None:
    """Return the number of rows a record was scored on; None if it does not say."""
    found = record.extra.get(f"num_{split}")
    return None if found is None else int(found)


def score_error(metric: str, scores: Mapping[str, float], rows: int | None) -> float | None:
    """Return a metric's standard error over `rows` rows, from the kept metrics; None if it is not known."""
    if rows is None or rows < 4 or metric not in scores:
        return None
    value = scores[metric]
    if metric in ("accuracy", "exact_match", "token_f1") or value == 1:
        # A row's score lies between 0 and 1, so its variance is at most that of a row that is right or wrong. Two right
        # and two wrong rows are added (Agresti and Coull): without a single wrong row the error would be zero.
        share = (value * rows + 2) / (rows + 4)
        return math.sqrt(max(share * (1 - share), 0.0) / rows)
    if metric in ("spearman", "pearson"):
        # Bonett and Wright 2000, Psychometrika 65, for Spearman's coefficient; the error of Pearson's is smaller.
        return (1 - value**2) * math.sqrt((1 + value**2 / 2) / (rows - 3))
    if metric in ("f1", "matthews"):
        shares = _confusion(scores)
        if shares is None:
            return None
        slopes = _slopes(metric, shares)  # the error of a function of multinomial shares, to first order
        return math.sqrt(max(float(shares @ slopes**2 - (shares @ slopes) ** 2), 0.0) / rows)
    return None


def _confusion(scores: Mapping[str, float]) -> Floats | None:
    """Return the shares of true and false positives, false and true negatives, for two classes.

    With W the share of wrong rows and F the F1, 2TP / (2TP + W) = F gives the true positives. Matthews' coefficient
    then tells how the wrong rows are divided in two parts. Which part are the false positives stays unknown, but no
    error depends on it. The division is found by search, since the coefficient has no simple inverse.
    """
    if not {"accuracy", "f1", "matthews"} <= scores.keys():
        return None
    accuracy, f1, matthews = (scores[name] for name in ("accuracy", "f1", "matthews"))
    wrong = 1 - accuracy
    if f1 >= 1 or wrong <= 0:
        return None
    right_positive = f1 * wrong / (2 * (1 - f1))
    right_negative = accuracy - right_positive
    if right_negative < -1e-9:
        return None
    false_positive = np.linspace(0, wrong, 2001)
    shares = np.stack([
        np.full_like(false_positive, right_positive),
        false_positive,
        wrong - false_positive,
        np.full_like(false_positive, max(right_negative, 0.0)),
    ])  # fmt: skip
    return np.asarray(shares[:, np.abs(_matthews(shares) - matthews).argmin()])


def _matthews(shares: Floats) -> Floats:
    tp, fp, fn, tn = shares
    below = np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return np.divide(tp * tn - fp * fn, below, out=np.zeros_like(tp), where=below > 0)


def _f1(shares: Floats) -> Floats:
    tp, fp, fn, _ = shares
    below = 2 * tp + fp + fn
    return np.divide(2 * tp, below, out=np.zeros_like(tp), where=below > 0)


_OF_SHARES = {"f1": _f1, "matthews": _matthews}


def _slopes(metric: str, shares: Floats) -> Floats:
    """Return the derivative of a metric by each of the four shares: central differences, one-sided at zero."""
    step = 1e-6
    found = []
    for number in range(4):
        up, down = shares.copy(), shares.copy()
        up[number] += step
        down[number] = max(down[number] - step, 0.0)
        columns = np.stack([up, down], axis=1)
        first, second = _OF_SHARES[metric](columns)
        found.append((first - second) / (up[number] - down[number]))
    return np.asarray(found)


def influence(metric: str, gold: Floats, answers: Floats) -> Floats | None:
    """Return each row's influence on a metric: for random rows, the metric varies as the mean of these values.

    The covariance of two runs' metrics on the same n rows is the covariance of their influences, divided by n.
    """
    if metric == "accuracy":
        return np.asarray(gold == answers, dtype=np.float64)
    if metric in ("f1", "matthews"):
        kind = np.where(answers == 1, np.where(gold == 1, 0, 1), np.where(gold == 1, 2, 3))
        shares = np.bincount(kind, minlength=4) / len(gold)
        return np.asarray(_slopes(metric, shares)[kind])
    if metric in ("spearman", "pearson"):
        from scipy.stats import rankdata

        # Pearson's r: uv − r (u² + v²) / 2, u and v standardised; Spearman's is that of ranks, to first order.
        pair = [gold, answers]
        if metric == "spearman":
            pair = [np.asarray(rankdata(values), dtype=np.float64) for values in pair]
        if pair[0].std() == 0 or pair[1].std() == 0:  # no correlation is defined, whichever rows are drawn
            return np.zeros(len(gold))
        u, v = ((values - values.mean()) / values.std() for values in pair)
        r = float((u * v).mean())
        return np.asarray(u * v - r * (u**2 + v**2) / 2)
    return None


def covariances(influences: Sequence[Floats]) -> Floats:
    """Return the covariances of the metrics of several runs on the same rows."""
    stacked = np.stack(influences)
    return np.atleast_2d(np.cov(stacked)) / stacked.shape[1]


def paired_error(records: Sequence[tuple[Record, float]], metric: str) -> float | None:
    """Return the row error of a weighted sum of runs' scores, from measured covariances; None without them."""
    total = 0.0
    for record, weight in records:
        known: Mapping[str, Any] = (record.extra.get("row_covariances") or {}).get(metric, {})
        for other, share in records:
            covariance = known.get(other.id)
            if covariance is None:
                return None
            total += weight * share * float(covariance)
    return math.sqrt(max(total, 0.0))


def keep_influences(folder: Path, run: Run, result: Result, backbone: Backbone) -> None:
    """Answer a run's dev rows with its best weights, and write each row's influence on its metrics."""
    from inlay.training import judge_split  # imports torch, which a report does not need

    task = run.task
    kind = KINDS[task.kind]
    if (folder / FILE).is_file() or not (kind.is_classifier or kind.is_number) or task.dev.targets is None:
        return
    judged = judge_split(result.spec(run), result.tensors, backbone, task.dev, run.reading)
    gold = np.asarray(task.dev.targets, dtype=np.float64)
    answers = np.asarray(judged.predictions(task.labels), dtype=np.float64)
    if kind.is_classifier:
        answers = answers.argmax(1).astype(np.float64)
    is_binary = kind.is_classifier and len(task.labels) == 2 and not task.dev.unseen
    names = ("spearman", "pearson") if kind.is_number else METRICS[:3] if is_binary else METRICS[:1]
    found = {name: values for name in names if (values := influence(name, gold, answers)) is not None}
    digest = hashlib.sha256(gold.tobytes()).digest()  # equal if two runs answered the same rows
    content = io.BytesIO()
    np.savez_compressed(content, digest=np.frombuffer(digest, dtype=np.uint8), **found)  # type: ignore[arg-type]
    write_atomically(folder / FILE, content.getvalue())


def add_covariances(records: Sequence[Record], runs: Path) -> list[Record]:
    """Return the records whose covariances change, from the influences that runs have kept."""
    # 1. the influences of runs that answered the same rows
    groups: dict[tuple[str, str, bytes], dict[str, Mapping[str, Floats]]] = {}
    for record in records:
        path = runs / record.id / FILE
        if record.status == FINISHED and path.is_file():
            with np.load(path, allow_pickle=False) as content:
                found = {name: content[name] for name in content.files}
            place = (record.task, record.fingerprint, found.pop("digest").tobytes())
            groups.setdefault(place, {})[record.id] = found
    # 2. their covariances: run -> metric -> other run
    measured: dict[str, dict[str, dict[str, float]]] = {}
    for influences in groups.values():
        for metric in METRICS:
            ids = [run_id for run_id, found in influences.items() if metric in found]
            if ids:
                matrix = covariances([influences[run_id][metric] for run_id in ids])
                for run_id, line in zip(ids, matrix, strict=True):
                    known = {other: float(f"{value:.{DIGITS}g}") for other, value in zip(ids, line, strict=True)}
                    measured.setdefault(run_id, {})[metric] = known
    # 3. put them into the records, beside those that another machine measured, whose runs' folders are not here
    changed = []
    for record in records:
        before = record.extra.get("row_covariances") or {}
        own = measured.get(record.id, {})
        after = before | {metric: {**before.get(metric, {}), **found} for metric, found in own.items()}
        if after != before:
            changed.append(dataclasses.replace(record, extra={**record.extra, "row_covariances": after}))
    return changed
