"""Pairs as two towers, trained: beside others as alone, resumed, published, started from, and refused by name."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest
import torch

from hooks import Hooks
from inlay.errors import BadConfig
from inlay.model.batch.route import Row, make_rows
from inlay.model.heads.inference import infer
from inlay.serving.engine import Engine, Request
from inlay.serving.verification import verify
from inlay.settings import DataConfig, JointConfig, MethodConfig, RunConfig, TrainConfig, digest, settled
from inlay.store import Store
from inlay.training import FitSettings, fit, make_run, publish
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.cohort.fit import Interrupted, has_compiled_losses
from inlay.training.evaluate import encode_rows
from inlay.training.run.joint import make_joint_run, materialize
from inlay.training.run.make_run import read_trained
from inlay.training.run.plan import count_plan, make_plan
from inlay.training.run.run import Result
from predicted import predict_split

SETTINGS = CohortSettings(token_budget=65536, num_threads=1, save_every=100)
QUIET = {"dropout": 0.0, "head_dropout": 0.0, "batch_size": 8, "max_length": 24, "epochs": 3, "lr": 3e-3}


def make(task, backbone, pairs="towers", method="houlsby", size=8, store=None, **train):
    config = RunConfig(
        method=MethodConfig(method, size), train=TrainConfig(**{**QUIET, **train}), data=DataConfig(pairs=pairs)
    )
    return make_run(task, config, backbone, store)


class InterruptAt(Hooks):
    def __init__(self, step):
        self.step = step

    def on_step(self, cohort, num_rows):
        if cohort.num_steps == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def take_steps(cohort, num_steps):
    with cohort.training():
        for _ in range(num_steps):
            cohort.step()
            cohort.backbone.model.eval()
            cohort.finish_epochs()
            cohort.backbone.model.train()


def dev_logits(cohort, slot):
    return torch.stack(infer(cohort.bank, make_rows(cohort.members[slot].dev, slot)))


@pytest.mark.parametrize("family", ["bert", "mpnet", "deberta-v2"])
def test_towers_in_a_cohort_are_as_alone(backbone_of, toy_task, toy_pairs, family):
    backbone = backbone_of(family)
    runs = [
        make(toy_pairs(), backbone),
        make(toy_pairs(), backbone, pairs="joined", size=5),
        make(toy_pairs("number", kind="regress", num_rows=40, seed=1), backbone, size=4, lr=1e-3, pooling="mean"),
        make(toy_task("five", num_labels=5, num_rows=37, seed=1), backbone, pairs="auto"),
        make(toy_pairs("both", kind="multilabel", seed=2), backbone, seed=3, pooling="cls"),
    ]
    together = Cohort(runs, backbone, SETTINGS)
    take_steps(together, 14)
    for slot, run in enumerate(runs):
        alone = Cohort([run], backbone, SETTINGS)
        take_steps(alone, 14)
        torch.testing.assert_close(dev_logits(together, slot), dev_logits(alone, 0), atol=2e-5, rtol=1e-4)
        for name, tensor in alone.bank.read(0).items():
            torch.testing.assert_close(together.bank.read(slot)[name], tensor, atol=2e-5, rtol=1e-3, msg=name)


def test_a_small_token_budget_adds_up_the_same_gradients(tiny_bert, toy_pairs):
    found = []
    for budget in (65536, 48):
        cohort = Cohort([make(toy_pairs(), tiny_bert)], tiny_bert, dataclasses.replace(SETTINGS, token_budget=budget))
        with cohort.training():
            found.append(cohort.stepper.differentiate(cohort.members, cohort.members[0].next_batches()))
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(whole, pieces, atol=1e-5, rtol=1e-4)


def test_towers_learn_their_rows(tiny_bert, toy_pairs, tmp_path):
    run = make(toy_pairs(), tiny_bert, epochs=12, lr=1e-2, pooling="mean")
    (result,) = fit([run], tiny_bert, tmp_path)
    assert result.history[-1]["train_loss"] < 0.6 * result.history[0]["train_loss"]


def test_stopped_and_resumed_towers_end_with_the_same_weights(tiny_bert, toy_pairs, tmp_path):
    runs = [make(toy_pairs(), tiny_bert, pairs=pairs, dropout=None, head_dropout=0.1) for pairs in ("towers", "joined")]
    with pytest.raises(Interrupted):
        fit(runs, tiny_bert, tmp_path / "a", emit=InterruptAt(7))
    resumed, whole = fit(runs, tiny_bert, tmp_path / "a"), fit(runs, tiny_bert, tmp_path / "b")
    for mine, other in zip(resumed, whole, strict=True):
        assert all(torch.equal(mine.tensors[name], other.tensors[name]) for name in other.tensors)
    assert "head.pair_weight" in resumed[0].tensors
    assert "head.pair_weight" not in resumed[1].tensors


def test_no_frozen_layers_are_reused_for_towers_and_those_beside_them_learn_the_same(tiny_bert, toy_pairs, tmp_path):
    def upper(pairs):
        config = RunConfig(
            method=MethodConfig("houlsby", 8, layers="2:"), train=TrainConfig(**QUIET), data=DataConfig(pairs=pairs)
        )
        return make_run(toy_pairs(), config, tiny_bert)

    runs = [upper("towers"), upper("joined")]
    with_reuse = fit(runs, tiny_bert, tmp_path / "a", FitSettings(reuse_prefix=True))
    without = fit(runs, tiny_bert, tmp_path / "b", FitSettings(reuse_prefix=False))
    for mine, other in zip(with_reuse, without, strict=True):
        for name, tensor in other.tensors.items():
            torch.testing.assert_close(mine.tensors[name], tensor, atol=2e-5, rtol=1e-3, msg=name)


def test_towers_name_a_run_and_joined_pairs_do_not(tiny_bert, toy_pairs, toy_task):
    task = toy_pairs()
    joined, left_open, towers = (make(task, tiny_bert, pairs=pairs) for pairs in ("joined", "auto", "towers"))
    assert joined.id == left_open.id != towers.id
    config = joined.config
    known = {"method": settled(config.method), "train": settled(config.train), "data": task.digest}
    assert joined.id == digest({**known, "backbone": tiny_bert.fingerprint})[:16]
    assert towers.id == digest({**known, "backbone": tiny_bert.fingerprint, "pairs": "towers"})[:16]
    assert [run.config.data.pairs for run in (joined, left_open, towers)] == ["joined", "joined", "towers"]
    assert (joined.spec.head.pairs, towers.spec.head.pairs) == ("joined", "towers")


def test_a_finished_run_of_towers_is_read_back(tiny_bert, toy_pairs, tmp_path):
    run = make(toy_pairs(), tiny_bert)
    (result,) = fit([run], tiny_bert, tmp_path)
    trained = read_trained(tmp_path / run.id, run.task, tiny_bert)
    assert trained.run.id == run.id
    assert trained.spec.head.pairs == "towers"
    assert torch.equal(trained.result.tensors["head.pair_weight"], result.tensors["head.pair_weight"])


def test_published_towers_stand_and_answer_beside_all_others(tiny_bert, toy_pairs, toy_task, tmp_path):
    store = Store(tmp_path)
    runs = [
        make(toy_pairs("towers"), tiny_bert),
        make(toy_pairs("joined"), tiny_bert, pairs="joined"),
        make(toy_pairs("number", kind="regress"), tiny_bert, size=4),
        make(toy_task("single"), tiny_bert, pairs="auto"),
    ]
    for run, result in zip(runs, fit(runs, tiny_bert, tmp_path / "runs"), strict=True):
        publish(run, result, tiny_bert, store)
    versions = [store.resolve(run.name) for run in runs]
    manifest = store.manifest(versions[0])
    assert manifest.head["pairs"] == "towers"
    assert manifest.extra["pairs"] is True
    checks = verify(versions, tiny_bert, store)
    assert [check.problem for check in checks] == [""] * 4
    assert all(check.is_exact for check in checks)
    engine = Engine(tiny_bert, store, num_slots=3)  # fewer than there are: they come and go
    dev = runs[0].task.dev
    requests = [Request(f"{run.name}", dev.texts[i], dev.pairs[i] if run.task.train.pairs else None)
                for i in range(5) for run in runs]  # fmt: skip
    mixed = engine.predict(requests)
    assert engine.num_tokens > 0
    for request, answer in zip(requests, mixed, strict=True):
        (alone,) = Engine(tiny_bert, store).predict([request])
        torch.testing.assert_close(answer.logits, alone.logits, atol=2e-5, rtol=1e-4)
    loaded = store.load(versions[0])
    own = predict_split(runs[0].spec, loaded.tensors, tiny_bert, dev.take(range(5)), 24)
    torch.testing.assert_close(
        torch.stack([mixed[4 * i].logits for i in range(5)]), torch.stack(own), atol=2e-5, rtol=1e-4
    )
    refused = engine.predict([Request("towers", "the cat")])[0].error
    assert "reads a pair" in str(refused)


def test_what_starts_from_towers_reads_pairs_as_they_do_unless_asked_otherwise(
    tiny_bert, toy_pairs, toy_task, tmp_path
):
    store = Store(tmp_path)
    for kind in ("classify", "regress"):
        run = make(toy_pairs(kind, kind=kind), tiny_bert)
        publish(run, fit([run], tiny_bert, tmp_path / "runs")[0], tiny_bert, store)
    source = store.load(store.resolve("classify")).tensors
    again = make(toy_pairs("again", seed=5), tiny_bert, "auto", store=store, start=("classify",))
    assert again.spec.head.has_towers
    assert torch.equal(
        Cohort([again], tiny_bert, SETTINGS).bank.read(0)["head.pair_weight"], source["head.pair_weight"]
    )
    joined = make(toy_pairs("again", seed=5), tiny_bert, "joined", store=store, start=("classify",))
    assert "reads the backbone in another way" in joined.start.notes[0]
    single = make(toy_task("single"), tiny_bert, "auto", store=store, start=("classify",))
    assert not single.spec.head.has_towers
    # A regression on another scale answers as before.
    task = toy_pairs("scaled", kind="regress", seed=6)
    train = dataclasses.replace(task.train, targets=10 * task.train.targets - 7)
    scaled = make(dataclasses.replace(task, train=train), tiny_bert, store=store, start=("regress",))
    number = store.manifest(store.resolve("regress")).head
    rows = make_rows(Cohort([scaled], tiny_bert, SETTINGS).members[0].dev)
    now = torch.stack(infer(Cohort([scaled], tiny_bert, SETTINGS).bank, rows))[:, 0]
    before = torch.stack(predict_split(run.spec, store.load(store.resolve("regress")).tensors, tiny_bert, task.dev, 24))
    wanted = before[:, 0] * number["target_std"] + number["target_mean"]
    torch.testing.assert_close(
        now * scaled.spec.head.target_std + scaled.spec.head.target_mean, wanted, atol=1e-4, rtol=1e-4
    )


def test_towers_are_one_task_of_several_as_alone(tiny_bert, toy_pairs, toy_task):
    """A run of several tasks may read the pairs of some apart; each task answers as in training once it is put down."""
    tasks = [toy_pairs("towers"), toy_task("single"), toy_pairs("joined", seed=1)]
    config = RunConfig(
        method=MethodConfig("hyperformer++", 4), train=TrainConfig(**QUIET), joint=JointConfig(batches="mixed")
    )
    data = [DataConfig(pairs="towers"), DataConfig(), DataConfig()]
    run = make_joint_run(tasks, config, tiny_bert, data=data)
    assert [part.spec.head.pairs for part in run.parts] == ["towers", "joined", "joined"]
    assert run.id != make_joint_run(tasks, config, tiny_bert).id
    cohort = Cohort([run], tiny_bert, SETTINGS)
    take_steps(cohort, 8)
    member = cohort.members[0]
    rows = member.parts[0].dev_rows()
    mixed = torch.stack(infer(cohort.bank, [row for part in member.parts for row in part.dev_rows()])[: len(rows)])
    result = dataclasses.replace(_result_of(member, cohort), tensors=member.read(cohort.bank))
    trained = materialize(run, result, tiny_bert)[0]
    own = predict_split(trained.spec, trained.result.tensors, tiny_bert, tasks[0].dev, 24)
    torch.testing.assert_close(mixed, torch.stack(own), atol=1e-5, rtol=1e-4)


def _result_of(member, cohort):
    progress = member.progress
    return Result(member.run.id, "finished", progress.best_epoch, progress.best_metric, progress.history, 0.0, 0)


def test_towers_leave_compiled_steps_to_others(tiny_bert, toy_pairs):
    """Programs know no heads of two texts: such runs train apart, where there are programs."""
    assert not has_compiled_losses(make(toy_pairs(), tiny_bert))
    assert has_compiled_losses(make(toy_pairs(), tiny_bert, "joined"))


def test_a_plan_counts_and_measures_towers(tiny_bert, toy_pairs):
    joined, towers = (make(toy_pairs(), tiny_bert, pairs) for pairs in ("joined", "towers"))
    more = 2 * (3 * tiny_bert.hidden_size + 1)
    assert (
        count_plan(towers, tiny_bert).inlay.trained_parameters
        == count_plan(joined, tiny_bert).inlay.trained_parameters + more
    )
    assert make_plan(towers, tiny_bert).inlay.seconds > 0


@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_rows_of_both_texts_are_what_budgets_count(backbone_of, toy_pairs, family):
    backbone = backbone_of(family)
    member = Cohort([make(toy_pairs(), backbone)], backbone, SETTINGS).members[0]
    row = member.rows([3])[0]
    alone = encode_rows(backbone, dataclasses.replace(member.run.task.train, pairs=None).take([3]), 24)[0]
    assert list(row.ids) == list(alone.ids)
    assert member.lengths[3] == len(row.ids) + len(row.other) == row.num_tokens
    assert isinstance(row, Row)


REFUSED = [
    ("single", {}, "its rows have no second text"),
    ("span", {}, "its head reads tokens"),
    ("pairs", {"hidden": "tanh"}, "`train.hidden` is `tanh`"),
]


@pytest.mark.parametrize(("kind", "train", "words"), REFUSED)
def test_towers_are_refused_where_they_cannot_be(tiny_bert, toy_task, toy_pairs, toy_answers, kind, train, words):
    task = {"single": toy_task, "span": toy_answers, "pairs": toy_pairs}[kind]()
    with pytest.raises(BadConfig, match=r"`data.pairs` is `towers`") as refused:
        make(task, tiny_bert, **train)
    assert words in refused.value.message
    assert "leave out `data.pairs`" in (refused.value.hint or "")
    assert not make(task, tiny_bert, "auto", **train).spec.head.has_towers


def test_towers_are_refused_on_a_backbone_that_writes(backbone_of, toy_pairs):
    with pytest.raises(BadConfig, match="writes its answers to one text"):
        make(toy_pairs(), backbone_of("t5"), lr=None)


def test_an_unknown_reading_is_refused_with_the_known_ones():
    with pytest.raises(BadConfig, match=r"`data.pairs` is `both`") as refused:
        DataConfig(pairs="both")
    assert "auto, joined, towers" in refused.value.hint
