"""One real replica: what its work takes, in processor time, its memory, and how long it takes to start.

    python bench/fleet_replica.py --out results/fleet/replica.json

A replica is an engine's process on one core, with one thread. Batches of rows and loads of versions are measured by the
processor time of their thread, so that others on the machine count little; a tenth of the batches is kept out of the
fit, and the report says how far it is off on them. What the process does beside its batches (tokenising, queue, socket)
is its whole processor time less theirs. `fleet_check.py` compares what the simulator makes of it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import report
from engine_socket import wait_for
from fleet_cell import Cell, ServiceTimes
from random_tasks import publish_tasks
from workload import glue_lengths, make_workload

from inlay.service.engine import Caller, EngineClient, FleetClient, SyncEngineClient, WireAnswer, WireRow
from inlay.service.settings import ServeSettings

METHOD = {"name": "pfeiffer", "size": 64}
NUM_TEXTS = 512
SIZES = (1, 2, 4, 8, 16)
REPEATS, LOAD_REPEATS = 12, 24
CHECKS = {"fit in the slots": (32, 64), "do not fit": (256, 64)}
LOADS = (0.3, 0.5, 0.7, 0.85)
TARGET_S = 0.06


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--folder", type=Path, help="where tasks and texts are kept; default: a new one")
    report.add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        findings = measure(options, options.folder or Path(temporary))
    report.finish(options, **findings)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the service times, memory and start of a replica, and measured beside simulated latencies."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the other core is the replica's
    home = folder / "store"
    texts, lengths = make_texts(options.backbone, folder)
    names = [f"t{index % 4}.task-{index:03d}" for index in range(max(tasks for tasks, _ in CHECKS.values()))]
    work = measure_work(options.backbone, home, names, texts)
    report.say(f"work: {work['times']}")
    times = ServiceTimes(**work["times"])
    with running(home, options.backbone, num_slots=64) as replica:
        alone = asyncio.run(measure_alone(replica, names[0], texts, lengths, times))
        times = dataclasses.replace(times, row_s=times.row_s + alone["side_s"], outside_s=alone["outside_s"])
        report.say(f"beside it: {alone}")
        asyncio.run(fill(replica, names[:64], texts))
        memory = {64: replica.client.stats().memory_bytes}
        start_s = replica.start_s
    with running(home, options.backbone, num_slots=256) as replica:
        asyncio.run(fill(replica, names, texts))
        memory[256] = replica.client.stats().memory_bytes
    return {
        "backbone": options.backbone,
        "method": METHOD,
        "rows": "random words, lengths as of real rows (bench/workload.py)",
        "lengths": lengths,
        "target_batch_s": TARGET_S,
        "times": dataclasses.asdict(times),
        "held_out_error": work["held_out_error"],
        "spread": work["spread"],
        "samples": work["samples"],
        "alone": alone,
        "start_cpu_s": round(start_s, 2),
        "memory_bytes": memory,
        "version_file_bytes": work["version_file_bytes"],
    }


def make_texts(backbone: str, folder: Path) -> tuple[dict[int, list[str]], list[int]]:
    """Return texts by the number of their tokens, and the numbers of tokens."""
    work = make_workload(backbone, glue_lengths(NUM_TEXTS), folder)
    rows = json.loads(work.path.read_text(encoding="utf8"))
    texts: dict[int, list[str]] = {}
    for text, ids in zip(rows["texts"], rows["ids"], strict=True):
        texts.setdefault(len(ids), []).append(text)
    return texts, [len(ids) for ids in rows["ids"]]


def make_cell(
    times: ServiceTimes, lengths: list[int], num_tasks: int, num_slots: int, load: float, seconds: float
) -> Cell:
    """Return the cell of one replica at a share of what it can do while nothing is loaded."""
    rate = load * times.find_capacity(statistics.mean(lengths), TARGET_S)[0]
    return Cell(
        times,
        rate,
        num_slots=num_slots,
        num_tasks=num_tasks,
        num_rows=int(rate * seconds),
        lengths=tuple(lengths),
        target_batch_s=TARGET_S,
        seed=int(100 * load),
    )


# Work, in this process.


def measure_work(backbone_name: str, home: Path, names: list[str], texts: dict[int, list[str]]) -> dict[str, Any]:
    """Return what batches and loads take, by processor time of the computing thread."""
    from inlay.model import load_backbone
    from inlay.serving import Engine
    from inlay.store import Store
    from inlay.threads import set_threads

    set_threads(1)
    backbone = load_backbone(backbone_name, device="cpu")
    store = Store(home)
    if not (home / "tasks").exists():
        publish_tasks(store, backbone, names, METHOD)
    engine = Engine(backbone, store, num_slots=64)
    flat = [text for some in texts.values() for text in some]
    draw = np.random.default_rng(0)
    samples = []
    for repeat in range(REPEATS + 1):
        for size in SIZES:
            for num_tasks in sorted({1, size}):
                rows = [(names[index % num_tasks], flat[int(draw.integers(len(flat)))]) for index in range(size)]
                seconds, num_tokens = time_batch(engine, rows)
                if repeat:  # the first turn warms up
                    samples.append((size, num_tokens, num_tasks, seconds))
    found = fit_times([sample for place, sample in enumerate(samples) if place % 10])
    predicted = [predict(found, sample) for sample in samples]
    held_out = [abs(mine / sample[3] - 1) for mine, sample in zip(predicted[::10], samples[::10], strict=True)]
    spread = sorted(round(sample[3] / mine, 4) for sample, mine in zip(samples, predicted, strict=True))
    load_s, busy_s = measure_loads(engine, store, names)
    path = next(iter(sorted((home / "objects").rglob("*"), key=lambda path: -path.stat().st_size)))
    return {
        "times": found | {"load_s": load_s, "load_busy_s": busy_s},
        "held_out_error": {
            "median": round(statistics.median(held_out), 4),
            "most": round(max(held_out), 4),
            "num_batches": len(held_out),
        },
        "spread": spread[:: max(1, len(spread) // 99)],
        "samples": [[*sample[:3], round(sample[3], 6)] for sample in samples],
        "version_file_bytes": path.stat().st_size,
    }


def time_batch(engine: Any, rows: list[tuple[str, str]]) -> tuple[float, int]:
    """Return the processor time of one batch whose versions are in slots, and its tokens."""
    from inlay.serving import Request

    versions: dict[str, Any] = {}
    checked = [engine.check(Request(name, text), versions) for name, text in rows]
    encoded = engine.encode(checked)
    with engine.hot_versions.holding({item.found.version.digest: item.found for item in checked}) as states:
        began = time.thread_time()
        answers = engine.answer(encoded, states)
        seconds = time.thread_time() - began
    assert all(answer.error is None for answer in answers)
    return seconds, sum(item.tokens.num_tokens for item in encoded)


def fit_times(samples: list[tuple[int, int, int, float]]) -> dict[str, float]:
    """Return the least squares, by relative error, of a batch's time over what is in it; nothing is negative."""
    from scipy.optimize import nnls

    rows = np.array([[1.0, tokens, size, tasks] for size, tokens, tasks, _ in samples])
    seconds = np.array([sample[3] for sample in samples])
    found, _ = nnls(rows / seconds[:, None], np.ones(len(seconds)))
    return dict(zip(("pass_s", "token_s", "row_s", "task_s"), map(float, found), strict=True))


