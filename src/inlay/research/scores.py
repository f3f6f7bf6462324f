"""From records to numbers: settings chosen on dev, means and s.e.m. over seeds, differences pair by pair.

Everything shown about a study goes through here, so that one rule holds everywhere. A **setting** is an arm with values
on its axes. Of the settings of a row the one with the best mean dev score is chosen: for each task, or once for all
tasks of one run or of one sequence. While a grid is not complete, settings have unlike numbers of seeds: one seed among
settings of more is no candidate, as a lucky one could win, nor is one of whose runs some diverged, as its others were
lucky; and a candidate counts by the lower of two means, over its own seeds and over those that all candidates have.
Test scores are never looked at before that. Numbers here are in points (× 100).

What one network scored is one draw, in however many columns it stands: columns that share networks (the tasks of a
joint run, two metrics of a task) are averaged seed by seed before their spread over seeds is taken.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from inlay.model.methods import JOINT_METHODS, METHODS
from inlay.research.records import DIVERGED, FAILED, FINISHED, Record


class StudySpec(Protocol):
    """What is shown of a study's own file; `research/study.py` has the whole."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def arms(self) -> Mapping[str, Any]: ...
    @property
    def tasks(self) -> Sequence[str]: ...
    @property
    def report_on(self) -> str: ...
    @property
    def published(self) -> str: ...
    @property
    def figures(self) -> Sequence[str]: ...


class Estimate(NamedTuple):
    """A mean with its standard error; no error from a single score."""

    mean: float
    sem: float | None = None
    num: int = 1
    freedom: int | None = None
    """degrees of freedom of the error: scores beyond the first of each group; None: as good as known"""

    @property
    def margin(self) -> float:
        """The standard error, 0 where it is not known."""
        return self.sem or 0.0


@dataclass(frozen=True)
class Cell:
    """A row's score on one task, at the setting that was best on dev."""

    task: str
    metric: str
    scores: Mapping[int, float]
    """seed -> score, in points"""
    dev: float
    """mean dev score that chose the setting"""
    setting: Mapping[str, Any]
    arm: str
    trained_parameters: int
    backbone_parameters: int
    num_train: int
    majority: float | None
    """in points"""
    num_settings: int
    """settings it was chosen from"""
    num_waiting: int
    """settings that had too few seeds to be among them"""
    num_lost: int
    """runs of the row on this task that diverged or failed"""
    by_metric: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """every metric of the chosen runs: seed -> score, in points"""
    is_copy: bool = False
    """all tasks of the row together are one copy of the backbone"""
    is_own_copy: bool = False
    """its run trained a copy of the whole backbone: the backbone itself need not be kept for it"""
    networks: frozenset[str] = frozenset()
    """the runs that were scored; a run of several tasks stands in the cells of all of them"""
    rates: tuple[float, ...] = ()
    """the learning rates that were tried, in order"""
    is_fixed: bool = False
    """nothing of it is drawn by a seed: it is the same with every one"""

    @property
    def estimate(self) -> Estimate:
        """Mean and s.e.m. over the seeds."""
        return estimate(self.scores.values())

    @property
    def share(self) -> float:
        """Trained parameters in percent of the backbone's."""
        return 100 * self.trained_parameters / self.backbone_parameters

    @property
    def end(self) -> str:
        """`greatest` or `least` where its learning rate is that of several that were tried, else nothing."""
        if len(self.rates) < 2:
            return ""
        return {self.rates[0]: "least", self.rates[-1]: "greatest"}.get(self.setting.get("lr", 0.0), "")


Row = dict[str, Cell]
"""task -> cell, of the tasks that have one"""


@dataclass(frozen=True)
class Paired:
    """A row less another, task by task and seed by seed, both at their chosen settings."""

    estimate: Estimate
    """mean over tasks of the mean difference; the s.e.m. is that of seeds, the tasks being given"""
    by_task: Mapping[str, Estimate]

    @property
    def num_pairs(self) -> int:
        """Pairs of runs with the same task and seed; where one of the two has several tasks, pairs of seeds."""
        return self.estimate.num

    @property
    def num_ahead(self) -> int:
        """Tasks on which the first row's mean is above the second's."""
        return sum(item.mean > 0 for item in self.by_task.values())


def estimate(scores: Iterable[float]) -> Estimate:
    """Mean and standard error of the mean: the sample's standard deviation over √n."""
    values = list(scores)
    sem = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), sem, len(values), len(values) - 1)


