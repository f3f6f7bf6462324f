"""What a step on a CPU leaves out changes nothing."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from inlay.model.batch.route import Batch
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training import make_run
from inlay.training.cohort.cohort import Cohort, CohortSettings

SETTINGS = CohortSettings(token_budget=65536, num_threads=1, save_every=100)
QUIET = {"dropout": 0.0, "head_dropout": 0.0, "batch_size": 8, "max_length": 32, "lr": 3e-3, "epochs": 2}


def make_cohort(backbone, task, *, pooling="cls", method=None, **train):
    method = MethodConfig(**{"size": 8} | (method or {}))
    config = RunConfig(method=method, train=TrainConfig(**QUIET | train, pooling=pooling))
    return Cohort([make_run(task, config, backbone)], backbone, SETTINGS)


@pytest.fixture
def narrowed(monkeypatch):
    """The batches whose last block computes first tokens alone."""
    found, original = [], Batch.narrowed
    monkeypatch.setattr(Batch, "narrowed", lambda self: found.append(self) or original(self))
    return found


def differentiate(cohort):
    torch.manual_seed(0)
    with cohort.training():
        return cohort.stepper.differentiate(cohort.active, {0: cohort.members[0].next_batch()})


@pytest.mark.parametrize("train", [{}, {"pooling": "pooler"}, {"hidden": "tanh"}, {"method": {"layers": "-1:"}}])
def test_first_tokens_alone_give_the_losses_and_gradients_of_all(backbone_of, toy_task, narrowed, train):
    cohort = make_cohort(backbone_of("bert"), toy_task(), **train)
    narrow = differentiate(cohort)
    assert len(narrowed) == 1
    cohort.stepper.may_narrow = False
    whole = differentiate(cohort)
    assert len(narrowed) == 1
    for found, expected in zip(narrow, whole, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "train",
    [
        {"pooling": "mean"},
        {"features": "mix"},
        {"attention_dropout": 0.1},
        {"method": {"inner_norm": "batch"}},
        {"method": {"name": "full", "size": None}},
    ],
    ids=str,
)
def test_what_needs_all_tokens_gets_them(backbone_of, toy_task, narrowed, train):
    differentiate(make_cohort(backbone_of("bert"), toy_task(), **train))
    assert not narrowed


def test_rows_that_are_padded_are_computed_whole(backbone_of, toy_task, narrowed):
    differentiate(make_cohort(backbone_of("modernbert"), toy_task()))
    assert not narrowed


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_a_step_smooths_the_labels_of_written_answers(backbone_of, toy_task, smoothing):
    """The loss of a token is -(1 - s)·log p(target) - s·mean log p over the vocabulary; of an answer, their mean."""
    t5, task = backbone_of("t5"), toy_task()
    method = {"name": "norms", "size": None}  # a fresh run of it is the backbone itself
    cohort = make_cohort(t5, task, pooling="auto", method=method, label_smoothing=smoothing)
    rows = cohort.members[0].next_batch()
    losses, _ = differentiate(cohort)
    plain = AutoModelForSeq2SeqLM.from_pretrained(t5.folder).eval()
    expected = []
    for row in rows:
        written = torch.tensor([t5.tokenizer(task.labels[task.train.targets[row]])["input_ids"]])
        ids = torch.tensor([t5.tokenizer(task.train.texts[row])["input_ids"]])
        with torch.no_grad():
            logs = plain(input_ids=ids, labels=written).logits[0].log_softmax(-1)
        own = logs.gather(1, written[0].unsqueeze(1)).squeeze(1)
        expected.append(-((1 - smoothing) * own + smoothing * logs.mean(1)).mean())
    lengths = torch.tensor([len(t5.tokenizer(task.labels[task.train.targets[row]])["input_ids"]) for row in rows])
    mean = (torch.stack(expected) * lengths).sum() / lengths.sum()  # over all tokens of the batch
    assert float(losses[0]) == pytest.approx(float(mean), rel=1e-5)


@pytest.mark.parametrize(("rates", "is_random"), [({}, False), ({"dropout": 0.5}, True), ({"head_dropout": 0.5}, True)])
def test_a_step_drops_as_the_run_says(backbone_of, toy_task, rates, is_random):
    cohort = make_cohort(backbone_of("bert"), toy_task(), **rates)
    batches = {0: cohort.members[0].next_batch()}
    with cohort.training():
        first, second = (cohort.stepper.differentiate(cohort.active, batches)[0] for _ in range(2))
    assert torch.equal(first, second) is not is_random
