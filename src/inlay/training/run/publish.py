"""Publishing: a trained run becomes an immutable version, with probes that prove it later."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from inlay.data import METRICS, Split, encode_split, find_layout
from inlay.errors import Diverged
from inlay.model import (
    Backbone,
    canonical_backbone,
    canonical_environment,
    collect_outputs,
    infer_canonically,
    make_rows,
)
from inlay.store import Manifest, Probe, Store, Version
from inlay.training.evaluate import score_split
from inlay.training.recipe.cross_validation import FoldScores
from inlay.training.run.run import Result, Run

NUM_PROBES = 8


def publish(
    run: Run,
    result: Result,
    backbone: Backbone,
    store: Store,
    name: str | None = None,
    *,
    folds: FoldScores | None = None,
) -> Version:
    """Add a run's best weights to the store under `name` (the task's own by default).

    Scores the test rows, where there are some, and answers the probe rows on the canonical path. `folds` is what the
    run's cross-validation came to, which the version keeps.
    """
    if not result.tensors:
        raise Diverged(
            f"run `{run.id}` has no weights to publish: {result.message or result.status}",
            "train it again with a smaller learning rate",
        )
    metrics = {"dev": result.dev_metrics}
    if run.task.test is not None and run.task.test.targets is not None:
        metrics["test"] = score_split(run, result, backbone, run.task.test)
    if folds is not None:
        metrics["folds"] = folds.means
    spec = result.spec(run)
    manifest = Manifest(
        kind=run.task.kind,
        labels=run.task.labels,
        metric=run.task.metric,
        higher_is_better=METRICS[run.task.metric].higher_is_better,
        method=dataclasses.asdict(spec.method),
        head=spec.head.to_stored(),
        max_length=run.max_length,
        metrics=metrics,
        data_digest=run.task.digest,
        dev_digest=run.task.dev_digest,
        backbone=describe_backbone(backbone),
        run_id=run.id,
        num_parameters=run.spec.count_parameters(backbone.anatomy),
        probes=tuple(_make_probes(run, result, canonical_backbone(backbone))),
        config=dataclasses.asdict(run.config.train),
        extra={
            "pairs": run.task.train.pairs is not None,
            **_windows(run),
            **_spelling(run),
            **_lineage(run),
            **_origin(run),
            **({} if folds is None else {"folds": folds.to_manifest()}),
        },
    )
    return store.publish(name or run.task.name, result.tensors, manifest, _sidecar(result))


def _spelling(run: Run) -> dict[str, Any]:
    """Return the manifest's entry for merged spellings of labels, if they were merged: later rows are read alike."""
    return {"merge_labels": True} if run.config.data.merge_labels else {}


def _lineage(run: Run) -> dict[str, Any]:
    """Return the manifest's entry for the versions a run started from; empty for a fresh start."""
    return {"from": list(run.start.lineage)} if run.start.lineage else {}


def _origin(run: Run) -> dict[str, Any]:
    """Return the manifest's entry for the multi-task run it was part of; empty if there is none."""
    return {"joint": dict(run.origin)} if run.origin else {}


def describe_backbone(backbone: Backbone) -> dict[str, Any]:
    """Return the manifest's entry for the backbone of a version."""
    return {
        "name": backbone.name,
        "fingerprint": backbone.fingerprint,
        "family": backbone.anatomy.family,
        "num_parameters": backbone.num_parameters,
        "exact_digest": backbone.exact_digest,
        "precision": backbone.precision,
    }


def _make_probes(run: Run, result: Result, backbone: Backbone) -> list[Probe]:
    dev = run.task.dev
    chosen = np.unique(np.linspace(0, len(dev) - 1, min(NUM_PROBES, len(dev))).astype(int))
    texts = [dev.texts[index] for index in chosen]
    pairs = None if dev.pairs is None else [dev.pairs[index] for index in chosen]
    encoded = encode_split(backbone.tokenizer, Split(texts, pairs, None, []), run.reading)
    logits = infer_canonically(backbone, run.spec, result.tensors, make_rows(encoded))
    outputs = collect_outputs(encoded, logits, texts)
    return [
        Probe(text, pair, tuple(output.flat.tolist()))
        for text, pair, output in zip(texts, pairs or [None] * len(texts), outputs, strict=True)
    ]


def _windows(run: Run) -> dict[str, int]:
    """Return the stride, for layouts whose windows overlap."""
    return {"stride": run.reading.stride} if find_layout(run.reading.kind).overlaps else {}


def _sidecar(result: Result) -> dict[str, Any]:
    return {
        "published_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "seconds": round(result.seconds, 3),
        "peak_memory_bytes": result.peak_memory_bytes,
        "commit": current_commit(),
        "environment": canonical_environment(),
    }


def current_commit() -> str:
    """Return the commit of the Inlay checkout in use, or "" for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except OSError:
        return ""
