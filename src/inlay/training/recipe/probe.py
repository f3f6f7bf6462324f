"""A linear probe: the backbone's frozen vectors, and a convex head on them.

One pass over the texts gives a vector for each, standardised over the training rows; the linear model of the task's
kind is fitted to them, its strength chosen by cross-validation on the training rows. It is the cheap thing anybody
would try first, so it says what adapters are worth.

Pairs are read in two ways: `joined`, as one text, as a run reads them today, and `towers`, each text by itself, with
u, v, |u − v|, u · v (element by element) and their cosine. The better of the two in cross-validation is the probe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from inlay.data import (
    KINDS,
    WHOLE_ROW,
    LabelErrors,
    Reading,
    Split,
    Task,
    as_probabilities,
    encode_cached,
    find_label_errors,
    is_better,
    list_metrics,
    score,
)
from inlay.errors import Unsupported
from inlay.model import TOKEN_BUDGET, Backbone, Bank, batches_by_length, make_rows
from inlay.training.recipe.linear import Validated, choose_strength, cross_validate, fit_raw, linear_kinds

_MOST_COMPARED = 1000  # rows used to choose how pairs are read
_SINGLE, _JOINED, _TOWERS = "single", "joined", "towers"


@dataclass(frozen=True)
class ProbeResult:
    """The result of a linear model on frozen vectors."""

    task: str
    kind: str
    metric: str
    backbone: str
    pooling: str
    reading: str
    """how texts were read: single, joined or towers"""
    strength: float
    tried: dict[str, dict[str, float]]
    """reading -> strength -> score in cross-validation on the training rows"""
    metrics: dict[str, dict[str, float]]
    """split -> metric -> value"""
    cosine: dict[str, dict[str, float]] | None
    """split -> correlation of the untrained cosine of two texts with the target; None unless the target is a number"""
    num_features: int
    num_train: int
    seconds: float
    label_errors: LabelErrors | None = None
    """rows of train and dev that may be labelled wrongly; None for numbers"""

    def to_json(self) -> dict[str, Any]:
        """Return the probe as data."""
        return asdict(self)


def fit_probe(
    task: Task, backbone: Backbone, *, max_length: int | None = None, on_rows: Callable[[int], object] = lambda _: None
) -> ProbeResult:
    """Fit the probe of a task, and score it on dev and test. `on_rows` is called with numbers of texts just read."""
    if KINDS[task.kind].linear is None:
        raise Unsupported(f"a linear probe for a `{task.kind}` task", f"it knows: {linear_kinds()}")
    began = time.perf_counter()
    # 1. compute the features of every text by the frozen backbone, once for each reading
    reader = _Reader(backbone, min(max_length or 128, backbone.max_length), on_rows)
    splits = {"train": task.train, "dev": task.dev}
    if task.test is not None and task.test.targets is not None:
        splits["test"] = task.test
    readings = (_SINGLE,) if task.train.pairs is None else (_JOINED, _TOWERS)
    features = {name: {side: reader.read(split, name) for side, split in splits.items()} for name in readings}
    # 2. choose strength and reading by cross-validation on the training rows
    targets, num_labels = _targets(task.train), len(task.labels)
    tried = {
        name: cross_validate(task.kind, task.metric, sides["train"], targets, num_labels)
        for name, sides in features.items()
    }
    best = {name: choose_strength(task.metric, found) for name, found in tried.items()}
    reading = readings[0]
    for name in readings[1:]:
        if is_better(task.metric, best[name].score, best[reading].score):
            reading = name
    strength = best[reading].strength
    # 3. fit on all training rows, and score by every metric of the kind
    chosen = features[reading]
    model = fit_raw(task.kind, chosen["train"], targets, strength, num_labels)
    outputs = {side: model.outputs(rows) for side, rows in chosen.items() if side != "train"}
    names = list_metrics(task.kind, len(task.labels))
    return ProbeResult(
        task=task.name,
        kind=task.kind,
        metric=task.metric,
        backbone=backbone.name,
        pooling=reader.pooling,
        reading=reading,
        strength=strength,
        tried={name: {f"{key:g}": value.score for key, value in found.items()} for name, found in tried.items()},
        metrics={side: {name: score(name, found, _targets(splits[side])) for name in names}
                 for side, found in outputs.items()},
        cosine=_score_cosine(task, features[_TOWERS], splits) if _TOWERS in features else None,
        num_features=chosen["train"].shape[1],
        num_train=len(task.train),
        seconds=time.perf_counter() - began,
        label_errors=_find_label_errors(task, best[reading], outputs["dev"]),
    )  # fmt: skip


def _find_label_errors(task: Task, left_out: Validated, dev_outputs: np.ndarray) -> LabelErrors | None:
    """Find rows that may be labelled wrongly: training rows by held-out folds, dev rows by the probe."""
    if not KINDS[task.kind].finds_label_errors:
        return None
    targets, logits, rows = _targets(task.train), left_out.outputs, task.train
    paths = [task.train.path] * len(task.train)
    if not task.dev.unseen:  # a label without an output cannot be judged
        rows = task.train.join(task.dev)
        logits, paths = np.concatenate([logits, dev_outputs]), paths + [task.dev.path] * len(task.dev)
    probabilities = as_probabilities(logits, targets, fitted_on=left_out.outputs)
    return find_label_errors(rows, task.labels, probabilities, paths)


def compare_readings(task: Task, backbone: Backbone, max_length: int, pooling: str) -> dict[str, float]:
    """Return the linear probe's cross-validation score on (some of) the training rows, for each reading of pairs."""
    key = (task.digest, task.metric, backbone.fingerprint, max_length, pooling)
    if key not in _COMPARED:
        rows = np.random.default_rng(0).permutation(len(task.train))[:_MOST_COMPARED]
        split, reader = task.train.take(np.sort(rows)), _Reader(backbone, max_length, lambda _: None, pooling)
        _COMPARED[key] = {
            name: choose_strength(
                task.metric,
                cross_validate(task.kind, task.metric, reader.read(split, name), _targets(split), len(task.labels)),
            ).score
            for name in (_JOINED, _TOWERS)
        }
    return _COMPARED[key]


