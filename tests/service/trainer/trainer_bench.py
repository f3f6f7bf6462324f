"""What tests of the trainer work with: rows that can be learned, and a service's state with a trainer on it."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inlay.service.state import Database, DatasetDraft, Job, JobQueue, JobRequest, UploadContent, Workspace
from inlay.service.trainer.answering import Answerer
from inlay.service.trainer.job_data import TrainerContext
from inlay.service.trainer.trainer import Trainer
from inlay.store import DRAFT_PREFIX, Store
from toys import WORDS

LABELS = ("billing", "delivery")
QUICK = {"method": "pfeiffer", "size": 4, "epochs": 2, "lr": 5e-3, "max_length": 16}


def make_rows(num_rows: int = 60, *, seed: int = 0, labels: tuple[str, ...] = LABELS, wrong: float = 0.0):
    """Rows whose label says which group of words a text draws from; a share of them is labelled wrongly."""
    generator = np.random.default_rng(seed)
    groups = [WORDS[start :: len(labels)] for start in range(len(labels))]
    rows = []
    for _ in range(num_rows):
        chosen = int(generator.integers(len(labels)))
        text = " ".join(generator.choice(groups[chosen], size=int(generator.integers(3, 9))))
        label = labels[(chosen + 1) % len(labels)] if generator.random() < wrong else labels[chosen]
        rows.append({"text": text, "label": label})
    return rows


@dataclass
class Bench:
    """Everything a test of the trainer needs."""

    home: Path | str
    db: Database
    queue: JobQueue
    store: Store
    context: TrainerContext
    trainer: Trainer

    def workspace(self, tenant: str = "acme") -> Workspace:
        return Workspace(self.db, tenant, "tester")

    def upload(self, rows: list[dict[str, Any]], tenant: str = "acme", *, name: str = "rows.jsonl") -> str:
        """Send rows as a dataset; return its id."""
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        folder = self.db.paths.datasets(tenant)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{DRAFT_PREFIX}{hashlib.sha256(content).hexdigest()[:8]}-{len(rows)}"
        path.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        # As the web reads it.
        labels = [{"label": label, "count": 1} for label in sorted({str(row.get("label")) for row in rows})]
        reading = {"text": "text", "pair": None, "label": "label", "kind": None, "labels": labels}
        reading["kind"] = "classify" if all(isinstance(row.get("label"), str) for row in rows) else None
        found = UploadContent(reading=reading)
        draft = DatasetDraft(path, name, "jsonl", len(content), digest, len(rows), found)
        return self.workspace(tenant).add_dataset(draft).id

    def submit(self, rows: list[dict[str, Any]] | str, task: str = "mail", tenant: str = "acme", **given: Any) -> Job:
        """Ask for a job of quick settings, which `settings` overrides."""
        dataset = rows if isinstance(rows, str) else self.upload(rows, tenant)
        settings = QUICK | given.pop("settings", {})
        request = JobRequest(given.pop("kind", "train"), task, dataset, settings, given.pop("publish", None))
        assert not given
        return self.workspace(tenant).submit(request)

    def train(self) -> None:
        """Train whatever is queued."""
        while self.trainer.train_next(company_s=0.0):
            pass

    def see(self, job: Job) -> Job:
        """Return a job as it is now."""
        return self.workspace(job.tenant).job(job.id)

    def kinds(self, job: Job) -> list[str]:
        """Return the kinds of a job's events, in order."""
        return [event.kind for event in self.workspace(job.tenant).events(job.id)]


def open_bench_at(home: Path | str, backbone: Any, client: Any = None) -> Bench:
    """Open the state below a folder, with a trainer; `client` asks a real or fake engine."""
    if isinstance(home, Path):
        home.mkdir(exist_ok=True)
    db, store = Database.open(home), Store(home)
    queue = JobQueue(db)
    context = TrainerContext(db, queue, store, backbone, Answerer(backbone, store, client, patience_s=0.5), 1)
    return Bench(home, db, queue, store, context, Trainer(context, "tester", threading.Event()))
