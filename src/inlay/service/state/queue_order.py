"""The order in which queued jobs come: tenants in turn, by weight; of a tenant's jobs by priority, then age.

A tenant's turn is the number of its jobs that were claimed, divided by its weight; whoever has the least comes next.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from inlay.service.state import schema


@dataclass(frozen=True)
class Waiting:
    """A queued job, as far as the order goes."""

    number: int
    tenant: str
    task: str
    kind: str
    structure: str
    priority: int
    deaths: int
    created_at: float
    cohort: str | None


@dataclass(frozen=True)
class Turn:
    """The number of jobs a tenant had claimed, by weight, and that weight."""

    at: float
    weight: float


def read_waiting(connection: Connection) -> list[Waiting]:
    """Return all queued jobs."""
    row = schema.jobs.c
    columns = (row.number, row.tenant, row.task, row.kind, row.structure, row.priority, row.deaths, row.created_at)
    query = select(*columns, row.cohort).where(row.state == "queued")
    return [Waiting(*item) for item in connection.execute(query)]


def read_turns(connection: Connection) -> dict[str, Turn]:
    """Return every tenant's turn."""
    row = schema.tenants.c
    found: Iterable[Any] = connection.execute(select(row.name, row.turn, row.weight))
    return {name: Turn(at, weight) for name, at, weight in found}


def in_order(jobs: Iterable[Waiting], turns: Mapping[str, Turn]) -> Iterator[Waiting]:
    """Yield jobs in the order they come."""
    lines: dict[str, deque[Waiting]] = defaultdict(deque)
    for job in sorted(jobs, key=lambda job: (-job.priority, job.number)):
        lines[job.tenant].append(job)
    heap = [(turns[tenant].at, line[0].number, tenant) for tenant, line in lines.items()]
    heapq.heapify(heap)
    while heap:
        at, _, tenant = heapq.heappop(heap)
        line = lines[tenant]
        yield line.popleft()
        if line:
            heapq.heappush(heap, (at + 1 / turns[tenant].weight, line[0].number, tenant))


def find_places(connection: Connection) -> dict[int, int]:
    """Return the place of every queued job, by its number. Those that were begun, and given back, come first."""
    waiting, turns = read_waiting(connection), read_turns(connection)
    begun = [job for job in waiting if job.cohort is not None]
    fresh = [job for job in waiting if job.cohort is None]
    order = [*begun, *in_order(fresh, turns)]
    return {job.number: place for place, job in enumerate(order, start=1)}
