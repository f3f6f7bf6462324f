"""Entries for the GLUE server: for each arm of a study, the best run's answers to every test set.

The best on dev of an arm's runs on a task answers, wherever it was trained; nothing of the test sets is used to choose.
What was answered is kept beside the results, with the run that did: it needs no weights any more. Where they are gone
before, that is said, and the run can be trained again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.errors import InlayError
from inlay.store import write_atomically
from inlay.studies.glue_server import SUBMISSION, answer_test, glue_name, has_test, pack_submission, write_submission
from inlay.studies.run.records import FINISHED, Record, StudyDirs
from inlay.studies.spec.planning import PlannedRun, StudyPlan
from inlay.training import Emit, FitSettings, Run, fit, read_result

_NOTED = "runs.json"


@dataclass(frozen=True)
class Entry:
    """One task's file in the entry of an arm: the run that answers, and the paths."""

    arm: str
    task: str
    record: Record
    run: Run
    weights: Path
    folder: Path

    @property
    def file(self) -> str:
        return SUBMISSION[glue_name(self.task)].name

    @property
    def has_weights(self) -> bool:
        return self.weights.is_file()

    @property
    def answered_by(self) -> str | None:
        """The id of the run whose answers are there: this one, or one that was the best before."""
        return _read_noted(self.folder).get(self.file, {}).get("run") if (self.folder / self.file).is_file() else None

    @property
    def is_written(self) -> bool:
        return self.answered_by == self.run.id

    def describe_gone(self) -> str:
        there = f" ({self.answered_by} answers)" if self.answered_by else ""
        return f"{self.task} {self.run.id}{there}"


def choose_entries(plan: StudyPlan, records: Iterable[Record], places: StudyDirs, root: str | None) -> list[Entry]:
    """Choose the best run on dev for each arm and GLUE task whose test file is here; in a tie, one with weights."""
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
        if _rank(entry) > _rank(other):
            best[record.arm, record.task] = entry
    return sorted(best.values(), key=lambda entry: asked.index(entry.task))


def _rank(entry: Entry) -> tuple[float, bool, bool]:
    """Return a sort key: the dev score (all of GLUE's metrics are better when higher), then what is at hand."""
    return (entry.record.dev[entry.record.metric], entry.is_written, entry.has_weights)


def list_gone(entries: Iterable[Entry]) -> list[Entry]:
    """Return the unanswered entries whose weights are not here."""
    return [entry for entry in entries if not entry.is_written and not entry.has_weights]


def train_again(plan: StudyPlan, entries: Iterable[Entry], places: StudyDirs, emit: Emit) -> None:
    """Train anew the runs whose weights are gone. Their records stay: nothing new is measured."""
    runs = {entry.run.id: entry.run for entry in entries}
    for run_id in runs:
        (places.runs / run_id / "result.json").unlink(missing_ok=True)
    settings = FitSettings(draw_curves=False, keep_last=False, **plan.study.fit)
    fit(list(runs.values()), plan.backbone, places.runs, settings, emit)


def write_entries(
    plan: StudyPlan, entries: Sequence[Entry], places: StudyDirs, root: str | None, missing: Iterable[PlannedRun] = ()
) -> list[str]:
    """Write `<results>/<study>/submission/<backbone>-<profile>-<arm>/`, a file for each task and a zip of them.

    What comes back says where they are, what they lack, and why. `missing` has what is still to be trained.
    """
    said = []
    for entry in entries:
        try:
            if not entry.is_written and entry.has_weights:
                _answer(plan, entry, root)
        except InlayError as error:
            said.append(f"{entry.arm}, {entry.task}: {error.message}")
    unsettled = {(item.arm.name, item.task) for item in missing}
    for arm in plan.study.arms:
        own = [entry for entry in entries if entry.arm == arm]
        said += _describe_arm(plan, own, root)
        so_far = [entry.task for entry in own if entry.is_written and (arm, entry.task) in unsettled]
        said += [f"{arm}: the best run so far answers {', '.join(so_far)}"] if so_far else []
    if gone := list_gone(entries):
        for arm in dict.fromkeys(entry.arm for entry in gone):
            of_arm = ", ".join(entry.describe_gone() for entry in gone if entry.arm == arm)
            said.append(f"{arm}: no weights here of the best runs {of_arm}")
        said.append(f"put the folders of these runs into `{places.runs}`, or train them again with `--retrain`")
    return said


def _answer(plan: StudyPlan, entry: Entry, root: str | None) -> None:
    """Have a task's test set answered, and record the run that did."""
    place, task = entry.weights.parent, plan.tasks[entry.task]
    answers = answer_test(plan.backbone, place, task, plan.study.data_config(entry.task, root))
    write_submission(task, answers, entry.folder)
    result = read_result(place)
    noted = {"run": entry.run.id, "seed": entry.record.seed, "axes": entry.record.axes}
    noted["dev"] = entry.record.dev if result is None else result.dev_metrics
    known = {**_read_noted(entry.folder), entry.file: noted}
    write_atomically(entry.folder / _NOTED, json.dumps(known, indent=1, sort_keys=True).encode())
    pack_submission(entry.folder)


def _describe_arm(plan: StudyPlan, entries: Sequence[Entry], root: str | None) -> list[str]:
    """Describe where an arm's entry lies and which of the server's files it lacks; empty if none was written."""
    folder = entries[0].folder if entries else None
    if folder is None or not (folder / "submission.zip").is_file():
        return []
    lacks: dict[str, list[str]] = {}
    asked = {entry.file for entry in entries}
    for name, file in SUBMISSION.items():
        if not (folder / file.name).is_file():
            is_here = _has_test(plan, f"glue/{name}", root)
            why = "no test file here" if not is_here else "not answered" if file.name in asked else "no run"
            lacks.setdefault(why, []).append(file.name)
    words = "; ".join(f"{', '.join(files)} ({why})" for why, files in lacks.items())
    line = f"{entries[0].arm}: {folder / 'submission.zip'}"
    hint = "the server wants all: fill these from GLUE's sample submission"
    return [f"{line}, without {words}: {hint}" if lacks else line]


def _has_test(plan: StudyPlan, task: str, root: str | None) -> bool:
    name = glue_name(task)
    return name in SUBMISSION and has_test(name, plan.study.data_config(task, root))


def _read_noted(folder: Path) -> Mapping[str, Any]:
    path = folder / _NOTED
    return json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}
