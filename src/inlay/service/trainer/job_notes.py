"""Notes on jobs: events of training in plain words, and errors without what a customer must not see.

What always holds: no note has a path of the server, the prefix of names in the store, or anything of another tenant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.errors import InlayError, OutOfMemory
from inlay.service.logs import log_failure
from inlay.service.state import Dataset, JobNote, Tenant
from inlay.service.web.problems import Secrets, describe_words, speak_http
from inlay.training import EpochEnded, Event, MemoryRanOut, Notice

_MOST_NOTES = 50
_LONGEST_NOTE = 500  # letters
_COMMAND_LINE = re.compile(r"`--|`inlay |`(?:data|train|method)\.")
_OURS = "the job failed in a way nobody foresaw"


@dataclass(frozen=True)
class PlainWords:
    """Cleans what is said of one job."""

    secrets: Secrets
    dataset: Dataset | None = None

    def clean(self, words: str) -> str:
        """Return words without the server's folders and names in the store; a file has its dataset's name."""
        if self.dataset is not None:
            words = words.replace(str(self.dataset.path), self.dataset.name)
            words = words.replace(self.dataset.path.name, self.dataset.name)
        return self.secrets.remove(words)


def make_words(home: Any, tenant: Tenant | None, dataset: Dataset | None = None) -> PlainWords:
    """Return the cleaner of a tenant's words."""
    return PlainWords(Secrets(home, "" if tenant is None else tenant.prefix), dataset)


def describe_failure(error: BaseException, words: PlainWords) -> dict[str, Any]:
    """Return why a job failed as a problem of the API, and its `message` as an error has it."""
    if isinstance(error, MemoryError):
        error = OutOfMemory("the job does not fit in memory", "send fewer rows, or choose a smaller `max_length`")
    if not isinstance(error, InlayError):
        log_failure("a job failed in a way nobody foresaw", {"error": type(error).__name__})
        ask = "try once more; if it fails again, ask the operator of this service"
        return {**describe_words("unforeseen", 500, _OURS, ask), "message": _OURS}
    hint = None if error.hint is None else words.clean(error.hint)
    message = words.clean(error.message)
    return {**describe_words(error.code, error.http_status, message, hint), "message": message}


def note_notes(notes: Sequence[str], words: PlainWords) -> list[str]:
    """Return notes on rows and settings: cleaned, in the words of the API, not too many and none too long."""
    cleaned = [words.clean(_speak(note)) for note in notes[:_MOST_NOTES]]
    return [note if len(note) <= _LONGEST_NOTE else f"{note[:_LONGEST_NOTE]}…" for note in cleaned]


def _speak(note: str) -> str:
    """Return a note with what it says of the command line said as the API would, or left out."""
    return speak_http(note) if _COMMAND_LINE.search(note) else note


def note_rows(described: Mapping[str, Any], notes: Sequence[str]) -> JobNote:
    """Return the note that a job's rows are read."""
    rows = described["rows"]
    message = f"{rows['train']:,} training rows and {rows['dev']:,} dev rows, {described['kind']}"
    message += f" with {described['num_labels']} labels" if described["num_labels"] else ""
    progress = {"stage": "reading", "epoch": None, "epochs": None, "dev": None}
    return JobNote("read", message, {**described, "notes": list(notes)}, progress)


def note_start(num_epochs: int, num_parameters: int, *, is_resumed: bool) -> JobNote:
    """Return the note that a job's training begins, or goes on after its trainer was stopped."""
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


def note_of(event: Event, words: PlainWords) -> JobNote | None:
    """Return the note of an event that is about a whole cohort; None where it says nothing to a customer."""
    if isinstance(event, Notice | MemoryRanOut):
        return JobNote("notice", note_notes([event.message], words)[0])
    return None
