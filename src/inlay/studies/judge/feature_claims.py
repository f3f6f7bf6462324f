"""What Peters et al. 2019 ("To tune or not to tune?") claim and advise, held against our records.

Their question: keep the pretrained network frozen and train a task model on its features, or tune it? Frozen features
have many rows here (what is read, and how large the task model is), which stand as one: the best of them on dev.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inlay.studies.judge.bounds import Estimate
from inlay.studies.judge.pairs import Paired, pair
from inlay.studies.judge.rows import RowSpec, Scored, name_task, score_row
from inlay.studies.judge.scores import Row
from inlay.studies.judge.verdicts import (
    CLEARLY,
    Claim,
    Finding,
    Verdict,
    at_least,
    at_most,
    gap_text,
    judge_pair,
    lacking,
    not_planned,
    verdict,
)
from inlay.studies.report.tables import ABSENT, Table, show

PREFIX, MANY = "features-", "-mlp"
"""rows of frozen features, and the end of those with many task parameters: a layer before the last"""
PAIRS = ("glue/mrpc", "glue/stsb")
LEVEL = ("glue/sst2", "glue/mnli")
"""tasks on which the published rows (BERT-base) are level: +0.5 and 0.0"""
NEAR = 0.5
_ROWS = ("features-*",)


def _features(scored: Scored, *, is_many: bool | None = None) -> Row:
    """All rows of frozen features as one, the best setting of each task; or those with many or few task parameters."""
    records = tuple(
        record
        for spec in scored.specs
        if spec.key.startswith(PREFIX) and (is_many is None or spec.key.endswith(MANY) is is_many)
        for record in spec.records
    )
    return score_row(scored.study, RowSpec("features", "", records), scored.split) if records else {}


def _tuned_less_frozen(scored: Scored, tasks: Sequence[str], tuned: str = "full") -> Paired | None:
    return pair(scored.rows[tuned], _features(scored), tasks) if tuned in scored.rows else None


def tuning_wins_on_pairs(scored: Scored) -> Verdict:
    """On sentence pairs fine-tuning is clearly above frozen features (published +6.7 on MRPC, +4.2 on STS-B)."""
    return _judge_tuning(scored, PAIRS, lambda gap: at_least(gap, CLEARLY))


def level_on_others(scored: Scored) -> Verdict:
    """On SST-2 and MNLI fine-tuning is at most half a point above frozen features."""
    return _judge_tuning(scored, LEVEL, lambda gap: at_most(gap, NEAR))


def _judge_tuning(scored: Scored, tasks: tuple[str, ...], test: Callable[[Estimate], Finding]) -> Verdict:
    paired = _tuned_less_frozen(scored, tasks)
    if paired is None:
        return not_planned(scored, "full") or lacking("full fine-tuning", "frozen features")
    text = gap_text(paired, "full fine-tuning less the best frozen features")
    return verdict(judge_pair(paired, test), text, (*_ROWS, "full"), tasks)


def frozen_want_parameters(scored: Scored) -> Verdict:
    """Frozen features are clearly better with many task parameters than with few."""
    paired = _many_less_few(scored)
    if paired is None:
        return lacking("features with a linear head", "features with a layer more")
    text = gap_text(paired, "the best features with a layer before the last less the best with a linear head")
    return verdict(judge_pair(paired, lambda gap: at_least(gap, CLEARLY)), text, _ROWS)


def _many_less_few(scored: Scored) -> Paired | None:
    return pair(_features(scored, is_many=True), _features(scored, is_many=False), scored.tasks)


def guideline_table(scored: Scored) -> list[Table]:
    """The paper's advice to practitioners, with what our rows say of each line."""
    if not _features(scored):
        return []
    pairs, level = (_tuned_less_frozen(scored, tasks) for tasks in (PAIRS, LEVEL))
    adapters, layer = _tuned_less_frozen(scored, scored.tasks, "adapters-64"), _many_less_few(scored)
    lines = (
        ("frozen features: add many task parameters", *_said(layer, "a layer more less a linear head")),
        ("tuned: add few task parameters", ABSENT, "not run: tuned rows have a linear head only"),
        ("pairs of sentences: tune", *_said(pairs, "tuned less frozen")),
        ("elsewhere both come out alike", *_said(level, "tuned less frozen")),
        ("(adapters, which the paper does not have)", *_said(adapters, "adapters (64) less frozen")),
    )
    notes = ("frozen: the best of the rows of features for each task, by dev; ± is the error of seeds alone",)
    return [Table("what Peters et al. advise", ("advice", "tasks", "ours, in points"), lines, notes)]


def _said(paired: Paired | None, what: str) -> tuple[str, str]:
    if paired is None:
        return ABSENT, "not run"
    return ", ".join(map(name_task, paired.by_task)), f"{what}: {show(paired.estimate, signed=True)}"


_SOURCE = "Peters et al. 2019"
FEATURE_CLAIMS = (
    Claim("tune-pairs", "on sentence pairs fine-tuning is clearly above frozen features", _SOURCE, "features",
          tuning_wins_on_pairs),
    Claim("tune-level", "on SST-2 and MNLI frozen features are within 0.5 points of fine-tuning", _SOURCE, "features",
          level_on_others),
    Claim("frozen-parameters", "frozen features are clearly better with many task parameters", _SOURCE, "features",
          frozen_want_parameters),
)  # fmt: skip
