"""Spans of adapters taken out of a trained task: what is left is the formula without them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inlay.data.windows import Reading
from inlay.errors import Missing, Unsupported, WrongBackbone
from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import SlotSpec
from inlay.model.heads.heads import HeadSpec
from inlay.model.heads.inference import infer
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.studies.ablate import list_spans, score_spans
from inlay.training import fit, make_run
from inlay.training.evaluate import encode_rows
from inlay.training.run.checked_files import write_tensors
from inlay.training.run.run import Result
from inlay.training.run.run_folder import write_result, write_start

QUIET = TrainConfig(epochs=1, batch_size=8, lr=3e-3, max_length=32, dropout=0.0, head_dropout=0.0, pooling="mean")


def random_tensors(backbone, spec, seed=0):
    """Tensors far from the identity, so that a missing adapter shows."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for item in spec.layout(backbone.anatomy):
        neutral = backbone.own_tensor(item.name) if item.start == "backbone" else float(item.start == "ones")
        tensors[item.name] = neutral + 0.2 * torch.randn(item.shape, generator=generator)
    return tensors


def write_run(folder, task, backbone, method=MethodConfig(size=8)):
    """The folder of a run that ended with random weights."""
    run = make_run(task, RunConfig(method=method, train=QUIET), backbone)
    tensors = random_tensors(backbone, run.spec)
    write_start(folder, run)
    write_tensors(folder / "best.safetensors", tensors)
    write_result(folder, Result(run.id, "finished", 1, 0.5, [{"epoch": 1, "dev": {}}], 1.0, 0))
    return run, tensors


def without(tensors, layers):
    """The tensors with the way up of the adapters in these layers at zero: their update is none, by the formula."""
    gone = tuple(f"{kind}.{layer}." for kind in ("adapter", "lora") for layer in layers)
    return {
        name: torch.zeros_like(tensor) if name.startswith(gone) and name.endswith((".up", ".up_bias")) else tensor
        for name, tensor in tensors.items()
    }


def accuracy_of(backbone, run, tensors):
    bank = Bank(backbone, 1)
    bank.put(0, run.spec, tensors)
    answers = infer(bank, encode_rows(backbone, run.task.dev, run.max_length))
    right = [int(row.argmax()) == int(target) for row, target in zip(answers, run.task.dev.targets, strict=True)]
    return sum(right) / len(right)


def error_of(backbone, run, tensors):
    """The root of the mean squared error on dev, on the targets' own scale."""
    bank, head = Bank(backbone, 1), run.spec.head
    bank.put(0, run.spec, tensors)
    answers = torch.cat(infer(bank, encode_rows(backbone, run.task.dev, run.max_length))).double()
    wrong = answers * head.target_std + head.target_mean - torch.as_tensor(run.task.dev.targets)
    return float(wrong.square().mean().sqrt())


def test_spans_are_all_contiguous_ranges_of_layers():
    assert list_spans(3) == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]
    assert len(list_spans(12)) == 78


@pytest.mark.parametrize("method", ["houlsby", "pfeiffer", "parallel", "lora"])
def test_a_span_scores_as_the_task_whose_adapters_there_do_nothing(tmp_path, tiny_bert, toy_task, method):
    """On a number, whose error tells any two spans apart."""
    run, tensors = write_run(tmp_path, toy_task(kind="regress"), tiny_bert, MethodConfig(method, 8))
    found = score_spans(tiny_bert, tmp_path, run.task)
    assert set(found) == {None, *list_spans(3)}
    assert found[None] == pytest.approx(error_of(tiny_bert, run, tensors), rel=1e-4)
    for span in list_spans(3):
        silent = without(tensors, range(span[0], span[1] + 1))
        assert found[span] == pytest.approx(error_of(tiny_bert, run, silent), rel=1e-4)
    assert len({round(value, 3) for value in found.values()}) == 7


def test_all_adapters_removed_is_the_backbone_with_the_trained_norms_and_head(tmp_path, tiny_bert, toy_task):
    run, tensors = write_run(tmp_path, toy_task(num_rows=120), tiny_bert)
    norms_only = SlotSpec.of(MethodConfig("norms"), run.spec.head)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("adapter.")}
    expected = accuracy_of(tiny_bert, dataclasses.replace(run, spec=norms_only), kept)
    assert score_spans(tiny_bert, tmp_path, run.task)[0, 2] == expected


def test_the_score_is_accuracy_also_where_another_metric_selected(tmp_path, tiny_bert, toy_task):
    task = dataclasses.replace(toy_task(num_rows=120), metric="matthews")
    run, tensors = write_run(tmp_path, task, tiny_bert)
    assert score_spans(tiny_bert, tmp_path, task)[None] == accuracy_of(tiny_bert, run, tensors)


@pytest.mark.parametrize("make", ["toy_tags", "toy_answers"])
def test_heads_that_read_tokens_are_ablated_too(tmp_path, tiny_bert, request, make):
    task = request.getfixturevalue(make)(num_rows=16)
    metric = "token_accuracy" if make == "toy_tags" else "token_f1"
    write_run(tmp_path, dataclasses.replace(task, metric=metric), tiny_bert)
    found = score_spans(tiny_bert, tmp_path, dataclasses.replace(task, metric=metric))
    assert len(found) == 7
    assert all(0 <= value <= 1 for value in found.values())


def test_every_dev_row_is_scored_once_though_they_are_more_than_a_batch(tmp_path, tiny_bert, toy_task, monkeypatch):
    run, tensors = write_run(tmp_path, toy_task(num_rows=120), tiny_bert)
    monkeypatch.setattr("inlay.studies.ablate.TOKEN_BUDGET", {"cpu": 64})
    assert score_spans(tiny_bert, tmp_path, run.task)[None] == accuracy_of(tiny_bert, run, tensors)


def test_a_trained_run_scores_unablated_what_it_scored_in_training(tmp_path, tiny_bert, toy_task):
    run = make_run(toy_task(), RunConfig(method=MethodConfig(size=8), train=QUIET), tiny_bert)
    result = fit([run], tiny_bert, tmp_path)[0]
    assert score_spans(tiny_bert, tmp_path / run.id, run.task)[None] == result.dev_metric


def test_what_cannot_be_ablated_is_refused(tmp_path, tiny_bert, backbone_of, toy_task):
    task = toy_task()
    with pytest.raises(Missing, match="no trained weights"):
        score_spans(tiny_bert, tmp_path / "none", task)
    write_run(tmp_path, task, tiny_bert)
    with pytest.raises(WrongBackbone, match="was not trained on these rows"):
        score_spans(tiny_bert, tmp_path, toy_task(seed=5))
    with pytest.raises(WrongBackbone, match="backbone"):
        score_spans(backbone_of("mpnet"), tmp_path, task)
    write_run(tmp_path / "bitfit", task, tiny_bert, MethodConfig("bitfit"))
    with pytest.raises(Unsupported, match="`bitfit`, which has no adapters"):
        score_spans(tiny_bert, tmp_path / "bitfit", task)


def test_reading_a_run_back_gives_its_own_way_of_reading(tmp_path, tiny_bert, toy_task):
    from inlay.training.run.make_run import read_trained

    run, _ = write_run(tmp_path, toy_task(), tiny_bert)
    trained = read_trained(tmp_path, run.task, tiny_bert)
    assert trained.run.reading == Reading("classify", 32)
    assert trained.spec == run.spec
    assert trained.spec.head == HeadSpec("classify", 2, "mean")
