"""What the way over a cluster costs: one engine on a Ray cluster beside one on this machine, asked in turns.

    python bench/cluster_cost.py --turns 5 --seconds 4 --connections 1,16

Both services have the tiny random backbone, so that the way counts and not the computing, the same task, one web
process and one engine with one thread. Prints a record for each turn as JSON, and at the end the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import httpx

sys.path += [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "cluster")]
from http_load import Load, Plan
from report import describe_hardware, find_commit, say
from two_nodes import run_two_nodes

from running_service import RunningService, wait_until

READY_S = 300.0
WORDS = ("refund", "charge", "crash", "login", "slow", "broken", "paid", "twice")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--connections", default="1,16")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cluster-cost-"))
    try:
        with ExitStack() as stack:
            stack.enter_context(run_two_nodes())
            services = start_services(folder, stack)
            compare(services, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_services(folder: Path, stack: ExitStack) -> dict[str, RunningService]:
    """A service here and one on the cluster, over copies of one home."""
    from inlay.model import make_tiny_folder

    backbone, home = make_tiny_folder(folder / "backbone"), folder / "local"
    local = RunningService(home, backbone, "--engine-threads", "1")
    local.start()
    stack.callback(end, local)
    local.wait_ready(READY_S)
    train(local)
    local.stop(120.0)
    shutil.copytree(home, folder / "ray", ignore=shutil.ignore_patterns("run"))
    local.flags.append("--no-train")
    flags = ("--on", "ray", "--engines", "1", "--no-train", "--engine-threads", "1")
    remote = RunningService(folder / "ray", backbone, *flags)
    services = {"local": local, "ray": remote}
    for name, service in services.items():
        service.start()
        if service is remote:
            stack.callback(end, remote)
        service.wait_ready(READY_S)
        say(f"{name} is ready")
    return services


def end(service: RunningService) -> None:
    if service.process is not None and service.process.poll() is None:
        service.stop(150.0)


def train(service: RunningService) -> None:
    rows = "".join(f"{WORDS[k % 8]} {WORDS[k // 8]} {k},{'a' if k % 2 else 'b'}\n" for k in range(64))
    with httpx.Client(base_url=service.url, timeout=60) as client:
        uploaded = client.post("/v1/datasets", files={"file": ("rows.csv", f"text,label\n{rows}", "text/csv")})
        settings = {"method": "houlsby", "size": 8, "epochs": 1, "max_length": 16}
        body = {"task": "desk", "dataset": uploaded.json()["id"], "settings": settings, "publish": "always"}
        path = client.post("/v1/jobs", json=body).raise_for_status().headers["location"]
        wait_until(lambda: client.get(path).json()["state"] == "succeeded", "the end of the job", READY_S)


def compare(services: dict[str, RunningService], options: argparse.Namespace) -> None:
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for turn in range(options.turns + 1):
        for connections in map(int, options.connections.split(",")):
            names = list(services) if turn % 2 else list(reversed(services))
            for name in names:
                record = measure(services[name], connections, options.seconds if turn else 1.0)
                if turn:  # the first one warms up
                    found.setdefault((name, connections), []).append(record)
                    print(json.dumps({"turn": turn, "service": name, "connections": connections, **record}), flush=True)
    for (name, connections), records in sorted(found.items()):
        medians = {key: round(statistics.median(record[key] for record in records), 3) for key in records[0]}
        print(json.dumps({"median_of": len(records), "service": name, "connections": connections, **medians}))
    for connections in sorted({connections for _, connections in found}):
        pairs = zip(found["ray", connections], found["local", connections], strict=True)
        ratios = [ray["rows_per_s"] / local["rows_per_s"] for ray, local in pairs]
        print(json.dumps({"connections": connections, "ray_to_local": round(statistics.median(ratios), 3)}))
    print(json.dumps({"commit": find_commit(), "at": time.strftime("%Y-%m-%d"), **describe_hardware()}, default=str))


def measure(service: RunningService, connections: int, seconds: float) -> dict[str, float]:
    """Ask one service over so many connections, each as soon as it has its answer."""
    requests = [make_request(service, number) for number in range(256)]
    plan = Plan("127.0.0.1", service.port, requests, seconds, connections)
    load = Load(plan)
    asyncio.run(load.run())
    result = asdict(load.found)
    if result["num_failed"] or set(result["statuses"]) != {"200"}:
        raise SystemExit(f"{result['num_failed']} failed, statuses {result['statuses']}")
    latencies = sorted(result["latencies_ms"])
    return {
        "rows_per_s": round(len(latencies) / result["seconds"], 1),
        "p50_ms": round(latencies[len(latencies) // 2], 2),
        "p99_ms": round(latencies[int(len(latencies) * 0.99)], 2),
    }


def make_request(service: RunningService, number: int) -> str:
    text = " ".join(WORDS[number // 8**place % 8] for place in range(3))
    body = json.dumps({"task": "desk", "rows": [text]})
    head = f"POST /v1/predict HTTP/1.1\r\nhost: 127.0.0.1:{service.port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
