"""The rows of a study's tables: which records belong to one, and what it is called.

A row is an arm as the study's file names it, or all arms of one kind together with the best chosen on dev: the adapters
of any size, the top k layers for any k. Which of the two a study shows is in the table ROWS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from inlay.studies.judge.published import Published
from inlay.studies.judge.scores import (
    Row,
    StudySpec,
    choose,
    joint_of,
    list_candidates,
    rank_settings,
    select,
    shared_tasks,
)
from inlay.studies.run.records import Record
from inlay.studies.spec.arms import ARM_KINDS

# kind -> how its arms are named; a number in the name is the size, or how many layers
KINDS = {
    "full": re.compile(r"full(-.*)?"),
    "adapters": re.compile(r"(?:adapters?|houlsby)(?:-m?(?P<number>\d+))?"),
    "top": re.compile(r"(?:top|variable)(?:-k?(?P<number>\d+))?(?:-layers?)?"),
    "norms": re.compile(r"(?:layer-)?norms(?:-only)?"),
    "baseline": re.compile(r"baseline|tf-?idf|no-transformer|no-bert"),
}
LABELS = {
    "full": "full fine-tuning",
    "norms": "layer norms only",
    "baseline": "TF-IDF, no transformer",
    "none": "`none` (not shared)",
    "top": "variable fine-tuning (top k)",
}
TASKS = {
    "glue/cola": "CoLA",
    "glue/sst2": "SST-2",
    "glue/mrpc": "MRPC",
    "glue/stsb": "STS-B",
    "glue/qqp": "QQP",
    "glue/mnli": "MNLI-m",
    "glue/mnli-mm": "MNLI-mm",
    "glue/qnli": "QNLI",
    "glue/rte": "RTE",
    "glue/wnli": "WNLI",
    "squad": "SQuAD v1.1",
    "cb": "CB",
    "imdb": "IMDB",
    "scitail": "SciTail",
    "yelp-polarity": "Yelp polarity",
}
METRICS = {
    "matthews": "Matthews",
    "accuracy": "accuracy",
    "f1": "F1",
    "macro_f1": "macro F1",
    "spearman": "Spearman",
    "pearson": "Pearson",
    "token_f1": "F1",
    "exact_match": "exact match",
    "entity_f1": "entity F1",
}


# What a study reports where it is not each task's own metric: on all tasks, or on some.
SHOWN_METRIC: dict[str, str | dict[str, str]] = {
    "sizes": "accuracy",
    "init": "accuracy",
    "ablation": "accuracy",
    "uva": "accuracy",
    "features": {"glue/mrpc": "accuracy", "glue/stsb": "pearson"},
}
WIDE = 7  # tasks beyond this are shown group by group, and as lines, not columns
NOT_AVERAGED = frozenset({"glue/wnli"})
# What differences are taken to, where it is not full fine-tuning; the first that the study has.
REFERENCES = {
    "extensions": ("plain", "adapters", "adapters-64", "houlsby"),
    "sizes": ("adapters-64",),
    "multitask": ("adapters-multi",),
    "hyper-ablation": ("hyperformer",),
}


class Way(NamedTuple):
    """How a record's parameters were tuned."""

    kind: str
    """a key of KINDS, or the arm's own name"""
    number: int | None = None
    """adapter size, or layers from the top"""


@dataclass(frozen=True)
class RowSpec:
    """A row to be shown: its key (also that of the published row), its label and its records."""

    key: str
    label: str
    records: tuple[Record, ...]


def way_of(record: Record) -> Way:
    """The kind and number of a record, by its arm's name, its axes and its settings."""
    way = read_way(record.arm)
    if way is None:
        return Way(record.arm)
    return way if way.number is not None else Way(way.kind, _number(way.kind, record))


def read_way(arm: str) -> Way | None:
    """What an arm's name says; None for a name of no kind."""
    for kind, pattern in KINDS.items():
        if found := pattern.fullmatch(arm):
            return Way(kind, int(found["number"]) if found.groupdict().get("number") else None)
    return None


