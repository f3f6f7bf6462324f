"""The papers' claims, each held against our records: confirmed, not confirmed or open, with one plain sentence.

What makes a claim confirmed is in `verdicts.py`, what it is sure by in `bounds.py`. Claims are judged for each backbone
and profile by itself, and those of one of them are a family of verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from inlay.studies.judge.bounds import CHANCE, Estimate, deviations, moderate, reach
from inlay.studies.judge.coverage import Coverage, match_rows
from inlay.studies.judge.extras import Ablation, forgotten, read_ablations, read_steps
from inlay.studies.judge.feature_claims import FEATURE_CLAIMS
from inlay.studies.judge.hyper_claims import HYPER_CLAIMS
from inlay.studies.judge.init_claims import INIT_CLAIMS
from inlay.studies.judge.pairs import Paired, pair
from inlay.studies.judge.rows import NOT_AVERAGED, RowSpec, Scored, mean_tasks, name_task, score_row, way_of
from inlay.studies.judge.scores import Row, mean_of
from inlay.studies.judge.series import most_parameters, series_keys
from inlay.studies.judge.sharing_claims import SHARING_CLAIMS
from inlay.studies.judge.verdicts import (
    CLEARLY,
    NONE,
    OPEN,
    UNKNOWN,
    Claim,
    Verdict,
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
from inlay.studies.report.tables import describe_ends, find_gaps, show
from inlay.studies.run.records import Record

NEAR_MAJORITY = 3.0
"""points from the majority class that still count as near it"""
NO_BETTER = 0.5
"""points that an extension may be above the plain adapter and still be no better"""
STEADY = 0.5
"""points that a size may be from the mean of all, and sizes still be stable: as published they are 0.3 from it"""
HARDLY = 2.0
"""points that hardly matter: what the paper says of a single layer"""
SIZES = frozenset((8, 64, 256))
"""those that the paper chooses among"""
UNMOVED = 0.01
"""points of a dev score that are no change"""

LIKE = 0.5
"""points that ours and the published difference may be apart and still agree, if we know ours to twice as many"""

Studies = Mapping[str, Scored]
"""study -> its rows, of one backbone"""


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict on one backbone."""

    claim: Claim
    verdict: Verdict
    stands: bool = False
    """holds together with all others that stand: the chance that one of them is wrong is 5%"""


def judge_claims(studies: Studies) -> list[Judged]:
    """Every claim on one backbone; what was not run has no verdict."""
    coverages = {name: Coverage.of(scored) for name, scored in studies.items()}
    found = [_judge(claim, studies.get(claim.study), coverages.get(claim.study)) for claim in CLAIMS]
    return [Judged(*item) for item in zip(CLAIMS, found, hold_together(found), strict=True)]


def _judge(claim: Claim, scored: Scored | None, coverage: Coverage | None) -> Verdict:
    """The verdict on a claim; open, and it says why, while planned runs of the rows that it rests on are missing."""
    if scored is None or not scored.rows or coverage is None:
        return Verdict(NONE, "its study has not been run")
    found = claim.judge(scored)
    rows = match_rows(scored.rows, found.rows)
    if found.rows != ("*",):  # not where all rows are meant: the table of settings says it
        found = replace(found, sentence="; ".join((found.sentence, *describe_ends(scored, rows, found.tasks))))
    gap = coverage.find_gap(found.rows, found.tasks)
    return (
        replace(found, status=OPEN, chance=1.0, sentence=f"{found.sentence}; open while {gap.text}") if gap else found
    )


@dataclass(frozen=True)
class _Adapters:
    """The row of adapters that a claim is about."""

    label: str
    row: Row
    share: float
    """trained per task in the mean, in percent of the backbone"""
    note: str = ""