def average(groups: Sequence[Sequence[float]], weights: Sequence[float] | None = None) -> Estimate:
    """The mean of the groups' means; its error is that of the scores within their groups.

    The groups (tasks) are what they are, the scores in them (seeds) could have been others: the variance within groups
    is pooled, so that a group with a single score still counts. No group may depend on another.
    """
    shares = [weight / sum(weights) for weight in weights] if weights else [1 / len(groups)] * len(groups)
    means = [statistics.fmean(group) for group in groups]
    freedom = sum(len(group) - 1 for group in groups)
    sem = None
    if freedom:
        squares = sum((score - mean) ** 2 for group, mean in zip(groups, means, strict=True) for score in group)
        spread = sum(share**2 / len(group) for share, group in zip(shares, groups, strict=True))
        sem = math.sqrt(squares / freedom * spread)
    mean = sum(share * mean for share, mean in zip(shares, means, strict=True))
    return Estimate(mean, sem, sum(map(len, groups)), freedom)


def average_columns(columns: Sequence[Mapping[int, float]], networks: Sequence[frozenset[str]]) -> Estimate:
    """The mean of columns (seed -> score); `networks` are the runs that each column's scores come from.

    Columns that share networks vary together, so they become one group: their mean for each seed that all have.
    """
    mean = statistics.fmean(statistics.fmean(column.values()) for column in columns)
    groups, weights = [], []
    for numbers in _join_shared(networks):
        together = [columns[number] for number in numbers]
        seeds = [seed for seed in together[0] if all(seed in column for column in together)]
        groups.append([statistics.fmean(column[seed] for column in together) for seed in seeds])
        weights.append(len(together))
    if not all(groups):  # no seed of one network has all its columns: how they vary together is not known
        return Estimate(mean, None, sum(map(len, groups)))
    return Estimate(mean, *average(groups, weights)[1:])


def _join_shared(networks: Sequence[frozenset[str]]) -> list[list[int]]:
    """Numbers of the columns, those together that share a network, if only by way of others."""
    found: list[tuple[frozenset[str], list[int]]] = []
    for number, own in enumerate(networks):
        touched = [item for item in found if item[0] & own]
        found = [item for item in found if not item[0] & own]
        joined = [other for _, numbers in touched for other in numbers]
        found.append((own.union(*(item[0] for item in touched)), [*joined, number]))
    return [numbers for _, numbers in found]


def choose(records: Iterable[Record], report_on: str = "dev", metric: str | None = None) -> Row:
    """A row of a table: for each task the scores of the setting that was best on dev.

    `metric` is what is shown, and on dev also what chooses; default: each record's own. A task without a finished run,
    or without the split that is reported, has no cell.
    """
    by_task: dict[str, list[Record]] = {}
    for record in records:
        by_task.setdefault(record.task, []).append(record)
    cells = {task: _choose(group, report_on, metric) for task, group in by_task.items()}
    return {task: cell for task, cell in cells.items() if cell is not None}


def _choose(records: Sequence[Record], report_on: str, metric: str | None) -> Cell | None:
    settings: dict[str, list[Record]] = {}
    for record in records:
        if record.status == FINISHED and _score(record, report_on, metric) is not None:
            settings.setdefault(_setting(record), []).append(record)
    if not settings:
        return None
    chosen, num_candidates = _pick(settings, metric, _diverged(records))
    first = chosen[0]
    return Cell(
        task=first.task,
        metric=metric or first.metric,
        scores=_by_seed(chosen, report_on, metric),
        dev=statistics.fmean(_by_seed(chosen, "dev", metric).values()),
        setting=first.axes,
        arm=first.arm,
        trained_parameters=first.trained_parameters,
        backbone_parameters=first.backbone_parameters,
        num_train=first.num_train,
        majority=None if first.majority is None else 100 * first.majority,
        num_settings=num_candidates,
        num_waiting=len({_setting(record) for record in records}) - num_candidates,
        num_lost=sum(record.status != FINISHED for record in records),
        by_metric={name: _by_seed(chosen, report_on, name) for name in first.dev},
        is_copy=bool(joint_of(first).get("is_copy")),
        is_own_copy=_is_own_copy(first),
        networks=frozenset(network_of(record) for record in chosen),
        rates=tuple(
            sorted({record.axes["lr"] for record in records if "lr" in record.axes and record.status != FAILED})
        ),
    )


