"""Says how many runs each study's command in docs/results.md finds among the shipped records.

    python docs/found_runs.py           # each command, what is printed behind it and what it should be
    python docs/found_runs.py --write   # puts the numbers behind the commands that have some already

A command is a code span that begins with `inlay study` and names a profile and a backbone; `MPNET`, `T5` and `DATA`
stand for folders. Behind it, before the next one, come the words "finds N of M runs": M that the studies plan, N that
have a record. Neither the data nor the backbones are needed; tests/cli/test_printed_commands.py holds the numbers, and
asks `inlay study --dry-run` too where the data are.

A run's id is made of its resolved settings, the digest of its rows and the backbone's fingerprint. Here the rows stand
for themselves as the task and the settings that choose among its rows, and of the backbone a few facts are enough.
tests/studies/test_matching.py holds this count equal to that of a dry run. What is not seen here: that a file of data
has changed, and rows of tasks too small for an arm's samples.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.cli.study import narrow
from inlay.data import PASSAGES, WHOLE_ROW
from inlay.model import WRITTEN, find_head, find_method, resolve_method
from inlay.settings import DataConfig, JointConfig, MethodConfig, RunConfig, TrainConfig, digest, from_tree, settled
from inlay.studies.run.records import FAILED, Record, list_files, read_records
from inlay.studies.spec.study import (
    ARM_KINDS,
    Arm,
    ArmKind,
    Study,
    bare_name,
    find_study,
    has_profile,
    list_studies,
    read_study,
    study_folders,
)

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results.md"
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


FACTS = {
    facts.name: facts
    for facts in (
        BackboneFacts("minilm", "1b270ee776ef549a2507f6df6dcc4adad804dd6a36dc5f2f2110833ae6840ba8", "mean", 6),
        BackboneFacts("mpnet-base", "eea7d0a402f3ead1d97b78fb468db4e19f87a732efcdc0f217734e8caa32ae93", "mean", 12),
        BackboneFacts("flan-t5-small", "851fa6075762bfeeaa57eb2a1415aec2024cd1cb55ba4046be132e3f767b73b9", "text", 16),
    )
}
FOLDERS = {"MINILM": "minilm", "MPNET": "mpnet-base", "T5": "flan-t5-small"}
"""what stands for a folder in a printed command -> the name of the backbone in it"""
_COMMAND = re.compile(r"`(inlay study [^`]+)`")
_WORDS = re.compile(r"finds ([\d,]+) of ([\d,]+) runs")


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
            "tasks": [bare_name(task) for task in self.tasks] if self.kind.is_joint else self.tasks,
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
        like = tuple(f"{bare_name(task)}={study.like[task]}" for task in tasks if task in study.like)
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


@dataclass(frozen=True)
class Printed:
    """A command of a document, with the text behind it up to the next command or the end of its line."""

    line: int
    text: str
    behind: str

    @property
    def counts(self) -> list[Count]:
        """What is said behind it, once if all is well."""
        return [Count(*(int(each.replace(",", "")) for each in found)) for found in _WORDS.findall(self.behind)]

    @property
    def arguments(self) -> list[str]:
        """What stands behind `inlay`."""
        return shlex.split(self.text)[1:]

    def option(self, name: str) -> str | None:
        """The value that it gives an option."""
        given = self.arguments
        return given[given.index(name) + 1] if name in given else None

    @property
    def backbone(self) -> str:
        """The short name of the backbone it runs on."""
        given = self.option("--backbone") or ""
        return FOLDERS.get(given, given)

    def count(self, records: list[Record]) -> Count:
        """The runs that it plans, and those of them that these records are of."""
        profile, folders = self.option("--profile") or "", study_folders()
        studies = [
            narrow(
                read_study(find_study(name, folders), profile, self.backbone),
                self.option("--arms"),
                self.option("--tasks"),
            )
            for name in self.arguments[1].split(",")
        ]
        return count_found(studies, FACTS[self.backbone], records)


def list_printed(text: str) -> list[Printed]:
    """The commands of a document that name a profile and a backbone."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        spans = [span for span in _COMMAND.finditer(line) if {"--profile", "--backbone"} <= set(shlex.split(span[1]))]
        for place, span in enumerate(spans):
            end = spans[place + 1].start() if span is not spans[-1] else len(line)
            found.append(Printed(number, span[1], line[span.end() : end]))
    return found


def read_shipped() -> list[Record]:
    """All records that studies look for."""
    return [record for path in list_files(ROOT / "results") for record in read_records(path)]


def main() -> None:
    """Print, or write, what every command finds."""
    text, records = RESULTS.read_text(encoding="utf8"), read_shipped()
    for printed in list_printed(text):
        count = printed.count(records)
        said = "nothing" if not printed.counts else " and ".join(each.words for each in printed.counts)
        state = "as printed" if printed.counts == [count] else f"printed: {said}"
        print(f"line {printed.line}: {printed.text}\n    {count.words} ({state})")
        if "--write" in sys.argv:
            whole = f"`{printed.text}`{printed.behind}"
            text = text.replace(whole, _WORDS.sub(count.words, whole))
    if "--write" in sys.argv:
        RESULTS.write_text(text, encoding="utf8")


if __name__ == "__main__":
    main()
