"""The training loop of one cohort: steps, scores, and the order in which files are written.

What always holds: the resume state is on disk before a result that depends on it, and a result is the last file of a
run. Killed anywhere, nothing is lost and nothing half written.
"""

from __future__ import annotations

import io
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inlay.errors import OutOfMemory
from inlay.model import head as head_part
from inlay.settings import FitSettings
from inlay.store import write_atomically
from inlay.threads import Threads, set_threads
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.cohort.frozen_cache import FrozenCache
from inlay.training.cohort.member import PROBE, AnyMember, Progress
from inlay.training.cohort.memory import peak_memory_bytes, retry_smaller
from inlay.training.cohort.parallel import World
from inlay.training.cohort.resume import cohort_id, save_state, write_membership
from inlay.training.events import (
    CohortStarted,
    Emit,
    EpochEnded,
    MemoryRanOut,
    Notice,
    RowsAnswered,
    RunEnded,
    RunEntered,
    StateSaved,
    StepTaken,
    ignore,
)
from inlay.training.recipe.halving import Referee
from inlay.training.run.checked_files import write_tensors
from inlay.training.run.run import AnyRun, Result, count_start_steps
from inlay.training.run.run_folder import PROBE_HEAD, is_finished, write_history, write_result

# A state of many large slots is gigabytes: written at every epoch's end it would take longer than the epochs. So a save
# that takes more than a second is not repeated before training had twenty times as long.
_QUICK_SECONDS, _REST = 1.0, 20.0
MAX_DRAWN = 8
"""largest cohort whose learning curves are drawn by default"""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during training: the resume state is on disk."""


class _Unscored(Exception):
    """Ctrl-C while dev rows were answered: the state is that of the last step."""


@dataclass
class CohortContext:
    """What the training of one cohort takes from `fit`, and the writing of its files.

    Of several processes, the first writes them.
    """

    runs: list[AnyRun]
    runs_dir: Path
    """the folder that gets a folder for each run, and `cohorts/`"""
    settings: FitSettings = field(default_factory=FitSettings)
    emit: Emit = ignore
    world: World = field(default_factory=World)
    referee: Referee = field(default_factory=Referee)
    """ends runs before their own end"""
    cache: FrozenCache | None = None
    """the states of frozen layers, kept for all cohorts, if texts are read more than once"""
    fallbacks: list[str] = field(default_factory=list)
    """settings that were made smaller because memory ran out"""
    threads: Threads = field(default_factory=lambda: Threads(1))
    """the number of threads that compute: fewer while other processes keep cores busy"""
    saved_at: float = field(default_factory=time.monotonic)
    rest_seconds: float = 0.0
    """training time before the next resume state, if a state takes long to write"""

    @property
    def cohort_dir(self) -> Path:
        """The cohort's own folder, which follows from its runs."""
        return self.runs_dir / "cohorts" / cohort_id(self.runs)

    def is_due(self) -> bool:
        """Tell whether it is time for another resume state. Processes that train together must all agree."""
        rest = max(self.settings.save_seconds, self.rest_seconds)
        return self.world.process.size > 1 or time.monotonic() - self.saved_at >= rest

    def write_membership(self, settings: CohortSettings) -> None:
        """Write the runs of the cohort, in order, and its settings."""
        if self.world.process.is_first:
            write_membership(self.cohort_dir, self.runs, settings, self.fallbacks)

    def save(self, cohort: Cohort) -> None:
        """Write the resume state, with the generators of the first process; the others reseed theirs each time."""
        began = time.monotonic()
        if self.world.process.is_first:
            save_state(self.cohort_dir, cohort)
            self.emit(StateSaved(self.runs_dir))
        self.saved_at = time.monotonic()
        took = self.saved_at - began
        self.rest_seconds = _REST * took if took > _QUICK_SECONDS else 0.0
        self.world.reseed(self.cohort_dir.name, cohort.num_steps)

    def fall_back(self, reason: str, smaller: str, settings: CohortSettings) -> None:
        """Record that memory ran out, and write the smaller settings: a resume begins with them."""
        message = f"memory ran out ({reason}): {smaller}"
        self.fallbacks.append(message)
        self.write_membership(settings)
        self.emit(MemoryRanOut(message))


