"""The simulator beside the engine's own process, in slow motion: the same rows at the same times, the same work.

    python bench/fleet_check.py --out results/fleet/check.json                                       one engine
    python bench/fleet_check.py --engines 4 --slow 8 --seconds 17 --out check-4.json                 several

The process is the real one: socket, intake, fair queue, batches, slots, loader. Its backbone is tiny, and a batch or a
load then sleeps until it has taken what the replica's would (`fleet_replica.py`), `--slow` times slower. So the machine
may do other things meanwhile: what is compared is how rows wait, not how fast this machine is. The rows of all cells
are sent at the times that the simulator has drawn, and all cells run at once. Nothing is fitted.

With `--engines` there are several, which listen at ports, and the service's own `FleetClient` places the rows: on any
engine while the tasks fit the slots of one, else on a task's own (`inlay.service.engine.placement`).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import report
from fleet_cell import Cell, ServiceTimes
from fleet_replica import CHECKS, LOADS, TARGET_S, ask, make_cell, make_texts
from fleet_simulator import Fleet
from random_tasks import publish_tasks

from inlay.model import load_backbone
from inlay.service.engine import EngineClient, FleetClient, Roster, RosterFile
from inlay.service.engine.engine_process import EngineLimits, EngineProcess
from inlay.service.engine.placement import TaskShares, count_engines, order_for
from inlay.service.engine.roster import Replica
from inlay.serving import Answer, EncodedRequest, Engine
from inlay.serving.hot_versions import HotVersion
from inlay.store import Store
from inlay.threads import set_threads

WARM_SHARE = 0.1
LOADS_OF_SEVERAL = (0.5, 0.7)
MOMENT_S = 0.005
TOKEN = "a token for engines of this process"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replica", type=Path, default=report.ROOT / "results" / "fleet" / "replica.json")
    parser.add_argument("--slow", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load, in the replica's time")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--measured", type=Path, help="a report whose measured side is taken; only simulate anew")
    report.add_options(parser)
    options = parser.parse_args()
    replica = json.loads(options.replica.read_text(encoding="utf8"))
    set_threads(1)
    about: dict[str, Any] = {"replica": replica["commit"], "slow": options.slow, "engines": options.engines}
    if options.measured is not None:
        known = json.loads(options.measured.read_text(encoding="utf8"))
        options.slow = known["slow"]
        about |= {"slow": known["slow"], "stalls": known["stalls"]}
        about["measured"] = {name: known[name] for name in ("command", "commit", "date", "hardware", "versions")}
        checks = simulate_again(replica, options, known["checks"])
    else:
        with tempfile.TemporaryDirectory() as folder, StallWatch() as stalls:
            checks = asyncio.run(check_all(replica, options, Path(folder)))
        about["stalls"] = stalls.describe(options.slow)
    report.finish(options, **about, checks=checks, error=summarise(checks))


def simulate_again(
    replica: dict[str, Any], options: argparse.Namespace, known: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return known checks with their simulated side made anew; the rows are the same if the options are."""
    names, checks = make_names(), []
    for one, cell in zip(known, plan_cells(replica, options).values(), strict=True):
        if (one["num_rows"], one["rows_per_s"]) != (cell.num_rows, round(cell.rows_per_s, 1)):
            raise SystemExit("give `--engines` and `--seconds` as they were when it was measured")
        replicas = name_engines([0] * cell.num_replicas)
        orders = find_orders(names[: cell.num_tasks], Roster(1, TOKEN, replicas)) if len(replicas) > 1 else None
        checks.append(one | {"placement": cell.placement} | simulate(Fleet(cell, orders), options.slow))
    return checks


def make_names() -> list[str]:
    """Return the tasks' names, the most asked first."""
    return [f"t.task-{index:03d}" for index in range(max(tasks for tasks, _ in CHECKS.values()))]


def name_engines(ports: Sequence[int]) -> tuple[Replica, ...]:
    """Return engines that listen at ports here."""
    return tuple(Replica(f"engine-{place}", "127.0.0.1", port) for place, port in enumerate(ports))


def find_orders(names: Sequence[str], roster: Roster) -> list[list[int]]:
    """Return the engines of each task in its own order, by their places in the roster."""
    return [[roster.replicas.index(replica) for replica in order_for(name, roster)] for name in names]


def simulate(plan: Fleet, slow: float) -> dict[str, Any]:
    """Return the simulated side of a check.

    The client counts the tasks' shares of the last seconds, of which there are more rows at full speed. So they are
    counted here as it does.
    """
    if plan.cell.placement == "helped":
        plan.use_spreads(count_spreads(plan, slow))
    run = plan.run().summarise(WARM_SHARE)
    return {
        "simulated_ms": [round(run[name], 1) for name in ("p50_ms", "p90_ms", "p99_ms")],
        "simulated_rows_per_batch": run["rows_per_batch"],
        "simulated_hit_rate": run["hit_rate"],
    }