def _number(kind: str, record: Record) -> int | None:
    method = record.config.get("method", {})
    if kind == "adapters":
        size = record.axes.get("size", method.get("size"))
        return None if size is None else int(size)
    if kind == "top":
        value = next((record.axes[key] for key in ("k", "layers", "top") if key in record.axes), method.get("layers"))
        digits = re.search(r"\d+", str(value))
        return int(digits[0]) if digits else None
    return None


RowMaker = Callable[[Sequence[Record]], list[RowSpec]]


def best_of(kind: str) -> RowMaker:
    """One row of all arms of a kind; the number that is best on dev is chosen for each task."""

    def make(records: Sequence[Record]) -> list[RowSpec]:
        found = select(records, lambda record: way_of(record).kind == kind)
        numbers = sorted({number for record in found if (number := way_of(record).number) is not None})
        label = LABELS.get(kind, kind)
        if kind == "adapters" and numbers:
            label = f"adapters ({numbers[0]}" + (f"–{numbers[-1]})" if len(numbers) > 1 else ")")
        return [RowSpec(kind, label, tuple(found))] if found else []

    return make


def each_of(kind: str, only: int | None = None) -> RowMaker:
    """A row for every number of a kind, or for one."""

    def make(records: Sequence[Record]) -> list[RowSpec]:
        ways = {way_of(record) for record in records if way_of(record).kind == kind}
        numbers = sorted(way.number for way in ways if way.number is not None and only in (None, way.number))
        rows = []
        for number in numbers:
            found = select(records, lambda record, way=Way(kind, number): way_of(record) == way)  # type: ignore[misc]
            rows.append(RowSpec(f"{kind}-{number}", name_row(kind, number), tuple(found)))
        return rows

    return make


def each_scale(records: Sequence[Record]) -> list[RowSpec]:
    """A row for every scale of the initial values."""
    scales = {record.id: scale_of(record) for record in records}
    rows = []
    for scale in sorted({scale for scale in scales.values() if scale is not None}):
        found = select(records, lambda record, scale=scale: scales[record.id] == scale)  # type: ignore[misc]
        text = f"{scale:g}" if scale >= 0.1 else f"{scale:.0e}".replace("e-0", "e-")
        rows.append(RowSpec(f"init-{scale:g}", f"σ = {text}", tuple(found)))
    return rows


def scale_of(record: Record) -> float | None:
    """The standard deviation that adapters start from."""
    value = record.axes.get("init_std", record.config.get("method", {}).get("init_std"))
    return None if value is None else float(value)


def name_row(kind: str, number: int | None) -> str:
    """How a row is called: `adapters (64)`, `top 3 layers`."""
    if number is None:
        return LABELS.get(kind, kind)
    return f"top {number} layer{'s' if number > 1 else ''}" if kind == "top" else f"{kind} ({number})"


# study -> what its rows are made of; arms that none of them takes follow, each as a row of its own
ROWS: dict[str, tuple[RowMaker, ...]] = {
    "glue": (best_of("full"), best_of("adapters"), each_of("adapters", only=64)),
    "extra": (best_of("baseline"), best_of("full"), best_of("top"), best_of("adapters")),
    "tradeoff": (best_of("full"), each_of("adapters"), each_of("top"), best_of("norms")),
    "squad": (best_of("full"), each_of("adapters")),
    "init": (each_scale,),
    "sizes": (each_of("adapters"),),
    "uva": (best_of("full"), each_of("adapters")),
    "stream": (best_of("full"), each_of("adapters")),
}


def shape_of(study: StudySpec) -> str:
    """Which of the known studies one is shown as: a copy under another name has the same published values."""
    return study.published or study.name


