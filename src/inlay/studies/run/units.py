"""Units of work: runs that are trained and scored together, each record written as soon as it is known.

The result of a finished run is read from its folder, and a stopped cohort is resumed. If a unit fails with an error
that a user can fix, the other units are still trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.errors import InlayError
from inlay.model import is_out_of_memory
from inlay.studies.ablate import score_spans
from inlay.studies.judge.row_sampling import keep_influences
from inlay.studies.run.recording import Recorder, has_diverged, list_notes, name_processor
from inlay.studies.run.records import Record
from inlay.studies.spec.planning import PlannedRun, StudyPlan
from inlay.studies.task_sequence import train_sequence
from inlay.training import (
    AnyRun,
    Emit,
    Event,
    FitSettings,
    Interrupted,
    JointRun,
    RunEnded,
    drop_rows,
    fan_out,
    fit,
    has_compiled_losses,
    is_finished,
    read_result,
    start_from,
    structure_of,
)

_SAVE_SECONDS = 60.0  # a state holds all weights and moments: saved after each epoch, it would cost more than the epoch

Keep = Callable[[Sequence[Record]], None]


@dataclass(frozen=True, eq=False)
class Unit:
    """A piece of work: runs that train together or one after another, or one item of another kind of arm."""

    kind: str
    items: tuple[PlannedRun, ...]
    """the items without a record"""
    resumed_with: tuple[PlannedRun, ...] = ()
    """finished items of a stopped cohort, which can only be resumed as a whole"""
    is_begun: bool = False
    """whether it was stopped, and has a state to resume from"""

    @property
    def is_finetuned(self) -> bool:
        """Whether its runs train copies of the backbone's weights, one after another."""
        return any(item.is_finetuned for item in self.items)

    @property
    def is_sequential(self) -> bool:
        """Whether it trains several copies of the backbone, one after another."""
        return self.is_finetuned and len(self.items) > 1

    @property
    def num_together(self) -> int:
        """Number of runs that train at the same time, if memory allows."""
        return 1 if self.is_finetuned else len(self.items) + len(self.resumed_with)

    @property
    def cost(self) -> float:
        return sum(item.cost for item in self.items)

    @property
    def num_runs(self) -> int:
        return len(self.items)

    @property
    def run_ids(self) -> set[str]:
        """The runs of its items and of those it is resumed with."""
        return {item.id for item in (*self.items, *self.resumed_with)}

    @property
    def urgency(self) -> tuple[bool, bool, int]:
        return (not self.is_begun, self.is_finetuned, self.items[0].tier)

    @property
    def compile_key(self) -> tuple[Any, ...]:
        """A key that is equal for units with the same compiled programs."""
        item = self.items[0]
        if item.run is None:
            return (item.arm.kind,)
        method, rates, _, num_parts = structure_of(item.run)  # whether the run is alone does not matter
        return (method, rates, num_parts, has_compiled_losses(item.run))

    def take(self, items: Iterable[PlannedRun]) -> Unit:
        """Return the unit with some of its items only."""
        return dataclasses.replace(self, items=tuple(items))

    def describe(self) -> str:
        """Return its arms, tasks and settings in a few words."""
        arms = list(dict.fromkeys(item.arm.name for item in self.items))
        tasks = list(dict.fromkeys(task for item in self.items for task in item.all_tasks))
        first = ", ".join(arms[:3]) + (f" … {arms[-1]}" if len(arms) > 3 else "")
        where = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"
        where += ", one after another" if len(tasks) > 1 and self.items[0].sequence else ""
        seeds = sorted({item.seed for item in self.items})
        which = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
        # sizes that the arms do not name, and the learning rate: they tell units of the same arms apart
        trained = [item for item in self.items if item.run is not None or item.sequence]
        named = {item.config.method.size for item in trained if str(item.config.method.size) not in item.arm.name}
        sizes = sorted(size for size in named if size is not None)
        if sizes:
            which += f", size {sizes[0]}" + (f" to {sizes[-1]}" if len(sizes) > 1 else "")
        rates = {item.config.train.lr for item in trained}
        if len(rates) == 1 and None not in rates:
            which += f", lr {rates.pop():g}"
        return f"{first} on {where}, {which}"


