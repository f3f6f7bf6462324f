"""What the way over a cluster costs: a service and a sweep on a Ray cluster beside the same on this machine alone.

    python bench/cluster_cost.py --out results/cluster/cost.json

Both services have the tiny random backbone, so that the way counts and not the computing, the same task, one web
process and one engine with one thread. They are asked in turns, and each turn's ratio is of two neighbours in time.
Processor time is that of all processes of a service (or of Ray) while it was asked; what they spend when nobody asks is
measured apart. The sweeps are commands, from their start to their end, with the backbone loaded anew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

sys.path += [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "cluster")]
import report
from http_load import Load, Plan
from two_nodes import run_two_nodes

from running_service import RunningService, wait_until

READY_S = 400.0
WARM_S = 1.0
WORDS = ("refund", "charge", "crash", "login", "slow", "broken", "paid", "twice")
SWEEP = ("--lr", "1e-3,3e-3,1e-2", "--size", "4,8", "--seeds", "2", "--epochs", "2", "--max-length", "16")
NUM_RUNS = 12
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--connections", default="1,16")
    parser.add_argument("--sweeps", type=int, default=2, help="sweeps on each side")
    report.add_options(parser)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cluster-cost-"))
    try:
        with ExitStack() as stack:
            stack.enter_context(run_two_nodes())
            services = start_services(folder, stack)
            asked = compare_services(services, options)
            for service in services.values():
                end(service)
            swept = compare_sweeps(folder, options.sweeps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.finish(options, service=asked, sweep=swept)


# The service.


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
        report.say(f"{name} is ready")
    return services


def end(service: RunningService) -> None:
    if service.process is not None and service.process.poll() is None:
        service.stop(150.0)


def make_table(num_rows: int) -> str:
    rows = [f"{WORDS[k % 8]} {WORDS[k // 8 % 8]} {k},{'a' if k % 2 else 'b'}" for k in range(num_rows)]
    return "text,label\n" + "\n".join(rows) + "\n"


def train(service: RunningService) -> None:
    with httpx.Client(base_url=service.url, timeout=60) as client:
        uploaded = client.post("/v1/datasets", files={"file": ("rows.csv", make_table(64), "text/csv")})
        settings = {"method": "houlsby", "size": 8, "epochs": 1, "max_length": 16}
        body = {"task": "desk", "dataset": uploaded.json()["id"], "settings": settings, "publish": "always"}
        path = client.post("/v1/jobs", json=body).raise_for_status().headers["location"]
        wait_until(lambda: client.get(path).json()["state"] == "succeeded", "the end of the job", READY_S)


def compare_services(services: dict[str, RunningService], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return, for each number of connections, what both services did, and the ratios of neighbouring turns."""
    numbers = [int(each) for each in options.connections.split(",")]
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for turn in range(options.turns + 1):
        for connections in numbers:
            for name in sorted(services, reverse=bool(turn % 2)):
                record = measure(services, name, connections, options.seconds if turn else WARM_S)
                if turn:  # the first one warms up
                    found.setdefault((name, connections), []).append(record)
            report.say(f"turn {turn}, {connections} connections")
    idle = {name: measure_idle(services, name, options.seconds) for name in services}
    summary: list[dict[str, Any]] = [{"connections": 0, "idle_cpu_share": idle}]
    for connections in numbers:
        about: dict[str, Any] = {"connections": connections, "turns": options.turns}
        for what in ("rows_per_s", "cpu_ms_per_row", "p50_ms", "p99_ms"):
            values = {name: [each[what] for each in found[name, connections]] for name in services}
            about[what] = {name: report.spread(each) for name, each in values.items()}
            about[what]["ray_to_local"] = report.compare(values["ray"], values["local"])
        summary.append(about)
    return summary