def train(cohort: Cohort, context: CohortContext) -> None:
    """Train every run of the cohort to its end, writing each one's folder."""
    emit, world, referee = context.emit, context.world, context.referee
    runs, runs_dir = cohort.queue.runs, context.runs_dir
    # Leave out copies of the backbone that were trained elsewhere since the state was written. Other runs must find
    # their cohort as it was: they draw the random numbers that it leaves them.
    if runs[0].spec.is_finetuned:
        cohort.queue.passed = {run.id for run in runs if is_finished(runs_dir / run.id)}
    emit(CohortStarted(cohort))
    if note := referee.begin(cohort, runs_dir):
        emit(Notice(note))
    if not cohort.is_unscored:  # else after the scores, since slots are given in order
        _settle(cohort, context)  # runs that ended before a kill; their results may not be written yet
    with _interruptible(world), cohort.training():
        while cohort.active:
            # 1. One step of every run, unless epochs were stopped before they were scored.
            before, began = cohort.active, time.perf_counter()
            if context.threads.look_again():  # other processes came or went, and so did free cores
                _use_threads(cohort, context)
            num_rows = 0 if cohort.is_unscored else _step(cohort, context)
            # 2. Score the runs that ended an epoch.
            is_late = referee.is_late(len(before))
            try:
                records = _score(cohort, context, is_late=is_late)
            except _Unscored:
                context.save(cohort)
                raise Interrupted from None
            cohort.seconds += time.perf_counter() - began
            emit(StepTaken(cohort, num_rows))
            for member, record in records:
                if world.process.is_first:
                    _write_epoch(member, record, cohort, runs_dir)
                emit(EpochEnded(member, record))
            # 3. Let the referee end runs, by the new scores and the time.
            if not any(member.progress.cursor for member in cohort.active):  # all are scored, and time is up
                is_late = is_late or referee.is_late(len(cohort.active))
            referee.judge(cohort.members, {member.run.id for member, _ in records}, is_late=is_late)
            ended = [member for member in before if not member.is_active]
            is_stopping = world.is_stopping
            # 4. Save the resume state before any result is written: after a resume, runs still in training must find
            # their cohort as it was. From an older state, runs that ended since then end again with the same result,
            # which is not written twice.
            is_a_time = records or ended or cohort.num_steps % cohort.settings.save_every == 0
            if is_stopping or (is_a_time and context.is_due()):
                context.save(cohort)
            # 5. Write the runs that ended, and give their slots to those that wait.
            for member in ended:
                _write_end(member, cohort, context)
                with cohort.backbone.answering():
                    emit(RunEnded(member))
            _settle(cohort, context)
            if is_stopping:
                raise Interrupted


def _settle(cohort: Cohort, context: CohortContext) -> None:
    """Write the runs that have ended and give their slots to those that wait.

    No state is written: from the last one, whose slots they still hold, the same runs enter the same slots.
    """
    while True:
        for member in cohort.members:
            if not member.is_active:
                _write_end(member, cohort, context)
        entered = cohort.refill()
        for member in entered:
            context.emit(RunEntered(member))
        context.referee.admit(entered)
        if all(member.is_active for member in entered):  # else some had lost their slots and ended, or came too late
            return


def _use_threads(cohort: Cohort, context: CohortContext) -> None:
    """Compute with the newly chosen number of threads from here on."""
    threads = context.threads
    set_threads(threads.number)
    cohort.settings = replace(cohort.settings, num_threads=threads.number)
    context.write_membership(cohort.settings)
    if threads.is_news:
        context.emit(Notice(threads.note))


def _step(cohort: Cohort, context: CohortContext) -> int:
    """Take one step, with fewer tokens in a forward pass if memory runs out; returns the number of rows."""

    def shrink(reason: str) -> None:
        is_smaller = cohort.halve_budget()
        # Nothing has moved, so a smaller cohort can go on from here. And the state comes before the membership:
        # killed between the two, the old budget runs out of memory again and ends here.
        context.save(cohort)
        if not is_smaller:
            raise OutOfMemory(reason)
        pieces = f"{cohort.settings.token_budget:,} tokens a forward pass from here on"
        context.fall_back(reason, pieces, cohort.settings)

    return retry_smaller(cohort.step, shrink)


