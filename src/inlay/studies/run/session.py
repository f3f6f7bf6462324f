"""Runs studies: trains the missing runs, skips finished ones, and writes every result as soon as it is known.

Several studies become one list of units of work, in which a run that several studies ask for occurs once. The most
valuable work comes first: of every study the first seed of everything with the best-known learning rates, then the next
tier. A study that is cut short so has whole tables of fewer seeds. Stopped cohorts are resumed before new ones begin.
With a deadline, units are cut to what is likely to fit, and what is running at the deadline is stopped and saved.

A session takes one unit at a time and claims its runs (`claimed_work.py`). So any number of sessions may work on the
same folders at the same time, each on runs that the others have neither done nor claimed. `worker_processes.py` starts
several sessions; a session on a cluster (`units_on_ray.py`) claims several units itself, and sends them to other
machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inlay.studies.judge.row_sampling import add_covariances
from inlay.studies.run.claimed_work import Claims
from inlay.studies.run.records import Record, StudyDirs, StudyRecords
from inlay.studies.run.units import Unit, UnitRunner
from inlay.studies.spec.planning import PlannedRun, StudyPlan
from inlay.training import (
    MAX_COHORT,
    Emit,
    Event,
    Interrupted,
    RowsAnswered,
    StepTaken,
    fan_out,
    ignore,
    is_finished,
    list_stopped,
    needs_own_cohort,
    structure_of,
)

# Stacks are as wide as their widest slot: above this size, a cohort of its own is cheaper than padding all others.
_PADDED_TO = 64
# Copies of the backbone that one unit trains in turn, with the same programs: few, so that other processes get the
# rest.
_COPIES_IN_A_ROW = 8


@dataclass
class SessionResult:
    """The result of a session, for all its studies."""

    records: list[Record] = field(default_factory=list)
    """all records that the plans ask for and that exist"""
    missing: list[PlannedRun] = field(default_factory=list)
    failed: list[tuple[PlannedRun, str]] = field(default_factory=list)
    """items that failed, with the reason; they are tried again next time"""
    num_trained: dict[str, int] = field(default_factory=dict)
    """study -> runs that got a record in this session, even if another study lent it"""
    total_trained: int = 0
    """the same over all studies, counting each run once"""
    seconds: float = 0.0


class StudyProgress:
    """Listener to the progress of studies. This one does nothing; the command line's shows it."""

    def begin(self, number: int, num_units: int, unit: Unit) -> None:
        """Note that a unit of work begins."""

    def watch(self, unit: Unit) -> Emit:
        """Return the listener to a unit's training, if this process trains it."""
        return ignore

    def tell(self, num_done: int, num_runs: int, num_busy: int, num_rows: int) -> None:
        """Note the progress of several processes: runs, busy processes, rows trained on since the last call."""

    def end(self, unit: Unit, seconds: float) -> None:
        """Note that a unit of work is done, or was stopped."""

    def warn(self, message: str) -> None:
        """Note that something failed; the studies go on without it."""


def run_studies(
    plans: Sequence[StudyPlan],
    dirs: StudyDirs,
    *,
    deadline: float | None = None,
    commit: str | None = None,
    progress: StudyProgress | None = None,
) -> SessionResult:
    """Do the missing work of plans, the most valuable first, until `deadline` (of `time.monotonic`), if there is one.

    Runs that other processes have claimed are left to them. Ctrl-C stops at once with everything saved and raises
    KeyboardInterrupt; the same call continues from there.
    """
    session = Session(plans, dirs, deadline=Deadline(deadline), commit=commit)
    session.train(progress or StudyProgress())
    return session.sum_up()