def _find_adapters(scored: Scored, most_share: float) -> _Adapters | None:
    """The adapters of the best size, or where these train more than a share, of the best size that does not."""
    key = next((key for key in ("adapters", *series_keys(scored, "adapters")[::-1]) if key in scored.rows), None)
    if key is None:
        return None
    whole = _Adapters(scored.label(key), scored.rows[key], _mean_share(scored, scored.rows[key]))
    specs = [spec for spec in scored.specs if spec.key == "adapters" or spec.key.rpartition("-")[0] == "adapters"]
    held = {item.key: item for spec in specs for item in spec.records}
    kept = [item for item in held.values() if 100 * item.trained_parameters <= most_share * item.backbone_parameters]
    row = score_row(scored.study, RowSpec(key, "", tuple(kept)), scored.split) if whole.share > most_share else {}
    if not row:
        return whole
    numbers = sorted({number for item in kept if (number := way_of(item).number) is not None})
    label = f"adapters ({'–'.join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))})" if numbers else whole.label
    note = (
        f"; the best of all sizes, {whole.label}, trains {whole.share:.2f}%: sizes within {most_share:g}% are compared"
    )
    return _Adapters(label, row, _mean_share(scored, row), note)


def _mean_share(scored: Scored, row: Row) -> float:
    shares = [cell.share for task, cell in row.items() if task in mean_tasks(scored)]
    return sum(shares) / max(len(shares), 1)


def within_of_full(bound: float, most_share: float = 100.0) -> Callable[[Scored], Verdict]:
    """Adapters lose at most `bound` points to full fine-tuning in the mean, at no more than a share of parameters."""

    def judge(scored: Scored) -> Verdict:
        adapters, full = _find_adapters(scored, most_share), scored.rows.get("full")
        tasks = [task for task in scored.tasks if task not in NOT_AVERAGED]
        paired = pair(adapters.row, full, tasks) if adapters and full else None
        if adapters is None or paired is None:
            return lacking("adapters", "full fine-tuning")
        is_within = adapters.share <= most_share
        findings = [judge_pair(paired, lambda gap: at_least(gap, -bound)), fact(is_within)]
        text = gap_text(paired, f"{adapters.label} less full fine-tuning")
        text += f", {adapters.share:.2f}% trained per task" + ("" if is_within else f", above {most_share:g}%")
        return verdict(all_of(findings), text + adapters.note, ("adapters", "adapters-*", "full"))

    return judge


def top_beats_full(scored: Scored) -> Verdict:
    """Fine-tuning the top layers is above full fine-tuning on some task, beyond what the best of so many is by chance.

    Two seeds say little about the error of one task: it is drawn towards that of all, as far as tasks are alike.
    """
    paired = compare(scored, "top", "full")
    if paired is None:
        return lacking("variable fine-tuning", "full fine-tuning")
    found, *more = (
        dict(zip(side.by_task, moderate(list(side.by_task.values())), strict=True))
        for side in (paired, paired.equal)
        if side is not None
    )
    if any(item.sem is None for item in found.values()):
        return lacking("two seeds a task")
    sides = [found, *more]
    tests = {task: bracket([above(side[task], 0.0) for side in sides if task in side]) for task in found}
    best = min(tests, key=lambda task: tests[task].new.confirm)
    text = (
        f"of {len(found)} tasks the surest is {name_task(best)} ({show(found[best], signed=True)}"
        f"{unsure(found[best])}), no task being surer than the mean of all"
    )
    return verdict(any_of(list(tests.values())), text, ("top", "full"))


def _on_ablations(judge: Callable[[Sequence[Ablation]], Verdict]) -> Callable[[Scored], Verdict]:
    def judged(scored: Scored) -> Verdict:
        records = [record for spec in scored.specs for record in spec.records]
        found = read_ablations(records, scored.study.tasks)
        return replace(judge(found), rows=("*",)) if found else Verdict(OPEN, "no spans were removed yet")

    return judged


def _single_layers(ablations: Sequence[Ablation]) -> Verdict:
    worst = {item.task: max(item.singles, key=lambda single: single.mean) for item in ablations}
    texts = [f"{name_task(task)} {show(value)}" for task, value in worst.items()]
    finding = all_of([at_most(cost, HARDLY) for item in ablations for cost in item.singles])
    return verdict(finding, f"the costliest single layer costs, in points of accuracy: {', '.join(texts)}")


def _all_layers(ablations: Sequence[Ablation]) -> Verdict:
    findings, texts = [], []
    for item in ablations:
        left = item.accuracy(*item.everything)
        if item.majority is None:
            findings.append(UNKNOWN)
            texts.append(f"{name_task(item.task)} {show(left)} (majority class not known)")
            continue
        findings.append(all_within([left._replace(mean=left.mean - item.majority)], NEAR_MAJORITY))
        texts.append(f"{name_task(item.task)} {show(left)} (majority class {item.majority:.1f})")
    return verdict(all_of(findings), f"accuracy without any adapter: {', '.join(texts)}")


