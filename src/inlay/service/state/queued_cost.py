"""The work that is queued: what one trainer would need for it, by the pace of the latest trainings."""

from __future__ import annotations

from sqlalchemy import select

from inlay.service.state import schema
from inlay.service.state.database import Database
from inlay.service.state.jobs import QUEUED, RUNNING, SUCCEEDED, TRAIN

_USUAL_S = 0.01
"""seconds for a row of one round, before any training has ended"""
_USUAL_ROUNDS = 10
_START_S = 5.0
_NUM_ENDED = 20
_MOST_COUNTED = 1000


def queued_seconds(db: Database) -> float:
    """Return the seconds that one trainer would need for all jobs that have not ended."""
    job, dataset = schema.jobs.c, schema.datasets.c
    joined = schema.jobs.join(
        schema.datasets, (dataset.tenant == job.tenant) & (dataset.id == job.dataset), isouter=True
    )
    columns = select(job.settings, job.started_at, job.ended_at, dataset.num_rows).select_from(joined)
    with db.reading() as connection:
        is_open = (job.kind == TRAIN, job.state.in_((QUEUED, RUNNING)))
        waiting = connection.execute(columns.where(*is_open).limit(_MOST_COUNTED)).all()
        is_ended = (job.kind == TRAIN, job.state == SUCCEEDED)
        newest = columns.where(*is_ended).order_by(job.number.desc()).limit(_NUM_ENDED)
        ended = connection.execute(newest).all()
    paces = sorted(
        (row.ended_at - row.started_at) / _rows_to_read(row)
        for row in ended
        if row.started_at is not None and row.ended_at is not None and _rows_to_read(row)
    )
    pace = paces[len(paces) // 2] if paces else _USUAL_S
    return sum(_START_S + _rows_to_read(row) * pace for row in waiting)


def _rows_to_read(row: object) -> float:
    """Return the rows of all rounds of a job."""
    rounds = row.settings.get("epochs") or _USUAL_ROUNDS  # type: ignore[attr-defined]
    return float((row.num_rows or 0) * rounds)  # type: ignore[attr-defined]