class Session:
    """One process's work on several plans, from reading the records to the result."""

    def __init__(
        self,
        plans: Sequence[StudyPlan],
        dirs: StudyDirs,
        *,
        deadline: Deadline,
        commit: str | None = None,
        num_jobs: int = 1,
        prefers_copies: bool = False,
        is_spread: bool = False,
    ) -> None:
        """Read the records. With `is_spread`, each job has its own machine and gets a part of every cohort."""
        self._began = time.monotonic()
        self.plans = {plan.study.name: plan for plan in plans}
        self.dirs, self.deadline = dirs, deadline
        self.known = StudyRecords(plans, dirs)
        self.known.write_borrowed()
        self.failed: list[tuple[PlannedRun, str]] = []
        self.runner = UnitRunner(self.plans, dirs.runs, self.known.add, commit)
        self._before = {name: self.known.run_ids(name) for name in self.plans}
        self._claims = Claims(dirs.runs)
        self._num_jobs, self._prefers_copies = num_jobs, prefers_copies
        self._most_together = MAX_COHORT
        if is_spread:
            num_left = len({item.id for plan in plans for item in plan.items if self.known.is_left(item)})
            self._most_together = min(MAX_COHORT, max(1, -(-num_left // num_jobs)))
        self._compiled: tuple[Any, ...] = ()
        """the compile key of the last unit"""

    def train(self, progress: StudyProgress, wait: Callable[[], None] | None = None) -> None:
        """Train unit by unit until the deadline, or until nothing unclaimed is left.

        With `wait`, which is called again and again, it stays until other processes are done too, to take over if one
        of them dies. Then the process that started it must also stop it at the deadline.
        """
        number = 0
        while not self.deadline.is_late:
            with self.claim_next() as (unit, num_left):
                if unit is not None:
                    number += 1
                    progress.begin(number, number + num_left - 1, unit)
                    self._do(unit, progress, None if wait is not None else _Alarm(self.deadline))
                    continue
            if not self.has_work:
                break
            if wait is None:
                progress.warn("other processes are working on what is left")
                break
            wait()

    def _do(self, unit: Unit, progress: StudyProgress, alarm: Emit | None) -> None:
        """Train a unit in this process; an interrupt at the deadline is expected."""
        began, failed = time.monotonic(), []
        listeners = [progress.watch(unit)] if alarm is None else [alarm, progress.watch(unit)]
        try:
            failed = self.runner.do(unit, fan_out(*listeners))
        except Interrupted:
            if not self.deadline.is_late:
                raise
        said = [(item, error.message) for item, error in failed]
        self.note_end(unit, said, time.monotonic() - began, progress)

    def note_end(
        self, unit: Unit, failed: Sequence[tuple[PlannedRun, str]], seconds: float, progress: StudyProgress
    ) -> None:
        """Note that a unit that nobody stopped has ended: what failed, and how long it took."""
        if failed:
            progress.warn(f"{unit.take(item for item, _ in failed).describe()}: {failed[0][1]}")
        self.failed += failed
        if not self.deadline.is_late:
            for item in unit.items:
                if not self.known.is_known(item):  # or else it would be tried again forever
                    self.known.failed.setdefault(item.id, "it left no record")
        self.deadline.note(unit, seconds)
        progress.end(unit, seconds)

    @contextlib.contextmanager
    def claim_next(self) -> Iterator[tuple[Unit | None, int]]:
        """Claim the next unit for the duration of the block; yields it, or None, and the number of units left."""
        if not self.has_work:  # then do not create the folder of claims
            yield None, 0
            return
        with self._claims.choosing() as held:
            self.known.refresh()  # after reading the claims, as a process writes its records before it releases a claim
            units = self.list_units(held)
            unit = self._choose(units, held)
            if unit is not None:
                unit = self.deadline.cut(unit)
                release = self._claims.claim(unit.run_ids | self.sources_to_train(unit))
        if unit is None:
            yield None, len(units)
            return
        try:
            yield unit, len(units)
        finally:
            release()

    @property
    def has_work(self) -> bool:
        """Whether any item has neither a record nor a failure, even if another process trains it."""
        return any(self.known.is_left(item) for plan in self.plans.values() for item in plan.items)

    def list_units(self, held: Collection[str] = ()) -> list[Unit]:
        """List the units that are left, without the runs that other processes hold."""
        in_pieces = self._num_jobs > 1 or self.deadline.deadline is not None
        return make_agenda(
            list(self.plans.values()),
            self.known,
            self.dirs.runs,
            most_together=self._most_together if in_pieces else None,
            num_jobs=self._num_jobs,
            held=held,
        )

    def _choose(self, units: Sequence[Unit], held: Collection[str]) -> Unit | None:
        """Choose the first unit whose sources are trained or can be trained with it, of the preferred kind if any."""
        # 1. the units whose sources no other unit trains or will train
        free = []
        for unit in units:
            needed = self.sources_to_train(unit)
            to_train = {item.id for other in units if other is not unit for item in other.items} if needed else set()
            if not needed & (to_train | set(held)):
                free.append(unit)
        # 2. the first of the preferred kind
        if self._prefers_copies:
            free.sort(key=lambda unit: not unit.is_finetuned)
        if not free:
            return None
        if self._num_jobs == 1:
            return free[0]
        # 3. among equally urgent units, one that needs no new compiled programs
        alike = [unit for unit in free if unit.urgency == free[0].urgency and unit.compile_key == self._compiled]
        chosen = alike[0] if alike else free[0]
        self._compiled = chosen.compile_key
        return chosen

    def sources_to_train(self, unit: Unit) -> set[str]:
        """Return the runs that a unit starts from and whose weights are not here."""
        needed = set()
        for item in (*unit.items, *unit.resumed_with):
            if item.source is not None:
                folder = self.dirs.runs / item.source.id
                if not (is_finished(folder) and (folder / "best.safetensors").is_file()):
                    needed.add(item.source.id)
        return needed

    def sum_up_all(self) -> SessionResult:
        """Return the result of a session that other processes work for: failures are in the records that they wrote."""
        result = self.sum_up()
        failed = {item.id: item for item in result.missing if item.id in self.known.failed}
        return dataclasses.replace(result, failed=[(item, self.known.failed[item.id]) for item in failed.values()])

    def sum_up(self) -> SessionResult:
        """Return the result of the session, including records that other processes have added meanwhile."""
        self.known.refresh()
        for name, plan in self.plans.items():
            if plan.study.paired_rows:
                self.known.revise(name, add_covariances(self.known.records(name), self.dirs.runs))
        new = {name: self.known.run_ids(name) - before for name, before in self._before.items()}
        return SessionResult(
            records=[record for name in self.plans for record in self.known.records(name)],
            missing=[item for plan in self.plans.values() for item in plan.items if not self.known.is_known(item)],
            failed=self.failed,
            num_trained={name: len(ids) for name, ids in new.items()},
            total_trained=len(set().union(*new.values())),
            seconds=time.monotonic() - self._began,
        )


class Deadline:
    """The time when work must end, if any, and an estimate of how much of a unit can be done by then."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self._rates: dict[bool, float] = {}

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def note(self, unit: Unit, seconds: float) -> None:
        """Measure the pace by a finished unit; a unit that was stopped at the deadline is ignored."""
        if unit.cost and not self.is_late:
            self._rates[unit.is_finetuned] = seconds / unit.cost

    def cut(self, unit: Unit) -> Unit:
        """Return the part of a unit that is likely to be done by the deadline, at least one run."""
        rate = self._rates.get(unit.is_finetuned)
        if self.deadline is None or rate is None or unit.is_begun:
            return unit  # a stopped unit is resumed as a whole: a part of it would not find the state
        left = (self.deadline - time.monotonic()) / rate
        kept: list[PlannedRun] = []
        for item in unit.items:
            if kept and item.cost > left:
                break
            left -= item.cost
            kept.append(item)
        return unit.take(kept)


class _Alarm:
    """A listener that stops at the deadline, once, as Ctrl-C would: the running step is finished and saved.

    A second interrupt would break off the saving.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline, self._has_rung = deadline, False

    def __call__(self, event: Event) -> None:
        if self._has_rung or not isinstance(event, StepTaken | RowsAnswered) or not self._deadline.is_late:
            return
        if threading.current_thread() is threading.main_thread():
            self._has_rung = True
            signal.raise_signal(signal.SIGINT)
        elif isinstance(event, StepTaken):  # other threads get no signals, so end at a step
            self._has_rung = True
            raise Interrupted


def make_agenda(
    plans: Sequence[StudyPlan],
    known: StudyRecords,
    runs: Path,
    *,
    most_together: int | None = None,
    num_jobs: int = 1,
    held: Collection[str] = (),
) -> list[Unit]:
    """List the runs without a record as units of work, the most valuable first. `runs` has the folders of runs.

    Within a tier, units are in the order of the studies. `most_together` limits the runs of a cohort, so that several
    processes can share the work, and a deadline leaves few runs unfinished. The copies of the backbone are divided
    among `num_jobs`. Runs that other processes hold are left out, and so are runs that failed since `known` was made.
    """
    # 1. every run once: of the items that ask for it, the one that needs spans (its record serves the others too), or
    # else the most urgent one
    asking: dict[str, list[PlannedRun]] = {}
    for item in (item for plan in plans for item in plan.items):
        if known.is_left(item):
            asking.setdefault(item.id, []).append(item)
    wanted = {
        run_id: min(items, key=lambda item: (item.arm.kind != "spans", item.tier)) for run_id, items in asking.items()
    }
    num_copies = Counter(item.tier for item in wanted.values() if item.is_finetuned)
    lengths = {tier: min(_COPIES_IN_A_ROW, -(-number // num_jobs)) for tier, number in num_copies.items()}
    # 2. stopped cohorts are resumed as they were
    begun = _find_begun(plans, wanted, runs, {*held, *known.failed})
    # 3. the others are grouped by what can train together
    by_study = {plan.study.name: plan for plan in plans}
    groups: dict[tuple[Any, ...], list[PlannedRun]] = {}
    for item in sorted(wanted.values(), key=lambda item: item.tier):
        if item.id not in held:
            groups.setdefault(_key(item, by_study[item.study]), []).append(item)
    # 4. units in order of their tier
    units = [unit for key, group in groups.items() for unit in _slice(key[0], group, lengths, most_together)]
    order = {name: number for number, name in enumerate(by_study)}
    units.sort(key=lambda unit: (unit.items[0].tier, order[unit.items[0].study]))
    # 5. place units after those that train their sources
    trained = {item.id: unit for unit in units for item in unit.items}
    placed: dict[int, Unit] = {}
    for unit in units:
        for item in unit.items:
            if item.source is not None and item.source.id in trained:
                source = trained[item.source.id]
                placed.setdefault(id(source), source)
        placed.setdefault(id(unit), unit)
    return [*begun, *placed.values()]


def _find_begun(plans: Sequence[StudyPlan], wanted: dict[str, PlannedRun], runs: Path, skipped: set[str]) -> list[Unit]:
    """Find stopped cohorts whose runs are all in these plans and not skipped; take their items out of `wanted`."""
    known = {item.id: item for plan in plans for item in plan.items}
    begun = []
    # Copies of a failed unit may have states of their own: the state with the most runs comes first.
    for ids in sorted(list_stopped(runs / "cohorts"), key=len, reverse=True):
        is_left = any(run_id in wanted and not is_finished(runs / run_id) for run_id in ids)
        if is_left and all(run_id in known for run_id in ids) and not skipped.intersection(ids):
            resumed_with = tuple(known[run_id] for run_id in ids if run_id not in wanted)
            items = tuple(wanted.pop(run_id) for run_id in ids if run_id in wanted)
            begun.append(Unit("runs", items, resumed_with, is_begun=True))
    return begun


def _key(item: PlannedRun, plan: StudyPlan) -> tuple[Any, ...]:
    """Return a key that is equal for items that can be one unit."""
    if item.run is None:
        return (item.arm.kind, item.id)
    width = max(_PADDED_TO, item.config.method.size or 0)
    structure = (*structure_of(item.run), needs_own_cohort(item.run, plan.backbone))
    return ("runs", plan.backbone.fingerprint, tuple(plan.study.fit.items()), structure, width, item.source is None)


def _slice(kind: str, group: list[PlannedRun], lengths: Mapping[int, int], most_together: int | None) -> list[Unit]:
    """Make units of a group: one, or pieces of `most_together`, the most urgent first, similar lengths together.

    Copies of the backbone, which train one after another, become units of one tier with the length that `lengths` has.
    """
    ordered = sorted(group, key=lambda item: (item.tier, -item.num_samples))
    if group[0].is_finetuned:
        tiers = itertools.groupby(ordered, key=lambda item: item.tier)
        return [Unit(kind, tuple(row)) for tier, own in tiers for row in _cut(list(own), lengths[tier])]
    if most_together is None or len(group) <= most_together:
        return [Unit(kind, tuple(group))]
    return [Unit(kind, tuple(row)) for row in _cut(ordered, most_together)]


def _cut(items: list[PlannedRun], most: int) -> Iterator[list[PlannedRun]]:
    return (items[start : start + most] for start in range(0, len(items), most))
