"""Several tasks trained as one run: what they share, what is their own, and that company changes nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hooks import Hooks
from inlay.errors import BadConfig
from inlay.model import load_backbone
from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import SlotSpec, materialized_method
from inlay.model.batch.route import Row
from inlay.model.heads.inference import infer
from inlay.settings import JointConfig, MethodConfig, RunConfig, TrainConfig
from inlay.training.cohort.cohort import Cohort
from inlay.training.cohort.fit import FitSettings, fit
from inlay.training.run.joint import expand_slot, make_joint_run
from inlay.training.run.make_run import make_run
from joint_runs import METHODS, QUIET, SETTINGS, make_joint, make_tasks, take_steps


def dev_logits(cohort, member):
    rows = [row for part in member.parts for row in part.dev_rows()]
    return infer(cohort.bank, rows)


@pytest.mark.parametrize("method", ["hyperformer", "full-multi"])
def test_training_learns_every_task(tiny_bert, toy_task, method):
    joint = {"batches": "mixed", "sampling": "uniform"}
    cohort = Cohort([make_joint(tiny_bert, toy_task, method, joint=joint, epochs=16)], tiny_bert, SETTINGS)
    member = cohort.members[0]
    take_steps(cohort, member.num_steps)
    assert member.progress.best_metric > 0.6
    assert member.progress.history[-1]["train_loss"] < 0.8 * member.progress.history[0]["train_loss"]


@pytest.mark.parametrize(
    ("family", "method"), [*(("bert", each) for each in METHODS), *(("t5", m) for m in METHODS[:4])]
)
def test_gradients_reach_what_is_trained_and_nothing_else(backbone_of, toy_task, family, method):
    """Hypernetwork, embeddings, norms of both stacks: every tensor of a run, and no weight of the backbone."""
    backbone = backbone_of(family)
    cohort = Cohort([make_joint(backbone, toy_task, method, joint={"batches": "mixed"})], backbone, SETTINGS)
    member = cohort.members[0]
    with cohort.training():
        batch = backbone.collate([row for part in member.parts for row in part.rows(range(4))])
        with cohort.bank.routed(batch.route):
            sum(logits.float().square().sum() for logits in cohort.bank.logits(batch)).backward()
    assert all(parameter.grad is None for parameter in backbone.model.parameters())
    for name, stack in cohort.bank.stacks.items():
        assert stack.grad is not None, name
        for row in range(len(stack)):
            assert stack.grad[row].abs().sum() > 0, name


@pytest.mark.parametrize("method", ["hyperformer++", "mahabadi-multi"])
def test_a_task_without_rows_keeps_what_is_its_own(tiny_bert, toy_task, method):
    cohort = Cohort([make_joint(tiny_bert, toy_task, method)], tiny_bert, SETTINGS)
    (member,) = cohort.members
    for _ in range(4):
        before = [cohort.bank.read(part.slot) for part in member.parts]
        (stepped,) = member.next_batches()
        cohort.step()
        for part, was in zip(member.parts, before, strict=True):
            shared = {item.name for item in part.run.spec.layout(tiny_bert.anatomy) if item.is_shared}
            for name, tensor in cohort.bank.read(part.slot).items():
                moves = name in shared or part.slot == stepped
                if not moves:
                    assert torch.equal(tensor, was[name]), name
                elif not name.startswith("adapter."):  # Adapters start with biases that get a gradient at once or not
                    assert not torch.equal(tensor, was[name]), name
    counts = cohort.counts(0)
    assert sum(counts[:3]) == counts[3] == 4


@pytest.mark.parametrize("batches", ["homogeneous", "mixed"])
@pytest.mark.parametrize("method", ["hyperformer", "hyperformer++", "mahabadi-multi"])
def test_three_seeds_in_a_cohort_equal_each_alone(tiny_bert, toy_task, method, batches):
    joint = {"batches": batches, "weights": ("two=2",)}
    runs = [make_joint(tiny_bert, toy_task, method, seed, joint, lr=3e-3 / (seed + 1)) for seed in range(3)]
    together = Cohort(runs, tiny_bert, SETTINGS)
    assert together.bank.num_slots == 9
    take_steps(together, 7)
    for seat, run in enumerate(runs):
        alone = Cohort([run], tiny_bert, SETTINGS)
        take_steps(alone, 7)
        for ours, theirs in zip(
            dev_logits(together, together.members[seat]), dev_logits(alone, alone.members[0]), strict=True
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
        own = together.members[seat].read(together.bank)
        for name, tensor in alone.members[0].read(alone.bank).items():
            torch.testing.assert_close(own[name], tensor, atol=1e-5, rtol=1e-3, msg=name)


def test_a_run_of_one_task_with_nothing_shared_among_others_is_the_task_alone(tiny_bert, toy_task):
    """Adapters† of one task are the single-task adapters, drawn and stepped as those."""
    task = toy_task("two", num_rows=32)
    train = TrainConfig(lr=3e-3, **{**QUIET, "batch_size": 32, "epochs": 5})
    joint = make_joint_run([task], RunConfig(method=MethodConfig("mahabadi-multi", 8), train=train), tiny_bert)
    single = make_run(task, RunConfig(method=MethodConfig("mahabadi", 8), train=train), tiny_bert)
    together, alone = Cohort([joint], tiny_bert, SETTINGS), Cohort([single], tiny_bert, SETTINGS)
    start = {name.removeprefix("two/"): tensor for name, tensor in together.members[0].read(together.bank).items()}
    alone.bank.put(0, single.spec, start)
    for cohort in (together, alone):
        take_steps(cohort, 5)
    expected = alone.bank.read(0)
    for name, tensor in together.members[0].read(together.bank).items():
        torch.testing.assert_close(tensor, expected[name.removeprefix("two/")], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_a_mixed_batch_of_tasks_equals_one_by_one(tiny_bert, toy_task, method):
    cohort = Cohort([make_joint(tiny_bert, toy_task, method)], tiny_bert, SETTINGS)
    take_steps(cohort, 3)
    rows = [row for part in cohort.members[0].parts for row in part.dev_rows()[:3]]
    for row, answer in zip(rows, infer(cohort.bank, rows), strict=True):
        torch.testing.assert_close(answer, infer(cohort.bank, [row])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("method", "most"), [("hyperformer", 0.01), ("hyperformer++", 0.1), ("mahabadi-multi", 0.1)])
@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet", "modernbert"])
def test_runs_of_several_tasks_start_near_an_encoder(backbone_folder, toy_task, family, method, most):
    """As published for T5, HyperFormer++'s norms begin at 0.08 and those of Adapters† at one: either drowns an encoder,
    whose states are of size one and smaller, and learns late."""
    backbone = load_backbone(str(backbone_folder(family)))
    batch = backbone.collate([Row(backbone.tokenizer("the movie was good")["input_ids"], 0)])
    for seed in range(2):
        cohort = Cohort([make_joint(backbone, toy_task, method, seed)], backbone, SETTINGS)
        with torch.no_grad():
            plain = backbone.hidden(batch)
            with cohort.bank.routed(batch.route):
                moved = (backbone.hidden(batch) - plain).norm() / plain.norm()
        assert 0 < moved < most


def test_embeddings_of_tasks_start_apart_and_depend_on_seed_and_name_only(tiny_bert, toy_task):
    def embeddings(run):
        cohort = Cohort([run], tiny_bert, SETTINGS)
        return {part.run.name: cohort.bank.read(part.slot)["task.embedding"] for part in cohort.members[0].parts}

    all_three = embeddings(make_joint(tiny_bert, toy_task))
    config = make_joint(tiny_bert, toy_task).config
    only_two = embeddings(make_joint_run(make_tasks(toy_task)[1:], config, tiny_bert))
    assert not torch.equal(all_three["two"], all_three["five"])
    for name, tensor in only_two.items():
        assert torch.equal(tensor, all_three[name])


def test_the_epoch_is_judged_by_the_mean_of_the_tasks_own_metrics(tiny_bert, toy_task):
    cohort = Cohort([make_joint(tiny_bert, toy_task)], tiny_bert, SETTINGS)
    member = cohort.members[0]
    take_steps(cohort, member.num_steps)
    assert member.progress.status == "finished"
    for record in member.progress.history:
        dev = record["dev"]
        each = [dev["two/accuracy"], dev["five/accuracy"], dev["number/pearson"]]
        assert dev["mean"] == pytest.approx(np.mean(each))
    means = [record["dev"]["mean"] for record in member.progress.history]
    assert member.progress.best_metric == max(means)


def test_steps_are_as_many_as_rows_need_or_as_are_asked_for(tiny_bert, toy_task):
    run = make_joint(tiny_bert, toy_task)
    assert run.num_steps == 3 * (40 + 32 + 24) // 8
    assert make_joint(tiny_bert, toy_task, joint={"steps": 7}).num_steps == 7
    cohort = Cohort([make_joint(tiny_bert, toy_task, joint={"steps": 7})], tiny_bert, SETTINGS)
    take_steps(cohort, 7)
    assert [record["step"] for record in cohort.members[0].progress.history] == [3, 6, 7]


class Stop(Hooks):
    """Ends the process after some steps, as a kill would: nothing more is written."""

    def __init__(self, num_steps):
        self.left = num_steps

    def on_step(self, cohort, num_rows):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["hyperformer++", "mahabadi-multi", "full-multi"])
def test_killed_and_resumed_it_ends_with_the_same_weights_to_the_last_bit(tiny_bert, toy_task, tmp_path, method):
    joint = {"batches": "mixed", "steps": 12}
    runs = [make_joint(tiny_bert, toy_task, method, seed, joint, dropout=0.1) for seed in range(2)]
    settings = FitSettings(save_every=3, token_budget=4096, draw_curves=False)
    whole = fit(runs, tiny_bert, tmp_path / "whole", settings)
    for num_steps in (5, 4):
        with pytest.raises(KeyboardInterrupt):
            fit(runs, tiny_bert, tmp_path / "pieces", settings, Stop(num_steps))
    pieces = fit(runs, tiny_bert, tmp_path / "pieces", settings)
    for ours, theirs in zip(whole, pieces, strict=True):
        assert ours.history[-1]["dev"] == theirs.history[-1]["dev"]
        assert ours.tensors.keys() == theirs.tensors.keys()
        assert all(torch.equal(tensor, theirs.tensors[name]) for name, tensor in ours.tensors.items())


def test_what_cannot_be_trained_together_is_refused(tiny_bert, toy_task):
    two, five, _ = make_tasks(toy_task)
    config = RunConfig(method=MethodConfig("hyperformer++", 4))
    with pytest.raises(BadConfig, match="several tasks"):
        make_run(two, config, tiny_bert)
    with pytest.raises(BadConfig, match="one task at a time"):
        make_joint_run([two, five], RunConfig(), tiny_bert)
    with pytest.raises(BadConfig, match="a name of its own"):
        make_joint_run([two, two], config, tiny_bert)
    with pytest.raises(BadConfig, match="lower is better"):
        make_joint_run([two, toy_task("number", kind="regress")], config, tiny_bert)
    with pytest.raises(BadConfig, match=r"joint\.weights"):
        make_joint_run([two, five], config.override(["joint.weights=three=2"]), tiny_bert)
    apart = RunConfig(method=MethodConfig("mahabadi-multi", 4)).override(["method.inner_norm=none"])
    assert make_joint_run([two, five], apart, tiny_bert), "the backbone's norms are shared"
    with pytest.raises(BadConfig, match="the tasks of `mahabadi-multi` share nothing"):
        make_joint_run([two, five], apart.override(["method.norms=none"]), tiny_bert)
    for setting, words in [
        ("joint.like=two=five", "no run to start from"),
        ("joint.trained=task", "no run to start from"),
        ("train.steps=bert", "for a run of several tasks"),
        ("train.bucket=4", "for a run of several tasks"),
        ("train.start=two", "for a run of several tasks"),
    ]:
        with pytest.raises(BadConfig, match=words) as caught:
            make_joint_run([two, five], config.override([setting]), tiny_bert)
        assert caught.value.hint
    with pytest.raises(BadConfig, match=r"`joint\.steps` is `3` for a run of one task"):
        make_run(two, RunConfig().override(["joint.steps=3"]), tiny_bert)


def test_rows_of_a_padded_backbone_are_drawn_as_its_settings_say(backbone_of, toy_task):
    """Tasks are drawn, then rows from all of a task's: none are kept together by their length."""
    run = make_joint(backbone_of("deberta-v2"), toy_task)
    assert {part.config.train.bucket for part in run.parts} == {run.config.train.bucket} == {1}


