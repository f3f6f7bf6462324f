"""Describes the differences between a profile and the profile `paper`.

Whole configs are compared, so a setting that only one of the two profiles gives is a difference too. The value of a
setting that ours leaves to the backbone or the method (`auto`) is taken from the records of its runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from inlay.studies.run.records import Record
from inlay.studies.spec.study import ARM_KINDS, LEFT_OPEN, Arm, Study

_OPEN = tuple([value] for value in LEFT_OPEN)
_OWN = frozenset(("seed",))  # a setting of each run, not of an arm

Key = tuple[str, str]
"""section and name of a setting"""


def list_differences(study: Study, paper: Study, records: Sequence[Record] = ()) -> list[str]:
    """Describe how a profile differs from `paper`: backbone, tasks, arms, seeds, axes and settings.

    `records` are those of the profile and backbone.
    """
    found = [f"backbone: {study.backbone} instead of {paper.backbone}"] if study.backbone != paper.backbone else []
    found += _compare_names("task", study.tasks, paper.tasks)
    found += _compare_names("arm", study.arms, paper.arms)
    arms = {
        name: _compare_arms(arm, paper.arms[name], [record.config for record in records if record.arm == name])
        for name, arm in study.arms.items()
        if name in paper.arms
    }
    found += _group(arms, "arms")
    own = {task: [_compare_task(study.per_task.get(task, {}), paper.per_task.get(task, {}))] for task in study.tasks}
    found += _group({task: filter(None, texts) for task, texts in own.items()}, "tasks")
    found += [
        f"at most {number:,} {side} rows a task"
        for side, number in study.most_rows.items()
        if number != paper.most_rows.get(side)
    ]
    limits = {task: study.data.get(task, {}).get("limit") for task in study.tasks}
    found += [
        f"{task}: at most {limit:,} training rows"
        for task, limit in limits.items()
        if limit is not None and limit != paper.data.get(task, {}).get("limit")
    ]
    return [*found, "rows: made up, not read"] if study.is_toy and not paper.is_toy else found


def _compare_names(what: str, ours: Iterable[str], theirs: Iterable[str]) -> list[str]:
    ours, theirs = list(ours), list(theirs)
    lists = {
        f"{what}s left out": [name for name in theirs if name not in ours],
        f"more {what}s": [name for name in ours if name not in theirs],
    }
    return [f"{title}: {', '.join(names)}" for title, names in lists.items() if names]


def _group(texts: Mapping[str, Iterable[str]], what: str) -> list[str]:
    """Group equal texts as `NAMES: TEXT`."""
    grouped: dict[str, list[str]] = {}
    for name, found in texts.items():
        for text in found:
            grouped.setdefault(text, []).append(name)
    said = []
    for text, names in grouped.items():
        whose = ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]} ({len(names)} {what})"
        said.append(f"{whose}: {text}")
    return said


def _compare_arms(ours: Arm, theirs: Arm, configs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if ours.kind != theirs.kind:
        yield f"an arm of the kind `{ours.kind}` instead of `{theirs.kind}`"
    if ours.seeds != theirs.seeds:
        yield f"{ours.seeds} seeds instead of {theirs.seeds}"
    if ours.sample != theirs.sample:
        yield f"{ours.sample} training rows a task instead of {theirs.sample}"
    if not ARM_KINDS[ours.kind].needs_backbone:
        return  # this arm reads no training settings
    values = _values(theirs)
    for key, value in _values(ours).items():
        there = values.get(key, [None])  # kinds of arms may have different settings
        if value != there and value in _OPEN:
            # The values that the runs had. Runs of sequences do not say, and there may be no runs.
            found = [config.get(key[0], {}).get(key[1]) for config in configs]
            value = list(dict.fromkeys(tuple(each) if isinstance(each, list) else each for each in found))
        if value and set(value) != set(there):
            yield f"{key[1]} {_show(value)}" + ("" if there in _OPEN else f" instead of {_show(there)}")


def _values(arm: Arm) -> dict[Key, list[Any]]:
    """Return every setting of an arm's runs, with all its values."""
    base = arm.base()
    sections = ("method", "train", "joint") if ARM_KINDS[arm.kind].is_joint else ("method", "train")
    trees = {section: dataclasses.asdict(getattr(base, section)) for section in sections}
    fixed = {(section, name): [value] for section, tree in trees.items() for name, value in tree.items()}
    varied = {key: list(arm.axes[key[1]]) for key in fixed if key[1] in arm.axes}
    return {key: value for key, value in (fixed | varied).items() if key[1] not in _OWN}


def _compare_task(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Describe a task's own values on some axes, if the paper's differ."""
    texts = []
    for key in dict.fromkeys([*ours, *theirs]):
        if ours.get(key) != theirs.get(key):
            value = _show(ours[key]) if key in ours else "as on other tasks"
            texts.append(f"{key} {value}" + (f" instead of {_show(theirs[key])}" if key in theirs else ""))
    return ", ".join(texts)


def _show(value: Any) -> str:
    if value in _OPEN:
        return "left open"
    values = value if isinstance(value, list | tuple) else [value]
    return ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in values)