class StallWatch:
    """Sleeps again and again for a moment, and notes how late it wakes: so late came every row and batch of this time.

    Who waits for a core that other work has is no part of the simulation. With stalls the check says little of p99.
    """

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> StallWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            began = time.perf_counter()
            time.sleep(MOMENT_S)
            self._late_s.append(time.perf_counter() - began - MOMENT_S)

    def describe(self, slow: float) -> dict[str, float]:
        """Return the percentiles of the lateness and its maximum, in the replica's time."""
        p50, p99, most = (1000 * float(np.percentile(self._late_s, each)) / slow for each in (50, 99, 100))
        return {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2), "most_ms": round(most, 1)}


async def check_all(replica: dict[str, Any], options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return what rows waited in the process and in the simulation, for every load and number of tasks."""
    texts, _ = make_texts("tiny", folder)
    names = make_names()
    store = Store(folder / "store")
    publish_tasks(store, load_backbone(str(folder / "backbones" / "tiny"), device="cpu"), names, {"name": "head"})
    cells = plan_cells(replica, options)
    fleets = [SlowFleet(folder, store, cell, options.slow, number) for number, cell in enumerate(cells.values())]
    begun = [await fleet.listen(names, Fleet(fleet.cell).popularity) for fleet in fleets]  # before any row is sent
    found = await asyncio.gather(
        *(check(fleet, plan, client, names, texts) for fleet, (plan, client) in zip(fleets, begun, strict=True))
    )
    return [{"tasks": label, "load": load} | one for (label, load), one in zip(cells, found, strict=True)]


def plan_cells(replica: dict[str, Any], options: argparse.Namespace) -> dict[tuple[str, float], Cell]:
    """Return the cells that are checked: some loads, for tasks that fit the slots of an engine and that do not."""
    times, cells = ServiceTimes(**replica["times"]), {}
    for label, (num_tasks, num_slots) in CHECKS.items():
        for load in LOADS if options.engines == 1 else LOADS_OF_SEVERAL:
            cell = make_cell(times, replica["lengths"], num_tasks, num_slots, load, options.seconds)
            is_crowded = num_tasks > num_slots
            cells[label, load] = dataclasses.replace(
                cell,
                service="spread",
                spread=tuple(replica["spread"]),
                num_replicas=options.engines,
                rows_per_s=cell.rows_per_s * options.engines,
                num_rows=cell.num_rows * options.engines,
                placement="helped" if is_crowded else "two-choices",
            )
    return cells


class SlowFleet:
    """The engines of a cell, and a client that places rows on them."""

    def __init__(self, folder: Path, store: Store, cell: Cell, slow: float, number: int) -> None:
        self.cell, self.slow, self._folder = cell, slow, folder / f"cell-{number}"
        self.engines = [self._make_engine(folder, store) for _ in range(cell.num_replicas)]
        limits = EngineLimits(1000 * TARGET_S * slow, most_queue_s=20 * slow)
        self._processes = [EngineProcess(engine, limits) for engine in self.engines]
        for process in self._processes:
            count_sleep_as_work(process)
        self._folder.mkdir()

    def _make_engine(self, folder: Path, store: Store) -> SlowEngine:
        backbone = load_backbone(str(folder / "backbones" / "tiny"), device="cpu")
        engine = SlowEngine(backbone, store, num_slots=self.cell.num_slots)
        engine.play(self.cell, self.slow)
        return engine

    async def listen(self, names: list[str], popularity: np.ndarray) -> tuple[Fleet, EngineClient | FleetClient]:
        """Begin, with the slots filled; return the simulated fleet, and the client that asks."""
        if len(self.engines) == 1:
            await self._processes[0].listen(self._folder / "engine.sock")
            plan = Fleet(self.cell)
            self._fill([range(self.cell.num_tasks)], names)
            return plan, EngineClient(self._folder / "engine.sock")
        ports = [await process.listen_on_port("127.0.0.1", TOKEN) for process in self._processes]
        replicas = name_engines(ports)
        is_crowded = self.cell.num_tasks > self.cell.num_slots
        roster = Roster(1, TOKEN, replicas, is_crowded)
        file = RosterFile(self._folder / "roster.json")
        file.write(roster)
        orders = find_orders(names[: self.cell.num_tasks], roster)
        own: list[list[int]] = [[] for _ in replicas]
        for task, order in enumerate(orders):
            spread = count_engines(float(popularity[task]), len(replicas)) if is_crowded else len(replicas)
            for place in order[:spread]:
                own[place].append(task)
        self._fill(own, names)
        return Fleet(self.cell, orders), FleetClient(file)

    def _fill(self, own: Sequence[Sequence[int]], names: list[str]) -> None:
        """Put the busiest tasks of each engine into its slots, the busiest last."""
        for engine, tasks in zip(self.engines, own, strict=True):
            for task in reversed(tasks[: self.cell.num_slots]):
                engine.load(engine.find_version(names[task]).version)
            engine.num_owed = 0

    async def close(self) -> None:
        """End the engines."""
        for process in self._processes:
            await process.close()


def count_sleep_as_work(process: EngineProcess) -> None:
    """Have a process bound its batches by the time they take: here they sleep, which is no processor time."""
    learn = process._rate.learn
    process._rate.learn = lambda work, seconds, busy_s: learn(work, seconds, seconds)  # type: ignore[method-assign]


class SlowEngine(Engine):
    """An engine whose batches and loads take what a replica's take, so many times slower."""

    def play(self, cell: Cell, slow: float) -> None:
        """Take the times of a cell."""
        self._cell, self._slow, self._draw = cell, slow, random.Random(cell.seed)
        self.num_batches = self.num_owed = 0
        self._slow_loads()

    def answer(self, batch: Any, states: Any) -> list[Answer]:
        """Answer a batch, and sleep until it has taken its time."""
        began = time.perf_counter()
        num_tokens = sum(item.tokens.num_tokens for item in batch if isinstance(item, EncodedRequest))
        seconds = self._cell.times.batch_s(len(batch), num_tokens, len({item.digest for item in batch}))
        answers = super().answer(batch, states)
        self.num_batches += 1
        seconds *= self._draw.choice(self._cell.spread)
        owed, self.num_owed = self.num_owed, 0
        sleep_until(began + self._slow * (seconds + owed * self._cell.times.load_busy_s))
        return answers

    def _slow_loads(self) -> None:
        """Have every load of a version take what a replica's takes: its own thread, and a moment of the next batch."""
        usual = self.hot_versions.hold

        def hold(found: Any) -> HotVersion:
            began = time.perf_counter()
            sleep_until(began + self._slow * self._cell.times.load_s)
            self.num_owed += 1
            return usual(found)

        self.hot_versions.hold = hold  # type: ignore[method-assign]

    def run_backbone(self, num_tokens: int) -> float:
        """Return what the backbone would take, which is where the process begins to learn its speed."""
        return num_tokens * self._cell.times.token_s * self._slow


def sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.perf_counter()))


