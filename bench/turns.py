"""Measuring processes, asked in turns: A, B, C, A, B, C … so that whatever else the machine does meets all alike.

Peers need libraries that Inlay's environment cannot hold, so every way of doing the work has a process of its own. A
few prepare side by side (compiling takes minutes, and many at once starve each other); all measure one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pack_peers import PACK, unpack
from report import ROOT, compare, spread

HERE = Path(__file__).parent
OURS, PEER = HERE / "peers" / "ours.py", HERE / "peers" / "worker.py"
# Several processes compile at once, each with so many helpers.
VARIABLES = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
INTEROP = ROOT / ".interop" / "bin" / "python"


@dataclass
class Way:
    """One way to do the work: what its process is told, and what it answered."""

    name: str
    job: dict[str, Any]
    is_ours: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    """samples a second, of each turn"""
    error: str = ""

    @property
    def needs_adapters(self) -> bool:
        return self.job.get("library") == "adapters"


@dataclass(frozen=True)
class Environments:
    """How to start a process that has the library a way needs."""

    adapters_python: Path | None
    folder: Path

    def command(self, way: Way) -> tuple[list[str], dict[str, str]]:
        """The command line and the environment variables of the way's process."""
        script = str(OURS if way.is_ours else PEER)
        variables = os.environ | VARIABLES
        if way.is_ours or not way.needs_adapters:
            return [sys.executable, script], variables
        python = self.adapters_python or (INTEROP if INTEROP.exists() else None)
        if python is not None:
            return [str(python), script], variables
        if not PACK.exists():
            sys.exit(f"no environment with `adapters`: run `make interop`, or bring {PACK} (bench/pack_peers.py)")
        return [sys.executable, script], variables | {"PYTHONPATH": str(unpack(PACK, self.folder / "peers"))}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every script that starts measuring processes."""
    parser.add_argument(
        "--adapters-python", type=Path, help="a Python with `adapters`; default: .interop's, or the pack"
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/inlay-bench"), help="for backbones, rows and logs")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prepare-limit-s", type=float, default=420, help="a way that takes longer is left out")
    parser.add_argument("--at-once", type=int, help="ways that prepare side by side; default: 1 on a CPU, 3 on a GPU")


class Worker:
    """A measuring process."""

    def __init__(self, way: Way, environments: Environments) -> None:
        command, variables = environments.command(way)
        self.way, self.log = way, environments.folder / f"{way.name.replace('/', '-').replace(' ', '-')}.log"
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            env=variables,
            start_new_session=True,  # what it compiles with must end with it
        )

    def ask(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(request) + "\n").encode())
        self.process.stdin.flush()

    def hear(self, limit_s: float) -> dict[str, Any] | None:
        """Its answer; None, with the way's error set, if there is none. The process is then gone."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, limit_s))
        line = self.process.stdout.readline() if ready else b""
        answer = json.loads(line) if line else {"error": "ended without a word" if ready else "took too long"}
        if "error" not in answer:
            return answer
        self.way.error = answer["error"]
        print(f"{self.way.name}: {self.way.error} (see {self.log})", file=sys.stderr, flush=True)
        self.stop()
        return None

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.kill()
        self.process.wait()
        self.process.stdin.close()


def measure_in_turns(ways: list[Way], options: argparse.Namespace, steps: Mapping[str, int]) -> None:
    """Prepare the ways, then let each do its steps in every turn. A way that fails says why and is left out."""
    options.folder.mkdir(parents=True, exist_ok=True)
    environments = Environments(options.adapters_python, options.folder)
    workers: list[Worker] = []
    at_once = options.at_once or (1 if options.device == "cpu" else 3)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the processes must not outlive this one
    try:
        for start in range(0, len(ways), at_once):
            begun = [Worker(way, environments) for way in ways[start : start + at_once]]
            workers += begun
            for worker in begun:
                worker.ask(do="prepare", **worker.way.job)
            deadline = time.monotonic() + options.prepare_limit_s
            for worker in begun:
                worker.way.facts = worker.hear(deadline - time.monotonic()) or {}
                print(f"ready: {worker.way.name} {json.dumps(worker.way.facts)}", file=sys.stderr, flush=True)
        _take_turns(workers, options.turns, steps)
    finally:
        for worker in workers:  # all at once: a process with a GPU takes seconds to end
            worker.kill()
        for worker in workers:
            worker.stop()


def _take_turns(workers: list[Worker], num_turns: int, steps: Mapping[str, int]) -> None:
    """All turns, or those that were whole when Ctrl-C came."""
    for turn in range(num_turns + 1):
        try:
            for worker in workers:
                if not worker.way.error:
                    _take_turn(worker, steps[worker.way.name], is_warm_up=turn == 0)
        except KeyboardInterrupt:
            if turn < 2:
                raise
            print(f"stopped after {turn - 1} of {num_turns} turns", file=sys.stderr, flush=True)
            for worker in workers:
                del worker.way.rates[turn - 1 :]
            return
        rates = {worker.way.name: round(worker.way.rates[-1], 1) for worker in workers if worker.way.rates}
        print(f"turn {turn} of {num_turns}: {json.dumps(rates)}", file=sys.stderr, flush=True)


def _take_turn(worker: Worker, steps: int, *, is_warm_up: bool) -> None:
    worker.ask(do="measure", steps=steps)  # a whole turn to warm up: every shape that will occur is met
    answer = worker.hear(600)
    if answer is not None and not is_warm_up:
        worker.way.rates.append(answer["samples"] / answer["seconds"])
        worker.way.facts |= {name: answer[name] for name in answer.keys() - {"seconds", "samples"}}


def ratios(ways: list[Way]) -> dict[str, dict[str, Any]]:
    """Each of ours over each peer, turn by turn."""
    peers = [way for way in ways if not way.is_ours and not way.error]
    return {
        ours.name: {peer.name: compare(ours.rates, peer.rates) for peer in peers}
        for ours in ways
        if ours.is_ours and not ours.error
    }


def describe(ways: list[Way]) -> dict[str, dict[str, Any]]:
    """What was measured of each way, or why it was not."""
    return {
        way.name: {"error": way.error} if way.error else {"samples_per_s": spread(way.rates, 1), **way.facts}
        for way in ways
    }
