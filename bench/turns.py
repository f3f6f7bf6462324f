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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pack_peers import PACK, unpack
from report import ROOT, Report, compare, say, spread

HERE = Path(__file__).parent
OURS, PEER = HERE / "peers" / "ours.py", HERE / "peers" / "worker.py"
# Several processes compile at once, each with so many helpers.
VARIABLES = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
TURN_LIMIT_S = 600
WARM_UP = "warm-up"
INTEROP = ROOT / ".interop" / "bin" / "python"


@dataclass
class Way:
    """One way to do the work: what its process is told, and what it answered."""

    name: str
    job: dict[str, Any]
    is_ours: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    """of its process's environment, besides those that all have"""
    facts: dict[str, Any] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    """samples a second, of each whole turn"""
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
        variables = os.environ | VARIABLES | way.variables
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
        self._rest = b""
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=variables,
                start_new_session=True,  # what it compiles with must end with it
            )

    def fileno(self) -> int:
        """Where `select` hears it."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def ask(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(request) + "\n").encode())
        self.process.stdin.flush()

    def hear(self, limit_s: float) -> dict[str, Any] | None:
        """Its answer; None, with the way's error set, if there is none. The process is then gone."""
        return hear_all([self], limit_s)[0]

    def read(self) -> dict[str, Any] | None:
        """Its answer, if that is among what it has said since; says the rest."""
        said = os.read(self.fileno(), 1 << 16)
        if not said:
            return {"error": self._last_words()}
        *lines, self._rest = (self._rest + said).split(b"\n")
        for line in map(json.loads, lines):
            if "says" not in line:
                return line
            say(f"{self.way.name}: {line['says']}")
        return None

    def _last_words(self) -> str:
        """How a process ended that gave no answer, with the last line of its log."""
        status = self.process.wait()
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        lines = self.log.read_text(encoding="utf8", errors="replace").split("\n") if self.log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        return f"ended without an answer, {how}; its log ends with: {last[:300]}"

    def fail(self, error: str) -> None:
        self.way.error = error
        say(f"{self.way.name}: {error} (see {self.log})")
        self.stop()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def hear_all(workers: list[Worker], limit_s: float) -> list[dict[str, Any] | None]:
    """The answer of each; None, with the way's error set, where there is none. Those processes are then gone."""
    deadline = time.monotonic() + limit_s
    answers: dict[Worker, dict[str, Any]] = {}
    while waiting := [worker for worker in workers if worker not in answers]:
        ready, _, _ = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))
        for worker in ready or waiting:
            if answer := worker.read() if ready else {"error": f"took longer than {limit_s:.0f} s"}:
                answers[worker] = answer
    for worker, answer in answers.items():
        if "error" in answer:
            worker.fail(answer["error"])
    return [None if worker.way.error else answers[worker] for worker in workers]


@contextmanager
def starting(workers: list[Worker]) -> Iterator[None]:
    """Processes that are put into the list end with the block: one after another, or all at once if it is stopped."""
    try:
        yield
    finally:
        for worker in workers:  # a process with a GPU takes seconds to end
            worker.kill()
        if not isinstance(sys.exception(), KeyboardInterrupt):
            for worker in workers:
                worker.stop()


def plan_turns(options: argparse.Namespace) -> list[str]:
    """The parts of a report of ways measured in turns."""
    return [f"turn {number}" for number in range(1, options.turns + 1)]


def measure_in_turns(ways: list[Way], options: argparse.Namespace, steps: Mapping[str, int], report: Report) -> None:
    """Prepare the ways, then let each do its steps in every turn that the report misses.

    A way that fails says why and is left out, also when the report is gone on with: turns are compared whole.
    """
    recall(ways, report.parts)
    missing = [name for name in report.missing if name in plan_turns(options)]
    if not missing:
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    environments = Environments(options.adapters_python, options.folder)
    workers: list[Worker] = []
    at_once = options.at_once or (1 if options.device == "cpu" else 3)
    left = [way for way in ways if not way.error]
    with starting(workers):
        for start in range(0, len(left), at_once):
            begun = [Worker(way, environments) for way in left[start : start + at_once]]
            workers += begun
            _prepare(begun, options.prepare_limit_s)
            # A whole turn, so that every shape that will occur is met; now, so that a rate is known if time runs out.
            _take_turn(WARM_UP, begun, steps, report)
            report.add("ways", tell(ways))
        for turn in missing:
            _take_turn(turn, workers, steps, report)
            report.add("ways", tell(ways))


def _prepare(workers: list[Worker], limit_s: float) -> None:
    say(f"preparing {', '.join(worker.way.name for worker in workers)}, {limit_s:.0f} s at most")
    for worker in workers:
        worker.ask(do="prepare", **worker.way.job)
    for worker, facts in zip(workers, hear_all(workers, limit_s), strict=True):
        if facts is not None:
            worker.way.facts = facts
            say(f"{worker.way.name}: ready {json.dumps(facts)}")


def _take_turn(turn: str, workers: list[Worker], steps: Mapping[str, int], report: Report) -> None:
    """All ways one after another; their rates are the report's part of this name, those of the warm-up only facts."""
    rates = {}
    for worker in workers:
        way = worker.way
        if way.error:
            continue
        say(f"{turn}: measuring {way.name}")
        worker.ask(do="measure", steps=steps[way.name])
        if (answer := worker.hear(TURN_LIMIT_S)) is not None:
            rates[way.name] = answer["samples"] / answer["seconds"]
            way.facts |= {name: answer[name] for name in answer.keys() - {"seconds", "samples"}}
            if turn == WARM_UP:
                way.facts["warm_up_samples_per_s"] = round(rates[way.name], 1)
    say(f"{turn}: {json.dumps({name: round(rate, 1) for name, rate in rates.items()})} samples/s")
    if turn != WARM_UP:
        for worker in workers:
            worker.way.rates += [rates[worker.way.name]] if worker.way.name in rates else []
        report.add(turn, rates)


def tell(ways: list[Way]) -> dict[str, dict[str, Any]]:
    """What a report keeps of the ways besides their rates."""
    return {way.name: {"facts": way.facts, "failed": way.error} for way in ways}


def recall(ways: list[Way], parts: Mapping[str, Any]) -> None:
    """Set the ways to what the parts of an earlier report say of them."""
    turns = sorted((name for name in parts if name.startswith("turn ")), key=lambda name: int(name.split()[1]))
    for way in ways:
        known = parts.get("ways", {}).get(way.name, {"facts": {}, "failed": ""})
        way.facts, way.error = known["facts"], known["failed"]
        way.rates = [parts[name][way.name] for name in turns if way.name in parts[name]]


def ratios(ways: list[Way]) -> dict[str, dict[str, Any]]:
    """Each of ours over each peer, turn by turn."""
    measured = [way for way in ways if way.rates and not way.error]
    peers = [way for way in measured if not way.is_ours]
    return {
        ours.name: {peer.name: compare(ours.rates, peer.rates) for peer in peers} for ours in measured if ours.is_ours
    }


def describe(ways: list[Way]) -> dict[str, dict[str, Any]]:
    """What was measured of each way, or why it was not."""
    return {
        way.name: {"error": way.error}
        if way.error
        else {"samples_per_s": spread(way.rates, 1) if way.rates else None, **way.facts}
        for way in ways
    }