def _score(cohort: Cohort, context: CohortContext, *, is_late: bool = False) -> list[tuple[AnyMember, dict[str, Any]]]:
    """Score the runs that ended an epoch, with fewer tokens in a forward pass if memory runs out."""

    def check_stop() -> None:  # answering may take minutes; not where processes share the rows
        context.emit(RowsAnswered())
        if context.world.process.size == 1 and context.world.is_stopping:
            raise _Unscored

    def shrink(reason: str) -> None:
        if not cohort.halve_answers():
            raise OutOfMemory(reason)
        pieces = f"{cohort.answer_budget:,} tokens a forward pass over dev rows from here on"
        context.fall_back(reason, pieces, cohort.settings)

    with cohort.backbone.answering():
        return retry_smaller(lambda: cohort.finish_epochs(check_stop, is_late=is_late), shrink)


def _write_epoch(member: AnyMember, record: dict[str, Any], cohort: Cohort, runs_dir: Path) -> None:
    """Write a run's epochs so far, and the linear probe that it begins with, for a later comparison of scores."""
    if record.get("stage") == PROBE:
        head = {name: tensor for name, tensor in member.read(cohort.bank).items() if head_part.is_of_head(name)}
        write_tensors(runs_dir / member.run.id / PROBE_HEAD, head)
    write_history(runs_dir / member.run.id, member.progress.history)


def _write_end(member: AnyMember, cohort: Cohort, context: CohortContext) -> None:
    """Write all files of an ended run, the result last. Repeated after a kill, it writes the same content."""
    folder, progress, settings = context.runs_dir / member.run.id, member.progress, context.settings
    if not context.world.process.is_first or is_finished(folder):
        return
    write_history(folder, progress.history)
    weights = write_tensors(folder / "best.safetensors", member.best_tensors) if member.best_tensors else ""
    if settings.keep_last:
        write_tensors(folder / "last.safetensors", member.read(cohort.bank))
    is_drawn = len(context.runs) <= MAX_DRAWN if settings.draw_curves is None else settings.draw_curves
    if is_drawn:
        draw_curve(folder / "curve.png", member.run, progress)
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
    write_result(folder, result, weights)


def draw_curve(path: Path, run: AnyRun, progress: Progress) -> None:
    """Write the learning curve as PNG: training loss by step, dev score by epoch, if one was finished."""
    from matplotlib.figure import Figure  # half a second to import, and only at the end of a run

    def position(line: dict[str, Any]) -> int:
        """Return an epoch's position on the axis of steps, counting those before training."""
        return int(line["step"]) + (0 if line.get("stage") == PROBE else count_start_steps(run.config.train))

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        range(1, len(progress.losses) + 1), progress.losses, color="#9bb8d3", linewidth=0.8, label="loss per step"
    )
    if progress.history:
        steps = [position(line) for line in progress.history]
        known = [line for line in progress.history if line["train_loss"] is not None]
        losses = [line["train_loss"] for line in known]
        axes.plot([position(line) for line in known], losses, color="#1f4e79", label="loss per epoch")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=0)
    lines, names = axes.get_legend_handles_labels()
    if progress.history:
        metric = run.metric
        scores = axes.twinx()
        (line,) = scores.plot(steps, [item["dev"][metric] for item in progress.history], "o-", color="#c0504d")
        best = next((line for line in progress.history if line["epoch"] == progress.best_epoch), progress.history[-1])
        scores.plot(position(best), best["dev"][metric], "o", color="#c0504d", markersize=10, fillstyle="none")
        scores.set_ylabel(f"dev {metric} (best: {best['dev'][metric]:.4f}, epoch {best['epoch']})", color="#c0504d")
        lines, names = [*lines, line], [*names, f"dev {metric}"]
    figure.legend(lines, names, loc="outside lower center", ncols=3, frameon=False)
    method, train = run.config.method, run.config.train
    axes.set_title(f"{run.name}: {method.name}, size {method.size}, lr {train.lr:g}, seed {train.seed}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


@contextmanager
def _interruptible(world: World) -> Iterator[None]:
    """Let the first Ctrl-C stop after the current step or dev pass, with everything saved; the second stops at once."""
    asked = world.asked = threading.Event()
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
