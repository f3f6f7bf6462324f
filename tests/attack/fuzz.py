"""Attacks every kind of input with seeded damage: `make fuzz`, or

    python tests/attack/fuzz.py [--minutes M | --tries N] [--seed S] [--kinds a,b] [--repeat KIND:NUMBER]

Prints `KIND: N tried, M failed`, and for each failure the seed that repeats it. An attempt fails by an exception that
is no `InlayError`, by a change that nobody noticed, by more than 10 s of processor time or by more than 1 GB.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["INLAY_CACHE_BYTES"] = "0"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from kinds import KINDS
from world import World

from inlay.errors import InlayError

MOST_SECONDS, MOST_BYTES = 10.0, 10**9
MOST_WAITING = 1800  # seconds: beside other processes, an attempt at the lowest priority waits minutes for its turn


class TooMuch(BaseException):
    """An attempt that takes too long or too much: nothing catches it on the way."""


@dataclass(frozen=True)
class Failure:
    """A failed attempt."""

    seed: str
    reason: str
    place: str

    def __str__(self) -> str:
        return f"--repeat {self.seed}  {self.reason}  at {self.place}"


@contextmanager
def watched() -> Iterator[None]:
    """Bound the processor time of an attempt while it runs, and its memory when it ends."""

    def stop(*_: Any) -> None:
        raise TooMuch(f"over {MOST_SECONDS:g} s of processor time, or half an hour of waiting")

    if threading.current_thread() is not threading.main_thread():  # where no signal can be taken
        yield
        return
    handlers = {name: signal.signal(name, stop) for name in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, MOST_WAITING)
    before = _reset_peak()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for name, handler in handlers.items():
            signal.signal(name, handler)
    if (grown := _read_status("VmHWM") - before) > MOST_BYTES:
        raise TooMuch(f"{grown / 1e9:.1f} GB")


def _reset_peak() -> int:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _read_status("VmRSS")


def _read_status(name: str) -> int:
    """A size of this process as Linux tells it; 0 elsewhere, where memory is not watched."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def attempt(kind: Any, seed: str) -> Failure | None:
    """Make one attempt; `seed` is `KIND:SEED:NUMBER` and decides everything about it."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        with warnings.catch_warnings(), watched():
            warnings.simplefilter("ignore")
            kind.attempt(random.Random(seed), folder)
    except InlayError:
        return None
    except (Exception, TooMuch, SystemExit) as error:
        words = f"{type(error).__name__}: {str(error)[:200]!r}"
        return Failure(seed, words, _place(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def _place(error: BaseException) -> str:
    """The innermost line of ours, and the innermost of all: failures of one place are one defect."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/inlay/" in frame.filename] or frames
    frame = ours[-1]
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}"


def run_kind(name: str, world: World, seed: str, numbers: Iterator[int]) -> Iterator[tuple[int, Failure | None]]:
    """Attempt a kind with each number."""
    made = KINDS[name].make(world)
    for number in numbers:
        yield number, attempt(made, f"{name}:{seed}:{number}")


def _in_children(name: str, world: World, seed: str, tries: int, until: float) -> tuple[int, list[str]]:
    """Attempt a kind in a child of its own; one that dies is a failure of the number it was at, and another goes on."""
    at, failures, number = mmap.mmap(-1, 8), [], 0
    while number < tries and time.monotonic() < until:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            try:
                _attack(name, world, seed, iter(range(number, tries)), until, at, writer)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as told:
            for line in told:
                failures.append(line.strip())
                print(f"  {line.strip()}", flush=True)
        _, status = os.waitpid(child, 0)
        number = int.from_bytes(at[:], "little")
        if status:
            failures.append(f"--repeat {name}:{seed}:{number}  the process died ({status})  at ?")
            print(f"  {failures[-1]}", flush=True)
            number += 1
    return number, failures


def _attack(
    name: str, world: World, seed: str, numbers: Iterator[int], until: float, at: mmap.mmap, writer: int
) -> None:
    """The work of a child: attempts, with little more memory than they may take, and a line for each failure."""
    limit = _read_status("VmSize") + 6 * MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with os.fdopen(writer, "w", buffering=1) as out:
        for tried, failure in run_kind(name, world, seed, numbers):
            at[:] = (tried + 1).to_bytes(8, "little")
            if failure is not None:
                print(failure, file=out)
            if time.monotonic() > until:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=None, help="minutes for all kinds together")
    parser.add_argument("--tries", type=int, default=None, help="attempts of each kind; default: 2,500")
    parser.add_argument("--seed", default="0", help="another seed makes other attempts")
    parser.add_argument("--kinds", default=",".join(KINDS), help="a,b of: " + ", ".join(KINDS))
    parser.add_argument("--repeat", help="one attempt, by the seed that was printed, with its traceback")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-world-"))
    try:
        world = World(folder)
        if given.repeat:
            (folder / "once").mkdir()
            KINDS[given.repeat.split(":")[0]].make(world).attempt(random.Random(given.repeat), folder / "once")
            return
        names = given.kinds.split(",")
        tries = given.tries or (10**9 if given.minutes else 2500)
        counts = {}
        for name in names:
            until = time.monotonic() + (given.minutes * 60 / len(names) if given.minutes else 10**9)
            tried, failures = _in_children(name, world, given.seed, tries, until)
            counts[name] = (tried, len(failures))
            print(f"{name}: {tried:,} tried, {len(failures):,} failed", flush=True)
        tried, failed = (sum(column) for column in zip(*counts.values(), strict=True))
        print(f"all: {tried:,} tried, {failed:,} failed")
        sys.exit(bool(failed))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
