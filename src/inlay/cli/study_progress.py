"""Progress of studies on the screen. Imported only when a study is run, because it imports torch."""

from __future__ import annotations

import time
from typing import Self

from inlay.cli import screen
from inlay.cli.lazy_packages import pipeline
from inlay.studies import StudyProgress, Unit
from inlay.training import Emit

_SMOOTHED_SECONDS = 10.0  # time over which the shown rate is averaged


class ScreenProgress(StudyProgress):
    """Progress of a study in this process: a line for every unit of work, and a bar while it is trained."""

    def __init__(self) -> None:
        self._meter: screen.Meter | None = None

    def begin(self, number: int, num_units: int, unit: Unit) -> None:
        self._close()
        screen.log(f"{number}/{num_units}  {unit.describe()}: {screen.count(unit.num_runs, 'run')}")

    def watch(self, unit: Unit) -> Emit:
        self._meter = screen.Meter("training")
        return pipeline.TrainingProgress(self._meter.__enter__(), num_runs=unit.num_runs)

    def end(self, unit: Unit, seconds: float) -> None:
        self._close()
        screen.detail(f"{screen.duration(seconds)}")

    def warn(self, message: str) -> None:
        self._close()
        screen.log(message, "yellow")

    def _close(self) -> None:
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self._meter = None


class JobsProgress(StudyProgress):
    """Progress of a study in several processes: one bar for all, and a line for every unit that begins or ends."""

    def __init__(self) -> None:
        self._meter = screen.Meter("runs")
        self._told, self._rate = time.monotonic(), 0.0

    def __enter__(self) -> Self:
        self._meter.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._meter.__exit__(*_)

    def begin(self, number: int, num_units: int, unit: Unit) -> None:
        self._meter.log(f"{number}/{num_units}  {unit.describe()}: {screen.count(unit.num_runs, 'run')}")

    def tell(self, num_done: int, num_runs: int, num_busy: int, num_rows: int) -> None:
        now = time.monotonic()
        passed, self._told = max(now - self._told, 1e-3), now
        weight = min(1.0, passed / _SMOOTHED_SECONDS)
        self._rate += weight * (num_rows / passed - self._rate)
        text = f"{screen.count(num_busy)} at work  {self._rate:,.0f} rows/s"
        self._meter.update(num_done, text, title="runs", total=num_runs)

    def end(self, unit: Unit, seconds: float) -> None:
        self._meter.log(f"  {unit.describe()}: {screen.duration(seconds)}")

    def warn(self, message: str) -> None:
        self._meter.log(message, "yellow")
