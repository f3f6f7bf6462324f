"""`inlay train --budget 5m`: candidates train together, the worst are halved away, and the best is published.

The result of a run that was ended early does not follow from its id, so candidates have a folder of their own,
`budgets/` in the store, with the plan made from measured steps: the same command finds both again. A winner that was
not ended early is copied to the other runs, as if it had been trained alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay import reports, terminal, training
from inlay.errors import BadConfig, StoreDamaged
from inlay.pipeline.progress import fit_runs, write_brief_reports
from inlay.settings import FitSettings, RunConfig, digest
from inlay.store import write_atomically

_PLAN = "plan.json"
_RESULT = "result.json"
_LONG_SECONDS = 120
_LAST_SECONDS = 2.0  # for answering the probes, writing and publishing
_UNITS = {"s": 1, "m": 60, "h": 3600}
COLUMNS = {"train.lr": "lr", "method.size": "size", "train.epochs": "epochs"}


def parse_budget(text: str) -> float:
    """Parse seconds: `90s`, `10m`, `1.5h`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip())
    if match is None or float(match[1]) <= 0:
        raise BadConfig(f"`--budget` is `{text}`", "write it as 90s, 10m or 1.5h")
    return float(match[1]) * _UNITS[match[2]]


def read_budget(text: str | None, folds: int | None = None) -> Budget | None:
    """Start the budget that a command was given; return None if it was given none.

    It cannot be combined with `folds`: they take a time of their own and judge the usual settings.
    """
    if text is None:
        return None
    seconds = parse_budget(text)
    if folds is not None:
        raise BadConfig(
            f"`--folds {folds}` with `--budget {text}`: a budget chooses the settings only while it trains",
            "leave out one; cross-validate what the budget chose by giving its `--lr`, `--size` and `--epochs`",
        )
    training.refuse_several()
    return Budget(seconds, time.monotonic())


