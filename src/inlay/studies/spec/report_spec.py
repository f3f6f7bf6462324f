"""The report of a study as its file defines it: `[report]` has rows, tables and figures, `[[claims]]` the claims.

A rule of `[[report.rows]]` selects the runs with the settings in `where`; with `each` it makes a row for every value of
one setting. `{size}` in its key or label stands for that value, or, in the label of a row of several sizes, for their
range. Runs that no rule selects make a row for each arm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inlay.errors import BadConfig, UnknownName
from inlay.settings import JointConfig, MethodConfig, TrainConfig, from_tree

# Section of a run's config -> its settings with their defaults; if two sections have one name, the first counts.
SETTINGS = {
    section: {item.name: item.default for item in dataclasses.fields(kind)}
    for section, kind in (("method", MethodConfig), ("train", TrainConfig), ("joint", JointConfig))
}
SAMPLE = "sample"
"""the only setting of an arm that a rule may name: the most training rows of a task"""

# Rule of a claim -> what it claims; `studies/judge/claims.py` has the function of each.
RULES = {
    "above": "the first row is above the second",
    "within": "the first row is at most `bound` points below the second",
    "at_most": "the first row is at most `bound` points above the second",
    "clearly_above": "the first row is at least `bound` points above the second",
    "clearly_below": "the first row is at least `bound` points below the second",
    "some_above": "the first row is above the second on some task",
    "none_above": "no row is more than `bound` points above the reference",
    "each_below": "each of the first rows is below the second",
    "lowest": "the first row is at least `bound` points below all of the second rows",
    "series_above": "the first series is above the second, over all its numbers",
    "series_below": "the first series is `bound` points below members of the second that train no more parameters",
    "stable": "no row of a series is more than `bound` points from their mean",
    "total": "parameters of `num_tasks` tasks together, as multiples of the backbone",
    "spans": "what removing trained adapters costs; `part`: single, all, lower, lowest",
    "init": "what the scale of initial values costs; `part`: robust, worse, compare",
    "moved": "no earlier task moves when a later one is learnt",
    "embeddings": "training takes embeddings of tasks of one of the `kinds` closer together",
}


@dataclass(frozen=True)
class RowRule:
    """A rule that selects the runs of one row of a report, or of several rows."""

    key: str
    """the row's name in claims and published tables: `adapters`, or `adapters-{size}` with `each`"""
    label: str
    where: Mapping[str, Any] = field(default_factory=dict)
    """setting of the method or the training -> the value that the runs must have"""
    each: str = ""
    """the setting that gets a row for every value"""
    kind: str = ""
    """the kind of arms; by default all kinds that train on the backbone"""
    is_shown: bool = True
    """whether its rows are in tables and figures, or only used by claims"""

    @property
    def series(self) -> str:
        """The common name of its rows: `adapters` for `adapters-{size}`."""
        return self.key.partition("-{")[0]


@dataclass(frozen=True)
class Advice:
    """A line in the table of a paper's advice, with a difference of two rows beside it."""

    text: str
    rows: tuple[str, ...] = ()
    what: str = ""
    tasks: tuple[str, ...] = ()
    """the tasks it is about; by default all"""


@dataclass(frozen=True)
class ReportSpec:
    """The settings of a study's report."""

    order: int = 1000
    """its place in the report of all studies; those without one come last, by name"""
    metric: str = ""
    """the metric that is shown, and that chooses settings, on all tasks; by default each task's own"""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """task -> its metric, if tasks have different ones"""
    reference: tuple[str, ...] = ()
    """the row that others are compared with: the first of these that has records; by default `full`"""
    tables: tuple[str, ...] = ("scores",)
    figures: tuple[str, ...] = ()
    rows: tuple[RowRule, ...] = ()
    advice: tuple[Advice, ...] = ()
    advice_title: str = ""

    def metric_of(self, task: str | None = None) -> str | None:
        """Return the metric that is set for a task, or for all tasks; None stands for the task's own."""
        return self.metrics.get(task or "") or self.metric or None


