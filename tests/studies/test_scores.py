"""Settings are chosen on dev; means, errors and differences are what the formulas say."""

from __future__ import annotations

import dataclasses
import math

import pytest
from synthetic import Bench

from inlay.studies.judge.bounds import average, estimate
from inlay.studies.judge.row_differences import pair
from inlay.studies.judge.scores import choose, column_row, keep_best, mean_of, select, total_parameters


def fill(scores: dict[float, list[float]], arm: str = "adapters-64", task: str = "glue/rte", **more) -> Bench:
    """One task: learning rate -> dev scores of the seeds, in shares."""
    bench = Bench("glue")
    for lr, values in scores.items():
        for seed, value in enumerate(values):
            bench.add(arm, task, value, axes={"lr": lr}, seed=seed, **more)
    return bench


def test_mean_and_standard_error_are_those_of_the_formula():
    found = estimate([70.0, 72.0, 77.0])
    mean = (70 + 72 + 77) / 3
    variance = sum((value - mean) ** 2 for value in (70, 72, 77)) / 2
    assert found.mean == pytest.approx(mean)
    assert found.sem == pytest.approx(math.sqrt(variance) / math.sqrt(3))
    assert estimate([70.0]).sem is None


def test_error_of_a_mean_over_tasks_is_that_of_seeds_not_of_tasks():
    groups = [[90.0, 92.0], [50.0, 54.0]]
    # var of a task's mean: s² / n; of the mean of two tasks: a quarter of their sum
    expected = math.sqrt((2.0 / 2 + 8.0 / 2) / 4)
    assert average(groups).mean == pytest.approx(71.5)
    assert average(groups).sem == pytest.approx(expected)
    assert average([[90.0], [50.0]]).sem is None
    assert average([[70.0, 72.0, 77.0]]) == pytest.approx(estimate([70.0, 72.0, 77.0]))


def fill_joint(arm: str, scores: dict[str, list[float]]) -> list:
    """Runs of several tasks: task -> a score of each seed, in points; all tasks of a seed are one network."""
    bench = Bench("multitask")
    for task, values in scores.items():
        for seed, value in enumerate(values):
            extra = {"joint": {"run": f"{arm}{seed}", "tasks": list(scores)}}
            bench.add(arm, task, value / 100, seed=seed, extra=extra, metric="accuracy")
    return bench.records


def test_tasks_of_one_network_are_averaged_for_each_seed_before_the_error_is_taken():
    # Seed 1 is better by 4 on both tasks: a lucky network, not two lucky runs.
    row = choose(fill_joint("hyperformer", {"glue/rte": [70.0, 74.0], "glue/mrpc": [80.0, 84.0]}))
    found = mean_of(row, row)
    assert found.mean == pytest.approx(77.0)
    assert found.sem == pytest.approx(estimate([75.0, 79.0]).sem)
    assert found.sem == pytest.approx(2.0)
    assert found.num == 2
    # What one task gains and the other loses leaves the mean where it is.
    row = choose(fill_joint("hyperformer", {"glue/rte": [70.0, 74.0], "glue/mrpc": [84.0, 80.0]}))
    assert mean_of(row, row).sem == pytest.approx(0.0)


def test_differences_of_joint_runs_are_averaged_over_tasks_for_each_seed_too():
    joint = choose(fill_joint("hyperformer", {"glue/rte": [71.0, 74.0, 70.0], "glue/mrpc": [80.0, 84.0, 83.0]}))
    other = choose(fill_joint("adapters-multi", {"glue/rte": [70.0, 70.0, 70.0], "glue/mrpc": [80.0, 80.0, 80.0]}))
    alone = Bench("multitask")
    for task in ("glue/rte", "glue/mrpc"):
        for seed in range(3):
            alone.add("single-adapters", task, 0.7 if task == "glue/rte" else 0.8, seed=seed, metric="accuracy")
    by_seed = [(1 + 0) / 2, (4 + 4) / 2, (0 + 3) / 2]
    for against in (other, choose(alone.records)):
        found = pair(joint, against)
        assert found.estimate.mean == pytest.approx(sum(by_seed) / 3)
        assert found.estimate.sem == pytest.approx(estimate(by_seed).sem)
        assert found.num_pairs == 3
        assert pair(against, joint).estimate.sem == pytest.approx(found.estimate.sem)


def test_two_metrics_of_a_run_are_one_draw_and_two_tasks_are_two():
    bench = Bench("multitask")
    for seed, (accuracy, f1, rte) in enumerate([(0.80, 0.86, 0.60), (0.84, 0.90, 0.66)]):
        bench.add("single-adapters", "glue/mrpc", f1, seed=seed, metric="f1", dev={"accuracy": accuracy})
        bench.add("single-adapters", "glue/rte", rte, seed=seed, metric="accuracy")
    columns = [("glue/mrpc", "accuracy"), ("glue/mrpc", "f1"), ("glue/rte", "accuracy")]
    row = column_row(choose(bench.records), columns)
    found = mean_of(row, row)
    assert found.mean == pytest.approx((82 + 88 + 63) / 3)
    # Each of the two tasks has its own variance, 8 and 18, halved for the mean of two seeds.
    assert found.sem == pytest.approx(math.sqrt((2 / 3) ** 2 * 8 / 2 + (1 / 3) ** 2 * 18 / 2))
    assert column_row(choose(bench.records), [("glue/rte", "f1")]) is None


