"""Publishing: a trained run becomes an immutable version, with probes that prove it later, and is reported as data.

The command line and the stream go from settings to a version in these steps: `make_run` into a `PreparedRun`, `fit`,
`publish_result`, `report_run`. The library and the studies call `publish` themselves.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from inlay.data import METRICS, Split, encode_split, find_layout
from inlay.errors import Diverged, UnknownName
from inlay.model import (
    BUILT_IN,
    Backbone,
    canonical_backbone,
    canonical_environment,
    collect_outputs,
    infer_canonically,
    make_rows,
)
from inlay.store import HASHED, Manifest, Probe, Store, Version, VersionInfo
from inlay.training.cohort.member import PROBE
from inlay.training.evaluate import score_probe, score_split
from inlay.training.recipe.cross_validation import FoldScores
from inlay.training.run.run import DIVERGED, Result, Run, Trained
from inlay.training.run.run_folder import PROBE_HEAD, is_finished, read_tensors

NUM_PROBES = 8
PROBES = ("rows", "hashed", "none")
"""what a version keeps of the dev rows that prove it: the rows themselves, hashes of them, or nothing"""
_GIT_SECONDS = 5.0
_TWICE = 2
_LAST = 3  # last epochs that are compared with as many before them
_LEAST = 0.005  # smallest gain worth the time


def publish(
    run: Run,
    result: Result,
    backbone: Backbone,
    store: Store,
    name: str | None = None,
    *,
    folds: FoldScores | None = None,
    probes: str = "rows",
) -> Version:
    """Add a run's best weights to the store under `name` (the task's own by default).

    Scores the test rows, where there are some, and answers the probe rows on the canonical path. `folds` are the
    scores of the run's cross-validation, which the version keeps. `probes` is one of `PROBES`.
    """
    manifest = make_manifest(run, result, backbone, folds=folds, probes=probes)
    sidecar = {
        "published_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "seconds": round(result.seconds, 3),
        "peak_memory_bytes": result.peak_memory_bytes,
        "commit": current_commit(),
        "environment": canonical_environment(),
    }
    if backbone.name not in BUILT_IN:
        store.register_backbone(backbone.name)
    return store.publish(name or run.task.name, result.tensors, manifest, sidecar)


def make_manifest(
    run: Run,
    result: Result,
    backbone: Backbone,
    *,
    folds: FoldScores | None = None,
    probes: str = "rows",
    test: dict[str, float] | None = None,
) -> Manifest:
    """Make the manifest of a version of a run's best weights, which includes answering its probe rows.

    `test` has the scores of the test rows, where they are known already.
    """
    check_probes(probes)
    if not result.tensors:
        raise Diverged(
            f"run `{run.id}` has no weights to publish: {result.message or result.status}",
            "train it again with a smaller learning rate",
        )
    metrics = {"dev": result.dev_metrics}
    if run.task.test is not None and run.task.test.targets is not None:
        metrics["test"] = score_split(run, result, backbone, run.task.test) if test is None else test
    extra: dict[str, Any] = {"pairs": run.task.train.pairs is not None}
    if find_layout(run.reading.kind).overlaps:
        extra["stride"] = run.reading.stride
    if run.config.data.merge_labels:  # later rows are read alike
        extra["merge_labels"] = True
    if "," in (run.config.data.text or ""):  # several columns, joined
        extra["joined_text"] = run.config.data.text
    if run.start.lineage:
        extra["from"] = list(run.start.lineage)
    if run.origin:  # the multi-task run that it was part of
        extra["joint"] = dict(run.origin)
    if folds is not None:
        metrics["folds"], extra["folds"] = folds.means, folds.to_manifest()
    kept = () if probes == "none" else tuple(_make_probes(run, result, canonical_backbone(backbone)))
    if probes == "hashed":
        extra[HASHED] = [
            {"row": probe.hash_row(run.id), "logits": [value.hex() for value in probe.logits]} for probe in kept
        ]
    spec = result.spec(run)
    return Manifest(
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
        probes=kept if probes == "rows" else (),
        config=dataclasses.asdict(run.config.train),
        extra=extra,
    )


def check_probes(probes: str) -> None:
    """Refuse an unknown way to keep probes."""
    if probes not in PROBES:
        raise UnknownName("way to keep probes", probes, PROBES)


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


def current_commit() -> str:
    """Return the commit of the Inlay checkout in use, or "" for an installed package, or if git does not answer."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        # To a file and in a session of its own: what git started may hold a pipe open when git itself has been killed.
        with TemporaryFile() as said:
            git = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.DEVNULL, start_new_session=True
            )
            try:
                git.wait(_GIT_SECONDS)
            except BaseException:
                os.killpg(git.pid, signal.SIGKILL)
                git.wait()
                raise
            said.seek(0)
            return said.read().decode(errors="replace").strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@dataclass(frozen=True)
class PreparedRun:
    """A run with the backbone and the store it is trained and published on."""

    run: Run
    backbone: Backbone
    store: Store
    own_folder: Path | None = None
    """the parent of its run folder, if that is not the store's `runs/`"""
    probes: str = "rows"
    """what its version keeps of the rows that prove it, one of `PROBES`"""

    @property
    def runs_folder(self) -> Path:
        """The folder that has a folder for each run."""
        return self.own_folder or self.store.run_folder(self.run.id).parent

    @property
    def is_finished(self) -> bool:
        """Whether the run was already trained to its end."""
        return is_finished(self.runs_folder / self.run.id)


