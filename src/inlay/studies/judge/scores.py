"""Numbers from records: settings chosen on dev, means and standard errors over seeds, sizes.

All numbers of a report come from here, so that one rule holds everywhere. A **setting** is an arm with values on its
axes. Of the settings of a row, the one with the best mean dev score is chosen: for each task, or once for all tasks of
one run or one sequence. While a grid is incomplete, settings have different numbers of seeds. A setting with one seed
is no candidate beside settings with more, as a lucky seed could win. Nor is a setting with a diverged run, as its other
runs were lucky. A candidate counts by the lower of two means: over its own seeds, and over the seeds that all
candidates have. Test scores are never looked at before the choice. Numbers here are in points (× 100).

The scores of one network are one draw, however many columns they fill: columns that share networks (the tasks of a
joint run, two metrics of a task) are averaged for each seed before their spread over seeds is taken.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inlay.model import JOINT_METHODS, METHODS
from inlay.settings import TrainConfig, leave_out_later
from inlay.studies.judge.bounds import MeanWithError, average, estimate
from inlay.studies.judge.row_sampling import num_rows, score_error
from inlay.studies.run.records import DIVERGED, FAILED, FINISHED, Record

ENOUGH_SEEDS = 2
"""number of seeds from which a setting is a candidate, though others have more"""


@dataclass(frozen=True)
class Candidate:
    """A setting that a row's best was chosen from."""

    scores: Mapping[int, float]
    """seed -> score, in points"""
    runs: Mapping[int, tuple[Record, ...]]
    """seed -> its runs: one, or repeats on other hardware"""


@dataclass(frozen=True)
class Cell:
    """A row's score on one task, at the setting that was best on dev."""

    metric: str
    scores: Mapping[int, float]
    """seed -> score, in points"""
    setting: Mapping[str, Any]
    trained_parameters: int
    backbone_parameters: int
    majority: float | None
    """accuracy of the majority class, in points"""
    num_settings: int
    """number of settings it was chosen from"""
    num_waiting: int
    """number of settings that were no candidates, such as those with too few seeds"""
    num_lost: int
    """number of the row's runs on this task that diverged or failed"""
    by_metric: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """every metric of the chosen runs: seed -> score, in points"""
    is_copy: bool = False
    """whether all tasks of the row share one fine-tuned copy of the backbone"""
    is_finetuned: bool = False
    """whether its run trained a copy of the whole backbone, so that the backbone itself is not needed"""
    networks: frozenset[str] = frozenset()
    """the runs that were scored; a run of several tasks stands in the cells of all of them"""
    rates: tuple[float, ...] = ()
    """the learning rates that were tried, in order"""
    is_fixed: bool = False
    """whether every seed gives the same result"""
    row_errors: Mapping[str, float | None] = field(default_factory=dict)
    """metric -> the standard error of its score from the rows that were scored, in points"""
    candidates: tuple[Candidate, ...] = ()
    """the settings it was chosen from, best first; empty if the shown scores are not those that chose"""
    runs: Mapping[int, tuple[Record, ...]] = field(default_factory=dict)
    """seed -> the scored runs; empty unless dev scores are shown, as only those have covariances"""

    @property
    def estimate(self) -> MeanWithError:
        """The mean with its errors of seeds and of rows."""
        return estimate(self.scores.values(), self.row_error)

    @property
    def row_error(self) -> float | None:
        """The standard error from the rows that were scored; None if it is not known."""
        return self.row_errors.get(self.metric)

    @property
    def share(self) -> float:
        """Trained parameters in percent of the backbone's."""
        return 100 * self.trained_parameters / self.backbone_parameters

    @property
    def end(self) -> str:
        """`greatest` or `least` if its learning rate is at that end of the grid, else ""."""
        if len(self.rates) < 2:
            return ""
        return {self.rates[0]: "least", self.rates[-1]: "greatest"}.get(self.setting.get("lr", 0.0), "")


Row = dict[str, Cell]
"""task -> cell, for the tasks that have one"""