@dataclass(frozen=True)
class Claim:
    """A published claim, the rule that judges it, and the rule's parameters."""

    name: str
    text: str
    source: str
    rule: str
    study: str = ""
    rows: tuple[str, ...] = ()
    """the rows, or series of rows, to compare; `*` in a name stands for anything"""
    names: tuple[str, ...] = ()
    """their names in the sentence; by default their labels"""
    needs: tuple[str, ...] = ()
    """the rows to name as missing if they were not run; by default their keys"""
    rests_on: tuple[str, ...] = ()
    """the rows whose planned runs must all be there; by default `rows`"""
    sentence: str = ""
    """the sentence of the verdict, with `{gap}` and other placeholders for the numbers"""
    bound: float = 0.0
    tasks: tuple[str, ...] = ()
    """the tasks it is about; by default all that count in a mean"""
    on_published: bool = False
    """whether it is about the tasks that the first row was published on"""
    share: float | None = None
    """most parameters of the first row, in percent of the backbone"""
    fraction: float | None = None
    """most parameters of the first row, as a fraction of the second's"""
    only_confirmed: bool = False
    """whether it can be confirmed but not broken, as the second row was chosen on the rows that are shown"""
    covers: Mapping[str, Any] = field(default_factory=dict)
    """setting -> values that the second row must have been trained with"""
    num_tasks: int = 0
    bounds: tuple[float, ...] = ()
    part: str = ""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """task -> its kind"""


def read_report(tree: Mapping[str, Any], figures: Iterable[str]) -> ReportSpec:
    """Read the section `report` of a study's file; `figures` are those listed outside of it."""
    inner = {"rows", "advice", "metric"}
    rules = tuple(_read_rule(item) for item in tree.get("rows", ()))
    advice = tuple(from_tree(Advice, item, "report.advice.") for item in tree.get("advice", ()))
    metric = tree.get("metric", "")
    metrics = {task: str(name) for task, name in metric.items()} if isinstance(metric, Mapping) else {}
    spec = from_tree(ReportSpec, {key: value for key, value in tree.items() if key not in inner}, "report.")
    return dataclasses.replace(
        spec,
        rows=rules,
        advice=advice,
        metrics=metrics,
        metric="" if metrics else str(metric),
        figures=spec.figures or tuple(figures),
    )


def _read_rule(tree: Mapping[str, Any]) -> RowRule:
    flat = {key: value for key, value in tree.items() if key != "where"}
    _require(flat, ("key", "label"), "report.rows")
    rule = from_tree(RowRule, flat, "report.rows.")
    for name in (*tree.get("where", {}), *((rule.each,) if rule.each else ())):
        find_section(name)
    if bool(rule.each) != (f"-{{{rule.each}}}" in rule.key):
        hint = 'write `key = "adapters-{size}"` with `each = "size"`, and neither without the other'
        raise BadConfig(f"`report.rows`: `key` is `{rule.key}` and `each` is `{rule.each}`", hint)
    return dataclasses.replace(rule, where=dict(tree.get("where", {})))


def find_section(name: str) -> str:
    """Return the section of a run's config that has this setting; "" for `sample`, which is a setting of an arm."""
    if name == SAMPLE:
        return ""
    for section, known in SETTINGS.items():
        if name in known:
            return section
    raise UnknownName("setting", name, [SAMPLE, *(each for known in SETTINGS.values() for each in known)])


def read_claims(study: str, tree: Iterable[Mapping[str, Any]]) -> tuple[Claim, ...]:
    """Read the claims of a study's file."""
    claims: dict[str, Claim] = {}
    for item in tree:
        flat = {key: value for key, value in item.items() if key not in ("covers", "kinds", "bounds")}
        _require(flat, ("name", "text", "source", "rule"), "claims")
        claim = from_tree(Claim, flat, "claims.")
        if claim.rule not in RULES:
            raise UnknownName(f"rule of claim `{claim.name}`", claim.rule, RULES)
        if claim.name in claims:
            raise BadConfig(f"two claims are named `{claim.name}`", "give each a name of its own")
        claims[claim.name] = dataclasses.replace(
            claim,
            study=study,
            covers=dict(item.get("covers", {})),
            kinds=dict(item.get("kinds", {})),
            bounds=tuple(map(float, item.get("bounds", ()))),
        )
    return tuple(claims.values())


def _require(tree: Mapping[str, Any], keys: Collection[str], where: str) -> None:
    for key in keys:
        if key not in tree:
            raise BadConfig(f"`{where}.{key}` is missing", "see studies/glue.toml for an example")
