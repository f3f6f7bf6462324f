"""Two processes come to what one comes to, whatever they share."""

from __future__ import annotations

import json
import time

import processes
import pytest
import torch
from kill_and_resume import outcome
from processes import in_processes, make_joint_runs, make_runs
from safetensors.torch import load_file

from inlay.errors import BadConfig, UnknownName
from inlay.processes import Process, current_process
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training import FitSettings, fit, make_run
from inlay.training.cohort.parallel import deal, spread_over


@pytest.mark.parametrize(
    "method", ["houlsby", *(pytest.param(name, marks=pytest.mark.long) for name in ("lora", "full"))]
)
def test_twenty_steps_of_two_processes_equal_those_of_one(tiny_bert_folder, tmp_path, method):
    assert in_processes(processes.take_twenty_steps, str(tiny_bert_folder), tmp_path, method) == [0, 0]
    processes.take_twenty_steps(str(tiny_bert_folder), tmp_path, method)
    alone, first, second = (load_file(tmp_path / f"{name}.safetensors") for name in ("0-of-1", "0-of-2", "1-of-2"))
    assert all(torch.equal(first[name], second[name]) for name in alone)  # bit for bit, without exchanging weights
    for name in alone:
        if name != "weights" or method != "full":  # the true gradient of a key's bias is zero: Adam steps by rounding
            torch.testing.assert_close(first[name], alone[name], rtol=1e-5, atol=1e-5)


def read_tensors(folder, runs, name="last"):
    return [load_file(folder / run.id / f"{name}.safetensors") for run in runs]


@pytest.mark.parametrize("spread", ["rows", "cohorts"])
def test_two_processes_leave_the_files_of_one(tiny_bert, tiny_bert_folder, tmp_path, spread):
    runs = make_runs(tiny_bert)
    fit(runs, tiny_bert, tmp_path / "one")
    assert in_processes(processes.train_quietly, str(tiny_bert_folder), tmp_path / "two", spread) == [0, 0]
    for name in ("best", "last"):
        for alone, shared in zip(
            *(read_tensors(tmp_path / which, runs, name) for which in ("one", "two")), strict=True
        ):
            torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-5)
    for run in runs:
        one, two = (
            {path.relative_to(tmp_path / which) for path in (tmp_path / which / run.id).rglob("*")}
            for which in ("one", "two")
        )
        assert one == two
    left = [path.name for path in (tmp_path / "two").rglob("*") if not path.is_dir()]
    assert not [name for name in left if name.startswith(".draft") or name == "state.safetensors"]
    cohorts = [json.loads(path.read_text())["runs"] for path in (tmp_path / "two" / "cohorts").glob("*/cohort.json")]
    assert sorted(map(len, cohorts)) == ([3] if spread == "rows" else [1, 2])


@pytest.mark.parametrize("method", ["hyperformer++", pytest.param("mahabadi-multi", marks=pytest.mark.long)])
def test_several_tasks_as_one_run_come_to_the_same_in_two_processes(tiny_bert_folder, tmp_path, method):
    """What tasks share is moved by the rows of both processes, what a task has of its own by its own."""
    runs = make_joint_runs(processes.load(str(tiny_bert_folder)), method)
    processes.train_several_tasks(str(tiny_bert_folder), tmp_path / "one", method)
    assert in_processes(processes.train_several_tasks, str(tiny_bert_folder), tmp_path / "two", method) == [0, 0]
    for alone, shared in zip(*(read_tensors(tmp_path / which, runs) for which in ("one", "two")), strict=True):
        assert any(name.startswith("two/") for name in alone)
        torch.testing.assert_close(shared, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("spread", "rank", "event"), [("rows", 0, 30), ("rows", 1, 9), ("cohorts", 1, 40)])
def test_killed_and_resumed_two_processes_end_as_undisturbed(
    undisturbed, tiny_bert_folder, tmp_path, spread, rank, event
):
    arguments = (str(tiny_bert_folder), tmp_path, {"spread": spread, "max_cohort": 2})
    began = time.monotonic()
    statuses = in_processes(processes.train, *arguments, (rank, event))
    assert statuses[rank] == -9
    assert statuses[1 - rank] == 1  # it noticed, and did not wait
    assert time.monotonic() - began < 30
    assert in_processes(processes.train, *arguments) == [0, 0]
    runs, expected = undisturbed(spread)
    assert outcome(tmp_path, runs) == expected  # to the last bit, dropout on
    assert not list((tmp_path / "cohorts").rglob("state.safetensors"))


@pytest.fixture(scope="module")
def undisturbed(tiny_bert, tiny_bert_folder, tmp_path_factory):
    """A function: spread -> runs with dropout, and what two processes make of them when nobody kills them."""
    found = {}

    def find(spread):
        if spread not in found:
            folder, runs = tmp_path_factory.mktemp(spread), make_runs(tiny_bert, dropout=0.1)
            assert in_processes(
                processes.train, str(tiny_bert_folder), folder, {"spread": spread, "max_cohort": 2}
            ) == [0, 0]
            found[spread] = (runs, outcome(folder, runs))
        return found[spread]

    return find