@pytest.mark.parametrize("method", METHODS[:4])
def test_a_backbone_that_writes_trains_several_tasks_alike(backbone_of, toy_task, method):
    """Two seeds together equal each alone, in both stacks, with label texts scored."""
    t5 = backbone_of("t5")
    runs = [make_joint(t5, toy_task, method, seed, {"batches": "mixed"}) for seed in range(2)]
    groups = [[run] for run in runs] if method == "full-multi" else [runs]
    together = [Cohort(group, t5, SETTINGS) for group in groups]
    for cohort in together:
        take_steps(cohort, 4)
    member = together[0].members[0]
    alone = Cohort(runs[:1], t5, SETTINGS)
    take_steps(alone, 4)
    own = member.read(together[0].bank)
    assert own.keys() == {item.name for item in runs[0].layout(t5.anatomy)}
    for name, tensor in alone.members[0].read(alone.bank).items():
        torch.testing.assert_close(own[name], tensor, atol=1e-5, rtol=1e-3, msg=name)
    rows = [row for part in member.parts for row in part.dev_rows()[:2]]
    for row, answer in zip(rows, infer(together[0].bank, rows), strict=True):
        torch.testing.assert_close(answer, infer(together[0].bank, [row])[0], atol=1e-5, rtol=1e-5)