def predict(times: dict[str, float], sample: tuple[int, int, int, float]) -> float:
    size, tokens, tasks, _ = sample
    return ServiceTimes(**times).batch_s(size, tokens, tasks)


def measure_loads(engine: Any, store: Any, names: list[str]) -> tuple[float, float]:
    """Return what it takes to bring a version into a slot, and the part after it was read and checked."""
    found = [engine.find_version(name) for name in names[: engine.num_slots + LOAD_REPEATS]]
    for each in found[: engine.num_slots]:
        engine.load(each.version, each.manifest)
    whole, read = [], []
    for each in found[engine.num_slots :]:
        began = time.thread_time()
        store.load(each.version, manifest=each.manifest)
        read.append(time.thread_time() - began)
        began = time.thread_time()
        engine.load(each.version, each.manifest)
        whole.append(time.thread_time() - began)
    load_s = statistics.median(whole)
    return load_s, max(0.0, load_s - statistics.median(read))


# The process.


@dataclasses.dataclass
class Running:
    """An engine's process on a core of its own."""

    path: Path
    process: subprocess.Popen[bytes]
    client: SyncEngineClient
    start_s: float
    """processor time until it answered"""

    def read_clock(self) -> float:
        """Return the processor time of its threads, in seconds."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextmanager
def running(home: Path, backbone: str, num_slots: int) -> Iterator[Running]:
    """Run an engine's process on one core inside the block."""
    settings = ServeSettings(
        home=home,
        backbone=backbone,
        device="cpu",
        engine_threads=1,
        num_slots=num_slots,
        target_batch_ms=1000 * TARGET_S,
    )
    settings.engine_socket.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "INLAY_SERVE": settings.to_json(),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    core = min(set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0), default=0)
    process = subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, "-m", "inlay.service.engine"],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(settings.engine_socket)
        found = Running(settings.engine_socket, process, SyncEngineClient(settings.engine_socket), 0.0)
        found.start_s = found.read_clock()
        yield found
    finally:
        process.terminate()
        process.wait(30)


def make_row(name: str, text: str) -> tuple[Caller, list[WireRow]]:
    return Caller("all"), [WireRow(name.partition(".")[2], name, 1, text)]


async def ask(client: EngineClient | FleetClient, name: str, text: str) -> Any:
    caller, rows = make_row(name, text)
    reply = await client.predict(caller, rows)
    assert isinstance(reply.answers[0], WireAnswer), reply.answers[0]
    return reply


async def measure_alone(
    replica: Running, name: str, texts: dict[int, list[str]], lengths: list[int], times: ServiceTimes
) -> dict[str, float]:
    """Return what a row costs the process beside its batch, and what a client waits beside that, at no load.

    The latter is what the fastest tenth of rows waited, as others use the cores too.
    """
    client = EngineClient(replica.path)
    for length in lengths[:20]:
        await ask(client, name, texts[length][0])
    spent = replica.read_clock()
    computed, waited = 0.0, []
    asked = lengths[20:140]
    for length in asked:
        began = time.perf_counter()
        reply = await ask(client, name, texts[length][0])
        waited.append(time.perf_counter() - began - reply.compute_ms / 1000)
        computed += times.batch_s(1, length, 1)
    spent = replica.read_clock() - spent
    side_s = max(0.0, (spent - computed) / len(asked))
    await client.close()
    return {
        "side_s": side_s,
        "outside_s": max(0.0, float(np.percentile(waited, 10)) - side_s),
        "spent_s": spent,
        "computed_s": computed,
    }


async def fill(replica: Running, names: list[str], texts: dict[int, list[str]]) -> None:
    """Ask every task once, the busiest last, so that the slots hold what a fleet's replica begins with."""
    client, text = EngineClient(replica.path), next(iter(texts.values()))[0]
    for name in reversed(names):
        await ask(client, name, text)
    await client.close()


if __name__ == "__main__":
    main()
