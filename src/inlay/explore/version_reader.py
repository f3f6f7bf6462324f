"""Reads rows through one version: its outputs, answers and vectors; and finds the rows it was trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from inlay.data import (
    WHOLE_ROW,
    Encoded,
    InputRow,
    Reading,
    Split,
    Task,
    encode_split,
    find_fault,
    hide_secrets,
    load_task,
)
from inlay.errors import BadData, InlayError, Missing
from inlay.explore.starting_points import StartCandidate, pooled_vectors
from inlay.model import Backbone, Bank, Output, collect_outputs, find_head, infer, infer_vectors, make_rows
from inlay.serving import Answer, check_backbone, describe_answer, find_reading, read_slot
from inlay.settings import DataConfig, read_toml
from inlay.store import Manifest, Store, Version

ROWS_AT_ONCE = 1024
OnRows = Callable[[int], object]
"""called with the number of rows that were just read"""


class VersionReader:
    """Reads rows through one version, in shared batches; a row that cannot be read is an error."""

    def __init__(self, version: Version, backbone: Backbone, store: Store) -> None:
        loaded = store.load(version)
        check_backbone(version, loaded.manifest, backbone)
        self.version, self.manifest, self.backbone = version, loaded.manifest, backbone
        self.spec, self.reading = read_slot(loaded.manifest, backbone), find_reading(loaded.manifest)
        self.bank = Bank(backbone, 1)
        self.bank.put(0, self.spec, loaded.tensors)
        self._candidate = StartCandidate(version.reference, self.spec, loaded.tensors)

    @property
    def takes_pairs(self) -> bool:
        """Whether its rows are pairs of texts."""
        return bool(self.manifest.extra.get("pairs"))

    def make_split(self, texts: Sequence[str], pairs: Sequence[str] | None) -> Split:
        """Return rows for this version; refuse texts that are unfit for a tokenizer, and pairs for single texts."""
        if self.takes_pairs != (pairs is not None):
            has, wants = ("one text", "a pair") if self.takes_pairs else ("a pair", "one text")
            hint = "give the second text too (`--pair`)" if self.takes_pairs else "leave out the second text"
            raise BadData(f"the row has {has}, but task `{self.version.name}` reads {wants}", hint)
        for text in (*texts, *(pairs or ())):
            fault = find_fault(text)
            if fault is not None:
                raise BadData(fault.reason, fault.hint)
        return Split(list(texts), None if pairs is None else list(pairs), None, list(range(1, len(texts) + 1)))

    def outputs(self, rows: Split, on_rows: OnRows = lambda _: None) -> list[Output]:
        """Return the outputs of every row."""
        found: list[Output] = []
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = rows.take(range(start, min(start + ROWS_AT_ONCE, len(rows))))
            encoded = self.encode(part)
            texts = part.texts if part.pairs is None else part.pairs
            found += collect_outputs(encoded, infer(self.bank, make_rows(encoded)), texts)
            on_rows(len(part))
        return found

    def describe(self, outputs: Sequence[Output]) -> list[dict[str, Any]]:
        """Return the answers that outputs stand for, as `inlay predict --json` prints them."""
        reference, head = self.version.reference, self.spec.head
        answer = find_head(head.kind).answer
        outcomes = [answer(output, head, self.manifest.labels) for output in outputs]
        return [describe_answer(Answer(reference, reference, outcome)) for outcome in outcomes]

    def vectors(self, rows: Split, on_rows: OnRows = lambda _: None) -> np.ndarray:
        """Return the task's vector of every row [n, D]: the one its head reads, or a mean of hidden states."""
        head = self.spec.head
        if not head.reads_rows or head.is_written:
            return self._pool(self._candidate, rows, on_rows)
        found = []
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = rows.take(range(start, min(start + ROWS_AT_ONCE, len(rows))))
            found.append(infer_vectors(self.bank, make_rows(self.encode(part))))
            on_rows(len(part))
        return np.concatenate(found) if found else np.zeros((0, self.backbone.hidden_size))

    def frozen_vectors(self, rows: Split, on_rows: OnRows = lambda _: None) -> np.ndarray:
        """Return the plain backbone's vector of every row [n, D]."""
        return self._pool(StartCandidate("", None, {}), rows, on_rows)

    def _pool(self, candidate: StartCandidate, rows: Split, on_rows: OnRows) -> np.ndarray:
        length = min(self.manifest.max_length, self.backbone.max_length)
        encoded = self.encode(rows, Reading(WHOLE_ROW, length))
        return pooled_vectors([candidate], self.backbone, encoded, on_rows)[0]

    def encode(self, rows: Split, reading: Reading | None = None) -> Encoded:
        """Return the windows of rows, by the version's reading or another one."""
        return encode_split(self.backbone.tokenizer, rows, reading or self.reading)


def split_of(rows: Sequence[InputRow], path: str = "") -> Split:
    """Return rows of a file as a split without targets; it has pairs if every row is one."""
    pairs = [row.pair or "" for row in rows] if rows and all(row.pair is not None for row in rows) else None
    return Split([row.text for row in rows], pairs, None, [row.line for row in rows], path)


def find_training_rows(
    version: Version,
    manifest: Manifest,
    store: Store,
    source: str | Task | None = None,
    *,
    format: str = "auto",
    header: bool | None = None,
) -> Task:
    """Return the task that a version was trained on; refuse other rows.

    A version knows the digest of its rows, and its run's folder where they were read from. `source` is their present
    file, or the task itself; `format` and `header` are those of the file, by default as in training.
    """
    if isinstance(source, Task):
        return _check_digest(source, "the task that was given", version, manifest)
    path = store.run_folder(manifest.run_id) / "config.toml"
    config = read_toml(path).data if path.is_file() else DataConfig()
    if source is not None:
        config = dataclasses.replace(config, source=source)
        config = config if format == "auto" else dataclasses.replace(config, format=format)
        config = config if header is None else dataclasses.replace(config, header=header)
    elif not config.source:
        raise Missing(
            f"it is not known where the training rows of `{version.reference}` are: `{path}` is not there",
            "name their file with `--data FILE`",
        )
    if config.source == "-":
        message = f"the training rows of `{version.reference}` were read from stdin, and are not kept"
        raise Missing(message, "name a file that has them with `--data FILE`")
    try:
        task = load_task(config, version.name)
    except InlayError as error:
        message = f"the training rows of `{version.reference}` cannot be read: {error.message}"
        if source is not None:  # the hint is about the given file
            raise Missing(message, error.hint) from None
        is_signed = config.source != hide_secrets(config.source)
        why = "the part of its link after `?` is not kept; " if is_signed else ""
        raise Missing(message, f"{why}name the file that has them now with `--data FILE`") from None
    return _check_digest(task, f"`{hide_secrets(config.source)}`", version, manifest)


def _check_digest(task: Task, what: str, version: Version, manifest: Manifest) -> Task:
    """Return the task; refuse one whose rows are not those of the version."""
    if task.digest != manifest.data_digest:
        raise BadData(
            f"{what} does not have the rows that `{version.reference}` was trained on",
            "it was changed, or read with other settings; name the unchanged file with `--data FILE`",
        )
    return task
