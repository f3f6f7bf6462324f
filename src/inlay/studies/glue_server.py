"""Answers to GLUE's unlabelled test sets, as files in the official format.

The server takes one zip with a file for each task: a header `index`, `prediction` and a line for every test row, in
the order of the test file. Classes are written as the data's own labels (0 and 1, or words), STS-B as a number from 0
to 5. It refuses a zip that lacks a task; GLUE's sample submission fills those that were not attempted.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from inlay.data import KINDS, Source, Split, Task, decide, open_glue
from inlay.errors import BadData, Missing, UnknownName
from inlay.model import Backbone, Bank
from inlay.settings import DataConfig
from inlay.store import write_atomically
from inlay.training import answer_slot, read_trained

_SIGNS = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True)
class TestFile:
    """One file of a submission."""

    name: str
    num_rows: int
    labels: tuple[str, ...]
    """the labels that the server knows; empty: a number from 0 to 5"""


SUBMISSION = {
    "cola": TestFile("CoLA.tsv", 1063, _SIGNS),
    "sst2": TestFile("SST-2.tsv", 1821, _SIGNS),
    "mrpc": TestFile("MRPC.tsv", 1725, _SIGNS),
    "stsb": TestFile("STS-B.tsv", 1379, ()),
    "qqp": TestFile("QQP.tsv", 390_965, _SIGNS),
    "mnli": TestFile("MNLI-m.tsv", 9796, ("contradiction", "entailment", "neutral")),
    "mnli-mm": TestFile("MNLI-mm.tsv", 9847, ("contradiction", "entailment", "neutral")),
    "qnli": TestFile("QNLI.tsv", 5463, _ENTAILMENT),
    "rte": TestFile("RTE.tsv", 3000, _ENTAILMENT),
    "wnli": TestFile("WNLI.tsv", 146, _SIGNS),
    "ax": TestFile("AX.tsv", 1104, ("contradiction", "entailment", "neutral")),
}


def answer_test(backbone: Backbone, run_folder: Path, task: Task, config: DataConfig) -> list[str | float]:
    """Return a finished run's answer to every row of its task's unlabelled test file, in order: labels, or numbers.

    `config` says where GLUE lies; the task's name says which set. A set whose test file is missing is a `Missing`.
    """
    split = read_test(task.name, config)
    trained = read_trained(run_folder, task, backbone)
    bank = Bank(backbone, 1)
    bank.put(0, trained.spec, trained.result.tensors)
    found = decide(task.kind, answer_slot(bank, 0, split, trained.run.reading, task.labels))
    return [float(value) if KINDS[task.kind].is_number else task.labels[int(value)] for value in found]


def read_test(task: str, config: DataConfig) -> Split:
    """Read the rows of a GLUE set's test file, in order, without labels."""
    table = _open(_find_name(task), config).read("test")
    pairs = table.column("pair") if "pair" in table.header.names else None
    return Split(table.column("text"), pairs, None, table.lines, table.header.path)


def has_test(name: str, config: DataConfig) -> bool:
    """Tell whether the test file of a GLUE set is at hand."""
    try:
        return "test" in _open(name, config).sides
    except (Missing, UnknownName):
        return False


def _open(name: str, config: DataConfig) -> Source:
    return open_glue(name, replace(config, source=f"glue/{name}"))


def write_submission(task: Task | str, answers: Sequence[str | float], folder: Path) -> Path:
    """Write a task's file of the submission; refuse answers that the server would refuse."""
    name = _find_name(task if isinstance(task, str) else task.name)
    entry = SUBMISSION[name]
    if len(answers) != entry.num_rows:
        raise BadData(
            f"{len(answers)} answers for glue/{name}, whose test file has {entry.num_rows} rows",
            "answer every row of the official test file, in its order",
        )
    lines = ["index\tprediction\n"]
    for index, answer in enumerate(answers):
        lines.append(f"{index}\t{_write_answer(answer, entry, f'glue/{name}')}\n")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / entry.name
    write_atomically(path, "".join(lines).encode())
    return path


def pack_submission(folder: Path) -> tuple[Path, list[str]]:
    """Zip the files that are there for the server; return the zip and the names of the missing files."""
    there = [entry.name for entry in SUBMISSION.values() if (folder / entry.name).is_file()]
    if not there:
        raise Missing(f"no answers in `{folder}`", "write a task's with `write_submission` first")
    path = folder / "submission.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in there:
            archive.write(folder / name, name)
    return path, [entry.name for entry in SUBMISSION.values() if entry.name not in there]


def glue_name(task: str) -> str:
    """Return the server's name of a study's task; None if it has none."""
    return task.removeprefix("glue/").lower()


def _find_name(task: str) -> str:
    name = glue_name(task)
    if name not in SUBMISSION:
        raise UnknownName("GLUE set", task, SUBMISSION)
    return name


def _write_answer(answer: str | float, entry: TestFile, task: str) -> str:
    if not entry.labels:
        if isinstance(answer, str) or not np.isfinite(answer):
            raise BadData(f"the answer `{answer}` for {task} is no number", "it takes numbers from 0 to 5")
        return f"{min(max(float(answer), 0.0), 5.0):.3f}"
    label = str(answer)
    if label not in entry.labels:
        raise BadData(f"the answer `{label}` is no label of {task}", f"its labels are: {', '.join(entry.labels)}")
    return label
