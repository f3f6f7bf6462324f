"""A day of traffic in an hour, and the service's memory through it: `make soak`, or

    python tests/attack/soak_service.py [--minutes M] [--seed S] [--customers C]

Customers ask, upload, train, correct, move aliases and delete, few at night and many at noon. Every few seconds the
memory, open files and threads of each process are read. After a first tenth, in which libraries and slots are filled,
nothing may grow by more than the bounds below. At the end the customers' ledgers are compared with what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from kill_service import TASKS, make_backbone, make_key, merge
from service_customer import Customer, Ledger, Stopped, check_ledger

from running_service import RunningService

MOST_GROWN_MB = 48.0
"""growth of one process's memory, from its median after the first tenth to that of the last tenth"""
MOST_GROWN_FILES = 16
SAMPLE_S = 2.0
_WARM = 0.15  # the share of the time in which everything is used for the first time


@dataclass
class Samples:
    """What one process used, sample by sample."""

    memory_mb: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)


class DayCustomer(Customer):
    """A customer who asks more at noon than at night, and trains a few times a day."""

    began = time.monotonic()
    day_s = 3600.0

    def run(self) -> None:
        """Act until stopped, with pauses by the time of the day."""
        while not self.stopping.is_set():
            weights = {self.predict: 200, self.correct: 6, self.move: 2, self.forget: 2, self.train: 2, self.cancel: 1}
            (action,) = self.chance.choices(list(weights), list(weights.values()))
            try:
                action()
            except Stopped:
                continue
            hour = (time.monotonic() - self.began) / self.day_s * 2 * math.pi
            self.stopping.wait(0.01 + 0.2 * (1 + math.cos(hour)) / 2)  # the day begins at midnight


def sample(pid: int, samples: Samples) -> None:
    """Read memory, open files and threads of a process, if it is there."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    samples.memory_mb.append(int(values["VmRSS"].split()[0]) / 1024)
    samples.threads.append(int(values["Threads"]))
    samples.files.append(files)


def judge(name: str, samples: Samples) -> list[str]:
    """Compare the last tenth with what was there after the beginning."""
    number = len(samples.memory_mb)
    first = slice(int(number * _WARM), int(number * (_WARM + 0.1)) + 1)
    last = slice(number - max(1, number // 10), number)
    problems = []
    for what, values, most in (
        ("MB of memory", samples.memory_mb, MOST_GROWN_MB),
        ("open files", samples.files, MOST_GROWN_FILES),
        ("threads", samples.threads, MOST_GROWN_FILES),
    ):
        before, after = statistics.median(values[first]), statistics.median(values[last])
        print(f"{name}: {what} {before:.0f} after the beginning, {after:.0f} at the end, {max(values):.0f} at most")
        if after - before > most:
            problems.append(f"{name}: {what} grew from {before:.0f} to {after:.0f}")
    return problems


def soak(folder: Path, seed: str, minutes: float, num_customers: int) -> list[str]:
    """Run a service under a day's traffic; what is wrong."""
    service = RunningService(folder / "home", make_backbone(folder), "--drain", "20s")
    key, ledgers = make_key(folder / "home"), [Ledger() for _ in range(num_customers)]
    samples: dict[str, Samples] = {}
    DayCustomer.day_s = minutes * 60
    with service:
        DayCustomer.began = time.monotonic()
        customers = []
        for number, ledger in enumerate(ledgers):
            customers.append(DayCustomer(service.url, key, f"{seed}:{number}", ledger, tasks=TASKS))
            customers[-1].first_seed(1 + number * 1_000_000)
        for job in [customers[0].train(task) for task in TASKS]:
            customers[0].wait_for_job(job)
        threads = [threading.Thread(target=each.run, daemon=True) for each in customers]
        for thread in threads:
            thread.start()
        until = DayCustomer.began + minutes * 60
        while time.monotonic() < until:
            for each in service.status().get("processes", ()):
                sample(each["pid"], samples.setdefault(each["name"], Samples()))
            sample(service.pid_of("supervisor") or 0, samples.setdefault("supervisor", Samples()))
            time.sleep(min(SAMPLE_S, max(0.1, minutes)))
        for customer in customers:
            customer.stopping.set()
        for thread in threads:
            thread.join(120.0)
        whole = merge(ledgers)
        for job, _ in whole.jobs.values():
            customers[0].wait_for_job(job)
        problems = check_ledger(customers[0], whole)
        restarts = [each for each in service.status()["processes"] if each["restarts"]]
        problems += [f"{each['name']} was started again {each['restarts']} times" for each in restarts]
        print(f"calls: {dict(whole.statuses)}; jobs {len(whole.jobs)}, corrections {len(whole.feedback)}")
        problems += [problem for name, each in samples.items() for problem in judge(name, each)]
        size = sum(path.stat().st_size for path in (folder / "home").rglob("*") if path.is_file())
        print(f"on disk: {size / 2**20:.0f} MB")
        if service.stop() != 0:
            problems.append("the drain did not end with exit status 0")
    (folder / "samples.json").write_text(json.dumps({name: vars(each) for name, each in samples.items()}))
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long the day is")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--customers", type=int, default=6)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    problems = soak(folder, given.seed, given.minutes, given.customers)
    for problem in problems[:50]:
        print(f"  {problem}")
    print(f"soak of {given.minutes:g} minutes: {len(problems)} problems" + (f"; kept: {folder}" if problems else ""))
    if not problems:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
