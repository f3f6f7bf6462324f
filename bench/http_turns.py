"""Loads on servers: what is asked, in turns, and whether the answers are right, before anything is timed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import http_load
import numpy as np
from http_load import Found, Plan, summarise
from http_servers import Server
from http_tasks import MOST_WHOLE, name_task
from report import say

TOLERANCE = 1e-4
"""of a probability: float32 on every side, other kernels and other padding"""
SETTLE_S = 0.5
ATTEMPTS = 6


@dataclass(frozen=True)
class LoadPlan:
    """A load, whichever server it is for. Rows come in the order of the file, so both sides of a turn get the same."""

    seconds: float
    connections: int = 64
    rows: int = 1
    """rows of a request, all of one task"""
    rate: float | None = None
    """requests a second; None: closed"""

    def describe(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class Asker:
    """Makes requests for servers and lets the generator's process send them."""

    def __init__(self, folder: Path, texts: Sequence[str]) -> None:
        self._folder, self._texts = folder, texts
        folder.mkdir(parents=True, exist_ok=True)

    def requests(
        self, server: Server, num_tasks: int, rows: int = 1, *, seed: int = 0, form: str = "task"
    ) -> list[str]:
        """Every text once, in lists of `rows`, each for a task drawn at random."""
        generator = np.random.default_rng(seed)
        shape, count = server.shape, len(self._texts) // rows
        chosen = generator.integers(num_tasks, size=count)
        starts = range(0, count * rows, rows)
        return [
            shape.request(name_task(int(index), form), self._texts[start : start + rows])
            for index, start in zip(chosen, starts, strict=True)
        ]

    def send(self, server: Server, requests: Sequence[str], plan: LoadPlan, *, keep: int = 0, start: int = 0) -> Found:
        """Carry a load out in the generator's process, and return all that came back."""
        return self.begin(server, requests, plan, keep=keep, start=start).result()

    def begin(
        self, server: Server, requests: Sequence[str], plan: LoadPlan, *, keep: int = 0, start: int = 0
    ) -> Sending:
        whole = Plan(
            *("127.0.0.1", server.port, list(requests), plan.seconds, plan.connections, plan.rate),
            keep=keep,
            start=start,
        )
        return Sending(whole, self._folder)

    def measure(self, server: Server, requests: Sequence[str], plan: LoadPlan, start: int = 0) -> dict[str, Any]:
        """The figures of one load: rates, latencies, and what the server used up for a row."""
        time.sleep(SETTLE_S)
        used = server.cpu_s()
        found = self.send(server, requests, plan, start=start)
        num_rows = max(1, len(found.latencies_ms) * plan.rows)
        summary = summarise(found)
        return summary | {
            "rows_per_s": summary["per_s"] * plan.rows,
            "cpu_ms_row": 1000 * (server.cpu_s() - used) / num_rows,
        }

    def compare(self, server: Server, expected: Sequence[dict[str, Any]], *, connections: int = 64) -> dict[str, Any]:
        """Ask rows of many tasks at once and hold the answers against those of Inlay's engine by itself."""
        known = [item for item in expected if int(item["task"][-3:]) < min(server.num_tasks, MOST_WHOLE)]
        shape = server.shape
        requests = [shape.request(item["task"], [item["text"]]) for item in known]
        # 1. sent at once, so that rows of several tasks meet
        bodies = self._ask_each(server, requests, min(connections, len(requests)))
        # 2. an answer for each, and its difference
        differences = []
        for body, item in zip(bodies, known, strict=True):
            (row,) = shape.read(json.loads(body))
            differences.append(max(abs(one - other) for one, other in zip(row, item["probs"], strict=True)))
        num_wrong = sum(difference > TOLERANCE for difference in differences)
        answer = {"rows": len(known), "max_difference": max(differences), "wrong": num_wrong, "tolerance": TOLERANCE}
        say(
            f"{server.name}: {len(known)} answers at {connections} connections, {num_wrong} wrong, "
            f"largest difference {max(differences):.1e}"
        )
        if num_wrong:
            raise WrongAnswers(
                f"{server.name}: {num_wrong} of {len(known)} answers are wrong, by {max(differences):.3f}"
            )
        return answer

    def _ask_each(self, server: Server, requests: Sequence[str], connections: int) -> list[str]:
        """The body of every answer; who was refused for the moment (429, 503) asks again, fewer at once."""
        found: dict[int, str] = {}
        left = list(range(len(requests)))
        for _ in range(ATTEMPTS):
            chosen = [requests[number] for number in left]
            plan = Plan("127.0.0.1", server.port, chosen, 60.0, connections, keep=len(chosen))
            answers = Sending(replace(plan, most_requests=len(chosen)), self._folder).result()
            found |= {left[int(place)]: body for place, body in answers.bodies.items()}
            left = [number for number in left if number not in found]
            if not left:
                return [found[number] for number in range(len(requests))]
            if answers.num_failed or answers.num_errors or set(answers.statuses) - {"200", "429", "503"}:
                break
            connections = max(1, connections // 4)
        raise WrongAnswers(f"{server.name}: row {left[0]} was not answered: {answers.statuses} {answers.refusal}")


class WrongAnswers(Exception):
    """A server whose answers are not those of the task: it is not measured."""


class Sending:
    """A load under way in the generator's own process."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        name = f"{time.monotonic_ns()}"
        self._plan, self._found = folder / f"plan-{name}.json", folder / f"found-{name}.json"
        self._plan.write_text(json.dumps(asdict(plan)), encoding="utf8")
        self._limit_s = plan.seconds + plan.timeout_s + 60
        self._process = subprocess.Popen([sys.executable, http_load.__file__, str(self._plan), str(self._found)])

    def result(self) -> Found:
        """Wait for it to end."""
        try:
            status = self._process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._plan.unlink()
        if status != 0:
            raise RuntimeError(f"the load generator ended with status {status}")
        found = Found(**json.loads(self._found.read_text(encoding="utf8")))
        self._found.unlink()
        return found


class MemoryWatch:
    """The most memory that a server takes while a block runs, looked at many times a second."""

    def __init__(self, server: Server, every_s: float = 0.05) -> None:
        self._server, self._every_s = server, every_s
        self.before_mb = self.most_mb = server.pss_mb()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        self._thread.join()
        self.most_mb = max(self.most_mb, self._server.pss_mb())

    def _watch(self) -> None:
        while not self._is_over.wait(self._every_s):
            self.most_mb = max(self.most_mb, self._server.pss_mb())


def in_turns(servers: Sequence[Server], turns: int) -> list[list[Server]]:
    """The servers in the order of each turn: the second turn goes backwards, so that no one is always first."""
    return [list(servers) if turn % 2 == 0 else list(reversed(servers)) for turn in range(turns)]
