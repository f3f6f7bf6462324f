"""Inlay's service beside one other server at a time: the same tasks and rows, answers first, then loads in turns.

Both run at once, but the one whose turn it is not stands still (SIGSTOP): an idle Ray takes 40% of a core. Inlay's is
never stopped; at rest it takes nothing worth a figure, which is measured too (`idle_cpu`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from http_servers import KINDS, Server, ServerFailed
from http_tasks import Tasks
from http_turns import Asker, LoadPlan, WrongAnswers, in_turns
from report import say

IDLE_S = 2.0
LIST_ROWS, LIST_CONNECTIONS = 32, 8
OURS = ("inlay", "inlay-2")
"""as it comes, with one thread that answers on two cores, and with two"""


@dataclass(frozen=True)
class Work:
    """What every part is given."""

    tasks: Tasks
    asker: Asker
    turns: int
    seconds: float
    """of a load"""


Record = dict[str, Any]


def compare_servers(work: Work, peer: str, num_tasks: int) -> Iterator[Record]:
    """The records of one pair: of both servers, and of every load in every turn."""
    kind = KINDS[peer]
    if num_tasks > kind.most_tasks:
        yield {"what": "skipped", "server": peer, "tasks": num_tasks, "why": kind.why_not_more}
        return
    with ExitStack() as stack:
        ours = [stack.enter_context(Server(name, work.tasks, num_tasks, more=["--no-train"])) for name in OURS]
        for server in ours:
            server.wait()
            yield from _describe(work, server, num_tasks)
        try:
            other = stack.enter_context(Server(peer, work.tasks, num_tasks))
            other.wait()
            yield from _describe(work, other, num_tasks)
            yield from _measure(work, [*ours, other], num_tasks)
        except (ServerFailed, WrongAnswers) as error:
            say(str(error))
            yield {"what": "failed", "server": peer, "tasks": num_tasks, "why": str(error)}


def _describe(work: Work, server: Server, num_tasks: int) -> Iterator[Record]:
    """Its answers held against those in process, and what it takes up once every task has answered."""
    equality = work.asker.compare(server, work.tasks.expected())
    warm_up(work, server, num_tasks)
    used = server.cpu_s()
    time.sleep(IDLE_S)
    yield {
        "what": "server",
        "server": server.name,
        "tasks": num_tasks,
        "about": server.kind.about,
        "ready_s": server.ready_s,
        "pss_mb": server.pss_mb(),
        "processes": len(server.processes()),
        "idle_cpu": (server.cpu_s() - used) / IDLE_S,
        "equality": equality,
    }


def warm_up(work: Work, server: Server, num_tasks: int) -> None:
    """Every task is asked, and then more, so that models are loaded and counters of speed have settled."""
    requests = work.asker.requests(server, num_tasks, seed=1)
    work.asker.send(server, requests, LoadPlan(seconds=min(20.0, max(3.0, num_tasks / 12))))


def _measure(work: Work, servers: list[Server], num_tasks: int) -> Iterator[Record]:
    closed = LoadPlan(work.seconds)
    rates: dict[str, list[float]] = {}
    for record in _take_turns(work, servers, num_tasks, "single", closed):
        rates.setdefault(record["server"], []).append(record["rows_per_s"])
        yield record
    lists = LoadPlan(work.seconds, LIST_CONNECTIONS, LIST_ROWS)
    yield from _take_turns(work, servers, num_tasks, "lists", lists)
    # The same rate for both: half of what the slower one can do, so that none is asked for more than it has.
    rate = min(statistics.median(found) for found in rates.values()) / 2
    steady = LoadPlan(work.seconds, rate=max(1.0, round(rate, 1)))
    yield from _take_turns(work, servers, num_tasks, "open", steady)


def _take_turns(work: Work, servers: list[Server], num_tasks: int, load: str, plan: LoadPlan) -> Iterator[Record]:
    requests = {server.name: work.asker.requests(server, num_tasks, plan.rows) for server in servers}
    for turn, order in enumerate(in_turns(servers, work.turns)):
        for server in order:
            others = [other for other in servers if other is not server and not other.kind.is_ours]
            for other in others:
                other.freeze()
            # Another stretch of rows in every turn, the same for both.
            start = turn * len(requests[server.name]) // work.turns
            found = work.asker.measure(server, requests[server.name], plan, start=start)
            for other in others:
                other.thaw()
            say(
                f"{num_tasks} tasks, {load}, turn {turn + 1}: {server.name} {found['rows_per_s']:.1f} rows/s, "
                f"p99 {found.get('p99_ms', float('nan')):.0f} ms, {found['cpu_ms_row']:.1f} CPU-ms a row"
            )
            yield {
                "what": "load",
                "server": server.name,
                "tasks": num_tasks,
                "load": load,
                "turn": turn,
                "plan": plan.describe(),
                **found,
            }


def goal(name: str, figure: dict[str, float] | float, limit: float, *, least: bool) -> Record:
    """A figure against its limit; of a spread the median counts."""
    value = figure["median"] if isinstance(figure, dict) else figure
    reached = value >= limit if least else value <= limit
    sign = "at least" if least else "at most"
    say(f"{name}: {figure} ({sign} {limit}: {'reached' if reached else 'NOT REACHED'})")
    return {"what": "goal", "goal": name, "figure": figure, "limit": limit, "sign": sign, "reached": reached}


def tell_load(load: str, turn: int, plan: LoadPlan, found: dict[str, Any]) -> Record:
    """A load on Inlay's own service, as a record."""
    p99 = found.get("p99_ms", float("nan"))
    say(
        f"{load}, turn {turn + 1}: {found['rows_per_s']:.1f} rows/s, p50 {found.get('p50_ms', 0):.0f}, p99 {p99:.0f} ms"
    )
    return {"what": "load", "server": "inlay", "load": load, "turn": turn, "plan": plan.describe(), **found}
