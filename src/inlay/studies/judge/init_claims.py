"""What Houlsby et al. 2019 claim of the scale of the initial values, held against our records."""

from __future__ import annotations

from inlay.studies.judge.bounds import Estimate, deviations, difference, mean_of_all
from inlay.studies.judge.rows import Scored, name_task
from inlay.studies.judge.verdicts import UNKNOWN, Claim, Verdict, above, all_of, all_within, lacking, verdict
from inlay.studies.report.tables import show

FLAT = 1.0
"""points that an accuracy may be from the mean over scales and still be robust"""
SPENT = 90.0
"""percent of what is above the majority class: who has lost as much can hardly lose more"""
_SMALL = 1.0001e-2
_ROWS = ("init-*",)


def _scales(scored: Scored, task: str) -> tuple[dict[float, Estimate], dict[float, Estimate]]:
    """Accuracy by scale: up to 1e-2, and above."""
    rows = {float(key.partition("-")[2]): row for key, row in scored.rows.items() if key.startswith("init-")}
    found = {scale: row[task].estimate for scale, row in sorted(rows.items()) if task in row}
    small = {scale: value for scale, value in found.items() if scale <= _SMALL}
    return small, {scale: value for scale, value in found.items() if scale > _SMALL}


def init_robust(scored: Scored) -> Verdict:
    """Up to 1e-2 accuracy hardly depends on the scale."""
    findings, texts = [], []
    for task in scored.tasks:
        small = list(_scales(scored, task)[0].values())
        if len(small) > 1:
            found = deviations(small)
            furthest = max(found, key=lambda item: abs(item.mean))
            findings.append(all_within(found, FLAT))
            texts.append(f"{name_task(task)} {show(furthest._replace(mean=abs(furthest.mean)))}")
    if not findings:
        return lacking("two scales of at most 1e-2")
    text = f"the scale of σ ≤ 1e-2 that is furthest from the mean of them, in points: {', '.join(texts)}"
    return verdict(all_of(findings), f"{text} (within {FLAT:g} is robust)", _ROWS)


def init_worse(scored: Scored) -> Verdict:
    """Above 1e-2 accuracy falls."""
    drops = {}
    for task in scored.tasks:
        small, large = _scales(scored, task)
        if small and large:
            drops[task] = difference(mean_of_all(list(small.values())), large[max(large)])
    if not drops:
        return lacking("scales on both sides of 1e-2")
    texts = [f"{name_task(task)} {show(drop)}" for task, drop in drops.items()]
    finding = all_of([above(drop, 0.0) for drop in drops.values()])
    return verdict(finding, f"points lost at the greatest scale: {', '.join(texts)}", _ROWS)


def init_cola(scored: Scored) -> Verdict:
    """At the first scale above 1e-2 CoLA has lost more of what it has above the majority class than MNLI."""
    shares = {task: _lost_share(scored, task) for task in ("glue/cola", "glue/mnli")}
    cola, mnli = shares.values()
    if cola is None or mnli is None:
        return lacking("CoLA", "MNLI", "scales on both sides of 1e-2, above the majority class")
    text = "of what is above the majority class the first scale above 1e-2 loses, in percent: "
    text += f"CoLA {show(cola)}, MNLI {show(mnli)}"
    if min(cola.mean, mnli.mean) > SPENT:
        return verdict(UNKNOWN, f"{text}; both have next to nothing left to lose", _ROWS, tuple(shares), is_tested=True)
    return verdict(above(difference(cola, mnli), 0.0), text, _ROWS, tuple(shares))


def _lost_share(scored: Scored, task: str) -> Estimate | None:
    """What the first scale above 1e-2 loses of the accuracy above the majority class, in percent."""
    small, large = _scales(scored, task)
    majority = next((row[task].majority for row in scored.rows.values() if task in row), None)
    if not small or not large or majority is None:
        return None
    usual, fallen = mean_of_all(list(small.values())), large[min(large)]
    height = usual.mean - majority
    if height <= 0:
        return None
    left = (fallen.mean - majority) / height
    if usual.sem is None or fallen.sem is None:
        return Estimate(100 * (1 - left))
    # The error of a ratio, to first order; its degrees of freedom are those of a difference.
    scaled = usual._replace(mean=0.0, sem=left * usual.sem, rows=None if usual.rows is None else left * usual.rows)
    whole = difference(scaled, fallen)
    rows = None if whole.rows is None else 100 * whole.rows / height
    return Estimate(100 * (1 - left), 100 * (whole.sem or 0.0) / height, fallen.num, whole.freedom, rows)


_SOURCE = "Houlsby et al. 2019"
INIT_CLAIMS = (
    Claim("init-robust", "robust to init scales up to 1e-2", _SOURCE, "init", init_robust),
    Claim("init-worse", "worse with init scales above 1e-2", _SOURCE, "init", init_worse),
    Claim("init-cola", "init scales above 1e-2 hurt CoLA more than MNLI", _SOURCE, "init", init_cola),
)
