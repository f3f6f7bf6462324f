"""The simulator beside the engine's own process, in slow motion: the same rows at the same times, the same work.

    python bench/fleet_check.py --replica results/fleet/replica.json --out results/fleet/check.json

The process is the real one: socket, intake, fair queue, batches, slots, loader. Its backbone is tiny, and a batch or a
load then sleeps until it has taken what the replica's would (`fleet_replica.py`), `--slow` times slower. So the machine
may do other things meanwhile: what is compared is how rows wait, not how fast this machine is. The rows of all cells
are sent at the times that the simulator has drawn, and all cells run at once. Nothing is fitted.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import report
from fleet_cell import Cell, ServiceTimes
from fleet_replica import CHECKS, LOADS, TARGET_S, ask, make_cell, make_texts
from fleet_simulator import Fleet
from random_tasks import publish_tasks

from inlay.model import load_backbone
from inlay.service.engine import EngineClient
from inlay.service.engine.engine_process import EngineLimits, EngineProcess
from inlay.serving import Answer, EncodedRequest, Engine
from inlay.serving.hot_versions import HotVersion, HotVersions
from inlay.store import Store
from inlay.threads import set_threads

WARM_SHARE = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replica", type=Path, default=report.ROOT / "results" / "fleet" / "replica.json")
    parser.add_argument("--slow", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load, in the replica's time")
    report.add_options(parser)
    options = parser.parse_args()
    replica = json.loads(options.replica.read_text(encoding="utf8"))
    set_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        checks = asyncio.run(check_all(replica, options, Path(folder)))
    report.finish(options, replica=replica["commit"], slow=options.slow, checks=checks, error=summarise(checks))


async def check_all(replica: dict[str, Any], options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return what rows waited in the process and in the simulation, for every load and number of tasks."""
    times, spread = ServiceTimes(**replica["times"]), tuple(replica["spread"])
    texts, _ = make_texts("tiny", folder)
    names = [f"t.task-{index:03d}" for index in range(max(tasks for tasks, _ in CHECKS.values()))]
    store = Store(folder / "store")
    publish_tasks(store, load_backbone(str(folder / "backbones" / "tiny"), device="cpu"), names, {"name": "head"})
    cells = {
        (label, load): dataclasses.replace(
            make_cell(times, replica["lengths"], num_tasks, num_slots, load, options.seconds),
            service="spread",
            spread=spread,
        )
        for label, (num_tasks, num_slots) in CHECKS.items()
        for load in LOADS
    }
    found = await asyncio.gather(
        *(
            check(SlowReplica(folder, store, cell, options.slow, number), names, texts)
            for number, cell in enumerate(cells.values())
        )
    )
    return [{"tasks": label, "load": load} | one for (label, load), one in zip(cells, found, strict=True)]


class SlowReplica:
    """The engine's process of a cell, on a socket of its own."""

    def __init__(self, folder: Path, store: Store, cell: Cell, slow: float, number: int) -> None:
        self.cell, self.slow, self.path = cell, slow, folder / f"{number}.sock"
        backbone = load_backbone(str(folder / "backbones" / "tiny"), device="cpu")
        self.engine = SlowEngine(backbone, store, num_slots=cell.num_slots)
        self.engine.play(cell, slow)
        self.process = EngineProcess(self.engine, EngineLimits(1000 * TARGET_S * slow, most_queue_s=20 * slow))


class SlowEngine(Engine):
    """An engine whose batches and loads take what a replica's take, so many times slower."""

    def play(self, cell: Cell, slow: float) -> None:
        """Take the times of a cell."""
        self._cell, self._slow, self._draw = cell, slow, random.Random(cell.seed)
        self.num_batches = 0
        slow_loads(self.hot_versions, cell.times, slow)

    def answer(self, batch: Any, states: Any) -> list[Answer]:
        """Answer a batch, and sleep until it has taken its time."""
        began = time.perf_counter()
        num_tokens = sum(item.tokens.num_tokens for item in batch if isinstance(item, EncodedRequest))
        seconds = self._cell.times.batch_s(len(batch), num_tokens, len({item.digest for item in batch}))
        answers = super().answer(batch, states)
        self.num_batches += 1
        sleep_until(began + self._slow * seconds * self._draw.choice(self._cell.spread))
        return answers

    def run_backbone(self, num_tokens: int) -> float:
        """Return what the backbone would take, which is where the process begins to learn its speed."""
        return num_tokens * self._cell.times.token_s * self._slow


def slow_loads(hot: HotVersions, times: ServiceTimes, slow: float) -> None:
    """Have every load of a version take what a replica's takes."""
    usual = hot.hold

    def hold(found: Any) -> HotVersion:
        began = time.perf_counter()
        sleep_until(began + slow * times.load_s)
        return usual(found)

    hot.hold = hold  # type: ignore[method-assign]


def sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.perf_counter()))


async def check(replica: SlowReplica, names: list[str], texts: dict[int, list[str]]) -> dict[str, Any]:
    """Send the rows of a cell; return measured latencies, in the replica's time, beside the simulated ones."""
    cell, slow = replica.cell, replica.slow
    plan = Fleet(cell)
    await replica.process.listen(replica.path)
    for name in reversed(names[: min(cell.num_tasks, cell.num_slots)]):
        replica.engine.load(replica.engine.find_version(name).version)
    client = EngineClient(replica.path)
    ms = np.full(cell.num_rows, np.nan)

    async def send(row: int, due: float) -> None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        some = texts[plan.tokens[row]]
        await ask(client, names[plan.tasks[row]], some[row % len(some)])
        ms[row] = 1000 * ((time.perf_counter() - due) / slow + cell.times.outside_s)

    began = time.perf_counter() + 1.0
    await asyncio.gather(*(send(row, began + slow * at) for row, at in enumerate(plan.arrivals.tolist())))
    await client.close()
    await replica.process.close()
    run = plan.run().summarise(WARM_SHARE)
    measured = np.percentile(ms[int(WARM_SHARE * cell.num_rows) :], (50, 90, 99))
    return {
        "rows_per_s": round(cell.rows_per_s, 1),
        "num_rows": cell.num_rows,
        "measured_ms": [round(float(value), 1) for value in measured],
        "simulated_ms": [round(run[name], 1) for name in ("p50_ms", "p90_ms", "p99_ms")],
        "measured_rows_per_batch": round(cell.num_rows / replica.engine.num_batches, 2),
        "simulated_rows_per_batch": run["rows_per_batch"],
        "simulated_hit_rate": run["hit_rate"],
    }


def summarise(checks: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest and the mean relative error of the simulated percentiles."""
    found = {}
    for place, name in enumerate(("p50", "p90", "p99")):
        errors = [abs(one["simulated_ms"][place] / one["measured_ms"][place] - 1) for one in checks]
        found |= {f"{name}_mean": round(statistics.mean(errors), 3), f"{name}_most": round(max(errors), 3)}
    return found


if __name__ == "__main__":
    main()