def test_a_run_stopped_in_two_processes_goes_on_in_one(tiny_bert, tiny_bert_folder, tmp_path):
    runs = make_runs(tiny_bert)
    whole = fit(runs, tiny_bert, tmp_path / "whole")
    assert in_processes(processes.interrupt, str(tiny_bert_folder), tmp_path, 1, 5) == [0, 0]
    assert [(tmp_path / f"stopped-{rank}").read_text() for rank in (0, 1)] == ["5", "5"]
    for one, other in zip(whole, fit(runs, tiny_bert, tmp_path), strict=True):
        torch.testing.assert_close(other.tensors, one.tensors, rtol=1e-5, atol=1e-5)
        assert len(other.history) == len(one.history)


def test_an_error_in_one_process_ends_both_within_seconds(tiny_bert_folder, tmp_path):
    began = time.monotonic()
    assert in_processes(processes.fail_on_the_second, str(tiny_bert_folder), tmp_path, 3) == [1, 7]
    assert time.monotonic() - began < 30


def test_a_process_short_of_memory_takes_smaller_pieces_and_the_sums_are_the_same(
    tiny_bert, tiny_bert_folder, tmp_path
):
    runs = make_runs(tiny_bert)
    fit(runs, tiny_bert, tmp_path / "one")
    assert in_processes(processes.run_out_of_memory, str(tiny_bert_folder), tmp_path / "two", 6) == [0, 0]
    for alone, shared in zip(*(read_tensors(tmp_path / which, runs) for which in ("one", "two")), strict=True):
        torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-5)


def test_a_process_without_memory_ends_both_within_seconds(tiny_bert_folder, tmp_path):
    began = time.monotonic()
    assert in_processes(processes.run_out_of_memory, str(tiny_bert_folder), tmp_path, 10**9) == [1, 1]
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(("method", "is_helped"), [("houlsby", True), ("full", False)])
def test_a_smaller_cohort_is_suggested_only_to_runs_that_train_together(tiny_bert_folder, tmp_path, method, is_helped):
    in_processes(processes.write_hint, str(tiny_bert_folder), tmp_path, method)
    hints = [path.read_text() for path in tmp_path.glob("hint-*")]
    assert hints
    assert all("`--checkpointing`" in hint and "`--spread cohorts`" in hint for hint in hints)
    assert all(("--max-cohort" in hint) == is_helped for hint in hints)


def test_a_script_may_train_more_than_once(tiny_bert_folder, tmp_path):
    assert in_processes(processes.train_twice, str(tiny_bert_folder), tmp_path) == [0, 0]


def test_processes_with_different_runs_are_refused_all(tiny_bert_folder, tmp_path):
    assert in_processes(processes.differ, str(tiny_bert_folder), tmp_path) == [0, 0]
    for rank in (0, 1):
        assert "process 1 has other runs than process 0" in (tmp_path / f"refused-{rank}").read_text()


def test_runs_are_dealt_out_whole_and_evenly(tiny_bert, toy_task):
    task = toy_task()
    configs = [
        RunConfig(method=MethodConfig(size=8), train=TrainConfig(max_length=32, epochs=epochs, seed=seed))
        for seed in range(4)
        for epochs in (3, 20)  # taken in turns, one process would get all the long ones
    ]
    runs = [make_run(task, config, tiny_bert) for config in configs]
    parts = [deal(runs, Process(rank, 2, rank)) for rank in (0, 1)]
    assert {run.id for part in parts for run in part} == {run.id for run in runs}
    assert [sum(run.config.train.epochs for run in part) for part in parts] == [46, 46]


@pytest.fixture
def second_of_two(monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def test_batch_norm_is_refused_where_batches_are_cut(tiny_bert, toy_task, tmp_path, second_of_two):
    method = MethodConfig(size=8, inner_norm="batch")
    run = make_run(toy_task(), RunConfig(method=method, train=TrainConfig(max_length=32)), tiny_bert)
    with pytest.raises(BadConfig, match="batch norm sees a run's batch whole") as caught:
        fit([run], tiny_bert, tmp_path, FitSettings(spread="rows"))
    assert "--spread cohorts" in caught.value.hint


def test_an_unknown_spread_is_refused_by_name(tiny_bert, toy_task, tmp_path):
    with pytest.raises(UnknownName, match="way to spread training named `row`") as caught:
        fit(make_runs(tiny_bert), tiny_bert, tmp_path, FitSettings(spread="row"))
    assert "did you mean `rows`?" in caught.value.hint


def test_without_torchrun_a_process_is_alone_and_connects_to_nobody(tiny_bert, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    runs = make_runs(tiny_bert)
    with spread_over(runs, tiny_bert.device, "rows") as (own, world):
        assert own == runs
        assert world.process == Process()
        assert not torch.distributed.is_initialized()


def test_a_place_is_read_from_the_environment_or_refused(monkeypatch, second_of_two):
    assert current_process() == Process(rank=1, size=2, local_rank=1)
    assert not current_process().is_first
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(BadConfig, match="`RANK` is `2` of `WORLD_SIZE` `2`"):
        current_process()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(BadConfig, match="`WORLD_SIZE` is `two`"):
        current_process()
    monkeypatch.delenv("RANK")
    assert current_process() == Process()