def average_columns(
    columns: Mapping[str, Mapping[int, float]],
    networks: Mapping[str, frozenset[str]],
    row_errors: Mapping[str, float | None],
) -> MeanWithError:
    """Average columns (name -> seed -> score); `networks` names the runs that each column's scores come from.

    Columns that share networks vary together, so they become one group: their mean for each seed that all have. Row
    errors add up within a task, whose columns are scored on the same rows, and are independent across tasks.
    """
    mean = statistics.fmean(statistics.fmean(column.values()) for column in columns.values())
    by_task: dict[str, float] = {}
    for name, error in row_errors.items():
        task = name.partition(":")[0].partition("@")[0]  # columns are named `TASK`, `TASK:METRIC` or `TASK@SAMPLES`
        by_task[task] = by_task.get(task, 0.0) + (error or 0.0) / len(row_errors)
    rows = None if None in row_errors.values() else math.hypot(*by_task.values())
    names, groups, weights = list(columns), [], []
    for numbers in _join_shared(list(networks.values())):
        together = [columns[names[number]] for number in numbers]
        seeds = [seed for seed in together[0] if all(seed in column for column in together)]
        groups.append([statistics.fmean(column[seed] for column in together) for seed in seeds])
        weights.append(len(together))
    if not all(groups):  # no seed of one network has all its columns: how they vary together is not known
        return MeanWithError(mean, None, sum(map(len, groups)), rows=rows)
    return average(groups, weights)._replace(mean=mean, rows=rows)


def _join_shared(networks: Sequence[frozenset[str]]) -> list[list[int]]:
    """Group the columns that share a network, directly or through others; return their indices."""
    found: list[tuple[frozenset[str], list[int]]] = []
    for number, own in enumerate(networks):
        touched = [item for item in found if item[0] & own]
        found = [item for item in found if not item[0] & own]
        joined = [other for _, numbers in touched for other in numbers]
        found.append((own.union(*(item[0] for item in touched)), [*joined, number]))
    return [numbers for _, numbers in found]


def choose(
    records: Iterable[Record], report_on: str = "dev", metric_of: Callable[[str], str | None] = lambda task: None
) -> Row:
    """Choose the best setting on dev for each task, and return the row of its scores.

    `metric_of` gives the metric that is shown, and by which settings are chosen; by default each record's own. A task
    without a finished run, or without scores on the reported split, has no cell.
    """
    by_task: dict[str, list[Record]] = {}
    for record in records:
        by_task.setdefault(record.task, []).append(record)
    row: Row = {}
    for task, own in by_task.items():
        metric = metric_of(task)
        ranked = rank_settings(own, metric, report_on)
        if not ranked:
            continue
        chosen, first = ranked[0], ranked[0][0]
        shown, is_on_dev = metric or first.metric, report_on == "dev"
        row[task] = Cell(
            metric=shown,
            scores=_by_seed(chosen, report_on, metric),
            setting=first.axes,
            trained_parameters=first.trained_parameters,
            backbone_parameters=first.backbone_parameters,
            majority=None if first.majority is None else 100 * first.majority,
            num_settings=len(ranked),
            num_waiting=len({_setting(record) for record in own}) - len(ranked),
            num_lost=sum(record.status != FINISHED for record in own),
            by_metric={name: _by_seed(chosen, report_on, name) for name in first.dev},
            is_copy=bool(joint_of(first).get("is_copy")),
            is_finetuned=_is_own_copy(first),
            networks=frozenset(map(network_of, chosen)),
            rates=tuple(sorted({item.axes["lr"] for item in own if "lr" in item.axes and item.status != FAILED})),
            row_errors={name: _row_error(chosen, report_on, name) for name in {shown, *first.dev}},
            candidates=list_candidates(ranked, task, metric) if is_on_dev else (),
            runs=_runs_by_seed(chosen) if is_on_dev else {},
        )
    return row


def list_candidates(ranked: Sequence[Sequence[Record]], task: str, metric: str | None) -> tuple[Candidate, ...]:
    """List one task's scores at ranked settings, in their order; the ranking may be over several tasks."""
    candidates = []
    for group in ranked:
        own = [record for record in group if record.task == task]
        if own:
            candidates.append(Candidate(_by_seed(own, "dev", metric), _runs_by_seed(own)))
    return tuple(candidates)