def list_rows(study: StudySpec, records: Sequence[Record]) -> list[RowSpec]:
    """The rows of a study that have records, in the order they are shown."""
    made = [row for make in ROWS.get(shape_of(study), ()) for row in make(records)]
    # The best of one size is that size: it is shown once.
    rows = [row for row in made if not any(row.records == other.records for other in made[made.index(row) + 1 :])]
    taken = {record.arm for row in rows for record in row.records}
    arms = dict.fromkeys([*study.arms, *sorted(record.arm for record in records)])
    for arm in (arm for arm in arms if arm not in taken):
        found = select(records, lambda record, arm=arm: record.arm == arm)  # type: ignore[misc]
        if found:
            key = _key(found[0])
            is_taken = any(row.key == key for row in rows)  # two arms of one kind: each keeps its name
            rows.append(RowSpec(arm if is_taken else key, name_arm(study, arm), tuple(found)))
    return rows


def _key(record: Record) -> str:
    way = way_of(record)
    return way.kind if way.number is None else f"{way.kind}-{way.number}"


def name_arm(study: StudySpec, arm: str) -> str:
    """How an arm is called: its own title in the study's file, or its name."""
    title = getattr(study.arms.get(arm), "title", "")
    return title if title and title != arm else LABELS.get(arm, name_way(read_way(arm), arm))


def name_way(way: Way | None, arm: str) -> str:
    """A kind with its number, or the arm's name as it is."""
    return arm if way is None or way.number is None else name_row(way.kind, way.number)


def name_task(task: str) -> str:
    """How a task is called: `CoLA`, `political bias`."""
    return TASKS.get(task, task.partition("/")[2].replace("-", " ") or task)


def name_column(task: str, metric: str) -> str:
    """A task with what is measured on it: `CoLA (Matthews)`."""
    return f"{name_task(task)} ({METRICS.get(metric, metric)})"


@dataclass(frozen=True)
class Scored:
    """The rows of a study with their cells: what tables, figures and claims are made of."""

    study: StudySpec
    specs: tuple[RowSpec, ...]
    rows: Mapping[str, Row]
    """key -> cells"""
    tasks: tuple[str, ...]
    """those with a cell in some row, in the study's order"""
    split: str
    published: Published

    @property
    def reference(self) -> str | None:
        """The row that differences are taken to."""
        wanted = REFERENCES.get(shape_of(self.study), ("full",))
        return next((key for key in (*wanted, "full") if key in self.rows), None)

    def label(self, key: str) -> str:
        """How a row is called."""
        return next((spec.label for spec in self.specs if spec.key == key), key)

    def metric(self, task: str) -> str:
        """What is measured on a task."""
        return next(row[task].metric for row in self.rows.values() if task in row)

    def column(self, task: str) -> str:
        """The task and its metric, as published columns are named."""
        return f"{task}:{self.metric(task)}"

    def is_tested(self, task: str) -> bool:
        """Whether a task has scores on labelled test rows."""
        return any(record.test for spec in self.specs for record in spec.records if record.task == task)

    def narrowed(self, tasks: Sequence[str]) -> Scored:
        """The same for some of the tasks."""
        rows = {key: {task: row[task] for task in tasks if task in row} for key, row in self.rows.items()}
        kept = {key: row for key, row in rows.items() if row}
        split = self.split if any(map(self.is_tested, tasks)) else "dev"
        return Scored(self.study, self.specs, kept, tuple(tasks), split, self.published)


def score_study(study: StudySpec, records: Sequence[Record], published: Published) -> Scored:
    """Choose every row's settings on dev. Records are of one backbone and profile.

    Where test scores are to be reported but a task has none (GLUE's test sides are unlabelled), dev is, and said.
    """
    has_test = any(record.test for record in records)
    split = study.report_on if has_test else "dev"
    specs = list_rows(study, records)
    rows = {spec.key: score_row(study, spec, split) for spec in specs}
    for spec in specs:
        if all(_is_fixed(study, record.arm) for record in spec.records):
            rows[spec.key] = {task: replace(cell, is_fixed=True) for task, cell in rows[spec.key].items()}
    held = {task for row in rows.values() for task in row}
    known = [*study.tasks, *sorted(held - set(study.tasks))]
    tasks = tuple(task for task in known if task in held)
    return Scored(study, tuple(specs), {key: row for key, row in rows.items() if row}, tasks, split, published)


