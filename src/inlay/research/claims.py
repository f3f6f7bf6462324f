"""The papers' claims, each held against our records: confirmed, not confirmed or open, with one plain sentence.

What makes a claim confirmed is in `verdicts.py`. Claims are judged for each backbone by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from inlay.research.curves import series_keys
from inlay.research.extras import Ablation, forgotten, read_ablations, read_steps
from inlay.research.hyper_claims import HYPER_CLAIMS
from inlay.research.lineup import Scored, mean_tasks, name_task
from inlay.research.scores import Estimate, Paired, estimate, largest_error, mean_of, pair
from inlay.research.tables import find_gaps, show
from inlay.research.verdicts import (
    CLEARLY,
    CONFIRMED,
    OPEN,
    REFUTED,
    Claim,
    Verdict,
    above,
    all_of,
    at_least,
    at_most,
    compare,
    gap_text,
    lacking,
)

NOT_RUN = "its study has not been run"
NEAR_MAJORITY = 3.0
"""points from the majority class that still count as near it"""
FLAT = 1.0
"""points that an accuracy may vary by and still be robust"""

LIKE = 0.5
"""points that ours and the published difference may be apart and still agree, if seeds differ by less"""

Studies = Mapping[str, Scored]
"""study -> its rows, of one backbone"""


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict on one backbone."""

    claim: Claim
    verdict: Verdict


def judge_claims(studies: Studies) -> list[Judged]:
    """Every claim on one backbone; what was not run is open."""
    return [Judged(claim, _judge(claim, studies.get(claim.study))) for claim in CLAIMS]


def _judge(claim: Claim, scored: Scored | None) -> Verdict:
    if scored is None or not scored.rows:
        return Verdict(OPEN, NOT_RUN)
    return claim.judge(scored)


def _adapters_within(scored: Scored, most_share: float) -> str | None:
    """The adapters of the best size if they keep to a share of the parameters, else the largest that do, else those."""
    keys = [key for key in ("adapters", *series_keys(scored, "adapters")[::-1]) if key in scored.rows]
    return next((key for key in keys if _mean_share(scored, key) <= most_share), keys[0] if keys else None)


def _mean_share(scored: Scored, key: str) -> float:
    shares = [cell.share for task, cell in scored.rows[key].items() if task in mean_tasks(scored)]
    return sum(shares) / max(len(shares), 1)


def within_of_full(bound: float, most_share: float = 100.0) -> Callable[[Scored], Verdict]:
    """Adapters lose at most `bound` points to full fine-tuning in the mean, at no more than a share of parameters."""

    def judge(scored: Scored) -> Verdict:
        key = _adapters_within(scored, most_share)
        paired = compare(scored, key, "full") if key else None
        if key is None or paired is None:
            return lacking("adapters", "full fine-tuning")
        share = _mean_share(scored, key)
        lost = Estimate(-paired.estimate.mean, paired.estimate.sem, paired.num_pairs)
        statuses = [at_most(lost, bound), CONFIRMED if share <= most_share else REFUTED]
        text = f"{gap_text(paired, f'{scored.label(key)} less full fine-tuning')}, {share:.2f}% trained per task"
        return Verdict(all_of(statuses), text + (f", above {most_share:g}%" if share > most_share else ""))

    return judge


def top_beats_full(scored: Scored) -> Verdict:
    """Fine-tuning the top layers is above full fine-tuning on some tasks, by more than its error."""
    paired = compare(scored, "top", "full")
    if paired is None:
        return lacking("variable fine-tuning", "full fine-tuning")
    above, below = (
        [task for task, item in paired.by_task.items() if item.sem is not None and sign * item.mean > 2 * item.sem]
        for sign in (1, -1)
    )
    if all(item.sem is None for item in paired.by_task.values()):
        return lacking("two seeds a task")
    best = max(paired.by_task.items(), key=lambda entry: entry[1].mean)
    text = (
        f"of {len(paired.by_task)} tasks top k is above full fine-tuning by more than twice its s.e.m. on {len(above)} "
        f"and below on {len(below)}; highest on {name_task(best[0])} ({show(best[1], signed=True)})"
    )
    return Verdict(CONFIRMED if above else REFUTED, text)


