"""The rows of a study's tables: their records, labels and order.

A row has the runs that a rule of the study's `[report]` selects by their settings; runs that no rule selects make a row
for each arm. A rule without `each` takes runs of several settings together, and the best of these is chosen on dev.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inlay.studies.judge.scores import joint_of, select
from inlay.studies.run.records import Record
from inlay.studies.spec.report_spec import SAMPLE, SETTINGS, RowRule, find_section
from inlay.studies.spec.study import ARM_KINDS, Study

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
NOT_AVERAGED = frozenset({"glue/wnli"})
WIDE = 7  # more tasks than this are shown in groups, and as lines instead of columns


@dataclass(frozen=True)
class RowSpec:
    """A row to be shown: its key (the published row has the same), its label and its records."""

    key: str
    label: str
    records: tuple[Record, ...]
    series: str = ""
    """the series that it belongs to, such as `adapters`, of any size; "" for an arm's own row"""
    number: float | None = None
    """its number in the series: a size, a number of layers or of samples, a scale"""


def find_setting(study: Study, record: Record, name: str) -> Any:
    """Return the value of a setting in a record's run; `sample` is a setting of its arm."""
    if name == SAMPLE:
        return study.arms[record.arm].sample if record.arm in study.arms else None
    section = find_section(name)
    known = record.config.get(section)
    if known is None:  # only the axes are known
        return record.axes.get(name)
    return record.axes.get(name, known.get(name, SETTINGS[section][name]))


def find_number(study: Study, record: Record, name: str) -> float | None:
    """Return a setting as a number: 64 for a size, 3 for the layers `-3:`; None if it is not a number."""
    value = find_setting(study, record, name)
    if isinstance(value, str):
        digits = re.search(r"\d+", value)
        return int(digits[0]) if digits else None
    return value


def plain_value(value: Any) -> Any:
    """Return a setting as JSON has it: tuples are lists."""
    return list(value) if isinstance(value, tuple) else value


def make_rows(study: Study, rule: RowRule, records: Sequence[Record]) -> list[RowSpec]:
    """Make the rows of a rule that have records: one, or one for every value of a setting."""

    def is_taken(record: Record) -> bool:
        kind = study.arms[record.arm].kind if record.arm in study.arms else "runs"
        is_of_kind = kind == rule.kind if rule.kind else ARM_KINDS[kind].needs_backbone
        return is_of_kind and all(
            plain_value(find_setting(study, record, name)) == plain_value(value) for name, value in rule.where.items()
        )

    found = select(records, is_taken)
    named = rule.each or next(iter(re.findall(r"\{(\w+)\}", rule.label)), "")
    numbers = {record.id: find_number(study, record, named) for record in found} if named else {}
    known = sorted({number for number in numbers.values() if number is not None})
    if not rule.each:
        return [RowSpec(rule.key, _fill(rule.label, named, known), tuple(found), rule.series)] if found else []
    rows = []
    for number in known:
        own = tuple(record for record in found if numbers[record.id] == number)
        key = rule.key.replace(f"{{{rule.each}}}", f"{number:g}")
        rows.append(RowSpec(key, _fill(rule.label, rule.each, [number]), own, rule.series, number))
    return rows


def _fill(label: str, name: str, numbers: Sequence[float]) -> str:
    """Fill a label with its number, or the range of several; without numbers, drop the part in brackets."""
    if not name:
        return label
    if not numbers:
        return re.sub(r"\s*\(\{\w+\}\)", "", label)
    ends = [f"{number:g}" if number >= 0.1 or number == 0 else f"{number:.0e}" for number in (numbers[0], numbers[-1])]
    shown = "–".join(dict.fromkeys(ends)).replace("e-0", "e-")  # `64`, `0.1`, `1e-2`
    return label.replace(f"{{{name}}}", shown).replace("(s)", "s" if numbers[-1] > 1 else "")


def list_rows(study: Study, records: Sequence[Record]) -> list[RowSpec]:
    """List the rows of a study that have records, in order: those of rules, then arms that no rule selects."""
    rules = [rule for rule in study.report.rows if rule.is_shown]
    made = [row for rule in rules for row in make_rows(study, rule, records)]
    # A row for the best of all sizes equals the row of a size if there is only one: show it once.
    rows = [row for place, row in enumerate(made) if all(row.records != other.records for other in made[place + 1 :])]
    taken = {(record.id, record.hardware) for row in rows for record in row.records}
    left = [record for record in records if (record.id, record.hardware) not in taken]
    for arm in dict.fromkeys([*study.arms, *sorted(record.arm for record in left)]):
        found = select(left, lambda record, arm=arm: record.arm == arm)  # type: ignore[misc]
        if found:
            key = f"arm {arm}" if any(row.key == arm for row in rows) else arm
            rows.append(RowSpec(key, name_arm(study, arm), tuple(found)))
    return rows


def name_row(study: Study, key: str) -> str:
    """Return the label of a row without records: from its rule, its arm's title, or its key."""
    rule = next((rule for rule in study.report.rows if rule.key == key), None)
    if rule is not None:
        return _fill(rule.label, "{", [])
    return name_arm(study, key)


def name_arm(study: Study, arm: str) -> str:
    """Return the label of an arm: its title in the study's file, or its name."""
    return study.arms[arm].title or arm if arm in study.arms else arm


def name_task(task: str) -> str:
    """Return the label of a task: `CoLA`, `political bias`."""
    return TASKS.get(task, task.partition("/")[2].replace("-", " ") or task)


def name_column(task: str, metric: str) -> str:
    """Return the label of a task with its metric: `CoLA (Matthews)`."""
    return f"{name_task(task)} ({METRICS.get(metric, metric)})"


def has_joint_runs(spec: RowSpec) -> bool:
    """Tell whether a row has multi-task runs."""
    return any(len(joint_of(record).get("tasks", ())) > 1 for record in spec.records)


def has_one_setting(spec: RowSpec) -> bool:
    """Tell whether a row has one setting for all its tasks, as they are one run or one sequence."""
    return has_joint_runs(spec) or any(len(record.extra.get("sequence", ())) > 1 for record in spec.records)


def group_tasks(tasks: Sequence[str]) -> dict[str, list[str]]:
    """Group tasks by their set (`glue/…`, `extra/…`); few tasks stay in one group."""
    if len(tasks) <= WIDE:
        return {"": list(tasks)} if tasks else {}
    groups: dict[str, list[str]] = {}
    for task in tasks:
        groups.setdefault(task.partition("/")[0], []).append(task)
    return groups
