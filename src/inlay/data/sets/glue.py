"""The GLUE sets by name: where their official files lie and what their columns mean.

The test sides are unlabelled, so a GLUE task has no test rows; the files can still be read to predict. Where QNLI's
training file is missing and SQuAD lies beside it, its rows are rebuilt from that, and the task's notes say so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from inlay.data.sets.qnli import rebuild_qnli
from inlay.data.sources import Source, Table, read_table
from inlay.errors import BadConfig, Missing, UnknownName
from inlay.settings import DataConfig

_NLI = ("sentence1", "sentence2", "label")
_COLA_COLUMNS = ("source", "label", "mark", "sentence")  # columns of the files without a header


@dataclass(frozen=True)
class GlueSet:
    """One GLUE set: its folder, its columns (text, pair, label) and its official metric."""

    folder: str
    columns: tuple[str, str | None, str]
    metric: str = "accuracy"
    kind: str = "classify"
    dev: str = "dev"
    test: str = "test"
    names: tuple[str, ...] | None = None  # columns of train and dev files without a header
    bounds: tuple[float, float] | None = None  # range of its numbers


GLUE = {
    "cola": GlueSet("CoLA", ("sentence", None, "label"), metric="matthews", names=_COLA_COLUMNS),
    "sst2": GlueSet("SST-2", ("sentence", None, "label")),
    "mrpc": GlueSet("MRPC", ("#1 String", "#2 String", "Quality"), metric="f1"),
    "stsb": GlueSet("STS-B", ("sentence1", "sentence2", "score"), metric="spearman", kind="regress", bounds=(0.0, 5.0)),
    "qqp": GlueSet("QQP", ("question1", "question2", "is_duplicate"), metric="f1"),
    "mnli": GlueSet("MNLI", ("sentence1", "sentence2", "gold_label"), dev="dev_matched", test="test_matched"),
    "mnli-mm": GlueSet("MNLI", ("sentence1", "sentence2", "gold_label"), dev="dev_mismatched", test="test_mismatched"),
    "qnli": GlueSet("QNLI", ("question", "sentence", "label")),
    "rte": GlueSet("RTE", _NLI),
    "wnli": GlueSet("WNLI", _NLI),
}


def open_glue(name: str, config: DataConfig) -> Source:
    """The sides of a GLUE set under `config.root` or `$INLAY_DATA`, as official .tsv or as .jsonl."""
    entry = GLUE.get(name.lower())
    if entry is None:
        raise UnknownName("GLUE set", name, GLUE)
    _refuse_settings(config)
    folder = _find_folder(entry, name.lower(), config)
    config = replace(
        config,
        text="text",
        pair=None if entry.columns[1] is None else "pair",
        label="label",
        kind=entry.kind if config.kind == "auto" else config.kind,
        metric=entry.metric if config.metric == "auto" else config.metric,
    )
    sides = {}
    for side, stem in (("train", "train"), ("dev", entry.dev), ("test", entry.test)):
        path = _find_file(folder, stem)
        if path is not None:
            sides[side] = _reading(path, entry if side != "test" else replace(entry, names=None), config)
    squad = folder.parent / "SQuAD" / "train-v1.1.json"
    if name.lower() == "qnli" and "train" not in sides and squad.is_file():
        sides["train"] = lambda: _plain_columns(rebuild_qnli(squad), entry)
    required = ("train", "dev") if config.dev is None else ("train",)  # scores are on the official dev rows or nothing
    return Source(f"glue/{name.lower()}", sides, config, str(folder), required, entry.bounds)


def _refuse_settings(config: DataConfig) -> None:
    for key in ("text", "pair", "label", "split"):
        if getattr(config, key) is not None:
            raise BadConfig(f"`data.{key}` is set, but a GLUE set has its own columns", f"leave out `--{key}`")


def _find_folder(entry: GlueSet, name: str, config: DataConfig) -> Path:
    root = config.root or os.environ.get("INLAY_DATA")
    if not root:
        raise Missing(f"no folder given for glue/{name}", "give it with `--data-root DIR` or set `$INLAY_DATA`")
    for folder in (Path(root) / entry.folder, Path(root) / name):
        if folder.is_dir():
            return folder
    raise Missing(
        f"no folder `{entry.folder}` in `{root}`", f"put GLUE's {entry.folder} there, as the official zip has it"
    )


def _find_file(folder: Path, stem: str) -> Path | None:
    """The official file, or a .jsonl whose name begins with it (a published subset says so in its name)."""
    official = folder / f"{stem}.tsv"
    return official if official.is_file() else min(folder.glob(f"{stem}*.jsonl"), default=None)


def _reading(path: Path, entry: GlueSet, config: DataConfig) -> Callable[[], Table]:
    def read() -> Table:
        table = read_table(path, config, entry.names if path.suffix == ".tsv" else None)
        note = () if path.suffix == ".tsv" else (f"rows read from {path.name}",)
        return _plain_columns(replace(table, notes=table.notes + note), entry)

    return read


def _plain_columns(table: Table, entry: GlueSet) -> Table:
    """The table with plain names, so that all files of a set agree: MNLI as .jsonl has others than as .tsv."""
    text, pair, label = entry.columns
    plain = {text: "text", pair: "pair", label: "label"}
    plain |= {} if text in table.header.names else {"premise": "text", "hypothesis": "pair"}
    names = tuple(plain.get(name, name) for name in table.header.names)
    return replace(table, header=table.header._replace(names=names))
