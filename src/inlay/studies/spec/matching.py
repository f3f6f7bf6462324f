"""Counts the runs of studies that have a record, by settings alone: without data sets and backbone.

A run's id is made of its resolved settings, the digest of its rows and the backbone's fingerprint. Here the rows stand
for themselves as the task and the settings that choose among its rows, and of the backbone a few facts are enough. So
what `inlay study --dry-run` finds done can be counted where neither is at hand; a test holds the two counts equal.

What is not seen here: that a file of data has changed, and rows of tasks too small for an arm's samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.data import PASSAGES, WHOLE_ROW
from inlay.model import WRITTEN, find_head, find_method, resolve_method
from inlay.settings import DataConfig, JointConfig, MethodConfig, RunConfig, TrainConfig, digest, from_tree, settled
from inlay.studies.run.records import FAILED, Record
from inlay.studies.spec.arms import ARM_KINDS, ArmKind
from inlay.studies.spec.study import Arm, Study, has_profile, list_studies, read_study, shorten, study_folders

# Data settings that say nothing about the rows: found out by a run, given by an arm, or paths.
# Answers are compared separately.
_NOT_ROWS = ("kind", "metric", "labels", "answers", "source", "dev", "test", "root", "sample", "sample_seed", "pairs")


@dataclass(frozen=True)
class BackboneFacts:
    """The facts about a backbone that decide which runs a study has on it."""

    name: str
    """short name, as in records"""
    fingerprint: str
    pooling: str
    """default pooling"""
    num_layers: int

    @property
    def is_seq2seq(self) -> bool:
        """Whether its answers are texts."""
        return self.pooling == WRITTEN


@dataclass(frozen=True)
class Count:
    """A number of runs and of those with a record; a run that several studies share counts once."""

    found: int
    planned: int

    @property
    def words(self) -> str:
        """Describe the counts: `finds 42 of 42 runs`."""
        return f"finds {self.found:,} of {self.planned:,} runs"


def count_found(studies: Sequence[Study], facts: BackboneFacts, records: Iterable[Record]) -> Count:
    """Count the runs that studies ask for on a backbone, and those with a record of any study."""
    found = _Found(facts, [record for record in records if record.fingerprint == facts.fingerprint], studies)
    planned: set[str] = set()
    left: set[str] = set()
    for study in studies:
        for arm in study.arms.values():
            if arm.min_layers > facts.num_layers:
                continue
            keys = _list_keys(study, arm, facts)
            planned.update(keys)
            left.update(key for key in keys if not found.has(key, needs_spans=arm.kind == "spans"))
    return Count(len(planned) - len(left), len(planned))


@dataclass(frozen=True)
class _Asked:
    """One run, as a study asks for it or as a record describes it."""

    kind: ArmKind
    tasks: tuple[str, ...]
    method: MethodConfig
    train: TrainConfig
    joint: JointConfig
    data: DataConfig
    sample: int | None
    start: str = ""
    """the key of the run that it starts from"""

    def make_key(self, facts: BackboneFacts, pooling: str) -> str:
        """Return the run's key: like its id, but with the settings of its rows instead of their digest."""
        rows = {name: value for name, value in dataclasses.asdict(self.data).items() if name not in _NOT_ROWS}
        answers = sorted(item for item in self.data.answers if len(set(item.split("=", 1))) > 1)
        content: dict[str, Any] = {
            "kind": [self.kind.is_trained, self.kind.is_joint, self.kind.needs_backbone],
            "tasks": [shorten(task) for task in self.tasks] if self.kind.is_joint else self.tasks,
            "rows": [rows, answers, self.sample],
            "method": settled(self.method),
            "train": settled(self.train),
        }
        if self.data.pairs == "towers":
            content["pairs"] = self.data.pairs
        if self.kind.needs_backbone:
            content |= {"backbone": facts.fingerprint, "pooling": pooling}
        if self.kind.is_joint:
            content |= {"joint": settled(dataclasses.replace(self.joint, start=None)), "start": self.start}
        return digest(content)


def _list_keys(study: Study, arm: Arm, facts: BackboneFacts) -> list[str]:
    """List the keys of all runs of an arm, with every seed."""
    spans_tasks = ARM_KINDS[arm.kind].spans_tasks
    groups = [tuple(arm.tasks)] if spans_tasks else [(task,) for task in arm.tasks]
    return [
        _plan(study, arm, tasks, point.config, seed, facts)
        for tasks in groups
        if tasks
        for point in arm.points(None if spans_tasks else study.per_task.get(tasks[0]))
        for seed in range(arm.seeds)
    ]