def _is_own_copy(record: Record) -> bool:
    """Whether a run trained the whole backbone; many parameters alone, such as a hypernetwork's, are no copy."""
    method = (METHODS | JOINT_METHODS).get(record.config.get("method", {}).get("name", ""))
    if method is not None and not method.has_own_weights:
        return False
    # Top layers are a copy where they are all layers. Of a method that is in no table its size is all that is known.
    is_large = record.trained_parameters > 0.95 * record.backbone_parameters
    return is_large or (method is not None and method.layers == "all")


def network_of(record: Record) -> str:
    """The run that a record is of; one of several tasks, or a sequence of them, has a record for each."""
    return joint_of(record).get("run") or record.id.partition("-")[0]


def joint_of(record: Record) -> Mapping[str, Any]:
    """What a record says of the run of several tasks that it is part of; nothing where there is none."""
    return record.extra.get("joint") or {}


def _pick(
    settings: Mapping[str, Sequence[Record]], metric: str | None, diverged: frozenset[str]
) -> tuple[Sequence[Record], int]:
    """Of settings the runs of the one that is best on dev, and how many could have been."""
    found = {name: _mean_by_seed(group, metric) for name, group in settings.items()}
    # A seed counts once it has all tasks; before any has, that with the most of them.
    tasks = max(num_tasks for seeds in found.values() for num_tasks, _ in seeds.values())
    whole = {name: {seed: mean for seed, (n, mean) in seeds.items() if n == tasks} for name, seeds in found.items()}
    steady = {name: seeds for name, seeds in whole.items() if name not in diverged and seeds} or whole
    fewest = min(ENOUGH_SEEDS, max(map(len, steady.values())))
    candidates = {name: seeds for name, seeds in steady.items() if len(seeds) >= fewest}
    shared = set.intersection(*map(set, candidates.values()))

    def worth(name: str) -> tuple[float, int]:
        seeds = candidates[name]
        means = [statistics.fmean(seeds.values())]
        means += [statistics.fmean(seeds[seed] for seed in shared)] if shared else []
        return min(means), len(seeds)

    return settings[max(candidates, key=worth)], len(candidates)


def _diverged(records: Iterable[Record]) -> frozenset[str]:
    """The settings of which a run diverged wherever it was tried."""
    tried: dict[tuple[str, str, int], set[str]] = {}
    for record in records:
        tried.setdefault((_setting(record), record.task, record.seed), set()).add(record.status)
    return frozenset(key[0] for key, statuses in tried.items() if DIVERGED in statuses and FINISHED not in statuses)


ENOUGH_SEEDS = 2
"""seeds that make a setting a candidate, though others have more"""


def _mean_by_seed(records: Sequence[Record], metric: str | None) -> dict[int, tuple[int, float]]:
    """Seed -> how many tasks have a dev score, and their mean."""
    found: dict[int, list[float]] = {}
    for task in dict.fromkeys(record.task for record in records):
        for seed, score in _by_seed([item for item in records if item.task == task], "dev", metric).items():
            found.setdefault(seed, []).append(score)
    return {seed: (len(scores), statistics.fmean(scores)) for seed, scores in found.items()}


def keep_best(records: Iterable[Record], metric: str | None = None, *, over_tasks: bool = False) -> list[Record]:
    """The finished runs of the setting that is best on dev: for each task, or one for all tasks together."""
    by_task: dict[str, list[Record]] = {}
    for record in records:
        by_task.setdefault("" if over_tasks else record.task, []).append(record)
    kept: list[Record] = []
    for group in by_task.values():
        settings: dict[str, list[Record]] = {}
        for record in group:
            if record.status == FINISHED and _score(record, "dev", metric) is not None:
                settings.setdefault(_setting(record), []).append(record)
        kept += _pick(settings, metric, _diverged(group))[0] if settings else []
    return kept


def _setting(record: Record) -> str:
    """What a record has in common with its other seeds: its settings, or where none are kept its place in the arm."""
    config = record.config
    if "train" not in config:
        return json.dumps([record.arm, record.axes], sort_keys=True, default=str)
    train = {key: value for key, value in config["train"].items() if key != "seed"}
    known = [config.get("method"), train, config.get("data", {}).get("limit")]
    if joint_of(record):
        known.append(config.get("joint"))
    return json.dumps(known, sort_keys=True, default=str)