class UnitRunner:
    """Trains and scores units of these plans, and gives records to `keep` as soon as they are known."""

    def __init__(self, plans: Mapping[str, StudyPlan], runs: Path, keep: Keep, commit: str | None = None) -> None:
        self._plans, self._runs, self._keep, self._commit = plans, runs, keep, commit
        self._recorders: dict[str, Recorder] = {}
        self._kept: set[tuple[str, str, str]] = set()

    def do(self, unit: Unit, emit: Emit) -> list[tuple[PlannedRun, InlayError]]:
        """Train and score a unit and keep its records; return the failed items with their errors.

        If copies of the backbone that train one after another fail, those that are left are trained one by one, without
        the common state, so that each can only fail by itself. If the unit is stopped, the records of finished runs are
        kept, except of runs whose spans must still be scored, which takes minutes.
        """
        try:
            if unit.kind == "runs":
                self._train(unit, emit)
            elif unit.kind == "baseline":
                self._score_baseline(unit.items[0])
            else:
                self._train_sequence(unit.items[0], emit)
        except Interrupted:
            self._keep_finished(unit.take(item for item in unit.items if item.arm.kind != "spans"))
            raise
        except InlayError as error:
            self._keep_finished(unit)
            lost = [item for item in unit.items if item.key not in self._kept]
            if unit.is_sequential:
                drop_rows(self._runs / "cohorts", unit.run_ids)
                return [failure for item in lost for failure in self.do(Unit(unit.kind, (item,)), emit)]
            self.record_failure(lost, error)
            return [(item, error) for item in lost]
        return []

    def record_failure(self, items: Iterable[PlannedRun], error: InlayError) -> None:
        """Keep records that say why items have no result; they are tried again in the next session."""
        self._keep([self._recorder(item).record_failure(item, error) for item in items])

    def _recorder(self, item: PlannedRun) -> Recorder:
        if item.study not in self._recorders:
            self._recorders[item.study] = Recorder(self._plans[item.study], self._commit)
        return self._recorders[item.study]

    def _hand_over(self, item: PlannedRun, records: Sequence[Record]) -> None:
        self._keep(records)
        self._kept.add(item.key)

    def _train(self, unit: Unit, emit: Emit) -> None:
        # 1. the runs, with the weights that they start from
        for item in unit.items:
            if item.arm.kind == "spans" or (item.run is not None and _has_tests(item.run)):
                self._forget_without_weights(item.id)
        plan = self._plans[unit.items[0].study]
        settings = FitSettings(save_seconds=_SAVE_SECONDS, draw_curves=False, keep_last=False, **plan.study.fit)
        self._train_sources(unit, plan, settings, emit)
        runs: list[AnyRun] = []
        for item in (*unit.items, *unit.resumed_with):
            run = item.run
            if item.source is not None and isinstance(run, JointRun):
                tasks = [part.task for part in run.parts]
                run = dataclasses.replace(run, start=start_from(self._runs / item.source.id, run.config, tasks))
            if run is not None:
                runs.append(run)
        if unit.is_finetuned:
            self._keep_finished(unit)  # runs that ended before they were scored, as this unit may be stopped again

        # 2. their training, and their records
        def keep_ended(event: Event) -> None:
            if isinstance(event, RunEnded):
                self._keep_ended(unit, event.member.run)

        fit(runs, plan.backbone, self._runs, settings, fan_out(keep_ended, emit))
        if unit.is_finetuned:  # a state may be left of a cohort of which some runs were trained elsewhere
            drop_rows(self._runs / "cohorts", unit.run_ids)
        self._keep_finished(unit)

    def _train_sources(self, unit: Unit, plan: StudyPlan, settings: FitSettings, emit: Emit) -> None:
        """Train the runs of other studies that this unit starts from, if their weights are not here."""
        all_items = (*unit.items, *unit.resumed_with)  # finished runs are made again too, to resume the whole cohort
        sources = {item.source.id: item.source for item in all_items if item.source is not None}
        for run_id in sources:
            self._forget_without_weights(run_id)
        if any(not is_finished(self._runs / run_id) for run_id in sources):
            fit(list(sources.values()), plan.backbone, self._runs, settings, emit)

    def _forget_without_weights(self, run_id: str) -> None:
        """Let a finished run be trained again if its weights were deleted."""
        folder = self._runs / run_id
        lacks_weights = is_finished(folder) and not (folder / "best.safetensors").is_file()
        result = read_result(folder) if lacks_weights else None
        if result is not None and result.dev_metric is not None:
            (folder / "result.json").unlink()

    def _keep_ended(self, unit: Unit, run: AnyRun) -> None:
        """Keep a run's record as soon as it ends, unless that takes more work, which would delay other runs."""
        pairs_rows = any(self._plans[item.study].study.paired_rows for item in unit.items)
        if (_has_tests(run) or pairs_rows) and not unit.is_finetuned:
            return  # scored with its weights, once the cohort has ended
        for item in unit.items:
            if item.id == run.id and item.arm.kind != "spans":
                try:
                    self._keep_result(item, unit.num_together)
                except (InlayError, RuntimeError, MemoryError) as error:
                    # There may be too little memory for its weights during the training: try again when that has ended.
                    if not is_out_of_memory(error):
                        raise

    def _keep_finished(self, unit: Unit) -> None:
        for item in unit.items:
            self._keep_result(item, unit.num_together)

    def _keep_result(self, item: PlannedRun, num_together: int) -> None:
        """Score an item's run if it has ended, and keep its records.

        Its test rows are scored, and its spans if the arm asks for them. It is done once, though a run that is resumed
        from an older state may end again.
        """
        run, plan = item.run, self._plans[item.study]
        result = read_result(self._runs / item.id) if run is not None and item.key not in self._kept else None
        if run is None or result is None:
            return
        extra: dict[str, Any] = {"together": num_together}
        if isinstance(run, JointRun):
            self._hand_over(item, self._recorder(item).record_joint(item, result, extra))
            return
        if item.arm.kind == "spans" and not has_diverged(result):
            # `first-last` -> dev score without the adapters of these layers; `whole` is the score with all
            scores = score_spans(plan.backbone, self._runs / item.id, run.task)
            extra["spans"] = {"whole" if span is None else f"{span[0]}-{span[1]}": at for span, at in scores.items()}
        if plan.study.paired_rows and not has_diverged(result):
            keep_influences(self._runs / item.id, run, result, plan.backbone)
        self._hand_over(item, [self._recorder(item).record_result(item, result, extra)])

    def _score_baseline(self, item: PlannedRun) -> None:
        from inlay.explore import fit_baseline  # scikit-learn takes long to import

        task = self._plans[item.study].tasks[item.task]
        found = fit_baseline(task)
        record = self._recorder(item).record(
            item,
            task,
            trained_parameters=found.num_parameters,
            dev=found.metrics["dev"],
            test=found.metrics.get("test"),
            seconds=found.seconds,
            hardware=name_processor(),
            extra={"notes": [*list_notes(task), *found.notes], "tried": found.tried},
        )
        self._hand_over(item, [record])

    def _train_sequence(self, item: PlannedRun, emit: Emit) -> None:
        """Train one network through all tasks, and keep a record for each."""
        plan = self._plans[item.study]
        settings, folder = FitSettings(**plan.study.fit), self._runs / item.id
        steps = train_sequence(plan.backbone, item.sequence, item.config, folder, emit, settings=settings)
        records = []
        for number, step in enumerate(steps):
            known = {name: value for name, value in step.items() if name not in ("task", "extra")}
            known["id"] = f"{item.id}-{number}" if number else item.id
            known["extra"] = {**step["extra"], "sequence": [task.name for task in item.sequence]}
            records.append(self._recorder(item).record(item, plan.tasks[step["task"]], **known))
        self._hand_over(item, records)


def _has_tests(run: AnyRun) -> bool:
    return any(part.task.test is not None for part in run.parts)
