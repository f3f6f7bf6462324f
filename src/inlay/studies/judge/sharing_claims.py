"""What the report of TF-Adapter-BERT claims of adapters that layers share, held against our records.

Claims are judged on the tasks that a row was published on; what other tasks say stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from inlay.studies.judge.rows import NOT_AVERAGED, Scored
from inlay.studies.judge.series import most_parameters
from inlay.studies.judge.verdicts import (
    Claim,
    Verdict,
    above,
    at_least,
    compare,
    gap_text,
    judge_pair,
    lacking,
    not_planned,
    verdict,
)


def _source_tasks(scored: Scored, key: str) -> tuple[str, ...]:
    """The study's tasks on which a row was published: what a claim about it is about; all where there is none."""
    columns = {
        column.partition(":")[0]
        for table in scored.published.tables
        for column in table.columns
        if table.value(key, column) is not None
    }
    tasks = tuple(task for task in scored.study.tasks if task not in NOT_AVERAGED)
    return tuple(task for task in tasks if task in columns) or tasks


def _beside(scored: Scored, key: str, other: str, judged: Sequence[str]) -> str:
    """A sentence's part on the tasks that a claim is not about."""
    paired = compare(scored, key, other, [task for task in scored.tasks if task not in (*judged, *NOT_AVERAGED)])
    return f"; {gap_text(paired, 'on tasks that were not published')}" if paired else ""


def every_third_within(scored: Scored) -> Verdict:
    """One adapter for three layers loses at most half a point, on the tasks it was published on."""
    tasks = _source_tasks(scored, "every-3")
    paired = compare(scored, "every-3", "none", tasks)
    if paired is None:
        return lacking("every-3", "none")
    text = gap_text(paired, "every-3 less none") + _beside(scored, "every-3", "none", tasks)
    counts = [most_parameters(scored, key) for key in ("every-3", "none")]
    text += f"; as published, `none` trains layer norms and a layer before the head too: {counts[0]:,} parameters "
    text += f"against {counts[1]:,}, so that it is no comparison of sharing alone (the study `methods` has one)"
    return verdict(judge_pair(paired, lambda gap: at_least(gap, -0.5)), text, ("every-3", "none"), tasks)


def within_layer_of_full(scored: Scored) -> Verdict:
    """Adapters that a layer's two places share lose at most half a point, on the tasks they were published on."""
    tasks = _source_tasks(scored, "within-layer")
    paired = compare(scored, "within-layer", "full", tasks)
    if paired is None:
        return lacking("within-layer", "full fine-tuning")
    text = gap_text(paired, "within-layer less full fine-tuning") + _beside(scored, "within-layer", "full", tasks)
    return verdict(judge_pair(paired, lambda gap: at_least(gap, -0.5)), text, ("within-layer", "full"), tasks)


def sharing_costs_little(scored: Scored) -> Verdict:
    """One adapter for three layers loses at most half a point to the same adapters without sharing."""
    paired = compare(scored, "every-3", "adapters-64")
    if paired is None:
        return not_planned(scored, "every-3", "adapters-64") or lacking("every-3", "adapters (64)")
    text = gap_text(paired, "shared by three layers less not shared, norms trained in both")
    return verdict(judge_pair(paired, lambda gap: at_least(gap, -0.5)), text, ("every-3", "adapters-64"))


def none_beats_full(scored: Scored) -> Verdict:
    """'Not shared' is above full fine-tuning on the additional tasks that it was published on."""
    tasks = _source_tasks(scored, "none")
    paired = compare(scored, "none", "full", tasks)
    if paired is None:
        return lacking("none", "full fine-tuning")
    text = gap_text(paired, "not shared less full fine-tuning")
    text += f"; ahead on {paired.num_ahead} of {len(paired.by_task)} tasks (published +3.5, made by two doubtful rows)"
    text += _beside(scored, "none", "full", tasks)
    return verdict(judge_pair(paired, lambda gap: above(gap, 0.0)), text, ("none", "full"), tasks)


_TF = "TF-Adapter-BERT"
SHARING_CLAIMS = (
    Claim("every-3", "one adapter for three layers is within 0.5 points of none shared", _TF, "sharing",
          every_third_within),
    Claim("every-3-alone", "one adapter for three layers is within 0.5 points of none shared, all else equal", _TF,
          "methods", sharing_costs_little),
    Claim("within-layer", "adapters shared within a layer are within 0.5 points of full fine-tuning", _TF, "sharing",
          within_layer_of_full),
    Claim("none-extra", "'not shared' beats full fine-tuning on the additional tasks", _TF, "extra", none_beats_full),
)  # fmt: skip
