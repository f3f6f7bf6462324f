"""Claims about ablations, initial scales, task sequences and embeddings, and the extra data of their records.

Ablations (scores without the adapters of spans of layers) and the steps of a sequence are read from a record's `extra`.
Scores are in points, means over the seeds of a task; a run that was repeated on other hardware counts once, as the mean
of its repeats.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inlay.studies.judge.bounds import MeanWithError, deviations, difference, estimate, mean_of_all, show
from inlay.studies.judge.row_sampling import num_rows, score_error
from inlay.studies.judge.row_specs import name_task
from inlay.studies.judge.scored_study import ScoredStudy, list_series
from inlay.studies.judge.scores import average_repeats, keep_best
from inlay.studies.judge.verdicts import (
    OPEN,
    UNKNOWN,
    ClaimVerdict,
    Finding,
    above,
    all_of,
    all_within,
    at_most,
    fact,
    lacking,
    unsure,
    verdict,
)
from inlay.studies.run.records import Record
from inlay.studies.spec.report_spec import Claim

Span = tuple[int, int]
SMALL_SCALE = 1.0001e-2
"""the largest scale of initial values that counts as small: 1e-2, however it is rounded"""
SPENT = 90.0
"""percent of the accuracy above the majority class; a row that lost this much can hardly lose more"""
UNMOVED = 0.01
"""points of a dev score that do not count as a change"""
MOVED = 0.1
"""how far training must move embeddings, as a share of their length, before they say anything about tasks"""


@dataclass(frozen=True)
class Ablation:
    """A task's accuracy without the adapters of each span of layers, over seeds."""

    task: str
    whole: Mapping[int, float]
    """seed -> accuracy with all adapters"""
    spans: Mapping[Span, Mapping[int, float]]
    """(first, last removed layer, both inclusive) -> seed -> accuracy"""
    majority: float | None
    num_rows: int | None = None
    """dev rows that were scored"""

    @property
    def num_layers(self) -> int:
        """Layers of the backbone."""
        return 1 + max((last for _, last in self.spans), default=-1)

    def accuracy(self, first: int, last: int) -> MeanWithError:
        """Accuracy without the adapters of layers first … last."""
        scores = self.spans[first, last]
        return estimate(scores.values(), self._row_error(scores))

    def decrease(self, first: int, last: int) -> MeanWithError:
        """Return the points lost, paired by seed."""
        return self.less(self.whole, self.spans[first, last])

    def less(self, scores: Mapping[int, float], others: Mapping[int, float]) -> MeanWithError:
        """Return one accuracy less another, paired by seed."""
        errors = [self._row_error(scores), self._row_error(others)]
        # Answers with and without some adapters are mostly the same, so this error for independent rows is too large.
        rows = None if None in errors else math.hypot(*(error or 0.0 for error in errors))
        return estimate((scores[seed] - others[seed] for seed in others if seed in scores), rows)

    def _row_error(self, scores: Mapping[int, float]) -> float | None:
        error = score_error("accuracy", {"accuracy": statistics.fmean(scores.values()) / 100}, self.num_rows)
        return None if error is None else 100 * error

    def relative(self, first: int, last: int) -> float:
        """Return the loss in percent of the whole, as in the paper's heat-map."""
        return 100 * statistics.fmean(
            (self.whole[seed] - value) / self.whole[seed] for seed, value in self.spans[first, last].items()
        )

    @property
    def singles(self) -> list[MeanWithError]:
        """Points lost by the removal of each single layer."""
        return [self.decrease(layer, layer) for layer in range(self.num_layers) if (layer, layer) in self.spans]

    @property
    def everything(self) -> Span:
        """The span of all layers."""
        return (0, self.num_layers - 1)


def lower_part(item: Ablation) -> int:
    """Return the number of lower layers, in proportion to layers 0–4 of twelve in Houlsby et al."""
    return max(1, round(item.num_layers * 5 / 12))