def _lower_layers(ablations: Sequence[Ablation]) -> Verdict:
    findings, texts = [], []
    for item in ablations:
        half = _lower_part(item)
        lower, upper = (0, half - 1), (item.num_layers - half, item.num_layers - 1)
        findings.append(above(item.less(lower, upper), 0.0))
        texts.append(f"{name_task(item.task)} {show(item.decrease(*lower))} against {show(item.decrease(*upper))}")
    count = f"the lowest {half} layers against the highest {half}"
    return verdict(all_of(findings), f"points lost by removing {count}: {', '.join(texts)}")


def _lower_part(item: Ablation) -> int:
    """As many layers of ours as layers 0–4 are of the paper's twelve."""
    return max(1, round(item.num_layers * 5 / 12))


def _lowest_on_mnli(ablations: Sequence[Ablation]) -> Verdict:
    item = next((item for item in ablations if item.task == "glue/mnli"), None)
    if item is None:
        return lacking("MNLI")
    last = _lower_part(item) - 1
    lost = item.decrease(0, last)
    text = (
        f"removing layers 0–{last} of {item.num_layers} costs {show(lost)} points of accuracy on MNLI-m{unsure(lost)}"
    )
    return verdict(at_most(lost, HARDLY), f"{text} (at most {HARDLY:g} is hardly)")


def sizes_stable(scored: Scored) -> Verdict:
    """No size's mean is far from the mean of all sizes."""
    if missing := not_planned(scored, "adapters-8", "adapters-64", "adapters-256"):
        return missing
    tasks, keys = mean_tasks(scored), series_keys(scored, "adapters")
    means = {key: mean for key in keys if (mean := mean_of(scored.rows[key], tasks)) is not None}
    if len(means) < 2:
        return lacking("two sizes")
    found = deviations(list(means.values()))
    furthest = max(found, key=lambda item: abs(item.mean))
    texts = ", ".join(f"{scored.label(key)} {show(mean)}" for key, mean in means.items())
    text = f"{texts} over {len(tasks)} tasks: at most {show(furthest._replace(mean=abs(furthest.mean)))} points from "
    text += f"their mean (within {STEADY:g} is stable)"
    return verdict(all_within(found, STEADY), text, ("adapters-*",))


def size_within(key: str, bound: float) -> Callable[[Scored], Verdict]:
    """A row loses at most `bound` points to full fine-tuning."""

    def judge(scored: Scored) -> Verdict:
        paired = compare(scored, key, "full")
        if paired is None:
            return not_planned(scored, key, "full") or lacking(scored.label(key), "full fine-tuning")
        text = gap_text(paired, f"{scored.label(key)} less full fine-tuning")
        return verdict(judge_pair(paired, lambda gap: at_least(gap, -bound)), text, (key, "full"))

    return judge


def fixed_size(scored: Scored) -> Verdict:
    """A fixed size of 64 loses at most 0.4 points to the best size of each task.

    Who chooses among sizes on the rows that are shown looks better on them than on others: a loss that is small even so
    is small, a large one may be that choice's.
    """
    records = [record for spec in scored.specs if spec.key == "adapters" for record in spec.records]
    if missing := sorted(SIZES - {way_of(record).number for record in records}):
        return Verdict(NONE, f"size {' and '.join(map(str, missing))} not in this profile")
    paired = compare(scored, "adapters-64", "adapters")
    if paired is None:
        return not_planned(scored, "adapters-64", "adapters") or lacking("adapters (64)", "adapters of several sizes")
    text = gap_text(replace(paired, equal=None), f"adapters (64) less {scored.label('adapters')}")
    text += "; it can only be confirmed, since the best size was chosen on the very rows that are shown"
    return verdict(never_broken(at_least(paired.estimate, -0.4)), text, ("adapters-64", "adapters"))


