"""Ranks stored tasks as starts for new data, from a few forward passes and without training.

A sample of the new rows goes through every candidate's slot and through the plain backbone, in mixed batches. A ridge
regression on each candidate's pooled vectors is then solved in closed form. Candidates are ranked by the share of the
targets' variance that it explains on held-out rows, so a start whose vectors already separate the new labels ranks
high. The score is the task's own metric on the same predictions, and the gain is its difference to the plain backbone's
score.

Each row is held out in turn: with centred rows, H = X (XᵀX + λI)⁻¹ Xᵀ + 1/n is the matrix that turns targets into
fitted values, and the prediction for row i without row i is exactly y_i − (y_i − ŷ_i) / (1 − H_ii).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from inlay.data import KINDS, METRICS, WHOLE_ROW, Encoded, Reading, Task, encode_cached, group_keys, score
from inlay.errors import InlayError, Unsupported
from inlay.explore.even_samples import find_firsts, order_evenly
from inlay.model import OWN_WEIGHTS, TOKEN_BUDGET, Backbone, Bank, Row, SlotSpec, batches_by_length, collate, make_rows
from inlay.notebook import show_html
from inlay.store import Store
from inlay.training import linear_kinds

_SLOTS = 16  # candidates in one bank
_PENALTIES = np.logspace(-4, 3, 15)  # penalties of the ridge, as multiples of the mean squared singular value


@dataclass(frozen=True)
class Suggestion:
    """A candidate, and how well its vectors predict the new task."""

    reference: str
    score: float
    """score by the task's metric, from predictions for held-out rows"""
    fit: float
    """share of the targets' variance that these predictions explain; below 0 is worse than predicting the mean"""
    gain: float
    """gain of the score over the plain backbone's; above 0 is better, also for metrics where lower is better"""
    kind: str = ""
    method: str = ""


@dataclass(frozen=True)
class Suggestions:
    """The candidates, the best first."""

    task: str
    metric: str
    num_rows: int
    plain: Suggestion
    """the backbone without any task"""
    ranked: tuple[Suggestion, ...]
    refused: dict[str, str]
    """candidate -> the reason why it cannot be a start"""

    def _repr_html_(self) -> str:
        ranked = [
            [item.reference or "(the backbone)", item.kind, item.method, item.score, item.gain, item.fit]
            for item in (*self.ranked, self.plain)
        ]
        head = ["start", "kind", "method", f"probed {self.metric}", "gain", "variance explained"]
        return show_html(f"starts for {self.task}", {"rows": self.num_rows}, head, ranked)


@dataclass(frozen=True)
class StartCandidate:
    """A version that may be a start, or the plain backbone."""

    reference: str
    spec: SlotSpec | None
    """None for the plain backbone"""
    tensors: dict[str, Tensor]
    kind: str = ""


