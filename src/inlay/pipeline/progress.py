"""Training with its progress on the screen: a line for each epoch of a single run, or for each ended run of several."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay import model, reports, terminal, training
from inlay.errors import InlayError
from inlay.pipeline.trackers import open_trackers
from inlay.settings import FitSettings

if TYPE_CHECKING:
    from inlay.cluster import RaySettings

_MANY_TEXTS = 500  # with fewer texts, the backbone's lower layers are done before a bar could be read
_LONG_SECONDS = 1.0  # shorter compilations are not reported: they were read back from the cache
_MANY_ROWS = 10_000  # fewer rows are tokenised before a bar could be read


def fit_runs(
    runs: Sequence[training.AnyRun],
    backbone: model.Backbone,
    folder: Path,
    settings: FitSettings,
    referee: training.Referee | None = None,
    cluster: RaySettings | None = None,
    trackers: Sequence[str] = (),
) -> list[training.Result]:
    """Train the unfinished runs, here or on a cluster, with progress on the screen; return the results of all runs.

    `trackers` (`tensorboard`, `mlflow`) log the epochs too.
    """
    if all(training.is_finished(folder / run.id) for run in runs):
        many = f"run {runs[0].id} was" if len(runs) == 1 else f"all {len(runs)} runs were"
        terminal.log(f"{many} finished before: not trained again", "yellow")
        return training.fit(runs, backbone, folder, settings)
    if cluster is not None:
        from inlay.cluster import fit_on_ray

        with resumable(), terminal.Meter("training on the cluster") as meter:
            return fit_on_ray(runs, backbone, folder, settings, cluster, meter.log)
    with resumable(), terminal.Meter("training") as meter:
        emit: training.Emit
        emit = TrainingProgress(meter, num_runs=len(runs)) if terminal.is_main_process() else training.ignore
        if trackers and terminal.is_main_process():
            emit = training.fan_out(emit, *open_trackers(trackers, folder))
        return training.fit(runs, backbone, folder, settings, emit, referee=referee)


def write_brief_reports(
    runs: Sequence[training.AnyRun],
    results: Sequence[training.Result],
    backbone: model.Backbone,
    folder: Path,
    left_out: str = reports.UNCHOSEN,
) -> None:
    """Write brief reports on runs that were not chosen into their folders; a failure is noted and stops nothing."""
    if not terminal.is_main_process():
        return
    try:
        reports.write_brief_reports(runs, results, backbone, folder, left_out)
    except InlayError as error:
        terminal.detail(f"no report was written: {error.message}")


def parse_cluster(text: str, num_cpus: float = 1, num_gpus: float = 0) -> RaySettings:
    """Parse the value of `--on`: the cluster to train on, and what each group of runs asks of a machine."""
    from inlay.cluster import RaySettings

    return RaySettings.parse(text, num_cpus, num_gpus)


@contextmanager
def resumable() -> Iterator[None]:
    """Explain after Ctrl-C how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped, and saved: the same command goes on from there") from None


