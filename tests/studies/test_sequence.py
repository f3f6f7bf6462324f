"""One network through a sequence of tasks forgets; slots do not."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from inlay.model.bank.bank import Bank
from inlay.model.heads.inference import infer
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.studies import task_sequence as sequence
from inlay.studies.task_sequence import train_sequence
from inlay.training import fit, make_run
from inlay.training.evaluate import encode_rows
from inlay.training.run.run_folder import read_result

TRAIN = TrainConfig(epochs=2, batch_size=8, lr=2e-3, max_length=32, dropout=0.0, head_dropout=0.0, pooling="mean")
FULL = RunConfig(method=MethodConfig("full"), train=TRAIN)
SLOTS = RunConfig(method=MethodConfig("houlsby", 8), train=TRAIN)


@pytest.fixture
def tasks(toy_task):
    return [
        toy_task("first", num_rows=80, seed=1),
        toy_task("second", num_rows=40, seed=3),
        toy_task("third", num_labels=3, num_rows=40, seed=2),
    ]


def test_one_network_is_scored_on_every_task_after_each_step(tmp_path, tiny_bert, tasks):
    steps = train_sequence(tiny_bert, tasks, FULL, tmp_path)
    assert [step["task"] for step in steps] == ["first", "second", "third"]
    assert [list(step["extra"]["after"]) for step in steps] == [
        ["first"],
        ["first", "second"],
        ["first", "second", "third"],
    ]
    for step in steps:
        assert step["extra"]["after"][step["task"]] == pytest.approx(step["dev"]["accuracy"])
        assert step["extra"]["moved"] is None
        assert len(step["curve"]) == 2
        assert step["status"] == "finished"
    heads = [2 * 33, 4 * 33, 4 * 33 + 3 * 33]
    assert [step["extra"]["total_parameters"] for step in steps] == [tiny_bert.num_parameters + n for n in heads]


def test_the_second_step_starts_from_the_weights_of_the_first(tmp_path, tiny_bert, tasks, monkeypatch):
    starts = []

    def note(runs, *more):
        starts.append(runs[0].start.tensors)
        return fit(runs, *more)

    monkeypatch.setattr(sequence, "fit", note)
    train_sequence(tiny_bert, tasks[:2], FULL, tmp_path / "sequence")
    alone = fit([make_run(tasks[0], FULL, tiny_bert)], tiny_bert, tmp_path / "alone")[0].tensors
    assert starts[0] == {}
    assert set(starts[1]) == {name for name in alone if not name.startswith("head.")}
    assert all(torch.equal(tensor, alone[name]) for name, tensor in starts[1].items())


def test_an_earlier_task_is_scored_with_its_head_on_the_network_of_now(tmp_path, tiny_bert, toy_task, monkeypatch):
    """On a number, whose error shows any move."""
    monkeypatch.setattr(sequence._Walk, "drop_weights", lambda self: None)
    tasks = [toy_task("number", kind="regress"), toy_task("classes")]
    steps = train_sequence(tiny_bert, tasks, FULL, tmp_path)
    places, runs = sorted(tmp_path.iterdir()), [make_run(task, FULL, tiny_bert) for task in tasks]
    first, second = (read_result(place / run.id) for place, run in zip(places, runs, strict=True))
    own = {name: tensor for name, tensor in first.tensors.items() if name.startswith("head.")}
    bank, head = Bank(tiny_bert, 1), first.spec(runs[0]).head
    bank.put(0, first.spec(runs[0]), {**second.tensors, **own})
    answers = torch.cat(infer(bank, encode_rows(tiny_bert, tasks[0].dev, 32))).double()
    wrong = answers * head.target_std + head.target_mean - torch.as_tensor(tasks[0].dev.targets)
    found = [step["extra"]["after"]["number"] for step in steps]
    assert found[1] == pytest.approx(float(wrong.square().mean().sqrt()), rel=1e-5)
    assert abs(found[1] - found[0]) > 1e-3  # the network has moved


def test_slots_score_the_same_after_every_later_task_and_do_not_move(tmp_path, tiny_bert, tasks):
    before = tiny_bert.fingerprint
    steps = train_sequence(tiny_bert, tasks, SLOTS, tmp_path)
    for number, step in enumerate(steps):
        for task in tasks[: number + 1]:
            own = next(other for other in steps if other["task"] == task.name)
            assert step["extra"]["after"][task.name] == own["dev"]["accuracy"]
        assert step["extra"]["moved"] == 0.0
    counts = [step["trained_parameters"] for step in steps]
    totals = [tiny_bert.num_parameters + sum(counts[: number + 1]) for number in range(3)]
    assert [step["extra"]["total_parameters"] for step in steps] == totals
    assert tiny_bert.fingerprint == before


def test_a_task_that_did_move_is_found_out(tmp_path, tiny_bert, tasks, monkeypatch):
    train_sequence(tiny_bert, tasks[:1], SLOTS, tmp_path)
    place = next(tmp_path.iterdir()) / "own.safetensors"
    tensors = sequence.read_tensors(place)
    tensors["head.bias"] = tensors["head.bias"] + torch.tensor([0.25, 0.0])
    sequence.write_tensors(place, tensors)
    steps = train_sequence(tiny_bert, tasks[:2], SLOTS, tmp_path)
    assert steps[1]["extra"]["moved"] == pytest.approx(0.25, abs=1e-5)


@pytest.mark.parametrize("config", [FULL, SLOTS], ids=["full", "slots"])
def test_a_sequence_goes_on_where_it_ended_and_repeats_nothing(tmp_path, tiny_bert, tasks, config, monkeypatch):
    whole = train_sequence(tiny_bert, tasks, config, tmp_path / "whole")
    trained = []

    def note(runs, *more):
        trained.append(runs[0].task.name)
        return fit(runs, *more)

    monkeypatch.setattr(sequence, "fit", note)
    monkeypatch.setattr(sequence._Walk, "drop_weights", lambda self: None)
    train_sequence(tiny_bert, tasks[:2], config, tmp_path / "parts")
    parts = train_sequence(tiny_bert, tasks, config, tmp_path / "parts")
    assert trained == ["first", "second", "third"]
    for one, other in zip(parts, whole, strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}
    shutil.rmtree(sorted((tmp_path / "whole").iterdir())[0] / "cohorts", ignore_errors=True)
    assert train_sequence(tiny_bert, tasks, config, tmp_path / "whole") == whole
    assert trained == ["first", "second", "third"]


def test_no_copy_of_the_network_stays_on_disk(tmp_path, tiny_bert, tasks):
    train_sequence(tiny_bert, tasks, FULL, tmp_path)
    assert not list(tmp_path.rglob("best.safetensors"))
    assert max(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) < 4000


def test_a_step_that_diverges_ends_the_sequence(tmp_path, tiny_bert, tasks):
    wild = dataclasses.replace(FULL, train=dataclasses.replace(TRAIN, lr=9.9, clip_norm=0.0, warmup=0.0))
    steps = train_sequence(tiny_bert, tasks, wild, tmp_path)
    assert [step["status"] for step in steps] == ["diverged"]
    assert steps[0]["extra"]["after"] == {}
    assert train_sequence(tiny_bert, tasks, wild, tmp_path) == steps
