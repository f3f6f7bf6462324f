"""`inlay train --budget 5m`: candidates train together, the worst are halved away, and the best is published.

A run that is ended early is not what its id stands for, so candidates have a folder of their own in the store,
`budgets/`, with the plan that was made from measured steps: the same command finds both again. A winner that came to
its own end is put among all runs, as if it had been trained alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.cli import screen
from inlay.cli.screen import Column
from inlay.cli.study import parse_budget
from inlay.cli.train import fit_runs
from inlay.errors import BadConfig, StoreDamaged
from inlay.settings import FitSettings, RunConfig, digest
from inlay.store import write_atomically

if TYPE_CHECKING:
    from inlay.training import PreparedRun, Result, Run, Spending, Standing

_PLAN = "plan.json"
_RESULT = "result.json"
_LONG_SECONDS = 120
_LAST_SECONDS = 2.0  # for answering the probes, writing and publishing
_COLUMNS = {"train.lr": "lr", "method.size": "size", "train.epochs": "epochs"}


def read_budget(text: str | None, folds: int | None = None) -> Budget | None:
    """Return the budget of a command from here on; None if it has none.

    It cannot be combined with `folds`, which take as long as they do and judge the usual settings.
    """
    if text is None:
        return None
    from inlay.training import refuse_several

    seconds = parse_budget(text)
    if folds is not None:
        raise BadConfig(
            f"`--folds {folds}` with `--budget {text}`, which does not say what is chosen before it is trained",
            "leave out one; cross-validate what the budget chose by giving its `--lr`, `--size` and `--epochs`",
        )
    refuse_several()
    return Budget(seconds, time.monotonic())


@dataclass
class Budget:
    """The time budget of a command, and what it was spent on."""

    seconds: float
    began: float
    seconds_before: float = 0.0
    """seconds that earlier calls of the same command trained"""
    spending: Spending | None = None
    candidates: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """the result of each candidate, the chosen one first"""
    metric: str = ""
    was_finished: bool = False
    """whether all of them had been trained before"""

    def train(self, ready: PreparedRun, asked: RunConfig, settings: FitSettings) -> tuple[PreparedRun, Result, bool]:
        """Train the candidates for a run; return the best one, ready to be published, and whether all were known."""
        from inlay.training import Halving, Standing, is_finished

        folder = self._find_folder(ready, asked)
        if settings.restart and not _is_done(folder):
            shutil.rmtree(folder, ignore_errors=True)
        self.spending, runs = self._plan(ready, asked, folder, settings)
        self._describe()
        inside = dataclasses.replace(ready, own_folder=folder)
        self.was_finished = all(is_finished(folder / run.id) for run in runs)
        contest = self.spending.contest(runs)
        referee = Halving(contest, self.spending.seconds, score_seconds=self.spending.score_seconds)
        results = {result.run_id: result for result in fit_runs(runs, ready.backbone, folder, settings, referee)}
        self.seconds_before = referee.seconds_before
        standings = {
            run.id: Standing(result.history, result.status, result.message, result.dev_metric)
            for run, result in ((run, results[run.id]) for run in runs)
        }
        order = contest.choose(standings)
        self.metric = contest.metric
        by_id = {run.id: run for run in runs}
        self.candidates = [_describe_candidate(by_id[run_id], standings[run_id], results[run_id]) for run_id in order]
        chosen, result = by_id[order[0]], results[order[0]]
        if result.status == "finished":
            _put_among_all(folder / chosen.id, ready.runs_folder / chosen.id)
            inside = ready
        return dataclasses.replace(inside, run=chosen), result, self.was_finished

    def _find_folder(self, ready: PreparedRun, asked: RunConfig) -> Path:
        """Return the folder of this command's candidates: the same for the same data, settings and budget."""
        is_open = [asked.train.lr is None, asked.train.epochs is None, asked.method.size is None]
        return ready.store.root / "budgets" / digest([ready.run.id, is_open, self.seconds])[:16]

    def _plan(
        self, ready: PreparedRun, asked: RunConfig, folder: Path, settings: FitSettings
    ) -> tuple[Spending, list[Run]]:
        """Read the plan made when the command was first given, or make one from measured steps."""
        from inlay.training import Spending, make_candidate

        path = folder / _PLAN
        if path.is_file():
            try:
                spending = Spending.from_json(json.loads(path.read_text(encoding="utf8")))
            except (ValueError, KeyError, TypeError) as error:
                raise StoreDamaged(f"the plan `{path}` cannot be read: {error}", f"delete `{folder}`") from None
        else:
            spending = self._measure(ready, asked, settings)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(spending.to_json(), indent=1).encode())
        runs = [make_candidate(ready.run, asked, change, ready.backbone, ready.store) for change in spending.changes]
        return spending, runs

    def _measure(self, ready: PreparedRun, asked: RunConfig, settings: FitSettings) -> Spending:
        from inlay.training import count_answered, list_changes, measure_durations, plan_spending

        run = ready.run
        with screen.working("budget: measuring a few steps"):
            parts = measure_durations(run, ready.backbone, checkpointing=settings.checkpointing)
        after = count_answered(run.task, has_probe=run.config.train.head_start == "probe") * parts.dev
        others = time.monotonic() - self.began + parts.setup + after + min(_LAST_SECONDS, 0.05 * self.seconds)
        left = max(0.0, self.seconds - others)
        return plan_spending(run, list_changes(run, asked), left, parts, may_cut=asked.train.epochs is None)

    def _describe(self) -> None:
        """Say how the budget will be spent."""
        spending = self.spending
        assert spending is not None
        screen.detail(
            f"budget: {screen.duration(self.seconds)}, of which {screen.duration(spending.seconds)} to train: an epoch "
            f"of one run takes about {screen.duration(spending.epoch_seconds)}, with its score"
        )
        usual = screen.count(spending.usual_epochs, "epoch")
        if len(spending.changes) > 1:
            rungs = [f"{rung.kept} after epoch {rung.epoch}" for rung in spending.rungs]
            screen.detail(f"{len(spending.changes)} candidates, of which go on: {', '.join(rungs) or 'all'}")
            tried = [f"{_COLUMNS[key]} {value:g}" for change in spending.changes[1:] for key, value in change.items()]
            screen.detail(f"beside the usual settings: {', '.join(tried)}")
        elif not spending.is_enough:
            at_least = _as_budget(self.seconds - spending.seconds + spending.needed_seconds)
            least = f"{screen.count(spending.epochs, 'epoch')}, for which use `--budget {at_least}`"
            screen.detail(
                f"that is too short for {least}: training ends where the time does; "
                f"the usual {usual} need `--budget {_as_budget(self.needed)}`"
            )
            if spending.before_seconds > spending.seconds:
                before = screen.duration(spending.before_seconds)
                screen.detail(f"what comes before the first step takes about {before}, and is done though it is longer")
        elif spending.epochs < spending.usual_epochs:
            screen.detail(
                f"there is time for {spending.epochs} of the usual {usual}, which need "
                f"`--budget {_as_budget(self.needed)}`"
            )

    @property
    def needed(self) -> float:
        """Seconds that the usual settings alone would take, as measured."""
        assert self.spending is not None
        return self.seconds - self.spending.seconds + self.spending.usual_seconds

    def to_json(self) -> dict[str, Any]:
        """Return the report on the budget as data."""
        assert self.spending is not None
        return {
            "seconds": self.seconds,
            "spent": self.spent,
            "trained_before": self.seconds_before,
            "is_enough": self.spending.is_enough,
            "needed": round(self.needed, 1),
            "epoch_seconds": self.spending.epoch_seconds,
            "rungs": [dataclasses.asdict(rung) for rung in self.spending.rungs],
            "candidates": self.candidates,
        }

    @property
    def spent(self) -> float:
        """Seconds of this call so far, and the training seconds of earlier ones."""
        return round(time.monotonic() - self.began + self.seconds_before, 1)

    def put(self) -> None:
        """Print the result of each candidate, and the time spent."""
        columns = [Column(title, is_number=True) for title in _COLUMNS.values()]
        columns += [Column(f"dev {self.metric}", is_number=True), Column("epoch", is_number=True), Column("end")]
        rows = []
        for index, item in enumerate(self.candidates):
            values = ["-" if value is None else f"{value:g}" for value in item["values"].values()]
            end = item["message"] or "at its own end"
            ends = (screen.score(item["dev_metric"]), str(item["best_epoch"]), f"{end} *" if index == 0 else end)
            rows.append([*values, *ends])
        screen.emit_table(columns, rows)
        said = f"{screen.duration(self.spent)} of {screen.duration(self.seconds)}"
        if self.seconds_before:
            said += f", {screen.duration(self.seconds_before)} of them before it was stopped"
        if self.was_finished:
            said = f"{screen.duration(self.seconds)}, spent before"
        screen.emit()
        screen.emit_pairs({"budget": f"{said}; * is the candidate below"})
        screen.emit()


