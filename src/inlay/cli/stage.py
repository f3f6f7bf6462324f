"""How a study goes, on the screen. Imported only where one is conducted, since it stands on torch."""

from __future__ import annotations

from inlay.cli import screen
from inlay.cli.watch import ScreenWatcher
from inlay.research.conduct import Stage
from inlay.research.planning import Unit
from inlay.training.cohort import Watcher


class ScreenStage(Stage):
    """A study on the screen: a line for every unit of work, with a bar while it is trained."""

    def __init__(self) -> None:
        self._meter: screen.Meter | None = None

    def begin(self, number: int, num_units: int, unit: Unit) -> None:
        self._close()
        screen.say(f"{number}/{num_units}  {unit.describe()}: {screen.count(unit.num_runs, 'run')}")

    def watch(self, unit: Unit) -> Watcher:
        self._meter = screen.Meter("training")
        return ScreenWatcher(self._meter.__enter__(), num_runs=unit.num_runs)

    def end(self, unit: Unit, seconds: float) -> None:
        self._close()
        screen.note(f"{screen.duration(seconds)}")

    def warn(self, message: str) -> None:
        self._close()
        screen.say(message, "yellow")

    def _close(self) -> None:
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self._meter = None