def suggest(
    task: Task,
    backbone: Backbone,
    store: Store,
    references: Sequence[str] | None = None,
    settings: SuggestSettings | None = None,
) -> Suggestions:
    """Rank versions of the store as starts for `task`: those of `references`, or every task's latest on `backbone`."""
    settings = settings or SuggestSettings()
    kind = KINDS[task.kind]
    if kind.output_targets is None:
        raise Unsupported(f"a suggestion for a `{task.kind}` task", f"it knows: {linear_kinds()}")
    # 1. the candidates, and a sample of the rows
    candidates, refused = _load_candidates(store, backbone, references, task)
    rows = sample_rows(task, settings.num_rows)
    part = task.train.take(rows)
    whole = Reading(WHOLE_ROW, min(settings.max_length, backbone.max_length))
    encoded = encode_cached(backbone.tokenizer, part, whole)
    assert part.targets is not None
    # 2. predictions from the vectors of each candidate, with the plain backbone first
    scored = []
    for group in _group_by_bank([StartCandidate("", None, {}), *candidates]):
        for candidate, vectors in zip(group, pooled_vectors(group, backbone, encoded, settings.on_rows), strict=True):
            if not np.isfinite(vectors).all():
                refused[candidate.reference] = "its vectors are not finite numbers"
                continue
            predictions, fit = predict_left_out(vectors, kind.output_targets(part.targets, len(task.labels)))
            value = score(task.metric, predictions - kind.output_cut, part.targets)
            scored.append((candidate, value, fit))
    # 3. the ranking
    sign = 1 if METRICS[task.metric].higher_is_better else -1
    plain, *others = [
        Suggestion(
            candidate.reference,
            value,
            fit,
            gain=sign * (value - scored[0][1]),
            kind=candidate.kind,
            method="" if candidate.spec is None else candidate.spec.method.name,
        )
        for candidate, value, fit in scored
    ]
    # Rank by the explained variance and not by the metric, in which few rows often tie: on real tasks this chose the
    # better starts (docs/results.md).
    ranked = sorted(others, key=lambda item: (-item.fit, -sign * item.score, item.reference))
    return Suggestions(task.name, task.metric, len(rows), plain, tuple(ranked), refused)


@dataclass(frozen=True)
class SuggestSettings:
    """The limits of the sample."""

    num_rows: int = 256
    """most rows of the sample"""
    max_length: int = 128
    """most tokens of a row"""
    on_rows: Callable[[int], object] = lambda num_rows: None
    """called with the number of rows that have just gone through the backbone"""


def sample_rows(task: Task, num_rows: int) -> np.ndarray:
    """Draw positions of training rows, always the same: equal shares of every class, and no text twice.

    A repeated text would reveal the label of the held-out row.
    """
    keys, targets = group_keys(task.train.texts, task.train.pairs), task.train.targets
    assert targets is not None
    order = np.random.default_rng(0).permutation(np.array(sorted(find_firsts(keys).values())))
    if len(order) <= num_rows:
        return np.sort(order)
    strata = np.asarray(KINDS[task.kind].targets.find_strata(targets))[order]
    return np.sort(order_evenly(order, strata)[:num_rows])


def _group_by_bank(candidates: Sequence[StartCandidate]) -> Iterator[list[StartCandidate]]:
    """Yield groups of candidates that share a bank; one with its own copy of the backbone's weights is alone."""
    mixed = [item for item in candidates if item.spec is None or not item.spec.is_finetuned]
    for start in range(0, len(mixed), _SLOTS):
        yield mixed[start : start + _SLOTS]
    yield from ([item] for item in candidates if item.spec is not None and item.spec.is_finetuned)


def pooled_vectors(
    candidates: Sequence[StartCandidate], backbone: Backbone, encoded: Encoded, on_rows: Callable[[int], object]
) -> list[np.ndarray]:
    """Return the pooled vectors [rows, D] of every candidate, each row through all slots in mixed batches."""
    bank = Bank(backbone, len(candidates))
    for slot, candidate in enumerate(candidates):
        if candidate.spec is not None:
            bank.put(slot, candidate.spec, candidate.tensors)
    weights = {
        OWN_WEIGHTS.theirs(name): backbone.like_own(name, tensor)
        for name, tensor in candidates[0].tensors.items()
        if OWN_WEIGHTS.owns(name)
    }
    found = [np.zeros((len(encoded), backbone.hidden_size)) for _ in candidates]
    places = [(slot, row) for row in range(len(encoded)) for slot in range(len(candidates))]
    lengths = [int(encoded.lengths[row]) for _, row in places]
    for chunk in batches_by_length(lengths, TOKEN_BUDGET[backbone.device.type]):
        rows = [make_rows([encoded.window(row)], slot)[0] for slot, row in (places[index] for index in chunk)]
        for index, vector in zip(chunk, _pool(bank, rows, weights or None), strict=True):
            slot, row = places[index]
            found[slot][row] = vector
        on_rows(len(chunk))
    return found


