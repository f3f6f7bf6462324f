"""Entries for the GLUE server: the best runs' answers to its unlabelled test sets, as files in the official format.

The server takes one zip with a file for each task: a header `index`, `prediction` and a line for every test row, in the
order of the test file. Classes are written as the data's own labels (0 and 1, or words), STS-B as a number from 0 to 5.
It refuses a zip that lacks a task; GLUE's sample submission has files for tasks that were not attempted.

For each arm of a study and each task, the run that is best on dev answers, wherever it was trained; the choice never
uses the test sets. The answers are kept beside the results, with the id of the run, whose weights are then no longer
needed. If its weights are gone before it has answered, this is reported, and the run can be trained again.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from inlay.data import KINDS, Source, Split, Task, decide, open_glue
from inlay.errors import BadData, InlayError, Missing, UnknownName
from inlay.model import Backbone, Bank
from inlay.settings import DataConfig
from inlay.store import write_atomically
from inlay.studies.run.records import FINISHED, Record, StudyDirs
from inlay.studies.spec.planning import PlannedRun, StudyPlan
from inlay.training import Emit, FitSettings, Run, answer_slot, fit, read_result, read_trained

_SIGNS = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_THREE_WAY = ("contradiction", "entailment", "neutral")
_NOTED = "runs.json"


@dataclass(frozen=True)
class TestFile:
    """One file of a submission."""

    name: str
    num_rows: int
    labels: tuple[str, ...]
    """the labels that the server knows; empty for a number from 0 to 5"""


SUBMISSION = {
    "cola": TestFile("CoLA.tsv", 1063, _SIGNS),
    "sst2": TestFile("SST-2.tsv", 1821, _SIGNS),
    "mrpc": TestFile("MRPC.tsv", 1725, _SIGNS),
    "stsb": TestFile("STS-B.tsv", 1379, ()),
    "qqp": TestFile("QQP.tsv", 390_965, _SIGNS),
    "mnli": TestFile("MNLI-m.tsv", 9796, _THREE_WAY),
    "mnli-mm": TestFile("MNLI-mm.tsv", 9847, _THREE_WAY),
    "qnli": TestFile("QNLI.tsv", 5463, _ENTAILMENT),
    "rte": TestFile("RTE.tsv", 3000, _ENTAILMENT),
    "wnli": TestFile("WNLI.tsv", 146, _SIGNS),
    "ax": TestFile("AX.tsv", 1104, _THREE_WAY),
}


def answer_test(backbone: Backbone, run_folder: Path, task: Task, config: DataConfig) -> list[str | float]:
    """Return a finished run's answer (label or number) to every row of its task's unlabelled test file, in order.

    `config` has the folder of GLUE; the task's name tells the set. Raises `Missing` if the set has no test file here.
    """
    split = read_test(task.name, config)
    trained = read_trained(run_folder, task, backbone)
    bank = Bank(backbone, 1)
    bank.put(0, trained.spec, trained.result.tensors)
    found = decide(task.kind, answer_slot(bank, 0, split, trained.run.reading, task.labels))
    return [float(value) if KINDS[task.kind].is_number else task.labels[int(value)] for value in found]


def read_test(task: str, config: DataConfig) -> Split:
    """Read the rows of a GLUE set's test file, in order, without labels."""
    table = _open(_glue_name(task), config).read("test")
    pairs = table.column("pair") if "pair" in table.header.names else None
    return Split(table.column("text"), pairs, None, table.lines, table.header.path)


def _open(name: str, config: DataConfig) -> Source:
    return open_glue(name, replace(config, source=f"glue/{name}"))


def _glue_name(task: str) -> str:
    """Return the server's name of a study's task."""
    return task.removeprefix("glue/").lower()


def _has_test(plan: StudyPlan, task: str, root: str | None) -> bool:
    """Tell whether a task is a GLUE set whose test file is here."""
    name = _glue_name(task)
    try:
        return name in SUBMISSION and "test" in _open(name, plan.study.data_config(task, root)).sides
    except (Missing, UnknownName):
        return False


