"""Verdicts on made-up records whose truth is known: they are wrong as often as they say, and not silent.

What is drawn is what is drawn in a study: seeds (each task with its own deviation, 17-fold apart), dev rows (a run's
answer to each row is right or wrong), and settings that are chosen on the very rows that are reported.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import synthetic

from inlay.studies.judge.claims import judge_claims
from inlay.studies.judge.published import Published
from inlay.studies.judge.row_differences import pair
from inlay.studies.judge.scored_study import score_study
from inlay.studies.judge.verdicts import hold_together

TASKS = ("glue/rte", "glue/sst2", "glue/mnli", "extra/airline")
ROWS = {"glue/rte": 277, "glue/sst2": 872, "glue/mnli": 2000, "extra/airline": 600}
SPREADS = {"glue/rte": 1.7, "glue/sst2": 0.1, "glue/mnli": 0.4, "extra/airline": 0.8}
"""points by which seeds differ"""
SHIFT = 0.1
"""points by which settings differ"""
TIMES = 300


def draw_study(
    draw: np.random.Generator, gap: float, *, spread: float = 1.0, rows: int = 1, settings=(4, 2), alike: float = 0.5
):
    """Records of full fine-tuning and adapters, which are `gap` points apart over new rows, at settings that differ.

    `alike` is the share of a row's difficulty that all runs have in common.
    """
    bench = synthetic.Bench("glue")
    for task in TASKS:
        num_rows = rows * ROWS[task]
        hardness = draw.normal(size=num_rows)  # rows that are hard are hard for both
        for arm, level, num_settings, seeds in (
            ("full", 80.0, settings[0], 2),
            ("adapters", 80.0 + gap, settings[1], 3),
        ):
            for number in range(num_settings):
                shift = SHIFT * (number - (num_settings - 1))  # the last is the best
                for seed in range(seeds):
                    own = level + shift + draw.normal(scale=SPREADS[task])
                    score = answer_rows(draw, hardness, own, alike)
                    bench.add(
                        arm, task, score, seed=seed, metric="accuracy", axes={"lr": 10.0**-number},
                        trained_parameters=2_000_000 if arm == "adapters" else synthetic.BACKBONE,
                        extra={"num_dev": num_rows},
                    )  # fmt: skip
    return synthetic.study("glue", TASKS, {"full": "full", "adapters": "adapters"}, published=""), bench.records


def answer_rows(draw: np.random.Generator, hardness: np.ndarray, level: float, alike: float) -> float:
    """The share of rows that a run answers rightly, where it would answer `level` percent of new rows."""
    from scipy.special import ndtri

    mixed = math.sqrt(alike) * hardness + math.sqrt(1 - alike) * draw.normal(size=len(hardness))
    return float(np.mean(mixed < ndtri(min(max(level / 100, 1e-6), 1 - 1e-6))))


def judge(study, records, names=("glue-0.8",)) -> dict[str, str]:
    scored = score_study(study, records, Published(""))
    return {
        item.claim.name: item.verdict
        for item in judge_claims(synthetic.CLAIMS, {"glue": scored})
        if item.claim.name in names
    }


def count_verdicts(gap: float, seed: int, times: int = TIMES, **more) -> Counter:
    draw = np.random.default_rng(seed)
    return Counter(judge(*draw_study(draw, gap, **more))["glue-0.8"].status for _ in range(times))


def most_often(chance: float = 0.05) -> float:
    """What a count of events of this chance stays under."""
    return TIMES * (chance + 3 * math.sqrt(chance * (1 - chance) / TIMES))


def test_a_claim_that_is_just_false_is_hardly_ever_confirmed():
    found = count_verdicts(-0.8 - 2 * SHIFT, seed=0)
    assert found["confirmed"] <= most_often()


@pytest.mark.long
def test_at_the_border_itself_a_bound_is_wrong_about_as_often_as_it_says():
    """Independent rows and one setting each: nothing here is too careful but few degrees of freedom."""
    found = count_verdicts(-0.8, seed=7, rows=20, settings=(1, 1), alike=0.0)
    assert 0 < found["confirmed"] <= most_often()
    assert 0 < found["not confirmed"] <= most_often()


def test_a_claim_that_is_just_true_is_hardly_ever_broken():
    found = count_verdicts(-0.8 + SHIFT, seed=1)
    assert found["not confirmed"] <= most_often()


def test_what_is_plain_is_found():
    true, false = (count_verdicts(gap, seed=2, times=40, rows=4) for gap in (6.0, -8.0))
    assert true["confirmed"] > 0.8 * 40
    assert false["not confirmed"] > 0.8 * 40


def test_more_settings_to_choose_from_win_nothing():
    """Both are equal, one has twelve settings that differ by luck alone: what is chosen must not look better."""
    draw, gaps, best = np.random.default_rng(4), [], []
    for _ in range(60):
        study, records = draw_study(draw, 0.0, settings=(12, 1))
        flat = [dataclasses.replace(item, dev={"accuracy": item.dev["accuracy"] + _undo(item, 12)}) for item in records]
        scored = score_study(study, flat, Published(""))
        found = pair(scored.rows["full"], scored.rows["adapters"], TASKS)
        best.append(found.estimate.mean)
        gaps.append(found.equal.estimate.mean)
    error = np.std(gaps) / math.sqrt(len(gaps))
    assert abs(np.mean(gaps)) < 3 * error
    assert np.mean(best) > 0.5, "chosen on the same rows, the best of twelve looks half a point better and more"


@pytest.mark.parametrize(
    ("full", "adapters", "wrong"),
    [((80, 76), (80, 76, 76, 76), "not confirmed"), ((82, 76, 76, 76), (80, 76), "confirmed")],
    ids=["as-good", "two-points-worse"],
)
def test_settings_that_nobody_would_take_do_not_count_against_a_row(full, adapters, wrong):
    draw, found = np.random.default_rng(6), Counter()
    for _ in range(20):
        bench = synthetic.Bench("glue")
        for task in TASKS:
            hardness = draw.normal(size=5000)
            for arm, levels in (("full", full), ("adapters", adapters)):
                for number, level in enumerate(levels):
                    for seed in range(3):
                        score = answer_rows(draw, hardness, level + draw.normal(scale=0.2), 0.5)
                        count = 2_000_000 if arm == "adapters" else synthetic.BACKBONE
                        bench.add(
                            arm, task, score, seed=seed, metric="accuracy", axes={"lr": 10.0**-number},
                            trained_parameters=count, extra={"num_dev": 5000},
                        )  # fmt: skip
        study = synthetic.study("glue", TASKS, {"full": "full", "adapters": "adapters"}, published="")
        found[judge(study, bench.records)["glue-0.8"].status] += 1
    assert found[wrong] <= 1


def _undo(record, num_settings: int) -> float:
    number = round(-math.log10(record.axes["lr"]))
    return SHIFT * (num_settings - 1 - number) / 100 if record.arm == "full" else 0.0


@pytest.mark.long
def test_of_verdicts_that_stand_together_hardly_ever_one_is_wrong():
    """Ten claims that are all just false: some are confirmed wrongly by themselves, of those that stand hardly any."""
    draw = np.random.default_rng(5)
    alone = together = 0
    families = 80
    for _ in range(families):
        found = [judge(*draw_study(draw, -0.85, settings=(1, 1), alike=0.0))["glue-0.8"] for _ in range(10)]
        stands = hold_together(found)
        alone += any(item.status == "confirmed" for item in found)
        together += any(own and item.status == "confirmed" for own, item in zip(stands, found, strict=True))
    assert together / families <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / families)
    assert alone > together, "else nothing is shown"