def _pool(bank: Bank, rows: Sequence[Row], weights: Mapping[str, Tensor] | None) -> list[np.ndarray]:
    """Return each row's pooled vector, in order; a slot whose head does not pool gets the default pooling."""
    backbone = bank.backbone
    batch = collate(rows, backbone.pad_id, backbone.device)
    assert batch.mask_BT is not None
    answers: list[np.ndarray] = [np.empty(0)] * len(rows)
    with torch.inference_mode(), bank.routed(batch.route):
        hidden_BTD = backbone.hidden_layers(batch, weights)[-1]
        for slot, start, stop in batch.route.segments:
            spec = bank.specs[slot]
            pooling = "mean" if backbone.is_seq2seq else backbone.default_pooling
            if spec is not None and spec.head.pooling in ("cls", "pooler", "mean"):
                pooling = spec.head.pooling
            pooled = backbone.pool(hidden_BTD[start:stop], batch.mask_BT[start:stop], pooling, weights)
            for place, vector in zip(batch.order[start:stop], pooled.double().cpu().numpy(), strict=True):
                answers[place] = vector
    return answers


def predict_left_out(vectors: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, float]:
    """Predict each row by a ridge regression without it [n, outputs]; also return the share of explained variance.

    The penalty is the one with the least squared error over held-out rows.
    """
    num_rows = len(vectors)
    centred, means = vectors - vectors.mean(0), targets.mean(0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    shares = left.T @ (targets - means)
    scale = (sizes**2).sum() / max(len(sizes), 1) or 1.0
    best, least = targets - targets, np.inf
    for penalty in _PENALTIES * scale:
        kept = sizes**2 / (sizes**2 + penalty)
        fitted = left @ (kept[:, None] * shares) + means
        leverage = (left**2) @ kept + 1 / num_rows
        errors = (targets - fitted) / np.maximum(1 - leverage, 1e-9)[:, None]
        if (errors**2).sum() < least:
            best, least = targets - errors, float((errors**2).sum())
    spread = float(((targets - means) ** 2).sum())
    return best, 1 - least / spread if spread else 0.0


def _load_candidates(
    store: Store, backbone: Backbone, references: Sequence[str] | None, task: Task
) -> tuple[list[StartCandidate], dict[str, str]]:
    """Load the candidates; also return the reasons for versions that cannot be starts."""
    if references is not None:
        versions = [store.resolve(reference) for reference in references]
    else:
        latest = [task.latest for task in store.ledger(lambda version, error: None)]  # without damaged versions
        fingerprint = backbone.fingerprint
        versions = [info.version for info in latest if info.summary.backbone["fingerprint"] == fingerprint]
    found, refused = [], {}
    splits = [split for split in (task.train, task.dev, task.test) if split is not None]
    rows = {row for split in splits for row in zip_longest(split.texts, split.pairs or ())}
    labels = (task.kind, task.labels)
    for version in versions:
        try:
            loaded = store.load(version)
            if loaded.manifest.backbone["fingerprint"] != backbone.fingerprint:
                raise Unsupported(f"it was trained on the backbone `{loaded.manifest.backbone['name']}`")
            manifest = loaded.manifest
            # The same rows split otherwise: it may know the answers to dev rows, and would score too well.
            is_split_otherwise = (manifest.kind, manifest.labels) == labels and manifest.share_of_probes_in(rows) > 0.5
            if manifest.data_digest == task.digest or is_split_otherwise:
                raise Unsupported("it was trained on these very rows")
            spec = SlotSpec.from_stored(loaded.manifest.method, loaded.manifest.head)
            Bank(backbone, 1).put(0, spec, loaded.tensors)  # fails here, before any work, if no bank can hold it
            found.append(StartCandidate(version.reference, spec, loaded.tensors, loaded.manifest.kind))
        except InlayError as error:
            refused[version.reference] = error.message
    return found, refused
