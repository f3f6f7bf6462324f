"""What Inlay's service is held against without another server: its own process, other loads, training, other tenants.

Every part yields records; `goal` records have a figure, its limit and whether it is reached (`http_report.py` shows
them). The loads that are compared are taken in turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import http_lifecycle
from http_load import Found, make_request, summarise
from http_pairs import Record, Work, goal, tell_load, warm_up
from http_servers import COMMON, PEERS, Server
from http_tasks import NUM_OF_TENANT, TENANTS, name_task
from http_turns import LoadPlan
from report import compare, say, spread

NUM_TASKS = 32
BATCHES = (16, 64)
STEPS_A_SECOND = 10
NUM_APART = 1500
"""texts of the rows that are asked about one text in requests of their own"""


class Engine:
    """Inlay's engine in a process of its own, asked by lines (`peers/http_engine.py`)."""

    def __init__(self, work: Work, num_tasks: int, *, threads: int, batch: int) -> None:
        words = [str(work.tasks.home), str(num_tasks), str(threads), str(batch)]
        variables = os.environ | COMMON | {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, str(PEERS / "http_engine.py"), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "it ended"}')
        if "error" in answer:
            raise RuntimeError(f"the engine in process: {answer['error']}")
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def _engines(work: Work, ways: dict[str, tuple[int, int]]) -> Iterator[dict[str, Engine]]:
    """Engines in process by name, from (threads, batch), ready."""
    rows = work.tasks.folder / "in-process-rows.json"
    texts = work.tasks.texts()
    rows.write_text(json.dumps([[name_task(7 * at % NUM_TASKS), text] for at, text in enumerate(texts)]))
    found = {name: Engine(work, NUM_TASKS, threads=way[0], batch=way[1]) for name, way in ways.items()}
    try:
        for engine in found.values():
            engine.ask(do="prepare", rows=str(rows))
        yield found
    finally:
        for engine in found.values():
            engine.stop()