def test_what_varies_together_is_not_known_from_a_single_seed_that_all_tasks_have():
    joint = choose(fill_joint("hyperformer", {"glue/rte": [70.0, 74.0], "glue/mrpc": [80.0, 84.0]}))
    alone = Bench("multitask")
    for task, seeds in {"glue/rte": (0, 1), "glue/mrpc": (1,)}.items():
        for seed in seeds:
            alone.add("single-adapters", task, 0.7, seed=seed, metric="accuracy")
    found = pair(joint, choose(alone.records)).estimate
    assert found.mean == pytest.approx(((0 + 4) / 2 + 14) / 2)
    assert found.sem is None


def test_the_setting_with_the_best_mean_on_dev_is_chosen():
    bench = fill({1e-4: [0.70, 0.72], 3e-4: [0.74, 0.71], 1e-3: [0.76, 0.60]})
    cell = choose(bench.records)["glue/rte"]
    assert cell.setting == {"lr": 3e-4}
    assert cell.estimate.mean == pytest.approx(72.5)
    assert cell.scores == pytest.approx({0: 74.0, 1: 71.0})
    assert cell.num_settings == 3


def test_test_scores_never_change_what_is_chosen():
    bench = fill({1e-4: [0.70, 0.72], 3e-4: [0.74, 0.71]})
    for tested in ({1e-4: 0.9, 3e-4: 0.1}, {1e-4: 0.1, 3e-4: 0.9}):
        records = [dataclasses.replace(item, test={"accuracy": tested[item.axes["lr"]]}) for item in bench.records]
        cell = choose(records, "test")["glue/rte"]
        assert cell.setting == {"lr": 3e-4}
        assert cell.estimate.mean == pytest.approx(100 * tested[3e-4])


def test_a_single_lucky_seed_does_not_beat_settings_with_more():
    bench = fill({1e-4: [0.70, 0.72, 0.71], 1e-3: [0.90]})
    assert choose(bench.records)["glue/rte"].setting == {"lr": 1e-4}


def test_settings_with_fewer_seeds_compete_from_two_on():
    # The first one's third seed came to nothing, which the second could not show: it has two.
    bench = fill({5e-4: [0.316, 0.304, 0.0], 1e-3: [0.30, 0.292], 3e-3: [0.35]})
    cell = choose(bench.records)["glue/rte"]
    assert cell.setting == {"lr": 1e-3}
    assert (cell.num_settings, cell.num_waiting) == (2, 1)
    # A seed that only one has says nothing for it either: on the shared ones it is behind.
    bench = fill({5e-4: [0.28, 0.29, 0.40], 1e-3: [0.30, 0.292]})
    assert choose(bench.records)["glue/rte"].setting == {"lr": 1e-3}
    bench = fill({5e-4: [0.31, 0.30, 0.29], 1e-3: [0.30, 0.292]})
    assert choose(bench.records)["glue/rte"].setting == {"lr": 5e-4}


def test_a_setting_of_whose_runs_one_diverged_does_not_win_by_the_others():
    bench = fill({1e-4: [0.70, 0.72, 0.71], 1e-3: [0.80, 0.80, 0.80]})
    lost = [
        dataclasses.replace(item, status="diverged") if item.axes["lr"] == 1e-3 and item.seed == 2 else item
        for item in bench.records
    ]
    assert choose(lost)["glue/rte"].setting == {"lr": 1e-4}
    assert {item.axes["lr"] for item in keep_best(lost)} == {1e-4}
    elsewhere = [dataclasses.replace(item, hardware="another GPU") for item in lost if item.status == "diverged"]
    assert choose([*bench.records, *elsewhere])["glue/rte"].setting == {"lr": 1e-3}, "the same run ended well here"
    only = [item for item in lost if item.axes["lr"] == 1e-3]
    assert choose(only)["glue/rte"].estimate.num == 2, "better than nothing"


def test_a_run_that_diverged_has_no_score_and_is_counted():
    bench = fill({1e-4: [0.70, 0.72], 1e-3: [0.80, 0.80]})
    records = [
        dataclasses.replace(item, status="diverged") if item.axes["lr"] == 1e-3 and item.seed else item
        for item in bench.records
    ]
    cell = choose(records)["glue/rte"]
    assert cell.setting == {"lr": 1e-4}
    assert cell.num_lost == 1
    assert choose([dataclasses.replace(item, status="failed") for item in records]) == {}