def _runs_by_seed(records: Sequence[Record]) -> dict[int, tuple[Record, ...]]:
    found: dict[int, dict[str, Record]] = {}
    for record in records:
        found.setdefault(record.seed, {})[record.hardware] = record
    return {seed: tuple(runs.values()) for seed, runs in sorted(found.items())}


def _row_error(records: Sequence[Record], split: str, metric: str) -> float | None:
    """Return the row error of a mean over runs, in points: all runs have the same rows, so it is that of one run."""
    errors = []
    for record in records:
        scores = record.dev if split == "dev" else record.test
        error = score_error(metric, scores or {}, num_rows(record, split))
        if error is None:
            return None
        errors.append(100 * error)
    return statistics.fmean(errors)


def _is_own_copy(record: Record) -> bool:
    """Tell whether a run trained the whole backbone; a large hypernetwork is no copy of it."""
    method = (METHODS | JOINT_METHODS).get(record.config.get("method", {}).get("name", ""))
    if method is not None and not method.is_finetuned:
        return False
    # Top layers are a copy if they are all layers. Of a method that is in no table, only the size is known.
    is_large = record.trained_parameters > 0.95 * record.backbone_parameters
    return is_large or (method is not None and method.layers == "all")


def network_of(record: Record) -> str:
    """Return the id of the run that a record belongs to; multi-task runs and sequences have a record per task."""
    return joint_of(record).get("run") or record.id.partition("-")[0]


def joint_of(record: Record) -> Mapping[str, Any]:
    """Return a record's data about its multi-task run; empty if there is none."""
    return record.extra.get("joint") or {}


def _mean_by_seed(records: Sequence[Record], metric: str | None) -> dict[int, tuple[int, float]]:
    """Map each seed to the number of tasks with a dev score, and their mean."""
    found: dict[int, list[float]] = {}
    for task in dict.fromkeys(record.task for record in records):
        for seed, score in _by_seed([item for item in records if item.task == task], "dev", metric).items():
            found.setdefault(seed, []).append(score)
    return {seed: (len(scores), statistics.fmean(scores)) for seed, scores in found.items()}


def keep_best(records: Iterable[Record], *, over_tasks: bool = False) -> list[Record]:
    """Return the finished runs of the setting that is best on dev: per task, or one for all tasks together."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault("" if over_tasks else record.task, []).append(record)
    best: list[Record] = []
    for group in groups.values():
        ranked = rank_settings(group)
        if ranked:
            best += ranked[0]
    return best


def rank_settings(
    records: Sequence[Record], metric: str | None = None, report_on: str = "dev"
) -> list[Sequence[Record]]:
    """Return the finished runs of each setting that may be chosen, over all tasks, the best on dev first."""
    settings: dict[str, list[Record]] = {}
    tried: dict[tuple[str, str, int], set[str]] = {}
    for record in records:
        setting = _setting(record)
        tried.setdefault((setting, record.task, record.seed), set()).add(record.status)
        if record.status == FINISHED and _score(record, report_on, metric) is not None:
            settings.setdefault(setting, []).append(record)
    if not settings:
        return []
    # 1. scores by setting and seed; a seed counts if it has all tasks, or else the most tasks that any seed has
    found = {name: _mean_by_seed(group, metric) for name, group in settings.items()}
    tasks = max(num_tasks for seeds in found.values() for num_tasks, _ in seeds.values())
    whole = {name: {seed: mean for seed, (n, mean) in seeds.items() if n == tasks} for name, seeds in found.items()}
    # 2. leave out settings with a run that diverged on every machine that tried it, then settings with too few seeds
    diverged = {key[0] for key, statuses in tried.items() if DIVERGED in statuses and FINISHED not in statuses}
    steady = {name: seeds for name, seeds in whole.items() if name not in diverged and seeds} or whole
    fewest = min(ENOUGH_SEEDS, max(map(len, steady.values())))
    candidates = {name: seeds for name, seeds in steady.items() if len(seeds) >= fewest}
    shared = set.intersection(*map(set, candidates.values()))

    def worth(name: str) -> tuple[float, int]:
        seeds = candidates[name]
        mean = statistics.fmean(seeds.values())
        if shared:
            mean = min(mean, statistics.fmean(seeds[seed] for seed in shared))
        return mean, len(seeds)

    return [settings[name] for name in sorted(candidates, key=worth, reverse=True)]


def _setting(record: Record) -> str:
    """Return a text that is equal for the seeds of one setting: the run's settings, or its axes if it has none."""
    config = record.config
    if "train" not in config:
        return json.dumps([record.arm, record.axes], sort_keys=True, default=str)
    train = leave_out_later(TrainConfig, {key: value for key, value in config["train"].items() if key != "seed"})
    known = [config.get("method"), train, config.get("data", {}).get("limit")]
    if joint_of(record):
        known.append(config.get("joint"))
    return json.dumps(known, sort_keys=True, default=str)