def test_tasks_that_share_every_weight_are_told_apart_by_what_stands_before_their_texts(backbone_of, toy_task):
    """A head of its own tells an encoder which task a row is of; a backbone that writes must read it."""
    t5 = backbone_of("t5")
    parts = make_joint(t5, toy_task, "full-multi").parts
    assert [part.reading.prompt for part in parts] == ["two: ", "five: ", "number: "]
    (member,) = Cohort([make_joint(t5, toy_task, "full-multi")], t5, SETTINGS).members
    for part in member.parts:
        text = f"{part.run.name}: {part.run.task.train.texts[0]}"
        assert list(part.rows([0])[0].ids) == t5.tokenizer(text)["input_ids"]
    for method in ("hyperformer++", "mahabadi-multi"):
        assert {part.reading.prompt for part in make_joint(t5, toy_task, method).parts} == {""}


@pytest.mark.parametrize("family", ["bert", "t5"])
@pytest.mark.parametrize("method", ["hyperformer++", "mahabadi-multi"])
def test_activations_computed_again_change_no_gradient(backbone_of, toy_task, method, family):
    backbone = backbone_of(family)
    run = make_joint(backbone, toy_task, method)
    kept, computed = (
        Cohort([run], backbone, dataclasses.replace(SETTINGS, checkpointing=again)) for again in (False, True)
    )
    for cohort in (kept, computed):
        take_steps(cohort, 3)
    for name, tensor in kept.members[0].read(kept.bank).items():
        torch.testing.assert_close(computed.members[0].read(computed.bank)[name], tensor, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("method", ["hyperformer++", "mahabadi-multi"])
def test_first_tokens_alone_give_the_losses_and_gradients_of_all(tiny_bert, toy_task, method):
    run = make_joint(tiny_bert, toy_task, method, joint={"batches": "mixed"}, pooling="cls")
    cohort = Cohort([run], tiny_bert, SETTINGS)
    (member,) = cohort.members
    batches = member.next_batches()
    parts = [part for part in member.parts if part.slot in batches]
    found = []
    for may_narrow in (True, False):
        cohort.stepper.may_narrow = may_narrow
        with cohort.training():
            found.append([*cohort.stepper.differentiate(parts, batches), cohort.shared.bank.take_grads()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("beams", [1, 3])
def test_texts_that_tasks_write_in_a_mixed_batch_are_those_they_write_alone(backbone_of, toy_task, toy_texts, beams):
    """The slots of a hypernetwork hold through decoder, caches and beams, beside tasks whose labels are scored."""
    t5 = backbone_of("t5")
    tasks = [dataclasses.replace(toy_texts(), name="echo"), toy_task("two", num_rows=24), *(
        dataclasses.replace(toy_texts(), name=name) for name in ("again", "more")
    )]  # fmt: skip
    config = RunConfig(
        method=MethodConfig("hyperformer++", 4),
        train=TrainConfig(lr=3e-2, **{**QUIET, "epochs": 1}),
        joint=JointConfig(batches="mixed", steps=6),
    )
    cohort = Cohort([make_joint_run(tasks, config, t5)], t5, SETTINGS)
    take_steps(cohort, 6)
    bank = Bank(t5, len(tasks))
    run = cohort.members[0].run
    for slot, part in enumerate(run.parts):
        own = expand_slot(part, cohort.members[0].read(cohort.bank), t5)
        head = part.spec.head if part.name == "two" else dataclasses.replace(part.spec.head, beams=beams, max_answer=6)
        bank.put(slot, SlotSpec(materialized_method(run.spec.method), head), own)
    rows = [row for part in cohort.members[0].parts for row in part.dev_rows()[:3]]
    for row, answer in zip(rows, infer(bank, rows), strict=True):
        torch.testing.assert_close(answer, infer(bank, [row])[0], atol=1e-4, rtol=1e-4)


class _Reads(TorchDispatchMode):
    """Notes what makes a host wait for its device: numbers read from it, and sizes that depend on numbers."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        indices = args[1] if name in ("index", "index_put_") else ()
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal") or any(
            index is not None and index.dtype == torch.bool for index in indices
        ):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["hyperformer++", "mahabadi-multi"])
@pytest.mark.parametrize("family", ["bert", "mpnet", "t5"])
def test_a_step_asks_its_device_for_nothing_but_losses_and_norms(backbone_of, toy_task, monkeypatch, family, method):
    backbone = backbone_of(family)
    runs = [make_joint(backbone, toy_task, method, seed, {"batches": "mixed"}) for seed in range(2)]
    cohort = Cohort(runs, backbone, SETTINGS)
    asked, original = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: asked.append(self.shape) or original(self))
    with cohort.training(), _Reads() as reads:
        cohort.step()
    assert reads.found == []
    assert asked == [(2, 2)]  # losses and norms of two runs


def test_a_task_counts_by_its_weight_and_its_share_of_the_rows(tiny_bert, toy_task):
    """A run's loss is the sum over tasks of weight · rows / all rows · the mean loss of the task's rows."""
    weights = {"two": 3.0, "five": 1.0, "number": 0.25}
    joint = {"batches": "mixed", "weights": ("two=3", "number=0.25")}
    cohort = Cohort([make_joint(tiny_bert, toy_task, joint=joint)], tiny_bert, SETTINGS)
    (member,) = cohort.members
    batches = member.next_batches()
    assert len(batches) == 3, "all tasks have rows"
    with cohort.training():
        losses, own = cohort.stepper.differentiate(member.parts, batches)
        shared = cohort.shared.bank.take_grads()
    num_rows = sum(len(rows) for rows in batches.values())
    expected = torch.zeros(())
    for part in member.parts:
        batch = tiny_bert.collate(part.rows(batches[part.slot]))
        order = batches[part.slot][list(batch.order)]
        with cohort.training(), cohort.bank.routed(batch.route):
            (logits,) = cohort.bank.logits(batch)
        targets = torch.as_tensor(part.run.task.train.targets[order])
        if part.run.name == "number":
            mean, std = part.run.task.train.targets.mean(), part.run.task.train.targets.std()
            loss = ((logits[:, 0] - (targets - mean).float() / std) ** 2).mean()
        else:
            loss = -logits.log_softmax(-1)[range(len(targets)), targets].mean()
        counted = weights[part.run.name] * len(targets) / num_rows * loss
        assert float(losses[part.slot]) == pytest.approx(counted.item(), rel=1e-4)
        expected = expected + counted
    cohort.slot_update.drop_grads()
    expected.backward()
    torch.testing.assert_close(cohort.slot_update.take_grads(), own, atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(cohort.shared.bank.take_grads(), shared, atol=1e-6, rtol=1e-3)