def beside_process(work: Work) -> Iterator[Record]:
    """HTTP's rows a second beside those of the engine in process, then latencies at half of that rate."""
    ways = {f"in process, 1 thread, batches of {batch}": (1, batch) for batch in BATCHES}
    ways["in process, 2 threads, batches of 64"] = (2, 64)
    plan = LoadPlan(work.seconds)
    with Server("inlay", work.tasks, NUM_TASKS, more=["--no-train"]) as server, _engines(work, ways) as engines:
        server.wait()
        yield {"what": "equality", **work.asker.compare(server, work.tasks.expected())}
        warm_up(work, server, NUM_TASKS)
        requests = work.asker.requests(server, NUM_TASKS)
        rates: dict[str, list[float]] = {}
        for turn in range(work.turns):
            found = work.asker.measure(server, requests, plan, start=turn * len(requests) // work.turns)
            rates.setdefault("http", []).append(found["rows_per_s"])
            yield tell_load("single", turn, plan, found)
            for name, engine in engines.items():
                answer = engine.ask(do="measure", steps=int(STEPS_A_SECOND * work.seconds))
                rates.setdefault(name, []).append(answer["samples"] / answer["seconds"])
                say(f"{name}, turn {turn + 1}: {rates[name][-1]:.1f} rows/s")
                yield {"what": "in process", "way": name, "turn": turn, "rows_per_s": rates[name][-1], **answer}
        for name in ways:
            yield {"what": "ratio", "of": f"http over {name}", **compare(rates["http"], rates[name])}
        # The service's engine has one thread here; the better of the batches stands for it.
        one_thread = [name for name, (threads, _) in ways.items() if threads == 1]
        best = max(one_thread, key=lambda name: statistics.median(rates[name]))
        yield goal("rows/s over HTTP / in process", compare(rates["http"], rates[best]), 0.9, least=True)
        half = statistics.median(rates["http"]) / 2
        steady = LoadPlan(work.seconds, rate=round(half, 1))
        tails = []
        for turn in range(work.turns):
            found = work.asker.measure(server, requests, steady, start=turn * len(requests) // work.turns)
            tails.append(found["p99_ms"])
            yield tell_load("half rate", turn, steady, found)
        yield goal("p99 in ms at half of that rate", spread(tails), 250, least=False)


def many_tasks(work: Work) -> Iterator[Record]:
    """256 tasks beside 32 of them, on one server that holds all; and on one that has the usual 64 slots."""
    plan = LoadPlan(work.seconds)
    for slots, counts in ((256, (32, 256)), (64, (32, 256))):
        with Server("inlay", work.tasks, NUM_TASKS, more=["--no-train", "--slots", str(slots)]) as server:
            server.wait()
            server.num_tasks = max(counts)
            warm_up(work, server, max(counts))
            rates: dict[int, list[float]] = {count: [] for count in counts}
            for turn in range(work.turns):
                for count in counts if turn % 2 == 0 else reversed(counts):
                    requests = work.asker.requests(server, count)
                    found = work.asker.measure(server, requests, plan, start=turn * len(requests) // work.turns)
                    rates[count].append(found["rows_per_s"])
                    yield tell_load(f"{count} tasks, {slots} slots", turn, plan, found)
            yield {"what": "memory", "slots": slots, "tasks": max(counts), "pss_mb": server.pss_mb()}
            ratio = compare(rates[256], rates[32])
            if slots == 256:
                yield goal("rows/s of 256 tasks / of 32", ratio, 0.9, least=True)
            else:
                yield {"what": "ratio", "of": "rows/s of 256 tasks in 64 slots / of 32 tasks", **ratio}


def memory(work: Work) -> Iterator[Record]:
    """Memory of the whole service that holds 32 tasks, as it comes and without its trainer."""
    for name, more in {"as it comes": [], "without trainer": ["--no-train"]}.items():
        with Server("inlay", work.tasks, NUM_TASKS, more=more) as server:
            server.wait()
            yield {"what": "memory", "service": name, "when": "started", "pss_mb": server.pss_mb()}
            warm_up(work, server, NUM_TASKS)
            found = server.pss_mb()
            yield {"what": "memory", "service": name, "when": "32 tasks have answered", "pss_mb": found}
            if name == "as it comes":
                yield goal("MB of 32 tasks, trainer and all", found, 1000, least=False)


def one_text(work: Work) -> Iterator[Record]:
    """One text for 32 tasks in one request, beside 32 requests, for tasks whose lower layers are the backbone's."""
    limits = {"top": 2.5, "head": 15.0, "houlsby": None, "task": None}
    words = {
        "top": "adapters in the top third",
        "head": "heads only",
        "houlsby": "adapters at full depth",
        "task": "LoRA at full depth",
    }
    texts = work.tasks.texts()
    with Server("inlay", work.tasks, NUM_TASKS, more=["--no-train", "--slots", "160"]) as server:
        server.wait()
        for form, limit in limits.items():
            names = [name_task(index, form) for index in range(NUM_TASKS)]
            # No text comes twice: the engine keeps states of texts.
            at_once = [make_request("/v1/predict", {"tasks": names, "rows": [text]}) for text in texts[NUM_APART:]]
            # What it is held against is ordinary traffic, rows of different texts: they have nothing to share.
            alone = work.asker.requests(server, NUM_TASKS, form=form)
            yield _compare_answers(server, names, texts[0])
            # Separate requests on one text, one after another: what the engine shares of them by itself.
            pairs = [(text, name) for text in texts[:NUM_APART] for name in names]
            apart = [make_request("/v1/predict", {"task": name, "rows": [text]}) for text, name in pairs]
            plans = {
                "together": (at_once, LoadPlan(work.seconds, 4, rows=NUM_TASKS)),
                "apart": (apart, LoadPlan(work.seconds)),
                "alone": (alone, LoadPlan(work.seconds)),
            }
            rates: dict[str, list[float]] = {name: [] for name in plans}
            for requests, plan in plans.values():
                work.asker.send(server, requests, LoadPlan(2.0, plan.connections))
            for turn in range(work.turns):
                for name, (requests, plan) in plans.items():
                    found = work.asker.measure(server, requests, plan, start=turn * len(requests) // work.turns)
                    rates[name].append(found["rows_per_s"])
                    yield tell_load(f"one text, {words[form]}, {name}", turn, plan, found)
            ratio = compare(rates["together"], rates["alone"])
            what = f"answers/s of one text for 32 tasks, {words[form]}"
            by_itself = f"answers/s of 32 requests on one text, {words[form]} / on different texts"
            yield {"what": "ratio", "of": by_itself, **compare(rates["apart"], rates["alone"])}
            if limit is None:
                yield {"what": "ratio", "of": what, **ratio}
            else:
                yield goal(f"{what} / 32 requests", ratio, limit, least=True)


def _compare_answers(server: Server, names: Sequence[str], text: str) -> Record:
    """The answers of one request for all tasks are those of a request for each."""
    together = server.call("POST", "/v1/predict", {"tasks": list(names), "rows": [text]})["answers"][0]
    worst = 0.0
    for name, answer in zip(names, together, strict=True):
        (alone,) = server.call("POST", "/v1/predict", {"task": name, "rows": [text]})["answers"]
        if answer.get("task") != name or alone["version"] != answer["version"]:
            raise RuntimeError(f"the answer for {name} is of {answer.get('task')}, {answer.get('version')}")
        both = [(value, answer["probabilities"][label]) for label, value in alone["probabilities"].items()]
        worst = max(worst, *(abs(one - other) for one, other in both))
    if worst > 1e-4:
        raise RuntimeError(f"one text for many tasks: an answer differs by {worst}")
    return {"what": "equality", "rows": len(names), "max_difference": worst, "wrong": 0}


def neighbour(work: Work) -> Iterator[Record]:
    """A tenant's latencies alone, and beside another one that asks for ten times its share.

    Two tenants share the service evenly, so a share is half of what it can do. The quiet one asks for a fifth of what
    the service can do, and both ways of holding the loud one back are met: its limit of tokens a minute, as it comes,
    and none, where only the fair queue is between them.
    """
    for limited in (True, False):
        home, keys = _make_tenants(work, limited=limited)
        headers = {tenant: (("Authorization", f"Bearer {key}"),) for tenant, key in keys.items()}
        quiet, loud = TENANTS
        server = Server("inlay", work.tasks, NUM_OF_TENANT, more=["--no-train"], home=home, headers=headers[quiet])
        with server:
            server.wait()
            asked = {}
            for tenant in TENANTS:
                server.shape = _with_headers(server, headers[tenant])
                asked[tenant] = work.asker.requests(server, NUM_OF_TENANT, seed=len(asked))
            for tenant in TENANTS:  # every task is loaded, below the loud one's limit
                work.asker.send(server, asked[tenant], LoadPlan(3.0, 8))
            whole = work.asker.measure(server, asked[quiet], LoadPlan(work.seconds))["rows_per_s"]
            yield {"what": "capacity", "limited": limited, "rows_per_s": whole}
            steady = LoadPlan(work.seconds, 16, rate=round(whole / 5, 1))
            flood = LoadPlan(work.seconds + 2, 64, rate=round(10 * whole / 2, 1))
            tails: dict[str, list[float]] = {"alone": [], "beside": []}
            for turn in range(work.turns):
                found = work.asker.measure(server, asked[quiet], steady, start=turn * 500)
                tails["alone"].append(found["p99_ms"])
                yield tell_load(f"quiet tenant alone, limits {limited}", turn, steady, found)
                noise = work.asker.begin(server, asked[loud], flood)
                time.sleep(1.0)
                found = work.asker.measure(server, asked[quiet], steady, start=turn * 500)
                tails["beside"].append(found["p99_ms"])
                heard: Found = noise.result()
                yield tell_load(f"quiet tenant beside a loud one, limits {limited}", turn, steady, found)
                yield {"what": "noise", "turn": turn, "limited": limited, "rate": flood.rate, **summarise(heard)}
                time.sleep(1.0)
            name = "with its usual limit" if limited else "without a limit"
            yield goal(
                f"p99 beside a neighbour that asks ten times its share, {name}",
                compare(tails["beside"], tails["alone"]),
                1.5,
                least=False,
            )


def _with_headers(server: Server, headers: Sequence[tuple[str, str]]) -> Any:
    shape = server.kind.shape
    return type(shape)(shape.path, shape.body, shape.read, lambda task: headers)


def _make_tenants(work: Work, *, limited: bool) -> tuple[Any, dict[str, str]]:
    """A home with both tenants, and their keys."""
    from inlay.service.state import NO_LIMITS, Keys, TenantLimits, Tenants

    keys, (quiet, _) = {}, TENANTS

    def add(db: Any) -> None:
        for tenant in TENANTS:
            Tenants(db).add(tenant, TenantLimits() if limited and tenant != quiet else NO_LIMITS)
            keys[tenant] = Keys(db).make(tenant, ("predict",))[1]

    home = work.tasks.copy_home("neighbours", add)
    _adopt(home)
    return home, keys


def _adopt(home: Path) -> None:
    """Let the service know the tenants' tasks: they were published by this bench, not by a job."""
    from inlay.service.state import Database
    from inlay.service.state.aliases import Reason, TaskKey, set_alias
    from inlay.service.state.served_tasks import adopt_task

    db = Database.open(home)
    with db.writing() as connection:
        for tenant in TENANTS:
            for index in range(NUM_OF_TENANT):
                task = TaskKey(tenant, name_task(index))
                version = db.store.resolve(f"{tenant}.{task.name}")
                adopt_task(connection, db, task, db.now())
                set_alias(connection, task, (version.number, version.digest), Reason("bench", "measured"), db.now())
    db.close()


PARTS: dict[str, Callable[[Work], Iterator[Record]]] = {
    "in-process": beside_process,
    "memory": memory,
    "many-tasks": many_tasks,
    "one-text": one_text,
    "neighbour": neighbour,
    **http_lifecycle.PARTS,
}
