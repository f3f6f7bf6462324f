"""Covariances of the scores of runs over draws of dev rows, measured from their answers.

A study with `paired_rows` keeps in each run's folder how every dev row moves the run's metrics (`influence`). When a
session ends, the covariances of all runs of a task are put into their records. Rows, labels and answers themselves stay
out of the results: data sets need not be passed on with them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from inlay.data import KINDS
from inlay.model import Backbone
from inlay.store import write_atomically
from inlay.studies.judge.row_sampling import Floats, covariances, influence
from inlay.studies.run.records import FINISHED, Record
from inlay.training import Result, Run, judge_split

FILE = "dev_rows.npz"
METRICS = ("accuracy", "f1", "matthews", "spearman", "pearson")
DIGITS = 6
"""significant digits of a covariance: more are noise"""


def keep_influences(folder: Path, run: Run, result: Result, backbone: Backbone) -> None:
    """Answer a run's dev rows with its best weights, and write each row's influence on its metrics."""
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
    content = io.BytesIO()
    np.savez_compressed(content, digest=np.frombuffer(_digest(gold), dtype=np.uint8), **found)  # type: ignore[arg-type]
    write_atomically(folder / FILE, content.getvalue())


def _digest(gold: Floats) -> bytes:
    """Return a digest of the labels in order: equal if two runs answered the same rows."""
    return hashlib.sha256(gold.tobytes()).digest()


def add_covariances(records: Sequence[Record], runs: Path) -> list[Record]:
    """Return the records whose covariances change, from the influences that runs have kept."""
    groups: dict[tuple[str, str, bytes], dict[str, Mapping[str, Floats]]] = {}
    for record in records:
        if record.status == FINISHED and (runs / record.id / FILE).is_file():
            digest, found = _read(runs / record.id / FILE)
            groups.setdefault((record.task, record.fingerprint, digest), {})[record.id] = found
    measured: dict[str, dict[str, dict[str, float]]] = {}
    for influences in groups.values():
        for metric in METRICS:
            ids = [run_id for run_id, found in influences.items() if metric in found]
            if ids:
                matrix = covariances([influences[run_id][metric] for run_id in ids])
                for run_id, line in zip(ids, matrix, strict=True):
                    known = {other: float(f"{value:.{DIGITS}g}") for other, value in zip(ids, line, strict=True)}
                    measured.setdefault(run_id, {})[metric] = known
    return list(_changed(records, measured))


def _changed(records: Iterable[Record], measured: Mapping[str, dict[str, dict[str, float]]]) -> Iterable[Record]:
    for record in records:
        before = record.extra.get("row_covariances") or {}
        # Covariances that another machine measured stay: its runs' folders are not here.
        own = measured.get(record.id, {})
        after = {**before, **{metric: {**before.get(metric, {}), **found} for metric, found in own.items()}}
        if after != before:
            yield dataclasses.replace(record, extra={**record.extra, "row_covariances": after})


def _read(path: Path) -> tuple[bytes, dict[str, Floats]]:
    with np.load(path, allow_pickle=False) as content:
        return content["digest"].tobytes(), {name: content[name] for name in content.files if name != "digest"}
