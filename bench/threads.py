"""Training beside other work: one thread, two that spin or sleep while they wait, and Inlay's own choice.

    python bench/threads.py [--turns 5] [--busy 1] [--rows 128] [--out results/speed/threads-cpu.json]

Every way has a process of its own. In each turn all of them train the same rows of MiniLM one after another, alone and
then beside so many other processes that compute without end; ratios are turn by turn, over one thread. Inlay's own
choice begins each time with its look at the machine, which is part of the time measured. On a machine where others
compute too, `alone` is not alone, and Inlay sees them: run it on a quiet one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import report
import turns
from turns import Way, Worker
from workload import Workload, glue_lengths, make_workload

from inlay import threads

CASES = ("alone", "beside")
BASE = "1 thread"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128, help="of a turn")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--busy", type=int, default=1, help="other processes that compute")
    turns.add_options(parser)
    report.add_options(parser)
    options = parser.parse_args()
    for name in threads.VARIABLES:
        os.environ.pop(name, None)  # else nothing is left to choose
    work = make_workload("minilm", glue_lengths(options.rows), options.folder)
    num_cores = len(os.sched_getaffinity(0))
    ways = make_ways(work, num_cores, options.batch_size)
    rates = measure(ways, options)
    found = {
        case: {
            way.name: {
                "samples_per_s": report.spread(rates[case, way.name], 1),
                "over_one_thread": report.compare(rates[case, way.name], rates[case, BASE]),
            }
            for way in ways
        }
        for case in CASES
    }
    show(ways, found)
    report.finish(options, work=work.describe(), busy_processes=options.busy, found=found)


def make_ways(work: Workload, num_cores: int, batch_size: int) -> list[Way]:
    common = {
        "work": "train",
        "folder": str(work.backbone),
        "rows": str(work.path),
        "device": "cpu",
        "batch_size": batch_size,
        "size": 64,
        "cohort": 1,
        "eager": False,
        "warm_up": 1,
    }
    several = f"{num_cores} threads"
    briefly = {"GOMP_SPINCOUNT": threads.SPINS}
    return [
        Way(BASE, common | {"threads": 1}, is_ours=True),
        Way(several, common | {"threads": num_cores}, is_ours=True),
        Way(f"{several}, passive", common | {"threads": num_cores}, True, {"OMP_WAIT_POLICY": "passive"}),
        Way(f"{several}, spinning briefly", common | {"threads": num_cores}, True, briefly),
        Way("Inlay's choice", common | {"threads": num_cores, "chooses_threads": True}, True, briefly),
    ]


def measure(ways: list[Way], options: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    """Rows a second of each way in each case, turn by turn."""
    environments = turns.Environments(None, options.folder)
    steps = options.rows // options.batch_size
    rates: dict[tuple[str, str], list[float]] = {(case, way.name): [] for case in CASES for way in ways}
    workers: list[Worker] = []
    with turns.starting(workers):
        for way in ways:
            workers.append(Worker(way, environments))
            workers[-1].ask(do="prepare", **way.job)
            if workers[-1].hear(options.prepare_limit_s) is None:
                sys.exit(f"{way.name}: {way.error}")
        for turn in range(1, options.turns + 1):
            for case in CASES:
                with computing(options.busy if case == "beside" else 0):
                    for worker in workers:
                        worker.ask(do="measure", steps=steps)
                        answer = worker.hear(turns.TURN_LIMIT_S)
                        if answer is None:
                            sys.exit(f"{worker.way.name}: {worker.way.error}")
                        rates[case, worker.way.name].append(answer["samples"] / answer["seconds"])
                last: dict[str, Any] = {way.name: round(rates[case, way.name][-1], 1) for way in ways}
                report.say(f"turn {turn}, {case}: {last} samples/s")
    return rates


@contextmanager
def computing(number: int) -> Iterator[None]:
    """So many other processes compute meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def show(ways: list[Way], found: dict[str, dict[str, Any]]) -> None:
    rows = {
        way.name: [
            cell
            for case in CASES
            for cell in (
                f"{found[case][way.name]['samples_per_s']['median']:.1f}",
                f"{found[case][way.name]['over_one_thread']['median']:.2f}",
            )
        ]
        for way in ways
    }
    report.print_table(rows, ["", *(word for case in CASES for word in (f"{case}, samples/s", "× of 1 thread"))])


if __name__ == "__main__":
    main()