def totals_of_nine(scored: Scored) -> Verdict:
    """Nine tasks take 1.3 times the backbone with adapters at 3.6% each, and nine times with full fine-tuning."""
    adapters, full = _find_adapters(scored, 3.6), scored.rows.get("full")
    if adapters is None or not full:
        return lacking("adapters", "full fine-tuning")
    ours, theirs = 1 + 9 * adapters.share / 100, 9 * _mean_share(scored, full) / 100
    text = f"nine tasks take {ours:.2f} times the backbone with {adapters.label}, {theirs:.2f} times with full "
    text += "fine-tuning (by the mean count of these tasks, heads included; counts alone, no score)"
    return verdict(all_of([fact(ours < 1.35), fact(theirs > 8.9)]), text, ("adapters", "adapters-*", "full"))


def norms_worse(scored: Scored) -> Verdict:
    """Layer norms alone are clearly worse than full fine-tuning."""
    paired = compare(scored, "norms", "full")
    if paired is None:
        return lacking("layer norms only", "full fine-tuning")
    text = gap_text(paired, "layer norms only less full fine-tuning")
    return verdict(judge_pair(paired, lambda gap: at_most(gap, -CLEARLY)), text, ("norms", "full"))


def top_worse_at_equal_size(scored: Scored) -> Verdict:
    """Top-k fine-tuning is clearly worse than adapters with no more parameters, over all k that have such adapters."""
    tasks = mean_tasks(scored)
    adapters = series_keys(scored, "adapters")
    gaps: list[Paired] = []
    used = ["top-*"]
    for key in series_keys(scored, "top"):
        limit = most_parameters(scored, key)
        smaller = [other for other in adapters if most_parameters(scored, other) <= limit]
        # Only where the two curves stand side by side: adapters of at least a quarter of these parameters.
        if smaller and most_parameters(scored, smaller[-1]) >= limit / 4:
            paired = pair(scored.rows[key], scored.rows[smaller[-1]], tasks)
            gaps += [paired] if paired else []
            used.append(smaller[-1])
    if not gaps:
        return lacking("top-k fine-tuning", "adapters of about as many parameters")
    overall = _mean_gap([item.estimate for item in gaps])
    equal = _mean_gap([(item.equal or item).estimate for item in gaps])
    finding = bracket([at_most(gap, -CLEARLY) for gap in (overall, equal)])
    worst, best = min(item.estimate.mean for item in gaps), max(item.estimate.mean for item in gaps)
    counted = f"top k less the largest adapters with no more parameters, for {len(gaps)} of the k"
    ends = f"{worst:+.1f} to {best:+.1f}".replace("-", "−")
    text = f"{counted}: {show(overall.mean, signed=True)} points in the mean ({ends})"
    return verdict(finding, text + unsure(overall), tuple(used))


def _mean_gap(values: Sequence[Estimate]) -> Estimate:
    """The mean of differences to the same adapters: their errors do not cancel out, so it has the largest of them."""
    widest = max(values, key=lambda value: math.inf if value.sem is None else reach(value, new_rows=True))
    return widest._replace(mean=sum(value.mean for value in values) / len(values))


def extensions_no_better(scored: Scored) -> Verdict:
    """No extension is above the plain adapter by more than half a point."""
    reference = scored.reference
    found = {
        key: paired
        for key in scored.rows
        if reference and key not in (reference, "full") and (paired := compare(scored, key, reference)) is not None
    }
    if not found:
        return lacking("extensions", "the plain adapter")
    best = max(found, key=lambda key: found[key].estimate.mean)
    text = gap_text(found[best], f"the best of {len(found)} extensions, {scored.label(best)}, less the plain adapter")
    text += f" (no better: at most {NO_BETTER:g})"
    findings = [judge_pair(item, lambda gap: at_most(gap, NO_BETTER)) for item in found.values()]
    return verdict(all_of(findings), text, ("*",))


def no_forgetting(scored: Scored) -> Verdict:
    """Where each task has its slot no answer of an earlier one moves, to the last bit, and no dev score changes."""
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
        return lacking("adapters and the scores of earlier tasks after each step")
    is_kept = max(moves) == 0 and max(changes) <= UNMOVED
    text = f"with adapters no answer of an earlier task moved by more than {max(moves):.2g} (logits)"
    text += f", no dev score by more than {max(changes):.2g} points"
    if networks:
        text += f"; one network fine-tuned in turn lost {sum(networks) / len(networks):.1f} points a task"
    return verdict(fact(is_kept), text, tuple(rows))