def _by_seed(records: Sequence[Record], split: str, metric: str | None) -> dict[int, float]:
    """Map each seed to its score in points; repeats on other hardware count once, as their mean."""
    scores = ((record, _score(record, split, metric)) for record in records)
    return average_repeats((record, 100 * score) for record, score in scores if score is not None)


def average_repeats(values: Iterable[tuple[Record, float]]) -> dict[int, float]:
    """Map each seed to its value, from single records; repeats on other hardware count once, as their mean."""
    found: dict[int, dict[str, float]] = {}
    for record, value in values:
        # A run that two arms share counts once; on two machines it is two measurements of one seed.
        found.setdefault(record.seed, {})[record.hardware] = value
    return {seed: statistics.fmean(scores.values()) for seed, scores in sorted(found.items())}


def _score(record: Record, split: str, metric: str | None) -> float | None:
    scores = record.dev if split == "dev" else record.test
    return None if scores is None else scores.get(metric or record.metric)


def mean_of(row: Row, tasks: Iterable[str]) -> MeanWithError | None:
    """Return the mean over tasks; None unless the row has all of them."""
    wanted = list(tasks)
    if not wanted or not all(task in row for task in wanted):
        return None
    return average_columns(
        {task: row[task].scores for task in wanted},
        {task: row[task].networks for task in wanted},
        {task: row[task].row_error for task in wanted},
    )


def column_row(row: Row, columns: Iterable[tuple[str, str]]) -> Row | None:
    """Return a row whose cells are columns (task, metric), as `task:metric`; None unless it has all of them."""
    wanted = list(columns)
    if not all(task in row and metric in row[task].by_metric for task, metric in wanted):
        return None
    return {
        f"{task}:{metric}": replace(row[task], metric=metric, scores=row[task].by_metric[metric], candidates=())
        for task, metric in wanted
    }


def select(records: Iterable[Record], accepts: Callable[[Record], bool]) -> list[Record]:
    """Return the records of a row, each run once even if it is in several arms."""
    found: dict[tuple[str, str], Record] = {}
    for record in records:
        if accepts(record):
            found.setdefault((record.id, record.hardware), record)
    return list(found.values())


def total_parameters(row: Row, *, needs_backbone: bool = True) -> float | None:
    """Return the size of all tasks together as a multiple of the backbone: 1 + their parts, or a copy for each.

    A row that does not need the backbone (TF-IDF) counts its parts alone.
    """
    if not row:
        return None
    cells = list(row.values())
    backbone = cells[0].backbone_parameters
    if not needs_backbone:
        return sum(cell.trained_parameters for cell in cells) / backbone
    # Unless every task has a fine-tuned network, its own or a shared one, the backbone itself is kept too.
    if not all(cell.is_finetuned or cell.is_copy for cell in cells):
        return 1 + sum(cell.trained_parameters for cell in cells) / backbone
    if any(cell.is_copy for cell in cells):  # each task has its share of the one network
        return sum(cell.trained_parameters for cell in cells) / backbone
    groups = _join_shared([cell.networks for cell in cells])  # tasks of one sequence share one network
    return sum(max(cells[index].trained_parameters for index in group) for group in groups) / backbone