def _on_ablations(judge: Callable[[Sequence[Ablation]], Verdict]) -> Callable[[Scored], Verdict]:
    def judged(scored: Scored) -> Verdict:
        records = [record for spec in scored.specs for record in spec.records]
        found = read_ablations(records, scored.study.tasks)
        return judge(found) if found else Verdict(OPEN, "no spans were removed yet")

    return judged


def _single_layers(ablations: Sequence[Ablation]) -> Verdict:
    worst = {item.task: max(item.singles, key=lambda single: single.mean) for item in ablations}
    texts = [f"{name_task(task)} {show(value)}" for task, value in worst.items()]
    status = all_of([at_most(value, 2.0) for value in worst.values()])
    return Verdict(status, f"the costliest single layer costs, in points of accuracy: {', '.join(texts)}")


def _all_layers(ablations: Sequence[Ablation]) -> Verdict:
    statuses, texts = [], []
    for item in ablations:
        left = item.accuracy(*item.everything)
        if item.majority is None:
            statuses.append(OPEN)
            texts.append(f"{name_task(item.task)} {show(left)} (majority class not known)")
            continue
        distance = Estimate(abs(left.mean - item.majority), left.sem)
        statuses.append(at_most(distance, NEAR_MAJORITY))
        texts.append(f"{name_task(item.task)} {show(left)} (majority class {item.majority:.1f})")
    return Verdict(all_of(statuses), f"accuracy without any adapter: {', '.join(texts)}")


def _lower_layers(ablations: Sequence[Ablation]) -> Verdict:
    statuses, texts = [], []
    for item in ablations:
        half = max(1, round(item.num_layers * 5 / 12))  # the paper's layers 0–4 of 12
        low, high = item.decrease(0, half - 1), item.decrease(item.num_layers - half, item.num_layers - 1)
        statuses.append(above(_difference(high, low), 0.0))
        texts.append(f"{name_task(item.task)} {show(low)} against {show(high)}")
    count = f"the lowest {half} layers against the highest {half}"
    return Verdict(all_of(statuses), f"points lost by removing {count}: {', '.join(texts)}")


def _difference(first: Estimate, second: Estimate) -> Estimate:
    is_known = first.sem is not None and second.sem is not None
    return Estimate(first.mean - second.mean, (first.margin**2 + second.margin**2) ** 0.5 if is_known else None)


def _scales(scored: Scored, task: str) -> dict[float, Estimate]:
    rows = {float(key.partition("-")[2]): row for key, row in scored.rows.items() if key.startswith("init-")}
    return {scale: row[task].estimate for scale, row in sorted(rows.items()) if task in row}


def init_robust(scored: Scored) -> Verdict:
    """Below 1e-2 accuracy hardly depends on the scale."""
    statuses, texts = [], []
    for task in scored.tasks:
        below = [value for scale, value in _scales(scored, task).items() if scale <= 1.0001e-2]
        if len(below) > 1:
            spread = max(below, key=lambda value: value.mean).mean - min(below, key=lambda value: value.mean).mean
            statuses.append(at_most(Estimate(spread, largest_error(below)), FLAT))
            texts.append(f"{name_task(task)} {spread:.1f}")
    if not statuses:
        return lacking("two scales of at most 1e-2")
    return Verdict(all_of(statuses), f"highest less lowest accuracy for σ ≤ 1e-2, in points: {', '.join(texts)}")


def _drops(scored: Scored) -> dict[str, Estimate]:
    """Task -> mean accuracy for σ ≤ 1e-2 less that of the greatest scale."""
    drops = {}
    for task in scored.tasks:
        scales = _scales(scored, task)
        below = [value.mean for scale, value in scales.items() if scale <= 1.0001e-2]
        if below and max(scales) > 1.0001e-2:
            last = scales[max(scales)]
            drops[task] = Estimate(sum(below) / len(below) - last.mean, last.sem)
    return drops