def score_row(study: StudySpec, spec: RowSpec, split: str) -> Row:
    """The cells of a row; tasks of one run, and of one sequence, have one setting for all of them."""
    found: Sequence[Record] = spec.records
    ranked = rank_settings(found, shown_metric(study)) if has_one_setting(spec) else []
    found = ranked[0] if ranked else found
    chosen = _choose(study, found, split)
    if ranked and split == "dev":
        chosen = {
            task: replace(cell, candidates=list_candidates(ranked, task, shown_metric(study, task)))
            for task, cell in chosen.items()
        }
    if len(found) < len(spec.records):
        tried = _choose(study, spec.records, split)
        counted = ("num_settings", "num_waiting", "num_lost", "rates")
        chosen = {
            task: replace(cell, **{name: getattr(tried[task], name) for name in counted})
            for task, cell in chosen.items()
        }
    untested = [record for record in found if split == "test" and record.task not in chosen]
    return chosen | _choose(study, untested, "dev")


def shown_metric(study: StudySpec, task: str | None = None) -> str | None:
    """What a study reports on a task, or on all of them, where that is not each one's own metric."""
    metric = SHOWN_METRIC.get(shape_of(study))
    return metric.get(task or "") if isinstance(metric, dict) else metric


def _choose(study: StudySpec, records: Sequence[Record], split: str) -> Row:
    """A row's cells, each in the metric that the study shows of its task."""
    row: Row = {}
    for task in dict.fromkeys(record.task for record in records):
        row |= choose([record for record in records if record.task == task], split, shown_metric(study, task))
    return row


def _is_fixed(study: StudySpec, arm: str) -> bool:
    """Whether an arm comes out the same with every seed: what has no backbone (TF-IDF) draws nothing."""
    kind = getattr(study.arms.get(arm), "kind", None) or (read_way(arm) or Way("runs")).kind
    return kind in ARM_KINDS and not ARM_KINDS[kind].needs_backbone


def has_joint_runs(spec: RowSpec) -> bool:
    """Whether runs of a row have several tasks."""
    return any(len(joint_of(record).get("tasks", ())) > 1 for record in spec.records)


def has_one_setting(spec: RowSpec) -> bool:
    """Whether the setting of a row is chosen once for all its tasks: they are one run, or one sequence."""
    return has_joint_runs(spec) or any(len(record.extra.get("sequence", ())) > 1 for record in spec.records)


def needs_backbone(scored: Scored, key: str) -> bool:
    """Whether a row's tasks are answered with the backbone; TF-IDF does without."""
    return not all(cell.is_fixed for cell in scored.rows[key].values())


def mean_tasks(scored: Scored) -> list[str]:
    """The tasks a mean is over: those that every row has. WNLI is shown and not averaged, as in the papers."""
    return [task for task in shared_tasks(scored.rows.values(), scored.tasks) if task not in NOT_AVERAGED]


def averaged_tasks(scored: Scored) -> list[str]:
    """All tasks that a mean may be over, whether or not every row has them."""
    return [task for task in scored.tasks if task not in NOT_AVERAGED]


def published_tasks(scored: Scored) -> list[str]:
    """Those of them that some published table has under the same metric: where two means can be compared."""
    columns = {column for table in scored.published.tables for column in table.columns}
    return [task for task in mean_tasks(scored) if scored.column(task) in columns]


def group_tasks(tasks: Sequence[str]) -> dict[str, list[str]]:
    """Tasks by where they come from (`glue/…`, `extra/…`); few of them stay together."""
    if len(tasks) <= WIDE:
        return {"": list(tasks)} if tasks else {}
    groups: dict[str, list[str]] = {}
    for task in tasks:
        groups.setdefault(task.partition("/")[0], []).append(task)
    return groups