def _by_seed(records: Sequence[Record], split: str, metric: str | None) -> dict[int, float]:
    """seed -> score in points; repeats of a run on other hardware count once, as their mean."""
    scores = ((record, _score(record, split, metric)) for record in records)
    return average_repeats((record, 100 * score) for record, score in scores if score is not None)


def average_repeats(values: Iterable[tuple[Record, float]]) -> dict[int, float]:
    """Seed -> value, from what single records say: those of one seed on other hardware count once, as their mean."""
    found: dict[int, dict[str, float]] = {}
    for record, value in values:
        # A run that stands in two arms is one run; on two machines it is two measurements of one seed.
        found.setdefault(record.seed, {})[record.hardware] = value
    return {seed: statistics.fmean(scores.values()) for seed, scores in sorted(found.items())}


def _score(record: Record, split: str, metric: str | None) -> float | None:
    scores = record.dev if split == "dev" else record.test
    return None if scores is None else scores.get(metric or record.metric)


def mean_of(row: Row, tasks: Iterable[str]) -> Estimate | None:
    """The mean over tasks; None unless the row has all of them."""
    wanted = list(tasks)
    if not wanted or not all(task in row for task in wanted):
        return None
    return average_columns([row[task].scores for task in wanted], [row[task].networks for task in wanted])


def column_row(row: Row, columns: Iterable[tuple[str, str]]) -> Row | None:
    """A row whose cells are columns (task, metric), as `task:metric`; None unless it has all of them."""
    wanted = list(columns)
    if not all(task in row and metric in row[task].by_metric for task, metric in wanted):
        return None
    return {
        f"{task}:{metric}": replace(row[task], metric=metric, scores=row[task].by_metric[metric])
        for task, metric in wanted
    }


def shared_tasks(rows: Iterable[Row], tasks: Sequence[str]) -> list[str]:
    """The tasks that every one of these rows has: what a mean can be compared over."""
    held = list(rows)
    return [task for task in tasks if held and all(task in row for row in held)]


def pair(row: Row, other: Row, tasks: Iterable[str] | None = None) -> Paired | None:
    """`row` less `other` over the runs that share task and seed; None where there is no such pair.

    What no seed draws (TF-IDF) is a pair with every seed of the other.
    """
    differences: dict[str, dict[int, float]] = {}
    for task in row if tasks is None else tasks:
        if task not in row or task not in other:
            continue
        first, second = _match_seeds(row[task], other[task])
        found = {seed: first[seed] - second[seed] for seed in first if seed in second}
        if found:
            differences[task] = found
    if not differences:
        return None
    networks = [row[task].networks | other[task].networks for task in differences]
    by_task = {task: estimate(found.values()) for task, found in differences.items()}
    return Paired(average_columns(list(differences.values()), networks), by_task)


def _match_seeds(*cells: Cell) -> list[Mapping[int, float]]:
    """The scores of two cells by seed; a cell that no seed draws has the other's seeds."""
    seeds = next((cell.scores for cell in cells if not cell.is_fixed), cells[0].scores)
    return [dict.fromkeys(seeds, cell.estimate.mean) if cell.is_fixed else cell.scores for cell in cells]


def select(records: Iterable[Record], accepts: Callable[[Record], bool]) -> list[Record]:
    """The records of a row, each run once though it may stand in several arms."""
    found: dict[tuple[str, str], Record] = {}
    for record in records:
        if accepts(record):
            found.setdefault((record.id, record.hardware), record)
    return list(found.values())


def total_parameters(row: Row, *, needs_backbone: bool = True) -> float | None:
    """What all tasks of a row take together, as a multiple of the backbone: 1 + their parts, or a copy for each.

    A row that has no use for the backbone (TF-IDF) takes its parts alone.
    """
    if not row:
        return None
    cells = list(row.values())
    backbone = cells[0].backbone_parameters
    if not needs_backbone:
        return sum(cell.trained_parameters for cell in cells) / backbone
    # Its own network for each task, or one for all of them: the backbone is not kept.
    if not all(cell.is_own_copy or cell.is_copy for cell in cells):
        return 1 + sum(cell.trained_parameters for cell in cells) / backbone
    if any(cell.is_copy for cell in cells):  # each task has its share of the one network
        return sum(cell.trained_parameters for cell in cells) / backbone
    groups = _join_shared([cell.networks for cell in cells])  # tasks that one network went through have it together
    return sum(max(cells[index].trained_parameters for index in group) for group in groups) / backbone