async def check(
    fleet: SlowFleet, plan: Fleet, client: EngineClient | FleetClient, names: list[str], texts: dict[int, list[str]]
) -> dict[str, Any]:
    """Send the rows of a cell; return measured latencies, in the replica's time, beside the simulated ones."""
    cell, slow = fleet.cell, fleet.slow
    ms = np.full(cell.num_rows, np.nan)

    async def send(row: int, due: float) -> None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        some = texts[plan.tokens[row]]
        await ask(client, names[plan.tasks[row]], some[row % len(some)])
        ms[row] = 1000 * ((time.perf_counter() - due) / slow + cell.times.outside_s)

    began = time.perf_counter() + 1.0
    await asyncio.gather(*(send(row, began + slow * at) for row, at in enumerate(plan.arrivals.tolist())))
    await client.close()
    await fleet.close()
    measured = np.percentile(ms[int(WARM_SHARE * cell.num_rows) :], (50, 90, 99))
    return {
        "placement": cell.placement,
        "rows_per_s": round(cell.rows_per_s, 1),
        "num_rows": cell.num_rows,
        "measured_ms": [round(float(value), 1) for value in measured],
        "measured_rows_per_batch": round(cell.num_rows / sum(engine.num_batches for engine in fleet.engines), 2),
        **simulate(plan, slow),
    }


def count_spreads(plan: Fleet, slow: float) -> list[int]:
    """Return how many engines the client gives the task of each row, by what it has counted when the row comes."""
    arrivals, found = iter(plan.arrivals.tolist()), []
    now = 0.0
    shares = TaskShares(lambda: now * slow)
    for task in map(str, plan.tasks.tolist()):
        now = next(arrivals)
        shares.add(Counter([task]))
        found.append(count_engines(shares.find(task), plan.cell.num_replicas))
    return found


def summarise(checks: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest and the mean relative error of the simulated percentiles."""
    found = {}
    for place, name in enumerate(("p50", "p90", "p99")):
        errors = [abs(one["simulated_ms"][place] / one["measured_ms"][place] - 1) for one in checks]
        found |= {f"{name}_mean": round(statistics.mean(errors), 3), f"{name}_most": round(max(errors), 3)}
    return found


if __name__ == "__main__":
    main()