class TrainingProgress:
    """A listener that draws the progress of `num_runs` runs on a meter, cohort by cohort."""

    def __init__(self, meter: terminal.Meter, *, num_runs: int = 1) -> None:
        self._meter, self._num_runs = meter, num_runs
        self._began, self._num_rows = 0.0, 0
        self._noted: set[str] = set()
        self._best = ""
        self._fell_back = False

    def __call__(self, event: training.Event) -> None:
        match event:
            case training.StepTaken(cohort, num_rows):
                self._num_rows += num_rows
                self._draw(cohort)
            case training.EpochEnded(member, record):
                self._show_epoch(member, record)
            case training.RunEnded(member):
                self._show_end(member)
            case training.RunEntered(member):
                self._note_rows(member)
            case training.CohortStarted(cohort):
                self._show_start(cohort)
            case training.MemoryRanOut(message):
                self._fell_back = True
                self._meter.log(message, "yellow")
            case training.Notice(message):
                self._meter.log(message)
            case training.CompileStarted(what):
                self._meter.wait(what)
            case training.CompileEnded(what, seconds) if seconds >= _LONG_SECONDS:
                self._meter.log(f"{what}: {terminal.duration(seconds)}")
            case training.RowsEncoded(num_done, num_rows) if num_rows >= _MANY_ROWS:
                self._meter.update(num_done, title="tokenising", total=num_rows)
            case training.StatesCached(num_done, num_texts) if num_texts >= _MANY_TEXTS:
                self._meter.update(num_done, title="computing the frozen layers once", total=num_texts)
            case training.CacheFull(num_left, num_texts):
                self._meter.log(
                    f"memory and disk hold the frozen layers of {num_texts - num_left:,} of {num_texts:,} texts: "
                    "those of the others are computed in every epoch"
                )

    def _show_start(self, cohort: training.Cohort) -> None:
        self._began, self._num_rows = time.perf_counter(), 0
        for member in cohort.members:
            self._note_rows(member)
        if cohort.num_steps and not self._fell_back:
            self._meter.log(f"going on after step {cohort.num_steps:,} of the run that was stopped")
        self._meter.log(_describe_cohort(cohort))
        self._draw(cohort)

    def _note_rows(self, member: training.AnyMember) -> None:
        """Report once for each task how many of its texts and answers are cut."""
        for part in member.parts:
            if part.run.task.digest not in self._noted:
                self._noted.add(part.run.task.digest)
                _note_truncation(part, self._meter)

    def _show_epoch(self, member: training.AnyMember, record: dict[str, Any]) -> None:
        metric, epochs = member.run.metric, member.num_stages
        value = record["dev"][metric]
        self._best = f"dev {member.progress.best_metric:.4f}"
        if self._is_alone:
            digits = len(str(epochs))
            is_best = " *" if member.progress.best_epoch == record["epoch"] else ""
            stages = {training.PROBE: "linear probe", training.CONTRAST: " of the contrastive start"}
            loss = stages.get(record.get("stage", ""), "")
            if record["train_loss"] is not None:
                loss = f"loss {record['train_loss']:.4f}{loss}"
            self._meter.log(
                f"epoch {record['epoch']:>{digits}}/{epochs}  {loss}  "
                f"dev {metric} {value:.4f}  {terminal.duration(record['seconds'])}{is_best}"
            )

    def _show_end(self, member: training.AnyMember) -> None:
        progress = member.progress
        if progress.status == training.DIVERGED:
            self._meter.log(f"run {member.run.id} {progress.message}", "yellow")
        elif progress.status == training.STOPPED_EARLY and self._is_alone:
            self._meter.log(f"stopped after epoch {progress.epoch}: {progress.message}")
        elif progress.message and self._is_alone:
            self._meter.log(progress.message)
        elif not self._is_alone:
            why = f"  {progress.message}" if progress.message else ""
            own = member.run.task.train if isinstance(member, training.Member) else None
            rows = "" if own is None else f"  {terminal.count(len(own), 'row')}"
            self._meter.log(
                f"{_describe(member)}{rows}  dev {member.run.metric} {terminal.score(progress.best_metric)}  "
                f"epoch {progress.best_epoch}{why}"
            )

    def _draw(self, cohort: training.Cohort) -> None:
        members, queue = cohort.members, cohort.queue
        self._is_alone = len(queue.runs) == self._num_runs == 1
        total = cohort.left_steps + sum(run.num_steps for run in queue.waiting)
        taken = sum(member.steps_taken for member in members)
        total += taken + sum(member.steps_left for member in members if member.is_active)
        done = cohort.left_steps + taken
        done += sum(parked.progress.step for parked in queue.parked)
        rate = self._num_rows / max(time.perf_counter() - self._began, 1e-9)
        losses = [member.progress.losses[-1] for member in members if member.is_active and member.progress.losses]
        loss = f"{sum(losses) / len(losses):.3f}" if losses else "-"
        text = f"loss {loss}  {rate:,.0f} rows/s  {self._best if self._is_alone else ''}".rstrip()
        if len(queue.runs) == 1:
            epoch, epochs = members[0].progress.epoch, members[0].num_stages
            name = "" if self._is_alone else f"{_describe(members[0])}  "
            title = f"{name}epoch {min(epoch + 1, epochs)}/{epochs}"
        else:
            title = f"{len(cohort.active)} of {len(queue.runs)} runs"
            title += f", {len(queue.waiting)} waiting" if queue.waiting else ""
        self._meter.update(done, text, title=title, total=total)


def _describe_cohort(cohort: training.Cohort) -> str:
    """Say what fits in the memory: `4 runs together, 2 waiting, up to 16,384 tokens a forward pass`."""
    how = f"{cohort.num_seats} runs together" if cohort.num_seats > 1 else "one run after another"
    many = f"{how}, {len(cohort.queue.waiting)} waiting, "
    again = ", activations computed again" if cohort.settings.checkpointing else ""
    tokens = f"up to {cohort.settings.token_budget:,} tokens a forward pass"
    return f"{many if len(cohort.queue.runs) > 1 else ''}{tokens}{again}"


def _describe(member: training.AnyMember) -> str:
    method, train = member.run.config.method, member.run.config.train
    return f"{terminal.name_method(method.name, method.size)}  lr {train.lr:g}  seed {train.seed}"


def _note_truncation(member: training.Member, meter: terminal.Meter) -> None:
    num_truncated, num_rows = member.train.num_truncated, len(member.train.ids)
    if num_truncated:
        max_length = member.run.max_length
        part = terminal.share(num_truncated, num_rows)
        meter.log(f"{terminal.count(num_truncated, 'text')} of {num_rows:,} ({part}) cut to {max_length} tokens")
    if member.num_cut_answers:
        part, longest = terminal.share(member.num_cut_answers, num_rows), member.run.spec.head.max_answer
        answers = terminal.count(member.num_cut_answers, "answer")
        meter.log(f"{answers} of {num_rows:,} ({part}) cut to {longest} tokens; more with `--set train.max_answer=N`")
    if member.num_unwritable:
        answers = terminal.count(member.num_unwritable, "answer")
        meter.log(f"{answers} of {num_rows:,} with characters that `{member.run.config.backbone}` cannot write")
    if member.train.num_lost:
        words = terminal.count(member.train.num_lost, "word")
        meter.log(f"{words} beyond that: not trained on, and counted as outside any entity")
    if member.train.num_rows < num_rows:
        rows = terminal.count(member.train.num_rows, "row")
        meter.log(f"{rows} read in {num_rows:,} windows: {terminal.count(member.steps_per_epoch, 'step')} an epoch")
