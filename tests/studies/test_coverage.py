"""What a study lacks is told by its plan: seeds and settings, not only arms and tasks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import synthetic

from inlay.studies.judge.coverage import Coverage, list_missing, split_planned
from inlay.studies.report.report import gather_chapter
from inlay.studies.run.records import append_records, results_file
from inlay.studies.spec.study import read_study

STUDIES = Path(__file__).parents[2] / "studies"
GRID = tuple({"lr": lr, "epochs": epochs} for lr in (1e-4, 3e-4) for epochs in (3, 10))


@pytest.fixture
def planned():
    """Two arms × two tasks × four settings × two seeds, all run."""
    tasks = ("glue/rte", "glue/mrpc")
    study, bench = synthetic.study("glue", tasks, {"full": "full", "adapters-64": "adapters"}), synthetic.Bench("glue")
    for arm in study.arms:
        study.arms[arm] = dataclasses.replace(study.arms[arm], grid=GRID, seeds=2)
        for task in tasks:
            for axes in GRID:
                for seed in range(2):
                    bench.add(arm, task, 0.7, axes=axes, seed=seed)
    return study, bench.records


def test_a_whole_study_lacks_nothing(planned):
    assert list_missing(*planned) == []
    assert Coverage(*planned).count == "32 of 32 planned runs"


def test_missing_settings_and_seeds_are_named_together(planned):
    study, records = planned
    some = [item for item in records if item.arm != "full" or item.axes["epochs"] == 3]
    some = [item for item in some if (item.arm, item.task, item.seed) != ("adapters-64", "glue/mrpc", 1)]
    assert list_missing(study, some) == [
        "20 of 32 planned runs are there",
        "no run with epochs 10: full on RTE, MRPC",
        "no run with seed 1: adapters-64 on MRPC",
    ]
    fewer = list_missing(study, some[1:])[1]
    assert fewer == "5 of 8 runs missing, among them all with epochs 10: full on RTE", "no grid of values: a number"


def test_a_run_with_a_setting_that_the_arm_no_longer_has_is_missing():
    study = read_study(STUDIES / "features.toml", "tiny")
    bench = synthetic.Bench("features", backbone="tiny", profile="tiny")
    for arm, task, point in study.points():
        config = {"method": dataclasses.asdict(point.config.method), "train": dataclasses.asdict(point.config.train)}
        for seed in range(arm.seeds):
            bench.add(arm.name, task, 0.7, axes=dict(point.axes), seed=seed, config=config)
    assert list_missing(study, bench.records) == []
    pooled = {**config["train"], "pooling": "max"}
    old = [dataclasses.replace(item, config={**item.config, "train": pooled}) if item.arm == "features-mix" else item
           for item in bench.records]  # fmt: skip
    assert any("features-mix" in line for line in list_missing(study, old))


def test_a_failed_run_is_missing_and_one_that_diverged_is_not(planned):
    study, records = planned
    ended = [dataclasses.replace(item, status="diverged") if item is records[0] else item for item in records]
    assert list_missing(study, ended) == ["1 run diverged: full on RTE"]
    failed = [dataclasses.replace(item, status="failed") if item is records[0] else item for item in records]
    first, second, third = list_missing(study, failed)
    assert first == "31 of 32 planned runs are there"
    assert second == "no run with lr 0.0001 and epochs 3 and seed 0: full on RTE"
    assert third == "1 run failed: full on RTE"


def test_many_gaps_are_a_few_lines(planned):
    study, records = planned
    for number in range(12):
        own = dataclasses.replace(study.arms["full"], name=f"arm-{number}", title=f"arm {number}", seeds=number + 1)
        study.arms[f"arm-{number}"] = own
        records = [*records, dataclasses.replace(records[number], arm=f"arm-{number}", seed=0)]
    lines = list_missing(study, records)
    assert len(lines) <= 9
    assert lines[-1].startswith("other runs missing: arm-")


def test_arms_that_the_backbone_is_too_shallow_for_are_in_no_plan(planned):
    study, records = planned
    records = [dataclasses.replace(item, backbone="of-unknown-depth") for item in records]
    for number in (3, 9):
        arm = dataclasses.replace(study.arms["full"], name=f"top-{number}", title=f"top {number}", min_layers=number)
        study.arms[arm.name] = arm
    missing = list_missing(study, records[1:])
    assert "not run: top-3 (if the backbone has 3 layers), top-9 (if the backbone has 9 layers) on RTE, MRPC" in missing
    top = [dataclasses.replace(item, arm="top-3", id=f"{item.id}3") for item in records if item.arm == "full"]
    assert not any("3 layers" in line for line in list_missing(study, [*records, *top[1:]]))
    assert list_missing(study, [*records, *top]) == ["left out, as the backbone has too few layers: top-9 (needs 9)"]
    assert Coverage(study, [*records, *top]).count == "48 of 48 planned runs"


@pytest.mark.parametrize(("backbone", "extra"), [("own", {"layers": 6}), ("minilm", {"layers": 6})])
def test_layers_are_asked_for_only_where_the_backbone_has_fewer(planned, backbone, extra):
    study, records = planned
    records = [dataclasses.replace(item, backbone=backbone, extra=extra) for item in records]
    records[1:3] = [dataclasses.replace(item, extra={}) for item in records[1:3]]  # an old record does not say it
    for number in (3, 9):
        arm = dataclasses.replace(study.arms["full"], name=f"top-{number}", title=f"top {number}", min_layers=number)
        study.arms[arm.name] = arm
    missing = list_missing(study, records[1:])
    assert "not run: top-3 on RTE, MRPC" in missing, "it has three layers"
    assert "left out, as the backbone has too few layers: top-9 (needs 9)" in missing


@pytest.mark.parametrize("name", ["glue", "extra", "stream", "multitask", "fewshot", "init"])
def test_the_plan_is_that_of_the_study(name):
    study = read_study(STUDIES / f"{name}.toml", "tiny")
    coverage = Coverage(study, [])
    assert coverage.count == f"0 of {study.num_runs} planned runs"
    row = {"glue": "adapters", "extra": "top", "init": "init-0.01", "fewshot": "hyperformer++-4"}.get(name, "*")
    gap = coverage.find_gap((row,))
    assert len(gap.planned) == len(gap.missing) > 0
    assert row == "*" or len(gap.planned) < len(coverage.planned)


def test_a_run_that_two_arms_ask_for_is_there_for_both():
    study = read_study(STUDIES / "glue.toml", "tiny")
    bench = synthetic.Bench("glue", backbone="tiny", profile="tiny")
    for task in study.tasks:
        for seed in range(2):
            bench.add("adapters", task, 0.7, axes={"size": 4, "lr": 1e-2, "epochs": 1}, seed=seed, config={})
    coverage = Coverage(study, bench.records)
    assert {item.axes["size"] for item in coverage.find_gap(("adapters",)).missing} == {2}, "the other size of the arm"
    assert not any(item.arm == "adapters-64" for item in coverage.missing)


@pytest.fixture
def several():
    """The study of several tasks as its file has it, all run."""
    study = read_study(STUDIES / "multitask.toml", "tiny")
    bench = synthetic.Bench("multitask", backbone="tiny", profile="tiny")
    for arm, task, point in study.points():
        config = {key: dataclasses.asdict(getattr(point.config, key)) for key in ("method", "train", "joint")}
        config["data"] = dataclasses.asdict(study.data_config(arm.tasks[0] if arm.kind == "joint" else task, None))
        for seed in range(arm.seeds):
            bench.add(arm.name, task, 0.7, axes=dict(point.axes), seed=seed, config=config)
    return study, bench.records


def _with(record, section, **values):
    config = {**record.config, section: {**record.config[section], **values}}
    return dataclasses.replace(record, config=config)


def test_runs_of_other_steps_or_rows_are_none_of_the_study(several):
    study, records = several
    assert list_missing(study, records) == []
    assert split_planned(study, records) == (records, [])
    for section, value in (("joint", {"steps": 7}), ("data", {"limit": 7}), ("data", {"most_dev": 7})):
        changed = [_with(item, section, **value) if item.arm == "hyperformer" else item for item in records]
        assert any("hyperformer" in line for line in list_missing(study, changed)), value
        kept, others = split_planned(study, changed)
        assert {item.arm for item in others} == {"hyperformer"}, value
        assert len(kept) + len(others) == len(records)
        assert "hyperformer" not in {item.arm for item in kept}


def test_a_run_of_other_tasks_samples_or_axes_is_none_of_the_study(several):
    study, records = several
    (task, *others), joint = study.tasks, {"tasks": [name.rpartition("/")[2] for name in study.tasks], "run": "a"}
    run = [item for item in records if item.arm == "hyperformer"]
    whole = [dataclasses.replace(item, extra={"joint": joint}) for item in run]
    assert split_planned(study, whole) == (whole, [])
    more = [dataclasses.replace(item, extra={"joint": {**joint, "tasks": [*joint["tasks"], "qqp"]}}) for item in run]
    assert split_planned(study, more) == ([], more)
    # `--skip-missing` left the first task out: the data settings are then those of the second.
    own = {others[0]: {**study.data.get(others[0], {}), "answers": ["1=yes"]}}
    study = dataclasses.replace(study, data={**study.data, **own})
    second = dataclasses.asdict(study.data_config(others[0], None))
    fewer = [
        dataclasses.replace(_with(item, "data", **second), extra={"joint": {**joint, "tasks": joint["tasks"][1:]}})
        for item in run
        if item.task != task
    ]
    assert split_planned(study, fewer) == (fewer, [])
    widened = [dataclasses.replace(item, axes={**item.axes, "size": 4}) for item in run]
    assert split_planned(study, widened) == ([], widened)

    sampled = read_study(STUDIES / "lowresource.toml", "tiny")
    arm = next(arm for arm in sampled.arms.values() if arm.sample)
    bench = synthetic.Bench("lowresource", backbone="tiny", profile="tiny")
    (point,) = arm.points()[:1]
    for num in (arm.sample, arm.sample + 1):
        bench.add(arm.name, arm.tasks[0], 0.7, axes=dict(point.axes), config={}, num_train=num)
    kept, others = split_planned(sampled, bench.records)
    assert ([item.num_train for item in kept], [item.num_train for item in others]) == ([arm.sample], [arm.sample + 1])


def test_answers_may_be_written_out_and_not_be_others(several):
    study, records = several
    given = {name: {**study.data.get(name, {}), "answers": ["1=yes"]} for name in study.tasks}
    study = dataclasses.replace(study, data=given)
    for answers, is_own in ((["1=yes"], True), (["0=0", "1=yes"], True), (["1=no"], False), ([], False)):
        changed = [_with(item, "data", answers=answers) for item in records]
        assert split_planned(study, changed) == ((changed, []) if is_own else ([], changed)), answers


def test_what_runs_find_out_and_where_files_lie_makes_no_other_study(several):
    study, records = several
    filled = [_with(item, "data", kind="classify", metric="f1", source="/mnt/x", root="/mnt") for item in records]
    filled = [_with(item, "train", pooling="mean", seed=item.seed) for item in filled]
    assert split_planned(study, filled) == (filled, [])
    more = [dataclasses.replace(item, seed=17) for item in filled]
    assert split_planned(study, more) == (more, []), "one seed more is no other setting"


def test_runs_that_go_on_from_an_older_run_are_none_of_the_study(tmp_path):
    path, others = STUDIES / "fewshot.toml", STUDIES / "multitask.toml"
    study, source = read_study(path, "device", "minilm"), read_study(others, "device", "minilm")
    bench, trained = (synthetic.Bench(name, backbone="minilm", profile="device") for name in ("fewshot", "multitask"))
    for arm, task, point in study.points():
        joint = {**dataclasses.asdict(point.config.joint), "start": "old" if "full" in arm.name else "new"}
        joint["like"] = [f"{task.rpartition('/')[2]}={study.like[task]}"] if task in study.like else []
        config = {"joint": joint}
        bench.add(arm.name, task, 0.7, axes=dict(point.axes), seed=0, config=config, num_train=arm.sample)
    assert split_planned(study, bench.records)[1] == [], "nothing is known of the runs they go on from"
    changed = [_with(item, "joint", like=["imdb=nothing"]) for item in bench.records]
    assert split_planned(study, changed)[0] == []
    for run, steps in (("old", 7), ("new", None)):
        for arm, task, point in source.points():
            joint = dataclasses.asdict(point.config.joint)
            config = {"joint": {**joint, "steps": steps or joint["steps"]}}
            extra = {"joint": {"tasks": [name.rpartition("/")[2] for name in arm.tasks], "run": run}}
            if arm.kind == "joint":
                known = {"id": f"{run}{len(trained.records)}", "config": config, "extra": extra}
                trained.add(arm.name, task, 0.7, axes=dict(point.axes), seed=0, **known)
    append_records(results_file(tmp_path, "fewshot", "minilm", "device"), bench.records)
    assert gather_chapter(path, tmp_path).left_out == {("minilm", "device"): []}
    append_records(results_file(tmp_path, "multitask", "minilm", "device"), trained.records)
    left_out = gather_chapter(path, tmp_path).left_out["minilm", "device"]
    assert {item.arm for item in left_out} == {name for name in study.arms if "full" in name}
