"""Tasks on a backbone that writes: trained together, scored, published, served, and refused where they do not go."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from inlay.config import MethodConfig, RunConfig, TrainConfig, digest
from inlay.errors import BadConfig, Unsupported
from inlay.model.slots import SlotSpec
from inlay.serving.engine import Engine, Request
from inlay.serving.verify import verify
from inlay.store import Store
from inlay.training.cohort import Cohort, CohortSettings
from inlay.training.evaluate import score_split
from inlay.training.fit import FitSettings, fit
from inlay.training.publish import publish
from inlay.training.run import make_run

SETTINGS = CohortSettings(token_budget=256, num_threads=1, save_every=100)


def make(backbone, task, **train):
    train = {"lr": 1e-2, "epochs": 3, "batch_size": 8, **train}
    config = RunConfig(method=MethodConfig("houlsby", 8), train=TrainConfig(**train))
    return make_run(task, config, backbone)


def as_numbers(task, scale):
    """A regression task with targets from 0 to `scale`."""
    sides = {}
    for side in ("train", "dev"):
        split = getattr(task, side)
        numbers = scale * (split.targets - 100.0) / 10.0
        sides[side] = dataclasses.replace(split, targets=numbers)
    return dataclasses.replace(task, metric="spearman", **sides)


def test_labels_numbers_and_texts_train_in_one_cohort_and_answer_as_they_were_judged(
    backbone_of, toy_task, toy_texts, tmp_path
):
    backbone, store = backbone_of("mt5"), Store(tmp_path / "store")
    number = as_numbers(toy_task("number", kind="regress"), 1.0)
    tasks = [toy_task("label"), number, toy_texts("text")]
    runs = [make(backbone, task) for task in tasks]
    results = fit(runs, backbone, tmp_path / "runs")
    for run, result in zip(runs, results, strict=True):
        version = publish(run, result, backbone, store)
        assert store.manifest(version).metrics["dev"] == result.dev_metrics
        again = score_split(run, result, backbone, run.task.dev)
        assert again[run.task.metric] == pytest.approx(result.dev_metric, abs=1e-6)
    checks = verify([store.resolve(task.name) for task in tasks], backbone, store)
    assert all(check.stands and check.is_exact for check in checks), checks
    texts = tasks[0].dev.texts
    engine = Engine(backbone, store)
    answers = engine.predict([Request(task.name, text) for text in texts for task in tasks])
    assert [answer.outcome.label for answer in answers[0::3]][:1][0] in ("label-0", "label-1")
    assert all(0.0 <= answer.outcome.value <= 1.0 for answer in answers[1::3])
    right = np.mean([a.outcome.answer == t for a, t in zip(answers[2::3], tasks[2].dev.targets, strict=True)])
    assert right == pytest.approx(results[2].dev_metrics["exact_match"])


@pytest.mark.slow
def test_a_text_task_is_learned(backbone_of, toy_texts, tmp_path):
    backbone = backbone_of("mt5")
    (result,) = fit([make(backbone, toy_texts(num_rows=96), epochs=12)], backbone, tmp_path)
    assert result.dev_metrics["exact_match"] > 0.85


def test_free_texts_in_a_cohort_are_trained_as_alone(backbone_of, toy_task, toy_texts):
    backbone = backbone_of("t5")

    def train(runs):
        cohort = Cohort(runs, backbone, SETTINGS)
        with backbone.training(0.0):
            for _ in range(6):
                cohort.step()
        return [cohort.bank.read(slot) for slot in range(len(runs))]

    quiet = {"dropout": 0.0}
    runs = [make(backbone, toy_texts(), seed=1, **quiet), make(backbone, toy_task(), seed=2, **quiet)]
    for run, together in zip(runs, train(runs), strict=True):
        (alone,) = train([run])
        for name, tensor in alone.items():
            torch.testing.assert_close(together[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def test_a_steps_loss_is_the_mean_over_the_tokens_of_its_answers(backbone_of, toy_texts):
    backbone = backbone_of("t5")
    run = make(backbone, toy_texts(), label_smoothing=0.2)
    cohort = Cohort([run], backbone, SETTINGS)
    (member,) = cohort.members
    batch = member.next_batch()
    losses_S, _ = cohort.stepper.differentiate([member], {0: batch})
    total, num_tokens = 0.0, 0
    for row in member.rows(batch):
        alone = backbone.collate([row])
        with torch.no_grad(), cohort.bank.routed(alone.route):
            (logits,) = cohort.bank.logits(alone)
        for place, token in enumerate(row.written):
            log = logits[0, place].log_softmax(-1)
            total -= float(0.8 * log[int(token)] + 0.2 * log.mean())
            num_tokens += 1
    assert float(losses_S[0]) == pytest.approx(total / num_tokens, rel=1e-4)


def test_labels_are_scored_by_what_is_written_for_them_and_answered_by_their_names(backbone_of, toy_task, tmp_path):
    backbone, store = backbone_of("t5"), Store(tmp_path / "store")
    run = make(backbone, dataclasses.replace(toy_task("label"), answers=("no", "yes")), epochs=1)
    assert run.spec.head.texts == ("no", "yes")
    assert run.config.data.answers == ("label-0=no", "label-1=yes")
    (result,) = fit([run], backbone, tmp_path / "runs", FitSettings(draw_curves=False))
    publish(run, result, backbone, store)
    (answer,) = Engine(backbone, store).predict([Request("label", "the movie")])
    assert answer.outcome.label in run.task.labels
    assert make(backbone, toy_task("label")).config.data.answers == ()


def test_numbers_are_written_in_steps_of_a_fifth(backbone_of, toy_task):
    run = make(backbone_of("t5"), as_numbers(toy_task(kind="regress"), 5.0))
    assert run.spec.head.texts == tuple(f"{number / 5:.1f}" for number in range(26))
    with pytest.raises(BadConfig, match=r"in steps of 0\.2"):
        make(backbone_of("t5"), as_numbers(toy_task(kind="regress"), 500.0))


def test_few_rows_leave_no_number_of_a_known_range_out(backbone_of, toy_task):
    """The ends of STS-B's range are rare: 100 rows may have neither, and 0.0 and 5.0 must be answers all the same."""
    task = as_numbers(toy_task(kind="regress"), 2.0)
    few = dataclasses.replace(task, train=dataclasses.replace(task.train, targets=task.train.targets + 1))
    for bounds, least, largest in [(None, 5, 15), ((0.0, 5.0), 0, 25), ((2.0, 2.4), 5, 15)]:
        run = make(backbone_of("t5"), dataclasses.replace(few, bounds=bounds))
        assert run.spec.head.texts == tuple(f"{number / 5:.1f}" for number in range(least, largest + 1))