def read_ablations(records: Iterable[Record], tasks: Sequence[str]) -> list[Ablation]:
    """Read the ablations of records, in the order of tasks, each at the setting that is best on dev."""
    by_task: dict[str, list[Record]] = {}
    for record in keep_best(record for record in records if record.extra.get("spans")):
        by_task.setdefault(record.task, []).append(record)
    order = [task for task in dict.fromkeys([*tasks, *by_task]) if task in by_task]
    found = []
    for task in order:
        whole: list[tuple[Record, float]] = []
        spans: dict[Span, list[tuple[Record, float]]] = {}
        for record in by_task[task]:
            accuracies = read_spans(record.extra["spans"])
            own = accuracies.pop(None, record.dev.get("accuracy", record.dev[record.metric]))
            whole.append((record, 100 * own))
            for span, value in accuracies.items():
                assert span is not None
                spans.setdefault(span, []).append((record, 100 * value))
        first = by_task[task][0]
        by_span = {span: average_repeats(values) for span, values in spans.items()}
        majority = None if first.majority is None else 100 * first.majority
        found.append(Ablation(task, average_repeats(whole), by_span, majority, num_rows(first, "dev")))
    return found


def read_spans(content: Mapping[str, float] | Sequence[Sequence[float]]) -> dict[Span | None, float]:
    """Read spans from JSON: {"0-11": 0.37, "whole": 0.84}, or [[0, 11, 0.37], …]."""
    pairs = content.items() if isinstance(content, Mapping) else [(f"{a:g}-{b:g}", value) for a, b, value in content]
    spans: dict[Span | None, float] = {}
    for key, value in pairs:
        numbers = re.findall(r"\d+", str(key))
        spans[(int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else None] = float(value)
    return spans


@dataclass(frozen=True)
class Step:
    """The scores on all tasks so far, after one more task."""

    task: str
    scores: Mapping[str, MeanWithError]


def read_steps(records: Iterable[Record], tasks: Sequence[str]) -> list[Step]:
    """Return a row's scores after each step of its sequence of tasks, over seeds: `extra["after"]`, task -> score.

    The whole sequence has one setting: the one whose tasks were best on dev, each right after it was learnt.
    """
    found: dict[str, dict[str, list[tuple[Record, float]]]] = {}
    sequences = [record for record in records if isinstance(record.extra.get("after"), Mapping)]
    for record in keep_best(sequences, over_tasks=True):
        for task, value in record.extra["after"].items():
            found.setdefault(record.task, {}).setdefault(task, []).append((record, 100 * float(value)))
    order = [task for task in dict.fromkeys([*tasks, *found]) if task in found]
    return [
        Step(task, {name: estimate(average_repeats(values).values()) for name, values in found[task].items()})
        for task in order
    ]


def forgotten(steps: Sequence[Step]) -> dict[str, float]:
    """Return the points each earlier task lost between its own step and the last one; without the last task."""
    lost = {}
    for step in steps[:-1]:
        before, after = step.scores.get(step.task), steps[-1].scores.get(step.task)
        if before is not None and after is not None:
            lost[step.task] = before.mean - after.mean
    return lost


@dataclass(frozen=True)
class Embeddings:
    """The embeddings that a hypernetwork learnt of its tasks in one run."""

    tasks: tuple[str, ...]
    vectors: Any
    """[tasks, width]"""
    starts: Any = None
    """[tasks, width] before training; None if it is not known"""

    @property
    def movement(self) -> float | None:
        """Return how far training moved the embeddings, relative to their initial length; None if it is not known."""
        import numpy

        if self.starts is None:
            return None
        norm = numpy.linalg.norm
        return float((norm(self.vectors - self.starts, axis=1) / norm(self.starts, axis=1)).mean())


Cosine = tuple[tuple[str, str], float]
"""two tasks, and the cosine of their embeddings"""


def _list_cosines(tasks: Sequence[str], vectors: Any, kinds: Mapping[str, str]) -> tuple[list[Cosine], list[Cosine]]:
    """Return the cosines of all pairs of tasks: first of pairs of one kind, then of different kinds."""
    import numpy

    unit = vectors / numpy.linalg.norm(vectors, axis=1, keepdims=True)
    groups: tuple[list[Cosine], list[Cosine]] = ([], [])
    for (i, a), (j, b) in itertools.combinations(enumerate(tasks), 2):
        is_one_kind = kinds.get(a, a) == kinds.get(b, b)
        groups[0 if is_one_kind else 1].append(((a, b), float(unit[i] @ unit[j])))
    return groups


def _cosine_gap(tasks: Sequence[str], vectors: Any, kinds: Mapping[str, str]) -> float | None:
    """Return the mean cosine within kinds less the one between kinds; None without pairs of both."""
    groups = _list_cosines(tasks, vectors, kinds)
    if not all(groups):
        return None
    within, between = (sum(value for _, value in pairs) / len(pairs) for pairs in groups)
    return within - between


def read_embeddings(scored: ScoredStudy) -> dict[int, Embeddings]:
    """Read the embeddings of the best run on dev by seed, of the first row that has them for two tasks or more."""
    import numpy

    order = {task: place for place, task in enumerate(scored.study.tasks)}
    for spec in scored.specs:
        known = [record for record in spec.records if record.extra.get("embedding")]
        by_seed: dict[int, dict[str, Record]] = {}
        for record in keep_best(known, over_tasks=True):
            by_seed.setdefault(record.seed, {})[record.task] = record
        found: dict[int, Embeddings] = {}
        for seed, own in sorted(by_seed.items()):
            if len(own) > 1:
                tasks = tuple(sorted(own, key=lambda task: order.get(task, len(order))))
                vectors = numpy.array([own[task].extra["embedding"] for task in tasks])
                starts = [own[task].extra.get("embedding_start") for task in tasks]
                found[seed] = Embeddings(tasks, vectors, numpy.array(starts) if all(starts) else None)
        if found:
            return found
    return {}


# Spans of layers whose trained adapters were removed


def judge_spans(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge what removing the trained adapters of some layers costs."""
    found = read_ablations(scored.records, scored.study.tasks)
    if not found:
        return ClaimVerdict(OPEN, "no spans were removed yet")
    judge = {"single": _single_layers, "all": _all_layers, "lower": _lower_layers, "lowest": _lowest_layers}[claim.part]
    return replace(judge(found, claim), rows=("*",))


def _single_layers(ablations: Sequence[Ablation], claim: Claim) -> ClaimVerdict:
    worst = {item.task: max(item.singles, key=lambda single: single.mean) for item in ablations}
    texts = [f"{name_task(task)} {show(value)}" for task, value in worst.items()]
    finding = all_of([at_most(cost, claim.bound) for item in ablations for cost in item.singles])
    return verdict(finding, f"the costliest single layer costs, in points of accuracy: {', '.join(texts)}")


def _all_layers(ablations: Sequence[Ablation], claim: Claim) -> ClaimVerdict:
    findings: list[Finding] = []
    texts = []
    for item in ablations:
        left = item.accuracy(*item.everything)
        if item.majority is None:
            findings.append(UNKNOWN)
            texts.append(f"{name_task(item.task)} {show(left)} (majority class not known)")
            continue
        findings.append(all_within([left._replace(mean=left.mean - item.majority)], claim.bound))
        texts.append(f"{name_task(item.task)} {show(left)} (majority class {item.majority:.1f})")
    return verdict(all_of(findings), f"accuracy without any adapter: {', '.join(texts)}")


def _lower_layers(ablations: Sequence[Ablation], claim: Claim) -> ClaimVerdict:
    findings, texts = [], []
    for item in ablations:
        half = lower_part(item)
        lower, upper = (0, half - 1), (item.num_layers - half, item.num_layers - 1)
        findings.append(above(item.less(item.spans[lower], item.spans[upper]), claim.bound))
        texts.append(f"{name_task(item.task)} {show(item.decrease(*lower))} against {show(item.decrease(*upper))}")
    count = f"the lowest {half} layers against the highest {half}"
    return verdict(all_of(findings), f"points lost by removing {count}: {', '.join(texts)}")


def _lowest_layers(ablations: Sequence[Ablation], claim: Claim) -> ClaimVerdict:
    item = next((item for item in ablations if item.task in claim.tasks), None)
    if item is None:
        return lacking(*claim.needs)
    last = lower_part(item) - 1
    lost = item.decrease(0, last)
    text = f"removing layers 0–{last} of {item.num_layers} costs {show(lost)} points of accuracy on "
    text += f"{name_task(item.task)}{unsure(lost)} (at most {claim.bound:g} is hardly)"
    return verdict(at_most(lost, claim.bound), text)


# Scales of the initial values


def judge_init(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge the effect of the initial scale: up to 1e-2, above it, and on one task compared with another."""
    judge = {"robust": _init_robust, "worse": _init_worse, "compare": _init_compare}[claim.part]
    return judge(scored, claim)


def _scales(
    scored: ScoredStudy, series: str, task: str
) -> tuple[dict[float, MeanWithError], dict[float, MeanWithError]]:
    """Return accuracy by scale: up to 1e-2, and above."""
    rows = {scale: scored.rows[key] for scale, key in list_series(scored).get(series, {}).items()}
    found = {scale: row[task].estimate for scale, row in rows.items() if task in row}
    small = {scale: value for scale, value in found.items() if scale <= SMALL_SCALE}
    return small, {scale: value for scale, value in found.items() if scale > SMALL_SCALE}


def _init_robust(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    findings, texts = [], []
    for task in scored.tasks:
        small = list(_scales(scored, claim.rows[0], task)[0].values())
        if len(small) > 1:
            found = deviations(small)
            furthest = max(found, key=lambda item: abs(item.mean))
            findings.append(all_within(found, claim.bound))
            texts.append(f"{name_task(task)} {show(furthest._replace(mean=abs(furthest.mean)))}")
    if not findings:
        return lacking(*claim.needs)
    text = f"the scale of σ ≤ 1e-2 that is furthest from the mean of them, in points: {', '.join(texts)}"
    return verdict(all_of(findings), f"{text} (within {claim.bound:g} is robust)", claim.rests_on)


def _init_worse(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    drops = {}
    for task in scored.tasks:
        small, large = _scales(scored, claim.rows[0], task)
        if small and large:
            drops[task] = difference(mean_of_all(list(small.values())), large[max(large)])
    if not drops:
        return lacking(*claim.needs)
    texts = [f"{name_task(task)} {show(drop)}" for task, drop in drops.items()]
    finding = all_of([above(drop, claim.bound) for drop in drops.values()])
    return verdict(finding, f"points lost at the greatest scale: {', '.join(texts)}", claim.rests_on)


def _init_compare(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    first, second = (_lost_share(scored, claim.rows[0], task) for task in claim.tasks)
    if first is None or second is None:
        return lacking(*claim.needs)
    text = "of what is above the majority class the first scale above 1e-2 loses, in percent: "
    text += f"{claim.names[0]} {show(first)}, {claim.names[1]} {show(second)}"
    if min(first.mean, second.mean) > SPENT:
        text += "; both have next to nothing left to lose"
        return verdict(UNKNOWN, text, claim.rests_on, claim.tasks, is_tested=True)
    return verdict(above(difference(first, second), claim.bound), text, claim.rests_on, claim.tasks)


def _lost_share(scored: ScoredStudy, series: str, task: str) -> MeanWithError | None:
    """Return how much the first scale above 1e-2 loses, in percent of the accuracy above the majority class."""
    small, large = _scales(scored, series, task)
    majority = next((row[task].majority for row in scored.rows.values() if task in row), None)
    if not small or not large or majority is None:
        return None
    usual, fallen = mean_of_all(list(small.values())), large[min(large)]
    height = usual.mean - majority
    if height <= 0:
        return None
    left = (fallen.mean - majority) / height
    if usual.sem is None or fallen.sem is None:
        return MeanWithError(100 * (1 - left))
    # The error of a ratio, to first order, with the degrees of freedom of a difference.
    scaled = usual._replace(mean=0.0, sem=left * usual.sem, rows=None if usual.rows is None else left * usual.rows)
    whole = difference(scaled, fallen)
    rows = None if whole.rows is None else 100 * whole.rows / height
    return MeanWithError(100 * (1 - left), 100 * (whole.sem or 0.0) / height, fallen.num, whole.freedom, rows)


# Tasks one after another


def judge_moved(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge whether, with a slot for each task, no answer and no dev score of an earlier task changes."""
    moves: list[float] = []  # largest changes of answers, with slots
    changes: list[float] = []  # changes of dev scores, with slots
    losses: list[float] = []  # points that one shared network lost
    rows: list[str] = []
    for spec in scored.specs:
        moved = [record.extra["moved"] for record in spec.records if record.extra.get("moved") is not None]
        if not moved:
            losses += forgotten(read_steps(spec.records, scored.study.tasks)).values()
            continue
        moves += moved
        rows.append(spec.key)
        # How each earlier task's dev score changed since it was learnt, run by run.
        sequences: dict[tuple[str, str, int, str], list[Record]] = {}
        for record in spec.records:
            axes = repr(sorted(record.axes.items()))
            sequences.setdefault((record.arm, axes, record.seed, record.hardware), []).append(record)
        for records in sequences.values():
            learnt = {record.task: record.extra.get("after", {}).get(record.task) for record in records}
            for record in records:
                for task, score in record.extra.get("after", {}).items():
                    before = learnt.get(task)
                    if task != record.task and before is not None:
                        changes.append(100 * abs(score - before))
    if not moves or not changes:
        return lacking(*claim.needs)
    is_kept = max(moves) == 0 and max(changes) <= UNMOVED
    text = f"with adapters no answer of an earlier task moved by more than {max(moves):.2g} (logits)"
    text += f", no dev score by more than {max(changes):.2g} points"
    if losses:
        text += f"; one network fine-tuned in turn lost {sum(losses) / len(losses):.1f} points a task"
    return verdict(fact(is_kept), text, tuple(rows))


# Embeddings of tasks


def judge_embeddings(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge whether training brings the embeddings of similar tasks closer together than those of others.

    Their random initial values have a gap already, so what counts is how much wider it gets. As long as training has
    hardly moved them, the claim is open.
    """
    kinds = claim.kinds
    # 1. the gap of each seed, after training and before
    found, gaps, firsts = [], [], []
    for item in read_embeddings(scored).values():
        gap = _cosine_gap(item.tasks, item.vectors, kinds)
        if gap is not None:
            found.append(item)
            gaps.append(gap)
            firsts.append(None if item.starts is None else _cosine_gap(item.tasks, item.starts, kinds))
    if not found:
        return lacking(*claim.needs)
    # 2. how much training widened it
    pairs = [pair for group in _list_cosines(found[0].tasks, found[0].vectors, kinds) for pair in group]
    nearest = max(pairs, key=lambda item: item[1])[0]
    text = f"cosine within kinds less that between: {_show(gaps)} over {len(gaps)} seeds"
    named = f"nearest in the first seed: {name_task(nearest[0])} and {name_task(nearest[1])}"
    known = [first for first in firsts if first is not None]
    if len(known) < len(gaps):
        return verdict(UNKNOWN, f"{text}; what it was before training is not known; {named}", ("*",))
    added = [gap - first for gap, first in zip(gaps, known, strict=True)]
    movement = sum(item.movement or 0.0 for item in found) / len(found)
    text += f", before training {_show(known)}: {_show(added)} wider; training moved them by {100 * movement:.0f}% of "
    text += f"their length{'' if movement >= MOVED else ', too little to say anything'}; {named}"
    finding = above(estimate(added), claim.bound) if movement >= MOVED else UNKNOWN
    return verdict(finding, text, ("*",), is_tested=len(added) > 1)


def _show(values: Sequence[float]) -> str:
    value = estimate(values)
    return f"{value.mean:+.3f}".replace("-", "−") + ("" if value.sem is None else f" ± {value.sem:.3f}")