def _as_budget(seconds: float) -> str:
    """Return seconds in the form of the option, rounded up."""
    return f"{math.ceil(seconds)}s" if seconds < _LONG_SECONDS else f"{math.ceil(seconds / 60)}m"


def _is_done(folder: Path) -> bool:
    """Tell whether every candidate of a plan has its result."""
    path = folder / _PLAN
    if not path.is_file():
        return False
    num_results = len(list(folder.glob(f"*/{_RESULT}")))
    return num_results == len(json.loads(path.read_text(encoding="utf8"))["changes"])


def _describe_candidate(run: Run, standing: Standing, result: Result) -> dict[str, Any]:
    values = {"train.lr": run.config.train.lr, "method.size": run.config.method.size}
    return {
        "run": run.id,
        "values": values | {"train.epochs": run.config.train.num_epochs},
        "dev_metric": standing.dev_metric,
        "best_epoch": result.best_epoch,
        "epochs_trained": len(standing.trained),
        "status": standing.status,
        "message": standing.message,
    }


def _put_among_all(source: Path, target: Path) -> None:
    """Copy the folder of a run that trained to its own end; the result last, as for every run."""
    if (target / _RESULT).is_file():
        return
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(_RESULT), dirs_exist_ok=True)
    write_atomically(target / _RESULT, (source / _RESULT).read_bytes())
