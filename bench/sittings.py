"""Where the time of a long `fit` goes, over all the sittings it takes: heartbeats, and a file beside the runs.

A sitting is the time from one start of the script to its end, or to its kill. What a kill loses is counted twice, as it
is trained twice: the sum says what was spent, never less.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from report import IDENTITY, Report, Stopped, say, write_whole

from inlay.training.cohort.cohort import Cohort
from inlay.training.events import (
    CohortStarted,
    CompileStarted,
    Event,
    MemoryRanOut,
    RowsEncoded,
    RunEnded,
    StepTaken,
)

BEAT_S, WRITE_S = 10.0, 1.0
FILE = "sittings.json"
SPLIT = ("preparing", "steps", "compiling", "dev scoring", "entering")
"""what is timed; `entering` is the values drawn for runs that get a slot of one that ended"""


@dataclass
class Sitting:
    """What was done from one start to its end."""

    date: str
    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    split: dict[str, float] = field(default_factory=dict)
    """seconds by what was done; the rest is writing states and results"""
    ended: dict[str, Any] = field(default_factory=dict)
    """the status and the best dev score of each run that ended, by its id"""


class Sittings:
    """Hears how `fit` goes: a line for every run that ends, and every ten seconds what was done since the last.

    The sittings are kept in the runs' folder, if there is one; a sitting of another commit or hardware is refused.
    """

    def __init__(self, num_runs: int, folder: Path | None, report: Report) -> None:
        self._num_runs, self._path, self._report = num_runs, None if folder is None else folder / FILE, report
        self.earlier = self._read()
        self.now = Sitting(report.head["date"])
        self._began = self._since = self._told_at = time.monotonic()
        self._doing, self._has_compiled = "preparing", False
        self._beaten = (self._began, 0, 0)
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    @property
    def all(self) -> list[Sitting]:
        return [*self.earlier, self.now]

    def __enter__(self) -> Sittings:
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        self.write()

    def write(self) -> None:
        """Keep this sitting as it is now."""
        with self._lock:
            self.now.seconds = time.monotonic() - self._began
            if self._path is not None:
                identity = {name: self._report.head[name] for name in IDENTITY}
                found = identity | {"sittings": [asdict(one) for one in self.all]}
                write_whole(self._path, json.dumps(found, indent=1))

    def describe(self) -> dict[str, Any]:
        """What all sittings come to."""
        spent = sum(one.seconds for one in self.all)
        split = {name: sum(one.split.get(name, 0.0) for one in self.all) for name in SPLIT}
        ended = {run: found for one in self.all for run, found in one.ended.items()}
        return {
            "seconds": round(spent, 1),
            "split": {name: round(value, 1) for name, value in (split | {"rest": spent - sum(split.values())}).items()},
            "sittings": [round(one.seconds, 1) for one in self.all],
            "steps": sum(one.steps for one in self.all),
            "samples_trained": sum(one.samples for one in self.all),
            "runs_ended": len(ended),
            "best_dev_so_far": max(
                (found["dev"] for found in ended.values() if found["dev"] is not None), default=None
            ),
        }

    def __call__(self, event: Event) -> None:
        match event:
            case RowsEncoded(num_done, num_rows):
                self.on_encode(num_done, num_rows)
            case CompileStarted(what):
                self.on_compile(what)
            case MemoryRanOut(message):
                say(message)
            case CohortStarted(cohort):
                self.on_start(cohort)
            case StepTaken(cohort, num_rows):
                self.on_step(cohort, num_rows)
            case RunEnded(member):
                self.on_end(member)

    def on_encode(self, num_done: int, num_rows: int) -> None:
        self._doing = f"tokenising {num_done:,} of {num_rows:,} rows"

    def on_compile(self, what: str) -> None:
        self._does(what)
        self._has_compiled = True
        say(what)

    def on_start(self, cohort: Cohort) -> None:
        """From here on every step, scoring and change of hands of this cohort is timed."""
        self._add("preparing", time.monotonic() - self._since)
        settings = cohort.settings
        say(f"training begins: {cohort.num_seats} runs together, {settings.token_budget:,} tokens a forward pass")
        self._does("stepping")
        cohort.step = self._timed("steps", cohort.step)  # type: ignore[method-assign]
        cohort.finish_epochs = self._timed("dev scoring", cohort.finish_epochs)  # type: ignore[method-assign]
        cohort.refill = self._timed("entering", cohort.refill)  # type: ignore[method-assign]

    def on_step(self, cohort: Cohort, num_rows: int) -> None:
        self.now.steps, self.now.samples = self.now.steps + 1, self.now.samples + num_rows
        if time.monotonic() - self._told_at >= BEAT_S:
            self._told_at = time.monotonic()
            self._report.write()
        if self._path is None and self._report.is_told:
            raise Stopped  # nothing is kept: do not wait for a state to be written

    def on_end(self, member: Any) -> None:
        train, progress = member.run.config.train, member.progress
        with self._lock:
            self.now.ended[member.run.id] = {"status": progress.status, "dev": progress.best_metric}
        what = f"lr {train.lr:g}, {train.epochs} epochs, size {member.run.config.method.size}, seed {train.seed}"
        score = "none" if progress.best_metric is None else f"{progress.best_metric:.3f}"
        say(f"{progress.status}: {what}: {score}")

    def _timed(self, what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same, its seconds added up; a step that compiled something counts as compiling."""

        def call(*args: Any) -> Any:
            began, self._has_compiled = time.monotonic(), False
            self._does("stepping" if what == "steps" else what)
            try:
                return work(*args)
            finally:
                self._add("compiling" if self._has_compiled else what, time.monotonic() - began)
                self._does("stepping")

        return call

    def _does(self, what: str) -> None:
        self._doing, self._since = what, time.monotonic()

    def _add(self, what: str, seconds: float) -> None:
        with self._lock:
            self.now.split[what] = self.now.split.get(what, 0.0) + seconds

    def _beat(self) -> None:
        """Beside the work, so that a long compilation is seen, and counted when it is killed."""
        while not self._is_over.wait(WRITE_S):
            self.write()
            if time.monotonic() - self._beaten[0] >= BEAT_S:
                self._tell()

    def _tell(self) -> None:
        before, steps, samples = self._beaten
        self._beaten = (time.monotonic(), self.now.steps, self.now.samples)
        rate = (self.now.samples - samples) / (self._beaten[0] - before)
        ended = sum(len(one.ended) for one in self.all)
        say(
            f"{self.now.steps:,} steps (+{self.now.steps - steps}), {rate:,.0f} samples/s, "
            f"{ended} of {self._num_runs} runs ended, {self._doing} for {time.monotonic() - self._since:.1f} s"
        )

    def _read(self) -> list[Sitting]:
        if self._path is None or not self._path.exists():
            return []
        known = json.loads(self._path.read_text(encoding="utf8"))
        self._report.check_same(known, self._path, "`--runs`")
        return [Sitting(**one) for one in known["sittings"]]