def init_worse(scored: Scored) -> Verdict:
    """Above 1e-2 accuracy falls."""
    drops = _drops(scored)
    if not drops:
        return lacking("scales on both sides of 1e-2")
    texts = [f"{name_task(task)} {show(drop)}" for task, drop in drops.items()]
    status = all_of([above(drop, 0.0) for drop in drops.values()])
    return Verdict(status, f"points lost at the greatest scale: {', '.join(texts)}")


def init_cola(scored: Scored) -> Verdict:
    """The fall is greater on CoLA than on MNLI."""
    drops = _drops(scored)
    if not {"glue/cola", "glue/mnli"} <= drops.keys():
        return lacking("CoLA", "MNLI")
    cola, mnli = drops["glue/cola"], drops["glue/mnli"]
    return Verdict(above(_difference(cola, mnli), 0.0), f"points lost: CoLA {show(cola)}, MNLI {show(mnli)}")


def sizes_stable(scored: Scored) -> Verdict:
    """The mean differs by no more between sizes than the published ones do (86.2 to 85.7)."""
    tasks, keys = mean_tasks(scored), series_keys(scored, "adapters")
    means = {key: mean for key in keys if (mean := mean_of(scored.rows[key], tasks)) is not None}
    if len(means) < 2:
        return lacking("two sizes")
    spread = max(mean.mean for mean in means.values()) - min(mean.mean for mean in means.values())
    error = largest_error(means.values())
    texts = ", ".join(f"{scored.label(key)} {show(mean)}" for key, mean in means.items())
    return Verdict(at_most(Estimate(spread, error), 0.5), f"{texts}: {spread:.1f} points apart over {len(tasks)} tasks")


def norms_worse(scored: Scored) -> Verdict:
    """Layer norms alone are clearly worse than full fine-tuning."""
    paired = compare(scored, "norms", "full")
    if paired is None:
        return lacking("layer norms only", "full fine-tuning")
    lost = Estimate(-paired.estimate.mean, paired.estimate.sem)
    return Verdict(at_least(lost, CLEARLY), gap_text(paired, "layer norms only less full fine-tuning"))


def top_worse_at_equal_size(scored: Scored) -> Verdict:
    """Top-k fine-tuning is clearly worse than adapters with no more parameters, over all k that have such adapters."""
    tasks = mean_tasks(scored)
    adapters = series_keys(scored, "adapters")
    gaps: list[Paired] = []
    for key in series_keys(scored, "top"):
        limit = max(cell.trained_parameters for cell in scored.rows[key].values())
        smaller = [other for other in adapters if _most_parameters(scored, other) <= limit]
        # Only where the two curves stand side by side: adapters of at least a quarter of these parameters.
        if smaller and _most_parameters(scored, smaller[-1]) >= limit / 4:
            paired = pair(scored.rows[key], scored.rows[smaller[-1]], tasks)
            gaps += [paired] if paired else []
    if not gaps:
        return lacking("top-k fine-tuning", "adapters of about as many parameters")
    overall = estimate(item.estimate.mean for item in gaps)
    lost = Estimate(-overall.mean, largest_error(item.estimate for item in gaps))
    worst, best = min(item.estimate.mean for item in gaps), max(item.estimate.mean for item in gaps)
    counted = f"top k less the largest adapters with no more parameters, for {len(gaps)} of the k"
    ends = f"{worst:+.1f} to {best:+.1f}".replace("-", "−")
    return Verdict(at_least(lost, CLEARLY), f"{counted}: {show(overall.mean, signed=True)} points in the mean ({ends})")


def _most_parameters(scored: Scored, key: str) -> int:
    return max(cell.trained_parameters for cell in scored.rows[key].values())


def extensions_no_better(scored: Scored) -> Verdict:
    """No extension is above the plain adapter by more than its error."""
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
    return Verdict(at_most(found[best].estimate, 0.0), text)


def every_third_within(scored: Scored) -> Verdict:
    """One adapter for three layers loses at most half a point."""
    paired = compare(scored, "every-3", "none")
    if paired is None:
        return lacking("every-3", "none")
    lost = Estimate(-paired.estimate.mean, paired.estimate.sem)
    return Verdict(at_most(lost, 0.5), gap_text(paired, "every-3 less none"))


