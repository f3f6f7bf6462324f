"""The loop of one cohort: steps and scores, what is written when, and smaller pieces when memory runs out.

What always holds: the resume state is on disk before a result that depends on it, and a result is the last file of a
run. Killed anywhere, nothing is lost and nothing half written.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from inlay.errors import OutOfMemory
from inlay.model.parts import head as head_part
from inlay.threads import Threads
from inlay.training.cohort.cohort import Cohort, CohortSettings, Watcher, peak_memory_bytes
from inlay.training.cohort.frozen_cache import FrozenCache
from inlay.training.cohort.member import PROBE
from inlay.training.cohort.parallel import World
from inlay.training.cohort.resume import drop_state, save_state, write_membership
from inlay.training.curve import draw_curve
from inlay.training.recipe.halving import Referee
from inlay.training.run.joint import AnyMember, AnyRun
from inlay.training.run.run import (
    PROBE_HEAD,
    Result,
    is_finished,
    write_history,
    write_result,
    write_start,
    write_tensors,
)

# A state of many large slots is gigabytes: written at every epoch's end it would take longer than the epochs. So a save
# that takes more than a second is not repeated before training had twenty times as long.
_QUICK_SECONDS, _REST = 1.0, 20.0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during training: the resume state is on disk."""


class _Unscored(Exception):
    """Ctrl-C while dev rows were answered: nothing has changed since the step before."""


@dataclass
class CohortFiles:
    """Where a cohort's files go, and who hears how it fares. Of processes that train together the first one writes."""

    place: Path
    """the cohort's own folder"""
    folder: Path
    """of the runs' folders"""
    runs: list[AnyRun]
    watch: Watcher
    world: World = field(default_factory=World)
    prefixes: FrozenCache | None = None
    """what is kept for all cohorts, if texts are read more than once"""
    fallbacks: list[str] = field(default_factory=list)
    save_seconds: float = 0.0
    draws_curves: bool = True
    """as pictures in the runs' folders"""
    keeps_last: bool = True
    """the last epoch's weights, beside the best one's"""
    threads: Threads = field(default_factory=lambda: Threads(1))
    """how many compute: fewer while others keep cores busy"""
    saved_at: float = field(default_factory=time.monotonic)
    rest_seconds: float = 0.0
    """what training gets before the next resume state, where a state takes long to write"""
    referee: Referee = field(default_factory=Referee)
    """ends runs before their own end"""

    def is_due(self) -> bool:
        """Whether the last resume state is old enough for another. Processes that train together must all agree."""
        rest = max(self.save_seconds, self.rest_seconds)
        return self.world.place.size > 1 or time.monotonic() - self.saved_at >= rest

    def begin(self) -> None:
        """Forget an earlier state, and put the runs' settings in their folders."""
        if self.world.is_first:
            drop_state(self.place)
            for run in self.runs:
                write_start(self.folder / run.id, run)
        self.world.agree(self.place.name, "cohort")  # no process looks for a state before it is gone

    def write_membership(self, settings: CohortSettings) -> None:
        """Who trains together, and how."""
        if self.world.is_first:
            write_membership(self.place, self.runs, settings, self.fallbacks)

    def write_history(self, member: AnyMember) -> None:
        """A run's epochs so far."""
        if self.world.is_first:
            write_history(self.folder / member.run.id, member.progress.history)

    def write_probe(self, member: AnyMember, cohort: Cohort) -> None:
        """The head that a run begins with, so that what adapters are worth can be told from it."""
        if self.world.is_first:
            head = {name: tensor for name, tensor in member.read(cohort.bank).items() if head_part.is_of_head(name)}
            write_tensors(self.folder / member.run.id / PROBE_HEAD, head)

    def save(self, cohort: Cohort) -> None:
        """The resume state. It holds the first process's generators; the others' begin anew with every state."""
        began = time.monotonic()
        if self.world.is_first:
            save_state(self.place, cohort)
        self.saved_at = time.monotonic()
        took = self.saved_at - began
        self.rest_seconds = _REST * took if took > _QUICK_SECONDS else 0.0
        self.world.reseed(self.place.name, cohort.num_steps)

    def check_stop(self) -> None:
        """Stop answering dev rows, which may take minutes, if asked to; processes that share them must go on."""
        self.watch.on_answer()
        if self.world.place.size == 1 and self.world.is_stopping:
            raise _Unscored

    def end(self) -> None:
        """The cohort has ended."""
        if self.world.is_first:
            drop_state(self.place)

    def share_cores(self, cohort: Cohort) -> None:
        """Take more threads or fewer from here on, if other processes have left cores or taken them."""
        if self.threads.look_again():
            torch.set_num_threads(self.threads.number)
            cohort.settings = replace(cohort.settings, num_threads=self.threads.number)
            self.write_membership(cohort.settings)
            if self.threads.is_news:
                self.watch.on_notice(self.threads.note)

    def fall_back(self, message: str, settings: CohortSettings) -> None:
        """Tell that memory ran out; a resume begins with what was chosen then."""
        self.fallbacks.append(message)
        self.write_membership(settings)
        self.watch.on_fallback(message)