def check_trained(result: Result) -> None:
    """Refuse a result that is not worth publishing: the run diverged."""
    if not result.tensors or result.status == DIVERGED:
        raise Diverged(f"run `{result.run_id}` {result.message}", "try a smaller `--lr`, such as a third of it")


def publish_result(
    prepared: PreparedRun,
    result: Result,
    *,
    name: str | None = None,
    folds: FoldScores | None = None,
) -> Version:
    """Publish a prepared run, with the scores of its cross-validation, if there was one; refuse a diverged one."""
    check_trained(result)
    return publish(prepared.run, result, prepared.backbone, prepared.store, name, folds=folds, probes=prepared.probes)


def report_run(prepared: PreparedRun, result: Result, version: Version | None) -> dict[str, Any]:
    """Return the report on a trained run, published or not, as data: `inlay train --json` prints it."""
    run, store, task = prepared.run, prepared.store, prepared.run.task
    best = latest = None  # the task's version that is best on these dev rows, and the one that its name means
    if version is not None:
        metrics, infos = store.manifest(version).metrics, store.versions(version.name)
        latest = store.resolve(version.name).reference
        with suppress(UnknownName):  # versions that cannot be compared
            best = _find_better(store, version, infos)
    else:
        metrics, infos = {"dev": result.dev_metrics}, []
        if task.test is not None and task.test.targets is not None:
            metrics["test"] = score_split(run, result, prepared.backbone, task.test)
    rising = find_rising(result.history, task.metric, len(task.dev))
    folder = prepared.runs_folder / result.run_id
    curve = folder / "curve.png"  # with many runs, no curve is drawn
    return {
        "task": task.name,
        "reference": None if version is None else version.reference,
        "latest": latest,
        "best": best,
        "digest": None if version is None else version.digest,
        "size_bytes": next((info.size_bytes for info in infos if info.version == version), None),
        "run": result.run_id,
        "status": result.status,
        "kind": task.kind,
        "labels": list(task.labels),
        "metric": task.metric,
        "metrics": metrics,
        "best_epoch": result.best_epoch,
        "probe": _score_probe(prepared, result, metrics),
        "still_rising": None if rising is None else dataclasses.asdict(rising),
        "num_parameters": run.spec.count_parameters(prepared.backbone.anatomy),
        "backbone_parameters": prepared.backbone.num_parameters,
        "seconds": result.seconds,
        "folder": str(folder),
        "curve": str(curve) if curve.is_file() else None,
    }


def _find_better(store: Store, version: Version, infos: Sequence[VersionInfo]) -> str:
    """Return the reference of `NAME@best` if it scored better than a version on the same dev rows; else its own."""
    best = store.resolve(f"{version.name}@best")
    own, other = (next((info.summary for info in infos if info.version == item), None) for item in (version, best))
    if own is None or other is None or own.dev_digest != other.dev_digest:
        return version.reference
    is_tie = own.score(own.metric) == other.score(own.metric)
    return version.reference if is_tie else best.reference


def _score_probe(prepared: PreparedRun, result: Result, metrics: Mapping[str, Any]) -> dict[str, float] | None:
    """Return split -> score of the linear probe that the run began with; None for a fresh head."""
    task = prepared.run.task
    first = next(iter(result.history), {})
    if first.get("stage") != PROBE:
        return None
    found = {"dev": first["dev"][task.metric]}
    head = read_tensors(prepared.runs_folder / result.run_id / PROBE_HEAD)
    if head and "test" in metrics and task.test is not None:
        found["test"] = score_probe(prepared.run, head, prepared.backbone, task.test)[task.metric]
    return found


@dataclass(frozen=True)
class Rising:
    """The cost of more epochs, for a run that was still getting better when it ended."""

    epochs: int
    """epochs to ask for: twice as many"""
    seconds: float
    """seconds that a run of so many epochs would take"""


def find_rising(history: Sequence[Mapping[str, Any]], metric: str, num_dev: int) -> Rising | None:
    """Return the cost of more epochs if the dev score still rose at the end by more than chance; else None."""
    trained = [line for line in history if not line.get("stage")]
    scores = [line["dev"][metric] for line in trained]
    if len(scores) < _TWICE * _LAST or not all(map(math.isfinite, scores)):
        return None
    sign = 1 if METRICS[metric].higher_is_better else -1
    late, early = (sum(part) / _LAST for part in (scores[-_LAST:], scores[-_TWICE * _LAST : -_LAST]))
    is_number = not 0 <= max(scores, key=abs) <= 1  # an error on the targets' own scale
    least = _LEAST * abs(early) if is_number else max(_LEAST, 0.5 / math.sqrt(num_dev) / math.sqrt(_LAST))
    # The learning rate falls to zero at the end: a run that still gains there has more to gain.
    if sign * (late - early) <= least:
        return None
    began = history[0]["seconds"] if history[0].get("stage") else 0.0
    return Rising(_TWICE * len(trained), began + _TWICE * (trained[-1]["seconds"] - began))


def report_task(item: Trained, backbone: Backbone, store: Store, *, publishes: bool) -> dict[str, Any]:
    """Return the report on one task of a multi-task run as data; publish the task first if `publishes`."""
    reference, test = None, None
    rows = item.run.task.test
    if publishes:
        version = publish(item.run, item.result, backbone, store)
        reference, test = version.reference, store.manifest(version).metrics.get("test")
    elif rows is not None and rows.targets is not None:
        test = score_split(item.run, item.result, backbone, rows)
    return {
        "task": item.run.name,
        "metric": item.run.metric,
        "dev": item.result.dev_metrics,
        "test": test,
        "reference": reference,
        "num_parameters": item.spec.count_parameters(backbone.anatomy),
    }
