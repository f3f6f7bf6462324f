"""Judges the claims of studies' files by our records: confirmed, not confirmed or open, with a sentence.

A claim names a rule and its parameters. `RULES` in `spec/report_spec.py` says what each rule claims; the functions here
compare the rows and write the sentence. When a claim counts as confirmed is in `verdicts.py`, the statistics in
`bounds.py`. No rule knows which study it judges.

Claims are judged separately for each backbone and profile; the verdicts of one backbone and profile are a family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from inlay.studies.judge.bounds import CHANCE, MeanWithError, deviations, moderate, negated, reach, show
from inlay.studies.judge.coverage import match_rows
from inlay.studies.judge.extra_data import judge_embeddings, judge_init, judge_moved, judge_spans
from inlay.studies.judge.row_differences import Paired, describe_ends, find_gaps, pair
from inlay.studies.judge.row_specs import NOT_AVERAGED, RowSpec, find_number, has_joint_runs, name_task
from inlay.studies.judge.scored_study import (
    ScoredStudy,
    averaged_tasks,
    list_series,
    mean_tasks,
    most_parameters,
    score_row,
    series_keys,
)
from inlay.studies.judge.scores import Row, mean_of
from inlay.studies.judge.verdicts import (
    NONE,
    OPEN,
    UNKNOWN,
    ClaimVerdict,
    Finding,
    above,
    all_of,
    all_within,
    any_of,
    at_least,
    at_most,
    bracket,
    compare,
    fact,
    gap_text,
    hold_together,
    judge_pair,
    lacking,
    never_broken,
    not_planned,
    unsure,
    verdict,
)
from inlay.studies.spec.report_spec import Claim

LIKE = 0.5
"""points by which our and the published difference may differ and still agree, if our bound is at most twice that"""
_TESTS: dict[str, Callable[[MeanWithError, float], Finding]] = {
    "above": above,
    "within": lambda gap, bound: at_least(gap, -bound),
    "at_most": at_most,
    "clearly_above": at_least,
    "clearly_below": lambda gap, bound: at_most(gap, -bound),
}


# Differences of two rows


def judge_difference(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge the difference of two rows by the test of the claim's rule."""
    key, other = claim.rows
    if missing := _find_untried(scored, claim):
        return ClaimVerdict(NONE, missing)
    # 1. compare the two rows over the tasks of the claim
    tasks = _source_tasks(scored, key) if claim.on_published else claim.tasks or None
    best = _best_within(scored, key, claim.share) if claim.share is not None else None
    if claim.share is None:
        paired = compare(scored, key, other, tasks)
    else:
        paired = pair(best.row, scored.find_row(other), averaged_tasks(scored)) if best else None
    if paired is None:
        unshown = {rule.key for rule in scored.study.report.rows if not rule.is_shown}
        shown = [row for row in claim.rows if claim.share is None and row not in unshown]
        return not_planned(scored, *shown) or lacking(*(claim.needs or claim.rows))
    # 2. test the difference, and the limits on parameters
    finding = judge_pair(paired, lambda gap: _TESTS[claim.rule](gap, claim.bound))
    if claim.only_confirmed:
        paired = replace(paired, equal=None)
        finding = never_broken(_TESTS[claim.rule](paired.estimate, claim.bound))
    facts, words = [], {"ahead": f"; ahead on {paired.num_ahead} of {len(paired.by_task)} tasks"}
    if best is not None and claim.share is not None:
        is_within = best.share <= claim.share
        facts.append(fact(is_within))
        words["share"] = f"{best.share:.2f}%"
        words["note"] = best.note if is_within else f", above {claim.share:g}%{best.note}"
    if claim.fraction is not None:
        counts = [sum(cell.trained_parameters for cell in scored.find_row(row).values()) for row in claim.rows]
        facts.append(fact(counts[0] <= claim.fraction * counts[1]))
        words["fraction"] = f"{100 * counts[0] / counts[1]:.0f}%"
    # 3. write the sentence
    labels = [best.label if best else scored.label(key), scored.label(other)]
    names = [given or label for given, label in zip(claim.names or ("", ""), labels, strict=True)]
    words["gap"] = gap_text(paired, f"{names[0]} less {names[1]}")
    words["unequal"] = _tell_unequal(scored, key, other)
    words["beside"] = ""
    if claim.on_published:
        others = [task for task in scored.tasks if task not in (*(tasks or ()), *NOT_AVERAGED)]
        apart = compare(scored, key, other, others)
        words["beside"] = f"; {gap_text(apart, 'on tasks that were not published')}" if apart else ""
    for place, row in enumerate(claim.rows):
        words[f"parameters_{place}"] = f"{most_parameters(scored, row):,}" if row in scored.rows else ""
    usual = "{gap}{ahead}{unequal}" if claim.rule == "above" else "{gap}"
    text = (claim.sentence or usual).format(**words)
    return verdict(all_of([finding, *facts]), text, claim.rests_on or claim.rows, tasks)