def test_a_task_adds_no_head_to_a_backbone_that_writes(backbone_of, toy_task):
    backbone = backbone_of("t5")
    run = make(backbone, toy_task())
    without = SlotSpec(run.spec.method, dataclasses.replace(run.spec.head, texts=()))
    assert not [item for item in run.spec.layout(backbone.anatomy) if item.name.startswith("head.")]
    assert run.spec.count_parameters(backbone.anatomy) == without.count_parameters(backbone.anatomy)


def test_what_does_not_go_with_the_backbone_is_refused_by_name(backbone_of, toy_task, toy_texts, toy_tags):
    with pytest.raises(Unsupported, match=r"`multilabel` task .*which writes its answers"):
        make(backbone_of("t5"), toy_task(kind="multilabel"))
    with pytest.raises(Unsupported, match=r"the `tag` task `tags`"):
        make(backbone_of("t5"), toy_tags())
    with pytest.raises(Unsupported, match=r"pooling `mean`"):
        make(backbone_of("t5"), toy_task(), pooling="mean")
    with pytest.raises(Unsupported, match=r"`text` task .*which writes no texts"):
        make(backbone_of("bert"), toy_texts())
    with pytest.raises(BadConfig, match=r"`train\.label_smoothing` is set"):
        make(backbone_of("bert"), toy_task(), label_smoothing=0.1)
    with pytest.raises(BadConfig, match=r"`train\.beams` is set for the `classify` task"):
        make(backbone_of("t5"), toy_task(), beams=4)


def test_settings_of_writing_leave_the_ids_of_other_runs_as_they_were(tiny_bert, toy_task):
    run = make(tiny_bert, toy_task())
    train = dataclasses.asdict(run.config.train)
    for name in ("label_smoothing", "beams", "max_answer", "prompt"):
        assert train.pop(name) is None
    method = dataclasses.asdict(run.config.method)
    assert [method.pop(name) for name in ("task_size", "projector", "writes")] == [None, None, "both"]
    known = {"method": method, "train": train, "data": run.task.digest, "backbone": run.fingerprint}
    assert run.id == digest(known)[:16]
    assert make(tiny_bert, toy_task()).id == run.id
