"""What Mahabadi et al. 2021 claim of hypernetworks, held against our records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from inlay.studies.judge.bounds import estimate, negated
from inlay.studies.judge.pairs import pair
from inlay.studies.judge.rows import Scored, has_joint_runs, mean_tasks, name_task
from inlay.studies.judge.scores import Row
from inlay.studies.judge.series import list_samples
from inlay.studies.judge.verdicts import (
    CLEARLY,
    UNKNOWN,
    Claim,
    Verdict,
    above,
    all_of,
    at_least,
    compare,
    fact,
    gap_text,
    judge_pair,
    lacking,
    not_planned,
    unsure,
    verdict,
)
from inlay.studies.report.figures.maps import read_embeddings
from inlay.studies.report.tables import show

CLOSE = 0.5
"""points that are close, where the published rows are 0.1 apart"""
FRACTION = 0.25
"""of the parameters: as published it is 0.04 (base) and 0.09 (small)"""
MOVED = 0.1
"""of the length of embeddings: what training must move them by before they say anything of tasks"""
# What a text is asked for; tasks of a kind should be embedded near each other.
KINDS = {
    "glue/mnli": "inference",
    "glue/qnli": "inference",
    "glue/rte": "inference",
    "glue/mrpc": "paraphrase",
    "glue/qqp": "paraphrase",
    "glue/stsb": "paraphrase",
}


def row_above(key: str, other: str) -> Callable[[Scored], Verdict]:
    """A row's mean is above another's."""

    def judge(scored: Scored) -> Verdict:
        paired = compare(scored, key, other)
        if paired is None:
            return not_planned(scored, key, other) or lacking(key, other)
        text = gap_text(paired, f"{scored.label(key)} less {scored.label(other)}")
        ahead = f"ahead on {paired.num_ahead} of {len(paired.by_task)} tasks"
        sentence = f"{text}; {ahead}{_unequal(scored, key, other)}"
        return verdict(judge_pair(paired, lambda gap: above(gap, 0.0)), sentence, (key, other))

    return judge


def _unequal(scored: Scored, *keys: str) -> str:
    """What is added where the settings of one row are chosen for each task and those of the other once for all."""
    tried = [max(cell.num_settings for cell in scored.rows[key].values()) for key in keys]
    joint = [any(has_joint_runs(spec) for spec in scored.specs if spec.key == key) for key in keys]
    if len(set(joint)) == 1 or max(tried) == 1:
        return ""
    apart, once = (scored.label(keys[joint.index(each)]) for each in (False, True))
    return f"; the settings of {apart} are chosen for each task, those of {once} once for all"


def close_at_a_fraction(scored: Scored) -> Verdict:
    """HyperFormer++ is close to HyperFormer, or above it, with a fraction of what that trains."""
    paired = compare(scored, "hyperformer++", "hyperformer")
    if paired is None:
        return not_planned(scored, "hyperformer++", "hyperformer") or lacking("HyperFormer++", "HyperFormer")
    counts = [
        sum(cell.trained_parameters for cell in scored.rows[key].values()) for key in ("hyperformer++", "hyperformer")
    ]
    is_fraction = counts[0] <= FRACTION * counts[1]
    finding = all_of([judge_pair(paired, lambda gap: at_least(gap, -CLOSE)), fact(is_fraction)])
    text = gap_text(paired, "HyperFormer++ less HyperFormer")
    text += f", with {100 * counts[0] / counts[1]:.0f}% of its parameters"
    return verdict(finding, text, ("hyperformer++", "hyperformer"))


def series_above(key: str, other: str) -> Callable[[Scored], Verdict]:
    """A method is above another in the mean over tasks and numbers of samples."""

    def judge(scored: Scored) -> Verdict:
        ours, theirs = (_join(scored, each) for each in (key, other))
        paired = pair(ours, theirs)
        if paired is None:
            return lacking(key, other)
        text = f"{key} less {other}: {show(paired.estimate, signed=True)} points over {len(paired.by_task)} tasks and "
        text += f"numbers of samples ({paired.num_pairs} pairs{unsure(paired.estimate)}); ahead on {paired.num_ahead}"
        finding = judge_pair(paired, lambda gap: above(gap, 0.0))
        if _has_start(scored):
            finding, text = UNKNOWN, text + _ONE_START
        return verdict(finding, text, (f"{key}-*", f"{other}-*"))

    return judge


_ONE_START = (
    "; open, since all seeds of a method go on from one trained run, of the first learning rate and not of the chosen "
    "one: the errors are those of samples and rows, and how far another such run would be from it is not known"
)


def _has_start(scored: Scored) -> bool:
    """Whether runs go on from what another trained, of which there is one for each method."""
    records = (record for spec in scored.specs for record in spec.records)
    return any((record.config.get("joint") or {}).get("start") for record in records)


def _join(scored: Scored, method: str) -> Row:
    """The rows of a method as one: a task with a number of samples is a task of its own.

    The few samples that a seed draws of a task are among the many that it draws: columns of one task vary together.
    """
    rows = list_samples(scored).get(method, {})
    return {
        f"{task}@{number}": replace(cell, networks=cell.networks | {f"samples of {task}"})
        for number, key in rows.items()
        for task, cell in scored.rows[key].items()
    }


def parts_matter(scored: Scored) -> Verdict:
    """Every part taken out costs points."""
    found = {key: compare(scored, key, "hyperformer") for key in scored.rows if key.startswith("without-")}
    known = {key: paired for key, paired in found.items() if paired is not None}
    if not known:
        return lacking("HyperFormer", "its variants")
    finding = all_of([judge_pair(item, lambda gap: above(negated(gap), 0.0)) for item in known.values()])
    texts = [f"{scored.label(key)} {show(paired.estimate, signed=True)}" for key, paired in known.items()]
    return verdict(finding, f"less HyperFormer: {', '.join(texts)}", ("*",))


def blocks_matter_most(scored: Scored) -> Verdict:
    """Nothing costs as much as taking out the adapter blocks."""
    tasks = mean_tasks(scored)
    rows = {key: scored.rows[key] for key in scored.rows if key.startswith("without-")}
    if "without-blocks" not in rows or len(rows) < 2:
        return lacking("HyperFormer without adapter blocks", "its other variants")
    gaps = {key: pair(row, rows["without-blocks"], tasks) for key, row in rows.items() if key != "without-blocks"}
    known = {key: paired for key, paired in gaps.items() if paired is not None}
    if not known:
        return lacking("HyperFormer without adapter blocks", "its other variants")
    nearest = min(known, key=lambda key: known[key].estimate.mean)
    text = f"the next, {scored.label(nearest)}, is {show(known[nearest].estimate, signed=True)} points above it"
    finding = all_of([judge_pair(item, lambda gap: at_least(gap, CLEARLY)) for item in known.values()])
    return verdict(finding, text, ("without-*",))


def kinds_lie_together(scored: Scored) -> Verdict:
    """Training takes embeddings of tasks of a kind closer to each other (by cosine) than to those of other tasks.

    They begin as draws by chance, which have a gap of their own: what counts is how much wider it gets. While they have
    hardly moved nothing is said.
    """
    found = [item for item in read_embeddings(scored).values() if item.gap(KINDS) is not None]
    if not found:
        return lacking("embeddings of tasks of one kind, and of others")
    gaps, firsts = [item.gap(KINDS) or 0.0 for item in found], [item.first_gap(KINDS) for item in found]
    nearest = max((pair for group in found[0].alike(KINDS) for pair in group), key=lambda item: item[1])[0]
    text = f"cosine within kinds less that between: {_show(gaps)} over {len(gaps)} seeds"
    named = f"nearest in the first seed: {name_task(nearest[0])} and {name_task(nearest[1])}"
    known = [first for first in firsts if first is not None]
    if len(known) < len(gaps):
        return verdict(UNKNOWN, f"{text}; what it was before training is not known; {named}", ("*",))
    added = [gap - first for gap, first in zip(gaps, known, strict=True)]
    movement = sum(item.movement or 0.0 for item in found) / len(found)
    text += f", before training {_show(known)}: {_show(added)} wider; training moved them by {100 * movement:.0f}% of "
    text += f"their length{'' if movement >= MOVED else ', too little to say anything'}; {named}"
    finding = above(estimate(added), 0.0) if movement >= MOVED else UNKNOWN
    return verdict(finding, text, ("*",), is_tested=len(added) > 1)


def _show(values: Sequence[float]) -> str:
    value = estimate(values)
    return f"{value.mean:+.3f}".replace("-", "−") + ("" if value.sem is None else f" ± {value.sem:.3f}")


_SOURCE = "Mahabadi et al. 2021"
HYPER_CLAIMS = (
    Claim("hyper-adapters", "HyperFormer is above Adapters† on the mean of GLUE", _SOURCE, "multitask",
          row_above("hyperformer", "adapters-multi")),
    Claim("hyper-plus-adapters", "HyperFormer++ is above Adapters† on the mean of GLUE", _SOURCE, "multitask",
          row_above("hyperformer++", "adapters-multi")),
    Claim("multi-single", "Adapters† are above adapters trained a task at a time", _SOURCE, "multitask",
          row_above("adapters-multi", "single-adapters")),
    Claim("hyper-plus-single", "HyperFormer++ is above adapters trained a task at a time", _SOURCE, "multitask",
          row_above("hyperformer++", "single-adapters")),
    Claim("hyper-plus-single-full", "HyperFormer++ is above full fine-tuning of each task by itself", _SOURCE,
          "multitask", row_above("hyperformer++", "single-full")),
    Claim("hyper-plus-close", "HyperFormer++ is close to HyperFormer at a fraction of the parameters", _SOURCE,
          "multitask", close_at_a_fraction),
    Claim("few-shot-adapters", "with few samples of a new task HyperFormer++ is above Adapters†", _SOURCE, "fewshot",
          series_above("hyperformer++", "adapters-multi")),
    Claim("few-shot-full", "with few samples of a new task HyperFormer++ is above full fine-tuning", _SOURCE,
          "fewshot", series_above("hyperformer++", "multi-full")),
    Claim("low-resource-adapters", "with few rows a task HyperFormer++ is above Adapters†", _SOURCE, "lowresource",
          series_above("hyperformer++", "adapters-multi")),
    Claim("low-resource-full", "with few rows a task HyperFormer++ is above full fine-tuning", _SOURCE, "lowresource",
          series_above("hyperformer++", "multi-full")),
    Claim("hyper-parts", "every part of HyperFormer is worth points", _SOURCE, "hyper-ablation", parts_matter),
    Claim("hyper-blocks", "adapter blocks are worth the most", _SOURCE, "hyper-ablation", blocks_matter_most),
    Claim("embeddings", "tasks of a kind are embedded near each other", _SOURCE, "embeddings", kinds_lie_together),
)  # fmt: skip