def none_beats_full(scored: Scored) -> Verdict:
    """'Not shared' is above full fine-tuning on the additional tasks."""
    paired = compare(scored, "none", "full")
    if paired is None:
        return lacking("none", "full fine-tuning")
    text = gap_text(paired, "not shared less full fine-tuning")
    ahead = f"ahead on {paired.num_ahead} of {len(paired.by_task)} tasks"
    return Verdict(above(paired.estimate, 0.0), f"{text}; {ahead} (published +3.5, made by two doubtful rows)")


def no_forgetting(scored: Scored) -> Verdict:
    """No answer of an earlier task moves, to the last bit, where each has its slot; one network in turn forgets."""
    slots: list[float] = []
    networks: list[float] = []
    moves: list[float] = []
    for spec in scored.specs:
        lost = [value.mean for value in forgotten(read_steps(spec.records, scored.study.tasks)).values()]
        moved = [record.extra["moved"] for record in spec.records if record.extra.get("moved") is not None]
        moves += moved
        (slots if moved else networks).extend(lost)
    if not moves or not slots:
        return lacking("adapters and the scores of earlier tasks after each step")
    text = f"with adapters no answer of an earlier task moved by more than {max(moves):.2g} (logits)"
    text += f", no dev score by more than {max(map(abs, slots)):.1g} points"
    if networks:
        text += f"; one network fine-tuned in turn lost {sum(networks) / len(networks):.1f} points a task"
    return Verdict(CONFIRMED if max(moves) == 0 else REFUTED, text)


_GLUE = "adapters within {} points of full fine-tuning on the GLUE mean at ≤ 3.6% of the parameters"
_HOULSBY, _TF = "Houlsby et al. 2019", "TF-Adapter-BERT"
CLAIMS = (
    Claim("glue-0.4", _GLUE.format(0.4), f"{_HOULSBY} (arXiv, slides)", "glue", within_of_full(0.4, 3.6)),
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
    Claim("init-robust", "robust to init scales up to 1e-2", _HOULSBY, "init", init_robust),
    Claim("init-worse", "worse with init scales above 1e-2", _HOULSBY, "init", init_worse),
    Claim("init-cola", "init scales above 1e-2 hurt CoLA more than MNLI", _HOULSBY, "init", init_cola),
    Claim("sizes-stable", "stable over sizes 8, 64 and 256", _HOULSBY, "sizes", sizes_stable),
    Claim("norms-worse", "layer norms alone are clearly worse", _HOULSBY, "tradeoff", norms_worse),
    Claim("top-worse", "top-k fine-tuning is clearly worse at equal parameters", _HOULSBY, "tradeoff",
          top_worse_at_equal_size),
    Claim("extensions", "the extensions of the adapter are no better", _HOULSBY, "extensions", extensions_no_better),
    Claim("every-3", "one adapter for three layers is within 0.5 points of none shared", _TF, "sharing",
          every_third_within),
    Claim("none-extra", "'not shared' beats full fine-tuning on the additional tasks", _TF, "extra", none_beats_full),
    Claim("no-forgetting", "no earlier task is forgotten", _HOULSBY, "stream", no_forgetting),
    *HYPER_CLAIMS,
)  # fmt: skip


def describe_agreement(scored: Scored) -> list[str]:
    """For each row whose difference to the reference was published too: one sentence on whether ours is like it."""
    sentences = []
    for key in scored.rows:
        gaps = find_gaps(scored, key)
        if gaps is None:
            continue
        ours, theirs = gaps.ours, gaps.published
        distance = abs(ours.estimate.mean - theirs)
        does = "as published" if distance <= max(2 * ours.estimate.margin, LIKE) else "not as published"
        does = "open, with one seed" if ours.estimate.sem is None else does
        sentences.append(
            f"{scored.label(key)} less {scored.label(scored.reference or '')} ({gaps.over}): ours "
            f"{show(ours.estimate, signed=True)}, published {show(theirs, signed=True)}: {does} "
            f"({distance:.1f} points apart)"
        )
    return sentences