def test_repeats_on_other_hardware_count_once_as_their_mean():
    bench = fill({1e-4: [0.70, 0.74]})
    again = dataclasses.replace(bench.records[0], hardware="CPU", dev={"accuracy": 0.72})
    cell = choose([*bench.records, again])["glue/rte"]
    assert cell.scores == pytest.approx({0: 71.0, 1: 74.0})


def test_a_run_in_two_arms_is_one_run():
    bench = fill({1e-4: [0.70, 0.74]})
    twin = [dataclasses.replace(item, arm="adapters", axes={"size": 64, **item.axes}) for item in bench.records]
    assert len(select([*bench.records, *twin], lambda record: True)) == 2
    # Seeds of one setting may come from two arms, under other axes.
    assert choose([bench.records[0], twin[1]])["glue/rte"].estimate.num == 2


def test_another_metric_may_be_shown_and_then_it_chooses():
    bench = Bench("uva")
    for lr, (matthews, accuracy) in {1e-4: (0.6, 0.80), 1e-3: (0.5, 0.85)}.items():
        bench.add("full", "glue/cola", matthews, axes={"lr": lr}, dev={"accuracy": accuracy})
    assert choose(bench.records)["glue/cola"].setting == {"lr": 1e-4}
    cell = choose(bench.records, "dev", lambda task: "accuracy")["glue/cola"]
    assert (cell.metric, cell.setting) == ("accuracy", {"lr": 1e-3})


def test_pairs_share_task_and_seed_and_tasks_weigh_alike():
    ours, full = Bench("glue"), Bench("glue")
    for task, scores in {"glue/rte": (0.70, 0.74, 0.80), "glue/mrpc": (0.90, 0.92, 0.5)}.items():
        for seed, score in enumerate(scores):
            ours.add("adapters-64", task, score, seed=seed)
    for task, scores in {"glue/rte": (0.71, 0.73), "glue/mrpc": (0.88, 0.92)}.items():
        for seed, score in enumerate(scores):
            full.add("full", task, score, seed=seed)
    found = pair(choose(ours.records), choose(full.records))
    assert found.num_pairs == 4
    assert found.by_task["glue/rte"].mean == pytest.approx(0.0)
    assert found.by_task["glue/mrpc"].mean == pytest.approx(1.0)
    assert found.estimate.mean == pytest.approx(0.5)
    # Differences −1 and 1, and 2 and 0: variances of 2 each, halved for two seeds, a quarter of the sum for two tasks.
    assert found.estimate.sem == pytest.approx(math.sqrt((2 / 2 + 2 / 2) / 4))
    assert found.num_ahead == 1
    assert pair(choose(ours.records), {}) is None


def test_a_mean_over_tasks_needs_all_of_them():
    row = choose(fill({1e-4: [0.70, 0.74]}).records)
    assert mean_of(row, ["glue/rte"]).mean == pytest.approx(72.0)
    assert mean_of(row, ["glue/rte", "glue/cola"]) is None
    assert mean_of(row, []) is None


def test_total_parameters_are_a_copy_each_or_one_backbone_and_parts():
    bench = Bench("glue")
    for task in ("glue/rte", "glue/mrpc", "glue/cola"):
        bench.add("full", task, 0.7, trained_parameters=1000, backbone_parameters=1000)
        bench.add("adapters-64", task, 0.7, trained_parameters=20, backbone_parameters=1000)
    rows = {arm: choose([item for item in bench.records if item.arm == arm]) for arm in ("full", "adapters-64")}
    assert total_parameters(rows["full"]) == pytest.approx(3.0)
    assert total_parameters(rows["adapters-64"]) == pytest.approx(1.06)
    assert total_parameters({}) is None
    assert total_parameters(rows["adapters-64"], needs_backbone=False) == pytest.approx(0.06), "TF-IDF has none"
    turns = [dataclasses.replace(record, id=f"one-{number}") for number, record in enumerate(bench.records[::2])]
    assert total_parameters(choose(turns)) == pytest.approx(1.0), "one network went through all three tasks"


def test_one_setting_is_kept_for_each_task_or_for_a_whole_sequence():
    bench = Bench("stream")
    levels = {"glue/rte": {1e-4: 0.70, 1e-3: 0.60}, "glue/mrpc": {1e-4: 0.80, 1e-3: 0.85}}
    for task, rates in levels.items():
        for lr, level in rates.items():
            for seed in range(2):
                bench.add("adapters-64", task, level, axes={"lr": lr}, seed=seed, metric="accuracy")
    assert {(item.task, item.axes["lr"]) for item in keep_best(bench.records)} == {
        ("glue/rte", 1e-4),
        ("glue/mrpc", 1e-3),
    }
    assert {item.axes["lr"] for item in keep_best(bench.records, over_tasks=True)} == {1e-4}
    assert len(keep_best(bench.records, over_tasks=True)) == 4