def measure(services: dict[str, RunningService], name: str, connections: int, seconds: float) -> dict[str, float]:
    """Ask one service over so many connections, each as soon as it has its answer."""
    service = services[name]
    requests = [make_request(service, number) for number in range(256)]
    load = Load(Plan("127.0.0.1", service.port, requests, seconds, connections))
    before = read_cpu(services, name)
    asyncio.run(load.run())
    spent = read_cpu(services, name) - before
    result = asdict(load.found)
    if result["num_failed"] or set(result["statuses"]) != {"200"}:
        raise SystemExit(f"{result['num_failed']} failed, statuses {result['statuses']}")
    latencies = sorted(result["latencies_ms"])
    return {
        "rows_per_s": round(len(latencies) / result["seconds"], 1),
        "cpu_ms_per_row": round(1000 * spent / len(latencies), 3),
        "p50_ms": round(latencies[len(latencies) // 2], 2),
        "p99_ms": round(latencies[int(len(latencies) * 0.99)], 2),
    }


def measure_idle(services: dict[str, RunningService], name: str, seconds: float) -> float:
    """Return the share of a core that a service takes while nobody asks."""
    before, began = read_cpu(services, name), time.monotonic()
    time.sleep(2 * seconds)
    return round((read_cpu(services, name) - before) / (time.monotonic() - began), 3)


def make_request(service: RunningService, number: int) -> str:
    text = " ".join(WORDS[number // 8**place % 8] for place in range(3))
    body = json.dumps({"task": "desk", "rows": [text]})
    head = f"POST /v1/predict HTTP/1.1\r\nhost: 127.0.0.1:{service.port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}"


def read_cpu(services: dict[str, RunningService], name: str) -> float:
    """Return the processor time so far of a service's processes; all of Ray's count as those of the one on Ray."""
    parents = read_parents()
    mine = {each: find_below(parents, service.process.pid) for each, service in services.items() if service.process}
    if name == "local":
        return sum(map(read_seconds, mine["local"]))
    return sum(map(read_seconds, find_below(parents, os.getpid()) - {os.getpid()} - mine["local"]))


def read_parents() -> dict[int, int]:
    """Return the parent of every process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
    return found


def find_below(parents: dict[int, int], root: int) -> set[int]:
    """Return a process and all that came of it."""
    below, is_larger = {root}, True
    while is_larger:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below |= more
        is_larger = bool(more)
    return below


def read_seconds(pid: int) -> float:
    """Return the processor time of a process, and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


# The sweep.


def compare_sweeps(folder: Path, times: int) -> dict[str, Any]:
    """Return the seconds of one sweep here and on the cluster, in turns; both sides' scores must be the same."""
    (folder / "rows.csv").write_text(make_table(512))
    seconds: dict[str, list[float]] = {"local": [], "ray": []}
    cpu: dict[str, list[float]] = {"local": [], "ray": []}
    for turn in range(times):
        for name in sorted(seconds, reverse=bool(turn % 2)):
            with timing(seconds[name], cpu[name]):
                sweep(folder, f"{name}-{turn}", ["--on", "ray"] if name == "ray" else [])
            report.say(f"sweep {turn}, {name}")
    about: dict[str, Any] = {"runs": NUM_RUNS, "turns": times}
    for what, values in (("seconds", seconds), ("cpu_s", cpu)):
        about[what] = {name: report.spread(each, 1) for name, each in values.items()}
        about[what]["ray_to_local"] = report.compare(values["ray"], values["local"])
    return about


@contextmanager
def timing(seconds: list[float], cpu: list[float]) -> Iterator[None]:
    """Note how long the block took, and the processor time of everything below this process."""

    def read() -> float:
        return sum(map(read_seconds, find_below(read_parents(), os.getpid())))

    began, spent = time.monotonic(), read()
    yield
    seconds.append(time.monotonic() - began)
    cpu.append(read() - spent)


def sweep(folder: Path, name: str, flags: list[str]) -> None:
    command = [sys.executable, "-m", "inlay", "sweep", str(folder / "rows.csv"), "--task", "desk"]
    command += ["--backbone", str(folder / "backbone"), "--store", str(folder / name), *SWEEP, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "INLAY_CACHE_BYTES": "0"})
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
