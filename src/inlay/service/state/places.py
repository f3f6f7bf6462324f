"""Places: where the service keeps its files, below the store's root."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PARTS = ".parts"


@dataclass(frozen=True)
class Places:
    """The folders of a service; `home` is the store's root."""

    home: Path

    @property
    def service(self) -> Path:
        """The folder with all that is the service's own."""
        return self.home / "service"

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.service / "service.db"

    @property
    def postgres_note(self) -> Path:
        """The file that says that the database is Postgres, and where."""
        return self.service / "postgres"

    @property
    def run(self) -> Path:
        """The folder of sockets and secrets of the running service."""
        return self.service / "run"

    def datasets(self, tenant: str) -> Path:
        """Return the folder of a tenant's uploads."""
        return self.service / "datasets" / tenant

    def evaluations(self, tenant: str, task: str) -> Path:
        """Return the folder with what a task's versions answered on their dev rows."""
        return self.service / "evaluations" / tenant / task

    def batch(self, tenant: str, job: str) -> Path:
        """Return the file with the answers of an offline batch."""
        return self.service / "batches" / tenant / f"{job}.jsonl"

    def batch_parts(self, tenant: str, job: str) -> Path:
        """Return the folder with the answers of an offline batch that is not done."""
        return self.batch(tenant, job).with_suffix(PARTS)

    def runs(self, tenant: str) -> Path:
        """Return the folder of a tenant's run folders."""
        return self.service / "runs" / tenant