def _plan(study: Study, arm: Arm, tasks: tuple[str, ...], config: RunConfig, seed: int, facts: BackboneFacts) -> str:
    """Return the key of one run that a study asks for, with every setting as `make_run` resolves it."""
    kind, joint, start = ARM_KINDS[arm.kind], config.joint, ""
    if arm.source:
        name, _, source = arm.source.partition("/")
        start = _list_keys(study.sources[name], study.sources[name].arms[source], facts)[0]
        like = tuple(f"{shorten(task)}={study.like[task]}" for task in tasks if task in study.like)
        joint = dataclasses.replace(joint, like=like)
    most = study.most_rows
    data = study.data_config(tasks[0], None)
    most_dev, most_test = most.get("dev", data.most_dev), most.get("test", data.most_test)
    data = dataclasses.replace(data, most_dev=most_dev, most_test=most_test)
    train, method = dataclasses.replace(config.train, seed=seed), config.method
    pooling = facts.pooling if train.pooling == "auto" else train.pooling
    if kind.is_trained:
        find_lr = find_method(method.name).find_lr
        lr = train.lr or find_lr(is_seq2seq=facts.is_seq2seq, is_alone=joint.trained == "task")
        method, train = resolve_method(method).as_config(), dataclasses.replace(train, lr=lr, bucket=train.bucket or 1)
    if kind.is_trained and not kind.is_joint:  # each of several tasks resolves these for itself
        longest = find_head(PASSAGES if "squad" in tasks[0] else WHOLE_ROW).max_length
        train = dataclasses.replace(train, pooling=pooling, max_length=train.max_length or longest)
    return _Asked(kind, tasks, method, train, joint, data, arm.sample, start).make_key(facts, pooling)


class _Found:
    """The runs that have a record on one backbone."""

    def __init__(self, facts: BackboneFacts, records: Sequence[Record], studies: Sequence[Study]) -> None:
        self._facts = facts
        self._given = {(study.name, study.profile): study for study in studies}
        self._records = {record.id: record for record in records}
        self._studies: dict[tuple[str, str], Study | None] = {}
        self._has_spans: dict[str, bool] = {}
        """key -> whether a record of that run has the scores of spans of layers"""
        for record in records:
            if record.status != FAILED and (key := self._key_of(record)):
                self._has_spans[key] = self._has_spans.get(key, False) or "spans" in record.extra

    def has(self, key: str, *, needs_spans: bool) -> bool:
        """Tell whether a run has a record, with scores of spans where they are asked for."""
        return key in self._has_spans and (self._has_spans[key] or not needs_spans)

    def _key_of(self, record: Record) -> str:
        """Return the key of a record's run; empty for the later tasks of a run and for old arms."""
        study = self._find_study(record)
        if "-" in record.id or study is None or record.arm not in study.arms:
            return ""
        arm, config = study.arms[record.arm], record.config
        kind = ARM_KINDS[arm.kind]
        joint = from_tree(JointConfig, config.get("joint", {}))
        source = self._records.get(joint.start or "")
        if joint.start and source is None:
            return ""  # its start is unknown
        asked = _Asked(
            kind,
            tuple(record.extra.get("joint", {}).get("tasks") or record.extra.get("sequence") or [record.task]),
            from_tree(MethodConfig, config["method"]),
            from_tree(TrainConfig, config["train"]),
            joint,
            from_tree(DataConfig, config.get("data", {})),
            arm.sample,
            "" if source is None else self._key_of(source),
        )
        pooling = self._facts.pooling if record.pooling == "auto" and self._facts.is_seq2seq else record.pooling
        return asked.make_key(self._facts, pooling)

    def _find_study(self, record: Record) -> Study | None:
        """Return a record's own study under its profile; None if it no longer exists."""
        key = (record.study, record.profile)
        if key not in self._studies:
            known = list_studies(study_folders())
            has = record.study in known and has_profile(known[record.study], record.profile)
            # From the file, not the study given: that one may be narrowed to some of its arms.
            found = read_study(known[record.study], record.profile, self._facts.name) if has else None
            self._studies[key] = found or self._given.get(key)
        return self._studies[key]