def train(cohort: Cohort, desk: CohortFiles) -> None:
    """Train every run of the cohort to its end, writing each one's folder."""
    watch = desk.watch
    _pass_over(cohort, desk)
    watch.on_start(cohort)
    if note := desk.referee.begin(cohort, desk.folder):
        watch.on_notice(note)
    if not cohort.is_unscored:  # else after the scores, as if it had not been stopped: slots are given in order
        _settle(cohort, desk)  # runs that ended before a kill, but were perhaps not yet written
    with _interruptible(desk.world), cohort.training():
        while cohort.active:
            before, began = cohort.active, time.perf_counter()
            desk.share_cores(cohort)
            num_rows = 0 if cohort.is_unscored else _step(cohort, desk)
            is_late = desk.referee.is_late(len(before))
            try:
                records = _score(cohort, desk, is_late=is_late)
            except _Unscored:
                desk.save(cohort)
                raise Interrupted from None
            cohort.seconds += time.perf_counter() - began
            watch.on_step(cohort, num_rows)
            for member, record in records:
                if record.get("stage") == PROBE:
                    desk.write_probe(member, cohort)
                desk.write_history(member)
                watch.on_epoch(member, record)
            if not any(member.progress.cursor for member in cohort.active):  # all are scored: no step is worth its time
                is_late = is_late or desk.referee.is_late(len(cohort.active))
            desk.referee.judge(cohort.members, {member.run.id for member, _ in records}, is_late=is_late)
            ended, is_stopping = [member for member in before if not member.is_active], desk.world.is_stopping
            # Before any result is written: resumed, the runs still training must find their cohort as it was. From an
            # older state those that ended in between end again, to the same result, which is not written twice.
            is_a_time = records or ended or cohort.num_steps % cohort.settings.save_every == 0
            if is_stopping or (is_a_time and desk.is_due()):
                desk.save(cohort)
            for member in ended:
                _write_end(member, cohort, desk)
                with _answering(cohort):
                    watch.on_end(member)
            _settle(cohort, desk)
            if is_stopping:
                raise Interrupted


def _pass_over(cohort: Cohort, desk: CohortFiles) -> None:
    """Leave out copies of the backbone that were trained elsewhere since the state was written.

    Other runs must find their cohort as it was: they draw the random numbers that it leaves them.
    """
    runs = cohort.queue.runs
    if runs[0].spec.is_finetuned:
        cohort.queue.passed = {run.id for run in runs if is_finished(desk.folder / run.id)}


def _settle(cohort: Cohort, desk: CohortFiles) -> None:
    """Write the runs that have ended and give their slots to those that wait.

    No state is written: from the last one, whose slots they still hold, the same runs enter the same slots.
    """
    while True:
        for member in cohort.members:
            if not member.is_active:
                _write_end(member, cohort, desk)
        entered = cohort.refill()
        for member in entered:
            desk.watch.on_enter(member)
        desk.referee.admit(entered)
        if all(member.is_active for member in entered):  # else some had lost their slots and ended, or came too late
            return


def _step(cohort: Cohort, desk: CohortFiles) -> int:
    def halve() -> str:
        if not cohort.halve_budget():
            return ""
        desk.save(cohort)  # before the membership: between the two, the old budget runs out again and ends here
        return f"{cohort.settings.token_budget:,} tokens a forward pass"

    try:
        return _in_pieces(cohort, desk, cohort.step, halve)
    except OutOfMemory:
        desk.save(cohort)  # nothing has moved: a smaller cohort goes on from here
        raise


def _score(cohort: Cohort, desk: CohortFiles, *, is_late: bool = False) -> list[tuple[AnyMember, dict[str, Any]]]:
    def halve() -> str:
        return f"{cohort.answer_budget:,} tokens a forward pass over dev rows" if cohort.halve_answers() else ""

    with _answering(cohort):
        return _in_pieces(cohort, desk, lambda: cohort.finish_epochs(desk.check_stop, is_late=is_late), halve)


@contextmanager
def _answering(cohort: Cohort) -> Iterator[None]:
    """The backbone as it answers, between two steps: nothing is dropped."""
    cohort.backbone.model.eval()
    try:
        yield
    finally:
        cohort.backbone.model.train()


def _in_pieces(cohort: Cohort, desk: CohortFiles, work: Callable[[], Any], halve: Callable[[], str]) -> Any:
    """What `work` gives, in smaller pieces as often as memory runs out; raises OutOfMemory where they cannot be.

    `halve` says what they are then; nothing, if they are as small as can be.
    """
    while True:
        try:
            return work()
        except OutOfMemory as error:
            if not (pieces := halve()):
                raise
            reason = error.message
        desk.fall_back(f"memory ran out ({reason}): {pieces} from here on", cohort.settings)


def _write_end(member: AnyMember, cohort: Cohort, desk: CohortFiles) -> None:
    """Everything of an ended run, the result last. Written again after a kill, with the same content."""
    place, progress = desk.folder / member.run.id, member.progress
    if not desk.world.is_first or is_finished(place):
        return
    write_history(place, progress.history)
    if member.best_tensors:
        write_tensors(place / "best.safetensors", member.best_tensors)
    if desk.keeps_last:
        write_tensors(place / "last.safetensors", member.read(cohort.bank))
    if desk.draws_curves:
        draw_curve(place / "curve.png", member.run, progress)
    result = Result(
        run_id=member.run.id,
        status=progress.status,
        best_epoch=progress.best_epoch,
        dev_metric=progress.best_metric,
        history=progress.history,
        seconds=cohort.seconds - progress.began,
        peak_memory_bytes=peak_memory_bytes(cohort.backbone.device),
        message=progress.message,
    )
    write_result(place, result)


@contextmanager
def _interruptible(world: World) -> Iterator[None]:
    """Ctrl-C is told to the world, so that the step in hand is finished, or the pass over dev rows, and saved; a second
    one stops at once."""
    asked = threading.Event()
    world.listen(asked)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