def _find_untried(scored: ScoredStudy, claim: Claim) -> str:
    """Name the settings of the claim that the second row was not trained with; empty if there are none."""
    records = [record for spec in scored.specs if spec.key == claim.rows[-1] for record in spec.records]
    for name, values in claim.covers.items():
        tried = {find_number(scored.study, record, name) for record in records}
        if missing := sorted(set(values) - tried):
            return f"{name} {' and '.join(map(str, missing))} not in this profile"
    return ""


def _source_tasks(scored: ScoredStudy, key: str) -> tuple[str, ...]:
    """Return the study's tasks for which a row has published values; all tasks if there are none."""
    columns = {
        column.partition(":")[0]
        for table in scored.published.tables
        for column in table.columns
        if table.value(key, column) is not None
    }
    tasks = tuple(task for task in scored.study.tasks if task not in NOT_AVERAGED)
    return tuple(task for task in tasks if task in columns) or tasks


def _tell_unequal(scored: ScoredStudy, *keys: str) -> str:
    """Return a remark if one row's settings are chosen per task and the other's once for all tasks."""
    rows = [scored.rows[key] for key in keys if key in scored.rows]
    if len(rows) < len(keys):
        return ""
    tried = [max(cell.num_settings for cell in row.values()) for row in rows]
    joint = [any(has_joint_runs(spec) for spec in scored.specs if spec.key == key) for key in keys]
    if len(set(joint)) == 1 or max(tried) == 1:
        return ""
    apart, once = (scored.label(keys[joint.index(each)]) for each in (False, True))
    return f"; the settings of {apart} are chosen for each task, those of {once} once for all"


class _Best(NamedTuple):
    """The best row of a series that trains at most some share of the backbone's parameters."""

    label: str
    row: Row
    share: float
    """parameters trained per task on average, in percent of the backbone"""
    note: str = ""


def _best_within(scored: ScoredStudy, series: str, most_share: float) -> _Best | None:
    """Return the best row of a series; if it trains more than `most_share` percent, the best that does not."""
    key = next((key for key in (series, *series_keys(scored, series)[::-1]) if key in scored.rows), None)
    if key is None:
        return None
    row = scored.rows[key]
    whole = _Best(scored.label(key), row, _mean_share(scored, row))
    held = {item.key: item for spec in scored.specs if spec.series == series for item in spec.records}
    kept = [item for item in held.values() if 100 * item.trained_parameters <= most_share * item.backbone_parameters]
    if whole.share <= most_share or not kept:
        return whole
    row = score_row(scored.study, RowSpec(key, "", tuple(kept)), scored.split)
    if not row:
        return whole
    numbers = sorted({number for item in kept if (number := find_number(scored.study, item, "size")) is not None})
    ends = "–".join(f"{number:g}" for number in dict.fromkeys((numbers[0], numbers[-1]))) if numbers else ""
    note = (
        f"; the best of all sizes, {whole.label}, trains {whole.share:.2f}%: sizes within {most_share:g}% are compared"
    )
    return _Best(f"{series} ({ends})" if ends else whole.label, row, _mean_share(scored, row), note)