def _changes(records: Sequence[Record]) -> list[float]:
    """How far each later dev score of a task is from that when it was learnt, run by run."""
    learnt = {(_sequence(item), item.task): item.extra.get("after", {}).get(item.task) for item in records}
    return [
        100 * abs(score - before)
        for item in records
        for task, score in item.extra.get("after", {}).items()
        if task != item.task and (before := learnt.get((_sequence(item), task))) is not None
    ]


def _sequence(record: Record) -> tuple[str, str, int, str]:
    """What the records of one sequence of tasks have in common."""
    return (record.arm, repr(sorted(record.axes.items())), record.seed, record.hardware)


_GLUE = "adapters within {} points of full fine-tuning on the GLUE mean at ≤ 3.6% of the parameters"
_HOULSBY = "Houlsby et al. 2019"
CLAIMS = (
    Claim("glue-0.4", _GLUE.format(0.4), f"{_HOULSBY} (arXiv, slides)", "glue", within_of_full(0.4, 3.6)),
    Claim("glue-total", "nine tasks take 1.3 times the backbone with adapters, 9 times with full fine-tuning", _HOULSBY,
          "glue", totals_of_nine),
    Claim("glue-64", "a fixed size of 64 is within 0.4 points of the best size of each task", _HOULSBY, "glue",
          fixed_size),
    Claim("glue-0.8", _GLUE.format(0.8), f"{_HOULSBY} (ICML abstract)", "glue", within_of_full(0.8, 3.6)),
    Claim("extra-0.4", "adapters within 0.4 points of full fine-tuning on the additional tasks", _HOULSBY, "extra",
          within_of_full(0.4)),
    Claim("top-above-full", "fine-tuning the top layers beats full fine-tuning on some tasks", _HOULSBY, "extra",
          top_beats_full),
    Claim("single-layer", "removing a single layer's adapters costs at most 2 points", _HOULSBY, "ablation",
          _on_ablations(_single_layers)),
    Claim("all-layers", "removing all adapters leaves about the majority class", _HOULSBY, "ablation",
          _on_ablations(_all_layers)),
    Claim("lower-layers", "adapters of lower layers matter less", _HOULSBY, "ablation", _on_ablations(_lower_layers)),
    Claim("lowest-mnli", "on MNLI the adapters of layers 0–4 hardly matter", _HOULSBY, "ablation",
          _on_ablations(_lowest_on_mnli)),
    *INIT_CLAIMS,
    Claim("squad-64", "on SQuAD adapters of size 64 are within 0.3 points (F1) of full fine-tuning", _HOULSBY, "squad",
          size_within("adapters-64", 0.3)),
    Claim("squad-2", "on SQuAD adapters of size 2 are within 0.8 points (F1) of full fine-tuning", _HOULSBY, "squad",
          size_within("adapters-2", 0.8)),
    Claim("sizes-stable", "stable over sizes 8, 64 and 256", _HOULSBY, "sizes", sizes_stable),
    Claim("norms-worse", "layer norms alone are clearly worse", _HOULSBY, "tradeoff", norms_worse),
    Claim("top-worse", "top-k fine-tuning is clearly worse at equal parameters", _HOULSBY, "tradeoff",
          top_worse_at_equal_size),
    Claim("extensions", "the extensions of the adapter are no better", _HOULSBY, "extensions", extensions_no_better),
    *SHARING_CLAIMS,
    Claim("no-forgetting", "no earlier task is forgotten", _HOULSBY, "stream", no_forgetting),
    Claim("uva", "adapters are within 0.5 points of full fine-tuning on MRPC and CoLA (accuracy)", "UVA reproduction",
          "uva", size_within("adapters-64", 0.5)),
    *HYPER_CLAIMS,
    *FEATURE_CLAIMS,
)  # fmt: skip


def describe_agreement(scored: Scored) -> list[str]:
    """For each row whose difference to the reference was published too: one sentence on whether ours is like it."""
    sentences = []
    coverage = Coverage.of(scored)
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
        gap = coverage.find_gap((key, scored.reference or ""), gaps.tasks)
        does = f"open while {gap.count}" if gap else does
        sentences.append(
            f"{scored.label(key)} less {scored.label(scored.reference or '')} ({gaps.over}): ours "
            f"{show(ours.estimate, signed=True)}, published {show(theirs, signed=True)}: {does} "
            f"({distance:.1f} points apart)"
        )
    return sentences
