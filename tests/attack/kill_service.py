"""Kills the processes of a service at random moments under load, and sees that nothing is lost: `make kill-service`, or

    python tests/attack/kill_service.py [--kills N] [--minutes M] [--seed S] [--only web,engine,trainer,supervisor]

Customers upload, train, ask, correct, move aliases, delete and cancel meanwhile, and each keeps a ledger of what was
acknowledged. A killed supervisor is started again, as systemd would; all others it starts itself. After each kill the
service must be ready within 15 s. From time to time, and at the end, the customers stop, and what the service has is
compared with the ledger: nothing acknowledged is lost, or there twice. Prints `N kills, M problems`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from service_customer import Customer, Ledger, check_ledger

from running_service import START_S, RunningService

READY_S = 15.0
"""longest time from a kill until all processes are ready again"""
NUM_CUSTOMERS = 3
TASKS = ("tone", "topic", "mood")
TARGETS = {"web": 0.3, "engine": 0.25, "trainer": 0.3, "supervisor": 0.15}
KILLS_BETWEEN_LOOKS = 50


class Attack:
    """A service, its customers, and the kills."""

    def __init__(self, folder: Path, seed: str, targets: Sequence[str], patience_s: float) -> None:
        self.chance, self.targets, self.patience_s = random.Random(f"kills:{seed}"), list(targets), patience_s
        self.service = RunningService(folder / "home", make_backbone(folder), "--drain", "20s")
        self.key = make_key(folder / "home")
        self.seed = seed
        self.ledgers = [Ledger() for _ in range(NUM_CUSTOMERS)]
        self.kills: Counter[str] = Counter()
        self.waits: list[float] = []
        self.problems: list[str] = []
        self.round = 0

    def run(self, num_kills: int, minutes: float) -> None:
        """Kill so many times, but begin nothing after so long, looking at what is there after each round."""
        self.until = time.monotonic() + 60 * minutes
        with self.service:
            self.prepare()
            print("every task answers; now kills", flush=True)
            while sum(self.kills.values()) < num_kills and not self.is_over():
                left = num_kills - sum(self.kills.values())
                self.run_round(min(KILLS_BETWEEN_LOOKS, left))
                self.look()
            if not self.problems and self.service.stop() != 0:
                self.problems.append("the last drain did not end with exit status 0")

    def prepare(self) -> None:
        """Make every task answer before the first kill."""
        customer = self.make_customer(0)
        for job in [customer.train(task) for task in TASKS]:
            customer.wait_for_job(job)
        customer.close()

    def make_customer(self, number: int) -> Customer:
        seed = f"{self.seed}:{self.round}:{number}"
        customer = Customer(self.service.url, self.key, seed, self.ledgers[number], tasks=TASKS)
        # Seeds of runs differ: two jobs of one run would have one version, by design.
        customer.first_seed(1 + number * 1_000_000 + self.round * 10_000)
        return customer

    def run_round(self, num_kills: int) -> None:
        """Let customers act while processes are killed; then let them finish what they do."""
        self.round += 1
        customers = [self.make_customer(number) for number in range(NUM_CUSTOMERS)]
        threads = [threading.Thread(target=each.run, daemon=True) for each in customers]
        for thread in threads:
            thread.start()
        for _ in range(num_kills):
            if self.is_over():
                break
            self.kill_once()
        for customer in customers:
            customer.stopping.set()
        for thread in threads:
            thread.join(180.0)
            if thread.is_alive():
                self.problems.append("a customer waits forever")
        if self.round == 1 and not self.problems:
            customers[0].erase(f"gone-{self.seed}")
        for customer in customers:
            customer.close()

    def is_over(self) -> bool:
        """Tell whether to kill no more."""
        return bool(self.problems) or time.monotonic() > self.until

    def kill_once(self) -> None:
        """Kill one process, perhaps while another one begins, and wait until all are ready again."""
        time.sleep(self.chance.uniform(0.0, 2.0))
        names = self.chance.choices(self.targets, [TARGETS[name] for name in self.targets], k=1)
        if self.chance.random() < 0.15:
            names += self.chance.choices(self.targets, k=1)
        for name in names:
            self.service.kill(name)
            self.kills[name] += 1
            if name == "supervisor":
                self.service.start()
            time.sleep(self.chance.choice((0.0, 0.0, 0.3)))
        began = time.monotonic()
        try:
            self.service.wait_ready(max(START_S, self.patience_s))
        except AssertionError as error:
            self.problems.append(f"after {'+'.join(names)}: {error}")
            return
        self.waits.append(time.monotonic() - began)
        if self.waits[-1] > self.patience_s:
            self.problems.append(f"ready {self.waits[-1]:.1f} s after {'+'.join(names)} was killed")

    def look(self) -> None:
        """Wait until all jobs have ended, and compare what is there with the ledgers together."""
        customer = self.make_customer(0)
        everything = merge(self.ledgers)
        for job, task in everything.jobs.values():
            if task not in everything.erased:  # its jobs go with it
                customer.wait_for_job(job)
        self.problems += check_ledger(customer, everything)
        customer.close()
        count, known = sum(self.kills.values()), len(everything.jobs)
        print(f"{count} kills, {known} jobs, {len(self.problems)} problems", flush=True)


def merge(ledgers: Sequence[Ledger]) -> Ledger:
    """All that several customers were told, as one ledger."""
    whole = Ledger()
    for ledger in ledgers:
        for name in ("datasets", "jobs", "feedback", "erased"):
            getattr(whole, name).update(getattr(ledger, name))
        whole.deleted |= ledger.deleted
        whole.gone_with_tasks |= ledger.gone_with_tasks
        whole.cancelled |= ledger.cancelled
        whole.moves += ledger.moves
        whole.wrong += ledger.wrong
        whole.statuses += ledger.statuses
        for what, label in ledger.labels.items():
            if whole.labels.setdefault(what, label) != label:
                whole.wrong.append(f"{what[0]} says {label} to one customer and {whole.labels[what]} to another")
    return whole


def make_backbone(folder: Path) -> Path:
    """The tiny random backbone."""
    from inlay.model import make_tiny_folder

    return Path(make_tiny_folder(folder / "backbone"))


def make_key(home: Path) -> str:
    """A key of the tenant `local`, made as an operator does."""
    command = [sys.executable, "-m", "inlay", "key", "make", "local", "--scope", "predict,train,admin"]
    done = subprocess.run([*command, "--store", str(home), "--json"], capture_output=True, text=True, check=True)
    return str(json.loads(done.stdout)["key"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="kills altogether")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="kill no more after so long")
    parser.add_argument("--seed", default="0", help="another seed kills others at other moments")
    parser.add_argument("--only", default=",".join(TARGETS), help="a,b of: " + ", ".join(TARGETS))
    parser.add_argument("--ready-within", type=float, default=READY_S, help="seconds from a kill until all is ready")
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder, began = Path(tempfile.mkdtemp(prefix="kill-service-")), time.monotonic()
    attack = Attack(folder, given.seed, given.only.split(","), given.ready_within)
    try:
        attack.run(given.kills, given.minutes)
    finally:
        report(attack, time.monotonic() - began)
        if attack.problems:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(bool(attack.problems))


def report(attack: Attack, seconds: float) -> None:
    """Print what was done, how long the service was away, and what is wrong."""
    whole, waits = merge(attack.ledgers), sorted(attack.waits) or [0.0]
    attack.problems += [wrong for wrong in whole.wrong if wrong not in attack.problems]
    for name, number in attack.kills.items():
        print(f"{name}: {number} kills")
    print(f"calls: {dict(whole.statuses)}")
    counts = {
        name: len(getattr(whole, name)) for name in ("datasets", "jobs", "feedback", "moves", "deleted", "labels")
    }
    print(f"acknowledged: {counts}")
    print(f"ready again: median {waits[len(waits) // 2]:.1f} s, longest {waits[-1]:.1f} s")
    for problem in attack.problems[:50]:
        print(f"  {problem}")
    print(f"all: {sum(attack.kills.values())} kills in {seconds:.0f} s, {len(attack.problems)} problems")


if __name__ == "__main__":
    main()
