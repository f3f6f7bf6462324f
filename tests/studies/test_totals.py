"""What all tasks of a row take together, beside the backbone or instead of it; and how a report counts its studies."""

from __future__ import annotations

import dataclasses

import pytest
from synthetic import Bench, study

from inlay.studies.judge.scores import choose, total_parameters
from inlay.studies.report.report import Chapter, make_report

TASKS = ("glue/rte", "glue/mrpc", "glue/cola")


def total_of(method: str, trained: int, **joint: object) -> float | None:
    """The total of three tasks on a backbone of 1,000 parameters; with `joint` they are one run."""
    bench = Bench("multitask")
    extra = {"joint": {"run": "one", "tasks": list(TASKS), **joint}} if joint else {}
    for task in TASKS:
        bench.add(method, task, 0.7, trained_parameters=trained, backbone_parameters=1000, extra=extra)
    return total_parameters(choose(bench.records))


@pytest.mark.parametrize("trained", [20, 960, 2000])
def test_what_stands_beside_the_backbone_is_no_copy_of_it_however_large(trained: int) -> None:
    assert total_of("hyperformer", trained, is_copy=False) == pytest.approx(1 + 3 * trained / 1000)
    assert total_of("houlsby", trained) == pytest.approx(1 + 3 * trained / 1000)


@pytest.mark.parametrize(("method", "trained"), [("full", 1000), ("full", 900), ("pal-full", 1013), ("top", 1000)])
def test_a_fine_tuned_copy_for_each_task_needs_no_backbone(method: str, trained: int) -> None:
    assert total_of(method, trained) == pytest.approx(3 * trained / 1000)


def test_top_layers_stand_on_the_others_of_the_backbone() -> None:
    assert total_of("top", 300) == pytest.approx(1.9)


def test_one_network_for_all_tasks_is_counted_by_their_parts_of_it() -> None:
    assert total_of("full-multi", 334, is_copy=True) == pytest.approx(1.002)


def test_a_report_of_one_study_says_so() -> None:
    bench = Bench("glue")
    bench.add("full", "glue/rte", 0.7)
    first = Chapter(study("glue", ["glue/rte"], {"full": "full fine-tuning"}), bench.records)
    second = dataclasses.replace(first, study=dataclasses.replace(first.study, name="extra"))
    assert "1 study, 1 run (" in make_report([first]).markdown
    assert "2 studies, 1 run (" in make_report([first, second]).markdown
