"""Conducting studies: what is missing is trained, what is there is not, and every result is on disk once it is known.

Several studies are one list of work (`agenda.py`), of which a run that several ask for is done once. With a deadline
the most valuable work is done first, units of work are cut to what is likely to fit, and what is in hand at the
deadline is stopped and saved. Here it is done by one process; `jobs.py` has it done by several.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from inlay.studies.run.agenda import Unit, make_agenda
from inlay.studies.run.ledger import Ledger, Places
from inlay.studies.run.records import Record
from inlay.studies.run.units import Bench
from inlay.studies.spec.planning import Item, Plan
from inlay.training.cohort.loop import Interrupted
from inlay.training.events import Emit, Event, RowsAnswered, StepTaken, emit_to, ignore

__all__ = ["Outcome", "Pace", "Places", "Sitting", "Stage", "conduct", "list_todo"]


@dataclass
class Outcome:
    """What a sitting came to, of all its studies."""

    records: list[Record] = field(default_factory=list)
    """all that the plans ask for and that there is"""
    missing: list[Item] = field(default_factory=list)
    failed: list[tuple[Item, str]] = field(default_factory=list)
    """what could not be done, and why; it is tried again next time"""
    num_trained: dict[str, int] = field(default_factory=dict)
    """study -> runs that got their record in this sitting, be it lent by another study"""
    total_trained: int = 0
    """those of all studies, each run once"""
    seconds: float = 0.0


class Stage:
    """Hears how studies go. This one is deaf; the command line's draws progress."""

    def begin(self, number: int, num_units: int, unit: Unit) -> None:
        """A unit of work begins."""

    def watch(self, unit: Unit) -> Emit:
        """Who hears how its training goes, where this process trains."""
        return ignore

    def tell(self, num_done: int, num_runs: int, num_busy: int, num_rows: int) -> None:
        """How far several processes are: runs, processes at work, rows trained on since this was told last."""

    def end(self, unit: Unit, seconds: float) -> None:
        """A unit of work is done, or was stopped."""

    def warn(self, message: str) -> None:
        """Something failed, and the studies go on without it."""


def conduct(
    plans: Sequence[Plan],
    places: Places,
    *,
    deadline: float | None = None,
    commit: str | None = None,
    stage: Stage | None = None,
) -> Outcome:
    """Do what is missing of plans, the most valuable first, until `deadline` (of `time.monotonic`), if there is one.

    Ctrl-C stops at once with everything saved: KeyboardInterrupt, and the same call goes on from there.
    """
    stage, sitting, pace = stage or Stage(), Sitting(plans, places), Pace(deadline)
    bench = Bench(sitting.plans.__getitem__, places.runs, sitting.ledger.keep, commit)
    agenda = make_agenda(plans, sitting.ledger, places.runs, in_pieces=deadline is not None)
    for number, unit in enumerate(agenda, start=1):
        todo = pace.cut(unit)
        if pace.is_late:
            break
        stage.begin(number, len(agenda), todo)
        began, failed = time.monotonic(), []
        try:
            failed = bench.do(todo, emit_to(_Alarm(pace), stage.watch(todo)))
        except Interrupted:
            if not pace.is_late:
                raise
        if failed:
            stage.warn(f"{todo.take(item for item, _ in failed).describe()}: {failed[0][1]}")
        sitting.failed += [(item, error.message) for item, error in failed]
        pace.note(todo, time.monotonic() - began)
        stage.end(todo, time.monotonic() - began)
    return sitting.sum_up()


def list_todo(plans: Sequence[Plan], places: Places) -> list[Unit]:
    """The units that `conduct` would do."""
    return make_agenda(plans, Ledger(plans, places), places.runs)


class Sitting:
    """What a call has to do and has done, whoever does it."""

    def __init__(self, plans: Sequence[Plan], places: Places) -> None:
        self._began = time.monotonic()
        self.plans = {plan.study.name: plan for plan in plans}
        self.ledger = Ledger(plans, places)
        self.ledger.write_borrowed()
        self.failed: list[tuple[Item, str]] = []
        self._before = {name: self.ledger.run_ids(name) for name in self.plans}

    def sum_up(self) -> Outcome:
        """What it came to."""
        self.ledger.add_covariances()
        items = [item for plan in self.plans.values() for item in plan.items]
        new = {name: self.ledger.run_ids(name) - before for name, before in self._before.items()}
        return Outcome(
            records=[record for name in self.plans for record in self.ledger.records(name)],
            missing=[item for item in items if not self.ledger.is_known(item)],
            failed=self.failed,
            num_trained={name: len(ids) for name, ids in new.items()},
            total_trained=len(set().union(*new.values())),
            seconds=time.monotonic() - self._began,
        )


class Pace:
    """How fast work is done, and what of it still fits before the deadline, if there is one."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self._rates: dict[bool, float] = {}

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def note(self, unit: Unit, seconds: float) -> None:
        """Learn from a unit that was done; one that was stopped at the deadline teaches nothing."""
        if unit.cost and not self.is_late:
            self._rates[unit.is_finetuned] = seconds / unit.cost

    def fits(self, unit: Unit) -> bool:
        """Whether the first of its runs is likely to be done by the deadline."""
        rate = self._rates.get(unit.is_finetuned)
        return self.deadline is None or rate is None or unit.items[0].cost * rate <= self.deadline - time.monotonic()

    def cut(self, unit: Unit) -> Unit:
        """As much of a unit as is likely to be done by the deadline, at least one run of it."""
        rate = self._rates.get(unit.is_finetuned)
        if self.deadline is None or rate is None or unit.is_begun:
            return unit  # what was stopped goes on whole: a part of it would not find the state
        left = (self.deadline - time.monotonic()) / rate
        kept: list[Item] = []
        for item in unit.items:
            if kept and item.cost > left:
                break
            left -= item.cost
            kept.append(item)
        return unit.take(kept)


class _Alarm:
    """Stops at the deadline as Ctrl-C would: the step in hand is finished and saved."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._has_rung = pace, False

    def __call__(self, event: Event) -> None:
        if not isinstance(event, StepTaken | RowsAnswered):
            return
        if _is_main_thread():
            if self._is_due():
                signal.raise_signal(signal.SIGINT)
        elif isinstance(event, StepTaken) and self._is_due():  # another thread has no signals: its next step ends it
            raise Interrupted

    def _is_due(self) -> bool:
        """Whether it is late; said once, since a second signal would stop the saving."""
        is_due = self._pace.is_late and not self._has_rung
        self._has_rung |= is_due
        return is_due


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
