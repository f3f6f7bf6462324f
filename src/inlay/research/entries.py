"""Entries for the GLUE server: for each arm of a study, the best run's answers to every test set.

The best on dev among the runs whose weights are here answers; nothing of the test sets is used to choose.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from inlay.errors import Missing
from inlay.research.ledger import Places
from inlay.research.planning import Plan
from inlay.research.records import FINISHED, Record


def find_answerers(records: Iterable[Record], places: Places) -> dict[tuple[str, str], Record]:
    """(arm, task) -> its best run on dev, of those whose weights are still on disk."""
    best: dict[tuple[str, str], Record] = {}
    for record in records:
        if record.status != FINISHED or not (places.runs / record.id / "best.safetensors").is_file():
            continue
        other = best.setdefault((record.arm, record.task), record)
        if record.dev[record.metric] > other.dev[record.metric]:  # all of GLUE's metrics are better when higher
            best[record.arm, record.task] = record
    return best


def write_entries(plan: Plan, records: Iterable[Record], places: Places, root: str | None) -> list[str]:
    """Write `<results>/<study>/submission/<arm>/`, a file for each task and a zip of them; what was written or missed.

    A set without its test file is left out and named.
    """
    submission = import_module("inlay.research.submission")
    study, tasks = plan.study, plan.tasks
    said, folders = [], {}
    for (arm, name), record in find_answerers(records, places).items():
        folder = places.results / study.name / "submission" / f"{record.backbone}-{arm}"
        try:
            config = study.data_config(name, root)
            answers = submission.answer_test(plan.backbone, places.runs / record.id, tasks[name], config)
        except Missing as error:
            said.append(f"{arm}, {name}: {error.message}")
            continue
        submission.write_submission(tasks[name], answers, folder)
        folders[arm] = folder
    for arm, folder in folders.items():
        path, lacks = submission.pack_submission(folder)
        said.append(f"{arm}: {path}" + (f", without {', '.join(lacks)}" if lacks else ""))
    return said