_COMPARED: dict[tuple[object, ...], dict[str, float]] = {}  # cached: all runs of a sweep need the same


class _Reader:
    """Reads texts as vectors of the plain backbone."""

    def __init__(
        self, backbone: Backbone, max_length: int, on_rows: Callable[[int], object], pooling: str | None = None
    ) -> None:
        self._backbone, self._max_length, self._on_rows = backbone, max_length, on_rows
        self.pooling = pooling or ("mean" if backbone.is_seq2seq else backbone.default_pooling)

    def read(self, split: Split, reading: str) -> np.ndarray:
        """Return the features of a split's rows [n, features]."""
        if reading != _TOWERS:
            return self._vectors(split)
        assert split.pairs is not None
        alone = replace(split, pairs=None)
        u, v = self._vectors(alone), self._vectors(replace(alone, texts=split.pairs))
        return np.concatenate([u, v, np.abs(u - v), u * v, _cosine(u, v)[:, None]], axis=1)

    def _vectors(self, split: Split) -> np.ndarray:
        encoded = encode_cached(self._backbone.tokenizer, split, Reading(WHOLE_ROW, self._max_length))
        rows = make_rows(encoded)
        bank = Bank(self._backbone, 1)  # an empty slot: the plain backbone
        found = np.zeros((len(rows), self._backbone.hidden_size))
        budget = TOKEN_BUDGET[self._backbone.device.type]
        lengths = [int(length) for length in encoded.lengths]
        for chunk in batches_by_length(lengths, budget, packs=self._backbone.packs):
            batch = self._backbone.collate([rows[index] for index in chunk])
            with torch.inference_mode(), bank.routed(batch.route):
                states = self._backbone.hidden(batch)
                if batch.pack is not None:
                    pooled = self._backbone.pool_packed(states[0], batch.pack, self.pooling)
                else:
                    assert batch.mask_BT is not None
                    pooled = self._backbone.pool(states, batch.mask_BT, self.pooling)
            found[[chunk[origin] for origin in batch.order]] = pooled.double().cpu().numpy()
            self._on_rows(len(chunk))
        return found


def _cosine(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(u, axis=1) * np.linalg.norm(v, axis=1)
    return np.asarray((u * v).sum(axis=1) / np.maximum(lengths, 1e-12))


def _score_cosine(task: Task, towers: Mapping[str, np.ndarray], splits: Mapping[str, Split]) -> dict[str, Any] | None:
    """Return the correlation of the untrained cosine with the target; None unless targets are numbers."""
    if not KINDS[task.kind].is_number:
        return None
    names = [name for name in ("spearman", "pearson") if name in list_metrics(task.kind, 0)]
    return {
        side: {name: score(name, towers[side][:, -1:], _targets(split)) for name in names}
        for side, split in splits.items()
        if side != "train"
    }


def _targets(split: Split) -> np.ndarray:
    assert split.targets is not None
    return split.targets
