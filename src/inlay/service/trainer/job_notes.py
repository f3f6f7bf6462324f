"""Notes on jobs for customers: events of training in plain words, and errors without the server's secrets.

What always holds: no note has a path of the server, the prefix of names in the store, or anything of another tenant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inlay.data import Task
from inlay.errors import InlayError, OutOfMemory
from inlay.service.logs import log_failure
from inlay.service.state import Dataset, JobNote, Tenant
from inlay.service.web.problems import Secrets, make_problem_body, speak_http
from inlay.training import EpochEnded, Event, MemoryRanOut, Notice

_MOST_NOTES = 50
_LONGEST_NOTE = 500  # letters
_COMMAND_LINE = re.compile(r"`--|`inlay |`(?:data|train|method)\.")
_OURS = "the job failed with an unexpected error"


@dataclass(frozen=True)
class TextCleaner:
    """A cleaner of texts about one job."""

    secrets: Secrets
    dataset: Dataset | None = None

    def clean(self, words: str) -> str:
        """Return a text without the server's folders and names in the store; a file gets its dataset's name."""
        if self.dataset is not None:
            words = words.replace(str(self.dataset.path), self.dataset.name)
            words = words.replace(self.dataset.path.name, self.dataset.name)
        return self.secrets.remove(words)


def make_words(home: Any, tenant: Tenant | None, dataset: Dataset | None = None) -> TextCleaner:
    """Return the cleaner of texts about a tenant's job."""
    return TextCleaner(Secrets(home, "" if tenant is None else tenant.prefix), dataset)


def describe_failure(error: BaseException, words: TextCleaner) -> dict[str, Any]:
    """Return the reason of a failed job as a problem of the API, with the `message` of an error."""
    if isinstance(error, MemoryError):
        error = OutOfMemory("the job does not fit in memory", "send fewer rows, or choose a smaller `max_length`")
    if not isinstance(error, InlayError):
        log_failure("a job failed with an unexpected error", {"error": type(error).__name__})
        ask = "try once more; if it fails again, ask the operator of this service"
        return {**make_problem_body("unforeseen", 500, _OURS, ask), "message": _OURS}
    hint = None if error.hint is None else words.clean(error.hint)
    message = words.clean(error.message)
    return {**make_problem_body(error.code, error.http_status, message, hint), "message": message}


def note_notes(notes: Sequence[str], words: TextCleaner) -> list[str]:
    """Return notes on rows and settings, cleaned, in the words of the API, and limited in number and length."""
    shown = []
    for note in notes[:_MOST_NOTES]:
        if _COMMAND_LINE.search(note):
            note = speak_http(note)
        note = words.clean(note)
        shown.append(note if len(note) <= _LONGEST_NOTE else f"{note[:_LONGEST_NOTE]}…")
    return shown


def note_rows(task: Task, notes: Sequence[str]) -> JobNote:
    """Return the note that a job's rows are read."""
    message = f"{len(task.train):,} training rows and {len(task.dev):,} dev rows, {task.kind}"
    message += f" with {len(task.labels)} labels" if task.labels else ""
    sides = {"train": task.train, "dev": task.dev, "test": task.test}
    rows = {name: len(side) for name, side in sides.items() if side is not None}
    data = {"kind": task.kind, "metric": task.metric, "num_labels": len(task.labels), "rows": rows}
    progress = {"stage": "reading", "epoch": None, "epochs": None, "dev": None}
    return JobNote("read", message, {**data, "notes": list(notes)}, progress)


def note_start(num_epochs: int, num_parameters: int, *, is_resumed: bool) -> JobNote:
    """Return the note that a job's training begins, or continues after its trainer was stopped."""
    message = "training goes on where it was stopped" if is_resumed else "training begins"
    progress = {"stage": "training", "epoch": 0, "epochs": num_epochs, "dev": None}
    return JobNote("training", message, {"epochs": num_epochs, "num_parameters": num_parameters}, progress)


def note_epoch(event: EpochEnded) -> JobNote:
    """Return the note of a scored epoch, with its dev scores for a learning curve."""
    run, record, num_epochs = event.member.run, event.record, event.member.num_stages
    dev = {name: value if math.isfinite(value) else None for name, value in record["dev"].items()}
    stage = record.get("stage") or ""
    score = dev.get(run.metric)
    said = "not a number" if score is None else f"{score:.4g}"
    what = {"probe": "linear probe", "contrast": "contrastive start"}.get(stage, f"epoch {record['epoch']}")
    of = "" if stage else f" of {num_epochs}"
    data = {
        "epoch": record["epoch"],
        "epochs": num_epochs,
        "stage": stage or "training",
        "step": record["step"],
        "seconds": round(float(record["seconds"]), 3),
        "train_loss": _finite(record["train_loss"]),
        "dev_loss": _finite(record["dev_loss"]),
        "metric": run.metric,
        "dev": dev,
    }
    progress = {"stage": stage or "training", "epoch": record["epoch"], "epochs": num_epochs, "dev": dev}
    return JobNote("epoch", f"{what}{of}: dev {run.metric} {said}", data, progress)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def note_of(event: Event, words: TextCleaner) -> JobNote | None:
    """Return the note of an event about a whole cohort; None for one that does not concern a customer."""
    if isinstance(event, Notice | MemoryRanOut):
        return JobNote("notice", note_notes([event.message], words)[0])
    return None