@dataclass
class Budget:
    """The time budget of a command, and what it was spent on."""

    seconds: float
    began: float
    seconds_before: float = 0.0
    """seconds that earlier calls of the same command trained"""
    spending: training.Spending | None = None
    candidates: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """the result of each candidate, the chosen one first"""
    metric: str = ""
    was_finished: bool = False
    """whether all of them had been trained before"""

    def train(
        self,
        ready: training.PreparedRun,
        asked: RunConfig,
        settings: FitSettings,
        trackers: Sequence[str] = (),
        *,
        writes_reports: bool = True,
    ) -> tuple[training.PreparedRun, training.Result, bool]:
        """Train the candidates for a run.

        Return the best one, ready to be published, its result, and whether all candidates had been trained before.
        """
        # 1. find the folder of this command's candidates: the same for the same data, settings and budget
        is_open = [asked.train.lr is None, asked.train.epochs is None, asked.method.size is None]
        folder = ready.store.root / "budgets" / digest([ready.run.id, is_open, self.seconds])[:16]
        if settings.restart and not _is_done(folder):
            shutil.rmtree(folder, ignore_errors=True)
        # 2. plan the candidates
        self.spending = spending = self._plan(ready, asked, folder, settings)
        runs = [
            training.make_candidate(ready.run, asked, change, ready.backbone, ready.store)
            for change in spending.changes
        ]
        self._describe(spending)
        # 3. train them together
        self.was_finished = all(training.is_finished(folder / run.id) for run in runs)
        contest = spending.contest(runs)
        referee = training.Halving(contest, spending.seconds, score_seconds=spending.score_seconds)
        trained = fit_runs(runs, ready.backbone, folder, settings, referee, trackers=trackers)
        results = {result.run_id: result for result in trained}
        self.seconds_before = referee.seconds_before
        # 4. choose the best one
        standings = {run_id: training.Standing.from_result(result) for run_id, result in results.items()}
        order = contest.choose(standings)
        self.metric = contest.metric
        by_id = {run.id: run for run in runs}
        self.candidates = [_describe_candidate(by_id[run_id], standings[run_id], results[run_id]) for run_id in order]
        if writes_reports:
            write_brief_reports(runs, trained, ready.backbone, folder, reports.OF_A_CANDIDATE)
        chosen, result = by_id[order[0]], results[order[0]]
        own_folder: Path | None = folder
        if result.status == "finished":
            _copy_to_runs(folder / chosen.id, ready.runs_folder / chosen.id)
            own_folder = ready.own_folder
        return dataclasses.replace(ready, run=chosen, own_folder=own_folder), result, self.was_finished

    def _plan(
        self, ready: training.PreparedRun, asked: RunConfig, folder: Path, settings: FitSettings
    ) -> training.Spending:
        """Read the plan made when the command was first given, or make one from measured steps."""
        path = folder / _PLAN
        if path.is_file():
            try:
                return training.Spending.from_json(json.loads(path.read_text(encoding="utf8")))
            except (ValueError, KeyError, TypeError) as error:
                raise StoreDamaged(f"the plan `{path}` cannot be read: {error}", f"delete `{folder}`") from None
        run = ready.run
        with terminal.working("budget: measuring a few steps"):
            parts = training.measure_durations(run, ready.backbone, checkpointing=settings.checkpointing)
        after = training.count_answered(run.task, has_probe=run.config.train.head_start == "probe") * parts.dev
        others = time.monotonic() - self.began + parts.setup + after + min(_LAST_SECONDS, 0.05 * self.seconds)
        left, changes = max(0.0, self.seconds - others), training.list_changes(run, asked)
        spending = training.plan_spending(run, changes, left, parts, may_cut=asked.train.epochs is None)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(spending.to_json(), indent=1).encode())
        return spending

    def _describe(self, spending: training.Spending) -> None:
        needed = self.seconds - spending.seconds + spending.usual_seconds
        terminal.detail(
            f"budget: {terminal.duration(self.seconds)}, of which {terminal.duration(spending.seconds)} to train: "
            f"an epoch of one run takes about {terminal.duration(spending.epoch_seconds)}, with its score"
        )
        usual = terminal.count(spending.usual_epochs, "epoch")
        if len(spending.changes) > 1:
            rungs = [f"{rung.kept} after epoch {rung.epoch}" for rung in spending.rungs]
            terminal.detail(f"{len(spending.changes)} candidates, of which continue: {', '.join(rungs) or 'all'}")
            tried = [f"{COLUMNS[key]} {value:g}" for change in spending.changes[1:] for key, value in change.items()]
            terminal.detail(f"beside the usual settings: {', '.join(tried)}")
        elif not spending.is_enough:
            at_least = _format_budget(self.seconds - spending.seconds + spending.needed_seconds)
            if spending.epochs:
                least = f"{terminal.count(spending.epochs, 'epoch')}, for which use `--budget {at_least}`"
                terminal.detail(
                    f"that is too short for {least}: training ends when the time is up; "
                    f"the usual {usual} need `--budget {_format_budget(needed)}`"
                )
            else:  # with few rows, all the work comes before the first epoch
                terminal.detail(f"that is too short for this run, which needs `--budget {at_least}`")
            if spending.before_seconds > spending.seconds:
                before = terminal.duration(spending.before_seconds)
                terminal.detail(
                    f"the work before the first step takes about {before}, longer than that, and is done all the same"
                )
        elif spending.epochs < spending.usual_epochs:
            least = _format_budget(needed)
            terminal.detail(f"there is time for {spending.epochs} of the usual {usual}, which need `--budget {least}`")

    def to_json(self) -> dict[str, Any]:
        """Return the report on the budget as data."""
        assert self.spending is not None
        needed = self.seconds - self.spending.seconds + self.spending.usual_seconds  # by the usual settings alone
        return {
            "seconds": self.seconds,
            "spent": self.spent,
            "trained_before": self.seconds_before,
            "is_enough": self.spending.is_enough,
            "needed": round(needed, 1),
            "epoch_seconds": self.spending.epoch_seconds,
            "rungs": [dataclasses.asdict(rung) for rung in self.spending.rungs],
            "candidates": self.candidates,
        }

    @property
    def spent(self) -> float:
        """Seconds of this call so far, and the training seconds of earlier ones."""
        return round(time.monotonic() - self.began + self.seconds_before, 1)


def _format_budget(seconds: float) -> str:
    """Write seconds as `--budget` takes them, rounded up."""
    return f"{math.ceil(seconds)}s" if seconds < _LONG_SECONDS else f"{math.ceil(seconds / 60)}m"


def _is_done(folder: Path) -> bool:
    path = folder / _PLAN
    if not path.is_file():
        return False
    num_results = len(list(folder.glob(f"*/{_RESULT}")))
    return num_results == len(json.loads(path.read_text(encoding="utf8"))["changes"])


def _describe_candidate(run: training.Run, standing: training.Standing, result: training.Result) -> dict[str, Any]:
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


def _copy_to_runs(source: Path, target: Path) -> None:
    """Copy the folder of a run that was not ended early; its result last, since that marks a finished run."""
    if (target / _RESULT).is_file():
        return
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(_RESULT), dirs_exist_ok=True)
    write_atomically(target / _RESULT, (source / _RESULT).read_bytes())
