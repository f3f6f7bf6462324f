"""Rules on data that records keep beside scores: spans of an ablation, initial scales, sequences, embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from inlay.studies.judge.bounds import MeanWithError, deviations, difference, estimate, mean_of_all, show
from inlay.studies.judge.row_specs import name_task
from inlay.studies.judge.scored import ScoredStudy
from inlay.studies.judge.series import (
    Ablation,
    forgotten,
    list_series,
    lower_part,
    read_ablations,
    read_embeddings,
    read_steps,
)
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

SMALL_SCALE = 1.0001e-2
"""the largest scale of initial values that counts as small: 1e-2, however it is rounded"""
SPENT = 90.0
"""percent of the accuracy above the majority class; a row that lost as much can hardly lose more"""
UNMOVED = 0.01
"""points of a dev score that do not count as a change"""
MOVED = 0.1
"""share of the embeddings' length that training must move them before they say anything about tasks"""


# Spans of layers whose trained adapters were removed


def judge_spans(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge what removing the trained adapters of some layers costs."""
    found = read_ablations(scored.records, scored.study.tasks)
    if not found:
        return ClaimVerdict(OPEN, "no spans were removed yet")
    return replace(_SPANS[claim.part](found, claim), rows=("*",))


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
        findings.append(above(item.less(lower, upper), claim.bound))
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


_SPANS: dict[str, Callable[[Sequence[Ablation], Claim], ClaimVerdict]] = {
    "single": _single_layers,
    "all": _all_layers,
    "lower": _lower_layers,
    "lowest": _lowest_layers,
}


# Scales of the initial values


def judge_init(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge the effect of the initial scale: up to 1e-2, above it, and on one task against another."""
    return _INIT[claim.part](scored, claim)


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


_INIT: dict[str, Callable[[ScoredStudy, Claim], ClaimVerdict]] = {
    "robust": _init_robust,
    "worse": _init_worse,
    "compare": _init_compare,
}


def _lost_share(scored: ScoredStudy, series: str, task: str) -> MeanWithError | None:
    """Return the share, in percent, of the accuracy above the majority class that the first scale above 1e-2 loses."""
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
    # The error of a ratio, to first order; its degrees of freedom are those of a difference.
    scaled = usual._replace(mean=0.0, sem=left * usual.sem, rows=None if usual.rows is None else left * usual.rows)
    whole = difference(scaled, fallen)
    rows = None if whole.rows is None else 100 * whole.rows / height
    return MeanWithError(100 * (1 - left), 100 * (whole.sem or 0.0) / height, fallen.num, whole.freedom, rows)


# Tasks one after another


def judge_moved(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge whether, with a slot for each task, no answer and no dev score of an earlier task changes."""
    changes: list[float] = []
    networks: list[float] = []
    moves: list[float] = []
    rows: list[str] = []
    for spec in scored.specs:
        moved = [record.extra["moved"] for record in spec.records if record.extra.get("moved") is not None]
        if moved:
            moves += moved
            changes += _changes(spec.records)
            rows.append(spec.key)
        else:
            networks += [value.mean for value in forgotten(read_steps(spec.records, scored.study.tasks)).values()]
    if not moves or not changes:
        return lacking(*claim.needs)
    is_kept = max(moves) == 0 and max(changes) <= UNMOVED
    text = f"with adapters no answer of an earlier task moved by more than {max(moves):.2g} (logits)"
    text += f", no dev score by more than {max(changes):.2g} points"
    if networks:
        text += f"; one network fine-tuned in turn lost {sum(networks) / len(networks):.1f} points a task"
    return verdict(fact(is_kept), text, tuple(rows))


def _changes(records: Sequence[Record]) -> list[float]:
    """Return the change of each earlier task's dev score since it was learnt, run by run."""
    learnt = {(_sequence(item), item.task): item.extra.get("after", {}).get(item.task) for item in records}
    return [
        100 * abs(score - before)
        for item in records
        for task, score in item.extra.get("after", {}).items()
        if task != item.task and (before := learnt.get((_sequence(item), task))) is not None
    ]


def _sequence(record: Record) -> tuple[str, str, int, str]:
    """Return the key of records that belong to one sequence of tasks."""
    return (record.arm, repr(sorted(record.axes.items())), record.seed, record.hardware)


# Embeddings of tasks


def judge_embeddings(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge whether training brings embeddings of similar tasks closer together than those of others.

    They begin as draws by chance, which have a gap of their own: what counts is how much wider it gets. While they have
    hardly moved nothing is said.
    """
    kinds = claim.kinds
    found = [item for item in read_embeddings(scored).values() if item.gap(kinds) is not None]
    if not found:
        return lacking(*claim.needs)
    gaps = [item.gap(kinds) or 0.0 for item in found]
    firsts = [item.first_gap(kinds) for item in found]
    nearest = max((pair for group in found[0].alike(kinds) for pair in group), key=lambda item: item[1])[0]
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