def _mean_share(scored: ScoredStudy, row: Row) -> float:
    shares = [cell.share for task, cell in row.items() if task in mean_tasks(scored)]
    return sum(shares) / max(len(shares), 1)


def judge_total(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge the total parameters of several tasks: adapters and one backbone against a network for each task."""
    best, full = _best_within(scored, claim.rows[0], claim.share or 100.0), scored.rows.get(claim.rows[1])
    if best is None or not full:
        return lacking(*claim.needs)
    ours = 1 + claim.num_tasks * best.share / 100
    theirs = claim.num_tasks * _mean_share(scored, full) / 100
    text = claim.sentence.format(ours=f"{ours:.2f}", theirs=f"{theirs:.2f}", label=best.label)
    most, least = claim.bounds
    return verdict(all_of([fact(ours < most), fact(theirs > least)]), text, claim.rests_on)


# Several rows, several tasks


def judge_some_above(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge whether a row is above another on some task, by more than the best of so many tasks is by chance.

    Two seeds say little about the variance of one task, so it is raised to the mean over tasks (`moderate`).
    """
    paired = compare(scored, *claim.rows)
    if paired is None:
        return lacking(*claim.needs)
    sides = []
    for side in (paired, paired.equal):
        if side is not None:
            sides.append(dict(zip(side.by_task, moderate(list(side.by_task.values())), strict=True)))
    found = sides[0]
    if any(item.sem is None for item in found.values()):
        return lacking("two seeds a task")
    tests = {task: bracket([above(side[task], 0.0) for side in sides if task in side]) for task in found}
    best = min(tests, key=lambda task: tests[task].new.confirm)
    text = (
        f"of {len(found)} tasks the surest is {name_task(best)} ({show(found[best], signed=True)}"
        f"{unsure(found[best])}), no task being surer than the mean of all"
    )
    return verdict(any_of(list(tests.values())), text, claim.rows)


def judge_none_above(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge whether no row is above the reference by more than the bound; full fine-tuning is left out."""
    reference = scored.reference
    found = {
        key: paired
        for key in scored.rows
        if reference and key not in (reference, "full") and (paired := compare(scored, key, reference)) is not None
    }
    if not found:
        return lacking(*claim.needs)
    best = max(found, key=lambda key: found[key].estimate.mean)
    words = {"num": len(found), "best": scored.label(best)}
    text = gap_text(found[best], claim.sentence.format(**words)) + f" (no better: at most {claim.bound:g})"
    findings = [judge_pair(item, lambda gap: at_most(gap, claim.bound)) for item in found.values()]
    return verdict(all_of(findings), text, ("*",))


def judge_each_below(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge whether each of several rows is below another."""
    pattern, other = claim.rows
    found = {key: compare(scored, key, other) for key in match_rows(scored.rows, [pattern])}
    known = {key: paired for key, paired in found.items() if paired is not None}
    if not known:
        return lacking(*claim.needs)
    finding = all_of([judge_pair(item, lambda gap: above(negated(gap), 0.0)) for item in known.values()])
    texts = [f"{scored.label(key)} {show(paired.estimate, signed=True)}" for key, paired in known.items()]
    return verdict(finding, f"less {claim.names[-1]}: {', '.join(texts)}", ("*",))


def judge_lowest(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge whether a row is clearly below all of several others."""
    lowest, pattern = claim.rows
    rows = {key: scored.rows[key] for key in match_rows(scored.rows, [pattern])}
    if lowest not in rows or len(rows) < 2:
        return lacking(*claim.needs)
    gaps = {key: pair(row, rows[lowest], mean_tasks(scored)) for key, row in rows.items() if key != lowest}
    known = {key: paired for key, paired in gaps.items() if paired is not None}
    if not known:
        return lacking(*claim.needs)
    nearest = min(known, key=lambda key: known[key].estimate.mean)
    text = f"the next, {scored.label(nearest)}, is {show(known[nearest].estimate, signed=True)} points above it"
    finding = all_of([judge_pair(item, lambda gap: at_least(gap, claim.bound)) for item in known.values()])
    return verdict(finding, text, (pattern,))


# Series of rows


def judge_series_above(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge whether a series is above another in the mean over tasks and numbers of samples."""
    key, other = claim.rows
    paired = pair(join_series(scored, key), join_series(scored, other))
    if paired is None:
        return lacking(key, other)
    text = f"{key} less {other}: {show(paired.estimate, signed=True)} points over {len(paired.by_task)} tasks and "
    text += f"numbers of samples ({paired.num_pairs} pairs{unsure(paired.estimate)}); ahead on {paired.num_ahead}"
    finding = judge_pair(paired, lambda gap: above(gap, 0.0))
    if any((record.config.get("joint") or {}).get("start") for record in scored.records):
        finding = UNKNOWN
        text += (
            "; open, since all seeds of a method go on from one trained run, of the first learning rate and not of the "
            "chosen one: the errors are those of samples and rows, and how far another such run would be from it is "
            "not known"
        )
    return verdict(finding, text, (f"{key}-*", f"{other}-*"))


def join_series(scored: ScoredStudy, series: str) -> Row:
    """Join the rows of a series into one: a task with a number of samples becomes a task of its own.

    A seed's few samples of a task are among its many samples, so the columns of one task vary together.
    """
    return {
        f"{task}@{number:g}": replace(cell, networks=cell.networks | {f"samples of {task}"})
        for number, key in list_series(scored).get(series, {}).items()
        for task, cell in scored.rows[key].items()
    }


def judge_series_below(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge whether a series is clearly below rows of another series that train no more parameters."""
    series, other = claim.rows
    tasks, smaller_rows = mean_tasks(scored), series_keys(scored, other)
    gaps: list[Paired] = []
    used = [f"{series}-*"]
    for key in series_keys(scored, series):
        limit = most_parameters(scored, key)
        smaller = [row for row in smaller_rows if most_parameters(scored, row) <= limit]
        # Compare only where the two curves overlap: the other row has at least a quarter of these parameters.
        if smaller and most_parameters(scored, smaller[-1]) >= limit / 4:
            paired = pair(scored.rows[key], scored.rows[smaller[-1]], tasks)
            if paired:
                gaps.append(paired)
            used.append(smaller[-1])
    if not gaps:
        return lacking(*claim.needs)
    overall = _mean_gap([item.estimate for item in gaps])
    equal = _mean_gap([(item.equal or item).estimate for item in gaps])
    finding = bracket([at_most(gap, -claim.bound) for gap in (overall, equal)])
    worst, best = min(item.estimate.mean for item in gaps), max(item.estimate.mean for item in gaps)
    ends = f"{worst:+.1f} to {best:+.1f}".replace("-", "−")
    text = f"{claim.sentence.format(num=len(gaps))}: {show(overall.mean, signed=True)} points in the mean ({ends})"
    return verdict(finding, text + unsure(overall), tuple(used))


def _mean_gap(values: Sequence[MeanWithError]) -> MeanWithError:
    """Return the mean of differences to the same rows with the largest of their errors, as these do not cancel."""
    widest = max(values, key=lambda value: math.inf if value.sem is None else reach(value, new_rows=True))
    return widest._replace(mean=sum(value.mean for value in values) / len(values))


def judge_stable(scored: ScoredStudy, claim: Claim) -> ClaimVerdict:
    """Judge whether no row of a series is far from the mean of all."""
    if missing := not_planned(scored, *claim.rows):
        return missing
    series = claim.rows[0].rpartition("-")[0]
    tasks, keys = mean_tasks(scored), series_keys(scored, series)
    means = {key: mean for key in keys if (mean := mean_of(scored.rows[key], tasks)) is not None}
    if len(means) < 2:
        return lacking(*claim.needs)
    found = deviations(list(means.values()))
    furthest = max(found, key=lambda item: abs(item.mean))
    texts = ", ".join(f"{scored.label(key)} {show(mean)}" for key, mean in means.items())
    text = f"{texts} over {len(tasks)} tasks: at most {show(furthest._replace(mean=abs(furthest.mean)))} points from "
    text += f"their mean (within {claim.bound:g} is stable)"
    return verdict(all_within(found, claim.bound), text, (f"{series}-*",))


# Rule -> the function that judges by it; `RULES` in `spec/report_spec.py` says what each claims.
JUDGES: dict[str, Callable[[ScoredStudy, Claim], ClaimVerdict]] = {
    **dict.fromkeys(_TESTS, judge_difference),
    "some_above": judge_some_above,
    "none_above": judge_none_above,
    "each_below": judge_each_below,
    "lowest": judge_lowest,
    "series_above": judge_series_above,
    "series_below": judge_series_below,
    "stable": judge_stable,
    "total": judge_total,
    "spans": judge_spans,
    "init": judge_init,
    "moved": judge_moved,
    "embeddings": judge_embeddings,
}


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its verdict on one backbone."""

    claim: Claim
    verdict: ClaimVerdict
    stands: bool = False
    """whether it stands as part of the family: the chance that any standing verdict is wrong is 5%"""


def judge_claims(claims: Sequence[Claim], studies: Mapping[str, ScoredStudy]) -> list[JudgedClaim]:
    """Judge claims on one backbone and profile; `studies` has its scored studies by name.

    A claim whose study was not run has no verdict. One whose rows lack planned runs is open, with the reason.
    """
    verdicts = []
    for claim in claims:
        scored = studies.get(claim.study)
        if scored is None or not scored.rows:
            verdicts.append(ClaimVerdict(NONE, "its study has not been run"))
            continue
        found = JUDGES[claim.rule](scored, claim)
        rows = match_rows(scored.rows, found.rows)
        if found.rows != ("*",):  # for claims on all rows, the table of settings has this note
            found = replace(found, sentence="; ".join((found.sentence, *describe_ends(scored, rows, found.tasks))))
        gap = scored.coverage.find_gap(found.rows, found.tasks)
        if gap:
            found = replace(found, status=OPEN, chance=1.0, sentence=f"{found.sentence}; open while {gap.text}")
        verdicts.append(found)
    return [JudgedClaim(*item) for item in zip(claims, verdicts, hold_together(verdicts), strict=True)]


def describe_agreement(scored: ScoredStudy) -> list[str]:
    """Describe for each row with a published difference to the reference whether ours agrees with it."""
    sentences = []
    for key in scored.rows:
        gaps = find_gaps(scored, key)
        if gaps is None:
            continue
        ours, theirs = gaps.ours, gaps.published
        distance = abs(ours.estimate.mean - theirs)
        bound = reach(ours.estimate, CHANCE / 2, new_rows=True)
        does = "as published" if distance <= LIKE else "not as published"
        if distance <= bound and (distance > LIKE or bound > 2 * LIKE):
            does = f"open, since our 95% bound is ± {bound:.1f}"
        does = "open, with one seed" if ours.estimate.sem is None else does
        does = "open, since the number of rows is not known" if ours.estimate.rows is None else does
        gap = scored.coverage.find_gap((key, scored.reference or ""), gaps.tasks)
        does = f"open while {gap.count}" if gap else does
        sentences.append(
            f"{scored.label(key)} less {scored.label(scored.reference or '')} ({gaps.over}): ours "
            f"{show(ours.estimate, signed=True)}, published {show(theirs, signed=True)}: {does} "
            f"({distance:.1f} points apart)"
        )
    return sentences