def write_submission(task: str, answers: Sequence[str | float], folder: Path) -> Path:
    """Write a task's file of the submission; refuse answers that the server would refuse."""
    name = _glue_name(task)
    entry = SUBMISSION[name]
    if len(answers) != entry.num_rows:
        raise BadData(
            f"{len(answers)} answers for glue/{name}, whose test file has {entry.num_rows} rows",
            "answer every row of the official test file, in its order",
        )
    lines = ["index\tprediction\n"]
    for index, answer in enumerate(answers):
        if entry.labels:
            text = str(answer)
            if text not in entry.labels:
                known = ", ".join(entry.labels)
                raise BadData(f"the answer `{text}` is no label of glue/{name}", f"its labels are: {known}")
        else:
            if isinstance(answer, str) or not np.isfinite(answer):
                raise BadData(f"the answer `{answer}` for glue/{name} is not a number", "it takes numbers from 0 to 5")
            text = f"{min(max(float(answer), 0.0), 5.0):.3f}"
        lines.append(f"{index}\t{text}\n")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / entry.name
    write_atomically(path, "".join(lines).encode())
    return path


def pack_submission(folder: Path) -> None:
    """Zip the files that are there for the server."""
    with zipfile.ZipFile(folder / "submission.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in SUBMISSION.values():
            if (folder / entry.name).is_file():
                archive.write(folder / entry.name, entry.name)


@dataclass(frozen=True)
class Entry:
    """One task's file in the entry of an arm, and the run that answers it."""

    arm: str
    task: str
    record: Record
    run: Run
    weights: Path
    folder: Path

    @property
    def file(self) -> str:
        return SUBMISSION[_glue_name(self.task)].name

    @property
    def has_weights(self) -> bool:
        return self.weights.is_file()

    @property
    def answered_by(self) -> str | None:
        """The id of the run that wrote the file: this one, or one that was the best before; None without a file."""
        return _read_noted(self.folder).get(self.file, {}).get("run") if (self.folder / self.file).is_file() else None

    @property
    def is_written(self) -> bool:
        return self.answered_by == self.run.id

    @property
    def rank(self) -> tuple[float, bool, bool]:
        """A sort key: the dev score (higher is better in all of GLUE's metrics), then whether it can answer here."""
        return (self.record.dev[self.record.metric], self.is_written, self.has_weights)

    def describe_gone(self) -> str:
        """Name its task and run, and the run that has answered instead, if any."""
        answered = f" ({self.answered_by} answers)" if self.answered_by else ""
        return f"{self.task} {self.run.id}{answered}"


def choose_entries(plan: StudyPlan, records: Iterable[Record], places: StudyDirs, root: str | None) -> list[Entry]:
    """Choose the best run on dev for each arm and each GLUE task with a test file; in a tie, one with weights."""
    asked = [task for task in plan.study.tasks if task.startswith("glue/") and _has_test(plan, task, root)]
    runs = {item.id: item.run for item in plan.items if isinstance(item.run, Run)}
    best: dict[tuple[str, str], Entry] = {}
    for record in records:
        if record.status != FINISHED or record.id not in runs or record.task not in asked:
            continue
        name = f"{record.backbone}-{record.profile}-{record.arm}"
        folder = places.results / plan.study.name / "submission" / name
        weights = places.runs / record.id / "best.safetensors"
        entry = Entry(record.arm, record.task, record, runs[record.id], weights, folder)
        other = best.setdefault((record.arm, record.task), entry)
        if entry.rank > other.rank:
            best[record.arm, record.task] = entry
    return sorted(best.values(), key=lambda entry: asked.index(entry.task))


def list_gone(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries that are not written and whose weights are not here."""
    return [entry for entry in entries if not entry.is_written and not entry.has_weights]


def train_again(plan: StudyPlan, entries: Iterable[Entry], places: StudyDirs, emit: Emit) -> None:
    """Train the runs of these entries again; their records stay as they are."""
    runs = {entry.run.id: entry.run for entry in entries}
    for run_id in runs:
        (places.runs / run_id / "result.json").unlink(missing_ok=True)
    settings = FitSettings(draw_curves=False, keep_last=False, **plan.study.fit)
    fit(list(runs.values()), plan.backbone, places.runs, settings, emit)


def write_entries(
    plan: StudyPlan, entries: Sequence[Entry], places: StudyDirs, root: str | None, missing: Iterable[PlannedRun] = ()
) -> list[str]:
    """Write `<results>/<study>/submission/<backbone>-<profile>-<arm>/`, a file for each task and a zip of them.

    Returns lines that tell where they are, what they lack, and why. `missing` are the runs that are still to be
    trained.
    """
    # 1. answer the test sets whose best run has weights here
    lines = []
    for entry in entries:
        try:
            if not entry.is_written and entry.has_weights:
                _answer_entry(plan, entry, root)
        except InlayError as error:
            lines.append(f"{entry.arm}, {entry.task}: {error.message}")
    # 2. describe each arm's files
    unfinished = {(item.arm.name, item.task) for item in missing}
    for arm in plan.study.arms:
        own = [entry for entry in entries if entry.arm == arm]
        lines += _describe_arm(plan, own, root)
        so_far = [entry.task for entry in own if entry.is_written and (arm, entry.task) in unfinished]
        if so_far:
            lines.append(f"{arm}: the best run so far answers {', '.join(so_far)}")
    # 3. name the best runs whose weights are gone
    gone: dict[str, list[str]] = {}
    for entry in list_gone(entries):
        gone.setdefault(entry.arm, []).append(entry.describe_gone())
    lines += [f"{arm}: no weights here of the best runs {', '.join(runs)}" for arm, runs in gone.items()]
    if gone:
        lines.append(f"put the folders of these runs into `{places.runs}`, or train them again with `--retrain`")
    return lines


def _answer_entry(plan: StudyPlan, entry: Entry, root: str | None) -> None:
    """Answer a task's test set, and note the run that answered."""
    run_folder, config = entry.weights.parent, plan.study.data_config(entry.task, root)
    answers = answer_test(plan.backbone, run_folder, plan.tasks[entry.task], config)
    write_submission(entry.task, answers, entry.folder)
    result = read_result(run_folder)
    noted = {"run": entry.run.id, "seed": entry.record.seed, "axes": entry.record.axes}
    noted["dev"] = entry.record.dev if result is None else result.dev_metrics
    known = {**_read_noted(entry.folder), entry.file: noted}
    write_atomically(entry.folder / _NOTED, json.dumps(known, indent=1, sort_keys=True).encode())
    pack_submission(entry.folder)


def _describe_arm(plan: StudyPlan, entries: Sequence[Entry], root: str | None) -> list[str]:
    """Describe where an arm's entry is and which of the server's files it lacks; empty if none was written."""
    if not entries or not (entries[0].folder / "submission.zip").is_file():
        return []
    folder = entries[0].folder
    lacks: dict[str, list[str]] = {}
    asked = {entry.file for entry in entries}
    for name, file in SUBMISSION.items():
        if not (folder / file.name).is_file():
            why = "not answered" if file.name in asked else "no run"
            if not _has_test(plan, f"glue/{name}", root):
                why = "no test file here"
            lacks.setdefault(why, []).append(file.name)
    words = "; ".join(f"{', '.join(files)} ({why})" for why, files in lacks.items())
    line = f"{entries[0].arm}: {folder / 'submission.zip'}"
    hint = "the server wants all: fill these from GLUE's sample submission"
    return [f"{line}, without {words}: {hint}" if lacks else line]


def _read_noted(folder: Path) -> Mapping[str, Any]:
    path = folder / _NOTED
    return json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}
