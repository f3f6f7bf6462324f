"""Tasks of a run become ordinary slots that answer as they did in training, and new ones start from what it learnt."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inlay.errors import BadConfig, BadData, Missing, UnknownName, WrongBackbone
from inlay.model.bank.bank import Bank
from inlay.model.batch.route import Row
from inlay.model.heads.inference import infer
from inlay.serving import Engine, Request
from inlay.settings.run_config import TrainConfig
from inlay.store import Store
from inlay.training.cohort.cohort import Cohort
from inlay.training.cohort.fit import FitSettings, fit
from inlay.training.run.joint import make_joint_run, materialize, read_materialized, read_parts, start_from
from inlay.training.run.make_run import make_run
from inlay.training.run.publish import publish
from joint_runs import METHOD_TABLE, METHODS, QUIET, SETTINGS, make_joint, make_tasks, take_steps

QUICK = FitSettings(draw_curves=False, token_budget=4096)


def train(backbone, toy_task, folder, method, **more):
    run = make_joint(backbone, toy_task, method, joint={"batches": "mixed", "steps": 6}, epochs=2, **more)
    (result,) = fit([run], backbone, folder, QUICK)
    return run, result


@pytest.mark.parametrize(
    ("family", "method"), [*(("bert", each) for each in METHODS), *(("t5", m) for m in METHODS[:4])]
)
def test_materialised_tasks_answer_as_in_training(backbone_of, toy_task, tmp_path, family, method):
    backbone = backbone_of(family)
    run, result = train(backbone, toy_task, tmp_path, method)
    cohort = Cohort(
        [dataclasses.replace(run, start=dataclasses.replace(run.start, tensors=result.tensors))], backbone, SETTINGS
    )
    served = Bank(backbone, 3)
    trained = materialize(run, result, backbone)
    for slot, item in enumerate(trained):
        served.put(slot, item.spec, item.result.tensors)
    for slot, part in enumerate(cohort.members[0].parts):
        rows = part.dev_rows()
        for ours, theirs in zip(infer(served, rows), infer(cohort.bank, rows), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        best = next(line for line in result.history if line["epoch"] == result.best_epoch)
        assert trained[slot].result.dev_metric == best["dev"][f"{part.run.name}/{part.run.metric}"]


def test_the_engine_reads_what_a_task_was_trained_to_read_before_its_texts(backbone_of, toy_task, tmp_path):
    t5 = backbone_of("t5")
    run, result = train(t5, toy_task, tmp_path / "runs", "full-multi")
    item = materialize(run, result, t5)[0]
    store = Store(tmp_path / "store")
    publish(item.run, item.result, t5, store)
    (answer,) = Engine(t5, store).predict([Request("two", "the movie was good")])
    bank = Bank(t5, 1)
    bank.put(0, item.spec, item.result.tensors)
    (logits,) = infer(bank, [Row(t5.tokenizer("two: the movie was good")["input_ids"], 0)])
    torch.testing.assert_close(answer.logits, logits, atol=1e-5, rtol=1e-5)


def test_store_and_engine_serve_them_like_any_other(tiny_bert, toy_task, tmp_path):
    run, result = train(tiny_bert, toy_task, tmp_path / "runs", "hyperformer++")
    store = Store(tmp_path / "store")
    for item in materialize(run, result, tiny_bert):
        version = publish(item.run, item.result, tiny_bert, store)
        manifest = store.manifest(version)
        assert manifest.run_id == run.id
        assert manifest.method["name"] == "mahabadi"
        assert manifest.extra["joint"]["tasks"] == ["two", "five", "number"]
    answers = Engine(tiny_bert, store).predict([Request("two", "the movie was good"), Request("number", "no")])
    assert answers[0].to_json()["label"] in ("label-0", "label-1")
    assert "value" in answers[1].to_json()


def test_a_task_of_a_finished_run_is_found_again_by_its_own_rows_alone(tiny_bert, backbone_of, toy_task, tmp_path):
    run, result = train(tiny_bert, toy_task, tmp_path, "hyperformer++")
    folder, tasks = tmp_path / run.id, make_tasks(toy_task)
    assert [config.task for config in read_parts(folder)] == ["two", "five", "number"]
    expected = materialize(run, result, tiny_bert)[2]
    (found,) = read_materialized(folder, tasks[2:], tiny_bert)
    assert found.run.id == expected.run.id == run.id
    assert found.run.origin == expected.run.origin
    assert found.run.config == expected.run.config
    assert found.spec == expected.spec
    assert all(torch.equal(found.result.tensors[name], tensor) for name, tensor in expected.result.tensors.items())
    with pytest.raises(BadData, match="task `two`: its rows are not those"):
        read_materialized(folder, [toy_task("two", num_labels=2, num_rows=36)], tiny_bert)
    with pytest.raises(UnknownName, match="seven"):
        read_materialized(folder, [dataclasses.replace(tasks[0], name="seven")], tiny_bert)
    with pytest.raises(WrongBackbone, match="was not trained on backbone"):
        read_materialized(folder, tasks[:1], backbone_of("roberta"))
    (folder / "tasks" / "001-five.digest").unlink()
    with pytest.raises(Missing, match="an older Inlay wrote it"):
        read_materialized(folder, tasks[:1], tiny_bert)


def new_run(backbone, toy_task, folder, source, task=None, **joint):
    task = task or toy_task("new", num_labels=3, num_rows=24, seed=5)
    joint = dataclasses.replace(source.config.joint, start=source.id, steps=4, **joint)
    config = dataclasses.replace(source.config, joint=joint)
    start = start_from(folder / source.id, config, [task])
    return make_joint_run([task], config, backbone, "new", start=start)


def test_a_new_task_may_train_its_embedding_and_head_alone(tiny_bert, toy_task, tmp_path):
    source, before = train(tiny_bert, toy_task, tmp_path, "hyperformer++")
    run = new_run(tiny_bert, toy_task, tmp_path, source, trained="task")
    (result,) = fit([run], tiny_bert, tmp_path, QUICK)
    own = {name for name in result.tensors if "/" in name}
    assert own == {"new/task.embedding", "new/head.weight", "new/head.bias"}
    for name, tensor in result.tensors.items():
        assert name in own or torch.equal(tensor, before.tensors[name]), name
    fresh = Cohort([run], tiny_bert, SETTINGS).members[0]
    cohort = Cohort([run], tiny_bert, SETTINGS)
    start = fresh.read(cohort.bank)
    assert all(not torch.equal(result.tensors[name], start[name]) for name in own)


def test_a_new_task_may_train_a_copy_of_the_hypernetwork_too(tiny_bert, toy_task, tmp_path):
    source, before = train(tiny_bert, toy_task, tmp_path, "hyperformer++")
    run = new_run(tiny_bert, toy_task, tmp_path, source, like=("new=five",))
    assert torch.equal(run.start.of("new")["task.embedding"], before.tensors["five/task.embedding"])
    (result,) = fit([run], tiny_bert, tmp_path, QUICK)
    moved = [
        name
        for name, tensor in result.tensors.items()
        if "/" not in name and not torch.equal(tensor, before.tensors[name])
    ]
    assert any(name.startswith("hyper.") for name in moved)
    assert any(name.startswith("norm.") for name in moved)


def test_a_new_task_goes_on_from_a_network_whose_tasks_have_nothing_of_their_own(backbone_of, toy_task, tmp_path):
    t5 = backbone_of("t5")
    source, before = train(t5, toy_task, tmp_path, "full-multi")
    assert not any("/" in name for name in before.tensors)
    run = new_run(t5, toy_task, tmp_path, source, like=("new=five",))
    start = run.start.of("new")
    assert all(torch.equal(start[name], tensor) for name, tensor in before.tensors.items())
    assert run.parts[0].reading.prompt == "five: ", "all that tells the task it is like from the others"
    assert new_run(t5, toy_task, tmp_path, source).parts[0].reading.prompt == "new: "
    with pytest.raises(UnknownName, match="seven"):
        new_run(t5, toy_task, tmp_path, source, like=("new=seven",))


def test_a_head_begins_as_that_of_the_task_it_is_like_by_what_labels_mean(tiny_bert, toy_task, tmp_path):
    source, before = train(tiny_bert, toy_task, tmp_path, "full-multi")
    task = toy_task("new", num_labels=3, num_rows=24, seed=5)
    weight, bias = (before.tensors[f"five/head.{name}"] for name in ("weight", "bias"))
    for answers, rows in [(("label-4", "label-0", "label-3"), [4, 0, 3]), ((), [0, 1, 2])]:
        named = dataclasses.replace(task, answers=answers)
        run = new_run(tiny_bert, toy_task, tmp_path, source, named, like=("new=five",))
        start = run.start.of("new")
        assert torch.equal(start["head.weight"], weight[rows])
        assert torch.equal(start["head.bias"], bias[rows])
        assert run.start.notes[-1] == "the head of `new` starts as that of `five`, label by label"
        (member,) = (cohort := Cohort([run], tiny_bert, SETTINGS)).members
        assert torch.equal(member.read(cohort.bank)["new/head.weight"], weight[rows])
    others = dataclasses.replace(task, labels=("label-0", "label-1", "another"))
    for unlike, old in [(others, "five"), (task, "two"), (task, "number")]:
        run = new_run(tiny_bert, toy_task, tmp_path, source, unlike, like=(f"new={old}",))
        assert not any(name.startswith("head.") for name in run.start.of("new"))
        assert run.start.notes[-1] == f"the head of `new` starts fresh: its labels are not those of `{old}`"


def test_ordinary_adapters_may_start_from_those_that_were_written(tiny_bert, toy_task, tmp_path):
    source, result = train(tiny_bert, toy_task, tmp_path / "runs", "hyperformer++")
    store = Store(tmp_path / "store")
    item = materialize(source, result, tiny_bert)[1]
    publish(item.run, item.result, tiny_bert, store)
    config = dataclasses.replace(item.run.config, train=dataclasses.replace(item.run.config.train, start=("five",)))
    run = make_run(toy_task("new", num_labels=3, num_rows=24, seed=5), config, tiny_bert, store)
    cohort = Cohort([run], tiny_bert, SETTINGS)
    for name, tensor in cohort.bank.read(0).items():
        assert torch.equal(tensor, item.result.tensors[name]) != name.startswith("head."), name
    take_steps(cohort, 2)


def test_a_start_of_another_method_or_of_an_unknown_task_is_refused(tiny_bert, toy_task, tmp_path):
    source, _ = train(tiny_bert, toy_task, tmp_path, "hyperformer++")
    other = make_joint(tiny_bert, toy_task, "hyperformer").config
    with pytest.raises(BadConfig, match="has `hyperformer\\+\\+`"):
        start_from(tmp_path / source.id, other, [])
    with pytest.raises(UnknownName, match="seven"):
        new_run(tiny_bert, toy_task, tmp_path, source, like=("new=seven",))
    with pytest.raises(BadConfig, match=r"`joint\.like` is `new`"):
        new_run(tiny_bert, toy_task, tmp_path, source, like=("new",))
    wider = dataclasses.replace(source.config, method=dataclasses.replace(source.config.method, size=8))
    with pytest.raises(BadConfig, match=r"`method\.size` is `8`, but run `\w+` has `4`"):
        start_from(tmp_path / source.id, wider, [])


def test_what_a_task_trains_alone_has_a_learning_rate_of_its_own(backbone_of, toy_task, tmp_path):
    """An embedding is of numbers of size one: the rate of a hypernetwork's weights would leave it where it is."""
    for family, usual in (("bert", METHOD_TABLE["hyperformer++"].lr), ("t5", 3e-4)):
        source, _ = train(backbone_of(family), toy_task, tmp_path, "hyperformer++")
        fresh = dataclasses.replace(source, config=dataclasses.replace(source.config, train=TrainConfig(**QUIET)))
        assert new_run(backbone_of(family), toy_task, tmp_path, fresh).config.train.lr == usual
        alone = new_run(backbone_of(family), toy_task, tmp_path, fresh, trained="task").config.train.lr
        assert alone == METHOD_TABLE["hyperformer++"].lr_alone > 10 * usual
        given = dataclasses.replace(source.config.train, lr=2e-3)
        fixed = dataclasses.replace(source, config=dataclasses.replace(source.config, train=given))
        assert new_run(backbone_of(family), toy_task, tmp_path, fixed, trained="task").config.train.lr == 2e-3


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_start_on_another_backbone_is_refused_though_its_shapes_fit(
    tiny_bert, backbone_of, toy_task, tmp_path, is_kept
):
    """By its fingerprint, or by its name where a folder is older than that."""
    source, _ = train(tiny_bert, toy_task, tmp_path, "hyperformer++")
    if not is_kept:
        (tmp_path / source.id / "fingerprint").unlink()
    assert new_run(tiny_bert, toy_task, tmp_path, source).start.tensors
    with pytest.raises(WrongBackbone, match=f"cannot start from run `{source.id}`") as caught:
        new_run(backbone_of("roberta"), toy_task, tmp_path, source)
    assert caught.value.hint.startswith(f"use `--backbone {tiny_bert.name}`")


def test_nothing_to_train_is_refused(backbone_of, toy_task, tmp_path):
    """A head is a task's own; a backbone that writes has none."""
    t5, bert = backbone_of("t5"), backbone_of("bert")
    for backbone in (t5, bert):
        source, _ = train(backbone, toy_task, tmp_path, "full-multi")
        if backbone is bert:
            assert new_run(bert, toy_task, tmp_path, source, trained="task")
            continue
        with pytest.raises(BadConfig, match=r"tasks have nothing of their own"):
            new_run(t5, toy_task, tmp_path, source, trained="task")
