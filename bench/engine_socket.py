"""The engine's process beside the engine: rows a second through the socket, by 64 clients that each ask one row.

    OMP_WAIT_POLICY=PASSIVE python bench/engine_socket.py --tasks 32 --seconds 8 --turns 4

In process, `Engine.predict` gets batches of `--batch` rows. Through the socket, `--clients` coroutines of one client
each send a row, wait for its answer and send the next; the client is this process, the engine another. Both compute
with `--threads` threads. They are measured in turns; the ratio is of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from random_tasks import TEXTS, publish_tasks

from inlay.service.engine import Caller, EngineClient, SyncEngineClient, WireAnswer, WireRow
from inlay.service.settings import ServeSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--target-ms", type=float)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(options, Path(folder))))


def measure(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Return the rates of both ways, turn by turn."""
    from inlay.model import load_backbone
    from inlay.serving import Engine, Request
    from inlay.store import Store
    from inlay.threads import set_threads

    set_threads(options.threads)
    backbone = load_backbone(options.backbone, device="cpu")
    store, names = Store(home), [f"t{index % 4}.task-{index}" for index in range(options.tasks)]
    publish_tasks(store, backbone, names, {"name": "pfeiffer", "size": 64})
    engine = Engine(backbone, store)
    asked = list(itertools.islice(zip(itertools.cycle(names), itertools.cycle(TEXTS[:7])), options.batch * 8))
    settings = ServeSettings(
        home=home, backbone=options.backbone, engine_threads=options.threads, target_batch_ms=options.target_ms
    )
    settings.engine_socket.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "INLAY_SERVE": settings.to_json(), "OMP_NUM_THREADS": str(options.threads)}
    child = subprocess.Popen([sys.executable, "-m", "inlay.service.engine"], env=environment)
    rates: dict[str, list[float]] = {"in process": [], "socket": []}
    latencies: list[float] = []
    try:
        wait_for(settings.engine_socket)
        run_batches(engine, [Request(name, text) for name, text in asked], options, 1.0)
        asyncio.run(run_clients(settings.engine_socket, asked, options, 2.0))
        for _ in range(options.turns):
            requests = [Request(name, text) for name, text in asked]
            rates["in process"].append(run_batches(engine, requests, options, options.seconds))
            rate, own = asyncio.run(run_clients(settings.engine_socket, asked, options, options.seconds))
            rates["socket"].append(rate)
            latencies += own
        stats = SyncEngineClient(settings.engine_socket).stats()
    finally:
        child.terminate()
        child.wait(30)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    latencies.sort()
    return {
        "rows_per_s": medians,
        "ratio": medians["socket"] / medians["in process"],
        "turns": rates,
        "p50_ms": 1000 * latencies[len(latencies) // 2],
        "p99_ms": 1000 * latencies[int(len(latencies) * 0.99)],
        "rows_per_batch": stats.num_rows / stats.num_batches,
        "memory_mb": stats.memory_bytes / 2**20,
    }


def wait_for(path: Path, seconds: float = 120.0) -> None:
    ends = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > ends:
            raise TimeoutError("the engine did not start")
        time.sleep(0.1)


def run_batches(engine: Any, requests: list[Any], options: argparse.Namespace, seconds: float) -> float:
    """Return the rows a second of `predict`, batch by batch."""
    began, num_rows = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        start = num_rows % len(requests)
        answers = engine.predict(requests[start : start + options.batch])
        assert all(answer.error is None for answer in answers)
        num_rows += len(answers)
    return num_rows / (time.perf_counter() - began)


async def run_clients(path: Path, asked: Any, options: argparse.Namespace, seconds: float) -> tuple[float, list[float]]:
    """Return the rows a second of clients that each ask one row after another, and how long each row took."""
    client, rows = EngineClient(path), itertools.cycle(asked)
    ends = time.perf_counter() + seconds
    latencies: list[float] = []

    async def ask() -> None:
        while (began := time.perf_counter()) < ends:
            name, text = next(rows)
            tenant, _, task = name.partition(".")
            (answer,) = (await client.predict(Caller(tenant), [WireRow(task, name, 1, text)])).answers
            assert isinstance(answer, WireAnswer), answer
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(options.clients)))
    rate = len(latencies) / (time.perf_counter() - began)
    await client.close()
    return rate, latencies


if __name__ == "__main__":
    main()
