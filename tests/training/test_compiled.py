"""Compiled steps equal the definition, and nothing is compiled twice: in the interpreter, compiled by a counter."""

from __future__ import annotations

import dataclasses
import operator
from types import SimpleNamespace

import pytest
import torch

from counted import count_graphs
from inlay.model import infer
from inlay.model.batch import buckets as rungs
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.cohort.frozen_cache import FrozenCache
from inlay.training.run.make_run import make_run
from inlay.training.step import compiled
from inlay.training.step.eager import Stepper
from inlay.training.step.optimizer import JointUpdate
from joint_runs import make_joint

pytestmark = pytest.mark.triton

SETTINGS = CohortSettings(token_budget=65536, num_threads=1, save_every=100)
QUIET = {"dropout": 0.0, "head_dropout": 0.0, "batch_size": 4, "max_length": 16, "epochs": 6}


@pytest.fixture
def compilations(monkeypatch):
    """The graphs that were compiled, in order."""
    return count_graphs(monkeypatch, compiled)


def make_runs(backbone, toy_task, **more):
    tasks = [
        (toy_task("two", num_labels=2, num_rows=22), 8, {"lr": 1e-3}),
        (toy_task("five", num_labels=5, num_rows=19, seed=1), 16, {"lr": 3e-3, "weight_decay": 0.1, "seed": 1}),
        (toy_task("number", kind="regress", num_rows=20, seed=2), 3, {"optimizer": "bert-adam", "schedule": "bert"}),
        (toy_task("several", kind="multilabel", num_labels=3, num_rows=21, seed=3), 8, {"clip_norm": 0.05}),
    ]
    return [
        make_run(task, RunConfig(method=MethodConfig(size=size), train=TrainConfig(**QUIET | own | more)), backbone)
        for task, size, own in tasks
    ]


def take(cohort, num_steps):
    losses = []
    with cohort.training():
        for _ in range(num_steps):
            cohort.step()
            cohort.backbone.model.eval()
            cohort.finish_epochs()
            cohort.backbone.model.train()
            losses.append([member.progress.losses[-1:] for member in cohort.members])
    return losses


def test_a_compiled_step_equals_the_definition_and_one_compilation_serves_every_block_and_mix(
    backbone_of, toy_task, compilations
):
    backbone = backbone_of("bert")
    runs = make_runs(backbone, toy_task, pooling="mean")[:3]
    ours, plain = Cohort(runs, backbone, SETTINGS), Cohort(runs, backbone, SETTINGS)
    assert isinstance(ours.stepper, compiled.CompiledStepper)
    plain.stepper = Stepper(plain.bank, plain.slot_update, SETTINGS.token_budget)
    counts = []
    for step in range(3):
        if step == 2:  # a run that left: another mix of the same size
            for cohort in (ours, plain):
                cohort.members[1].progress.status = "finished"
        (one,), (other,) = take(ours, 1), take(plain, 1)
        counts.append(len(compilations))
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours.flat.values_SP, plain.flat.values_SP, atol=1e-4, rtol=1e-3)
    assert counts == [2, 2, 2]  # a block, for all three of them, and the optimizer's step
    block = compilations[0].graph
    assert not block.find_nodes(op="call_function", target=operator.add)  # the norms add
    assert len(block.find_nodes(op="call_function", target=torch.ops.inlay.segment_attention.default)) == 1


def test_runs_beyond_the_token_budget_are_stepped_by_several_programs_and_equal_the_definition(
    backbone_of, toy_task, compilations
):
    backbone = backbone_of("bert")
    runs = make_runs(backbone, toy_task, pooling="mean", batch_size=16)[:3]
    small = dataclasses.replace(SETTINGS, token_budget=256)
    ours, plain = Cohort(runs, backbone, small), Cohort(runs, backbone, SETTINGS)
    plain.stepper = Stepper(plain.bank, plain.slot_update, SETTINGS.token_budget)
    losses = take(ours, 2), take(plain, 2)
    assert ours.stepper.num_moved > 2
    assert {program.rung.capacity.num_tokens for program in ours.stepper._programs.values()} == {256}
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours.flat.values_SP, plain.flat.values_SP, atol=1e-4, rtol=1e-3)
    assert ours.optimizer.num_steps == plain.optimizer.num_steps


def test_heads_that_read_tokens_and_several_ways_of_pooling_are_one_program_and_equal_the_definition(
    backbone_of, toy_task, toy_tags, toy_answers, compilations
):
    backbone = backbone_of("bert")
    tasks = [
        (toy_task("two", num_labels=2, num_rows=22), {"pooling": "mean"}),
        (toy_tags(num_rows=12), {}),
        (toy_answers(num_rows=12, longest=8), {}),
        (toy_task("number", kind="regress", num_rows=20, seed=2), {"pooling": "cls"}),
    ]
    runs = [
        make_run(task, RunConfig(method=MethodConfig(size=8), train=TrainConfig(**QUIET | own)), backbone)
        for task, own in tasks
    ]
    ours, plain = Cohort(runs, backbone, SETTINGS), Cohort(runs, backbone, SETTINGS)
    plain.stepper = Stepper(plain.bank, plain.slot_update, SETTINGS.token_budget)
    losses = take(ours, 2), take(plain, 2)
    assert ours.stepper.num_moved == 2
    assert {program.mix.kinds for program in ours.stepper._programs.values()} == {
        ("classify", "regress", "tag", "span")
    }
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), atol=2e-5, rtol=1e-4)
    # Not the values: what is added to all tokens alike moves no passage, and Adam makes a step of nothing but rounding.
    torch.testing.assert_close(ours.optimizer.first_SP, plain.optimizer.first_SP, atol=1e-5, rtol=1e-3)


def test_heads_with_a_layer_before_their_last_are_in_the_program_of_those_without(
    backbone_of, toy_task, toy_tags, compilations
):
    backbone = backbone_of("bert")
    tasks = [
        (toy_task("two", num_labels=2, num_rows=22), {"pooling": "mean"}),
        (toy_task("five", num_labels=5, num_rows=19, seed=1), {"pooling": "cls", "hidden": "tanh"}),
        (toy_task("number", kind="regress", num_rows=20, seed=2), {"pooling": "cls", "hidden": "pooler"}),
        (toy_tags(num_rows=12), {"hidden": "tanh"}),
    ]
    runs = [
        make_run(task, RunConfig(method=MethodConfig(size=8), train=TrainConfig(**QUIET | own)), backbone)
        for task, own in tasks
    ]
    ours, plain = Cohort(runs, backbone, SETTINGS), Cohort(runs, backbone, SETTINGS)
    assert isinstance(ours.stepper, compiled.CompiledStepper)
    plain.stepper = Stepper(plain.bank, plain.slot_update, SETTINGS.token_budget)
    losses = take(ours, 2), take(plain, 2)
    assert ours.stepper.num_moved == 2, "no step was left to the definition"
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours.optimizer.first_SP, plain.optimizer.first_SP, atol=1e-5, rtol=1e-3)
    has_hidden = ours.bank.stacks["head.hidden.weight"].flatten(1).abs().sum(1) > 0
    assert has_hidden.tolist() == [False, True, True, True], "a head without the layer gets none"


def test_what_a_layer_before_the_last_reads_and_gives_is_dropped_as_its_head_says(backbone_of, toy_task, compilations):
    """The pooler's input is not dropped, as in BERT; a tanh layer's is. Half of a vector that is dropped is zero."""
    backbone, seen = backbone_of("bert"), []
    runs = [
        make_run(
            toy_task(hidden, num_rows=22),
            RunConfig(
                method=MethodConfig(size=8),
                train=TrainConfig(**QUIET | {"head_dropout": 0.5, "pooling": "cls", "hidden": hidden}),
            ),
            backbone,
        )
        for hidden in ("none", "tanh", "pooler")
    ]
    cohort = Cohort(runs, backbone, SETTINGS)
    product = compiled.grouped.segment_linear

    def watched(vectors, *others):
        seen.append(vectors.detach().clone())
        return product(vectors, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled.grouped, "segment_linear", watched)
        take(cohort, 1)
    before, after = seen[-2:]  # what the layer and what the last one reads, in the order of slots
    shares = [[float((part == 0).float().mean()) for part in vectors[:12].split(4)] for vectors in (before, after)]
    assert shares[0] == pytest.approx([0.5, 0.5, 0.0], abs=0.2)
    assert shares[1] == pytest.approx([0.5, 0.5, 0.5], abs=0.2)


def make_joint_cohorts(backbone, runs):
    """One that is compiled, and the definition."""
    ours, plain = Cohort(runs, backbone, SETTINGS), Cohort(runs, backbone, SETTINGS)
    assert isinstance(ours.stepper, compiled.CompiledStepper)
    plain.stepper = Stepper(plain.bank, plain.slot_update, SETTINGS.token_budget)
    return ours, plain


def compare_joint(ours, plain, num_steps):
    losses = take(ours, num_steps), take(plain, num_steps)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), atol=2e-5, rtol=1e-4)
    for one, other in ((ours.optimizer, plain.optimizer), (ours.shared, plain.shared)):
        assert one.num_steps == other.num_steps
        for found, expected in zip(one.stored, other.stored, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.fixture
def small_rungs(monkeypatch):
    """The interpreter takes its time for every row of padding."""
    monkeypatch.setattr(rungs, "SMALLEST", 64)


@pytest.mark.usefixtures("small_rungs")
@pytest.mark.parametrize(("method", "batches"), [("hyperformer++", "mixed"), ("mahabadi-multi", "homogeneous")])
def test_compiled_steps_of_runs_of_several_tasks_equal_the_definition(
    backbone_of, toy_task, compilations, method, batches
):
    """Two of those that tests/test_gpu_joint.py has, which are all."""
    backbone, joint = backbone_of("bert"), {"batches": batches, "weights": ("five=3",)}
    settings = {"max_length": 8, "batch_size": 4, "clip_norm": 0.5}
    runs = [make_joint(backbone, toy_task, method, seed, joint, lr=3e-4, **settings) for seed in range(2)]
    ours, plain = make_joint_cohorts(backbone, runs)
    compare_joint(ours, plain, 2)
    assert ours.stepper.num_moved == 2, "no step was left to the definition"
    assert len(compilations) == 2, "a block, for every one and every step, and the optimizer's step"


@pytest.mark.usefixtures("small_rungs")
@pytest.mark.parametrize("method", ["full-multi", "pal-published"])
def test_compiled_steps_of_tasks_that_share_a_copy_of_the_backbone_equal_the_definition(
    backbone_of, toy_task, compilations, method
):
    backbone, settings = backbone_of("bert"), {"max_length": 8, "batch_size": 4, "clip_norm": 0.5, "lr": 3e-4}
    ours, plain = make_joint_cohorts(backbone, [make_joint(backbone, toy_task, method, **settings)])
    compare_joint(ours, plain, 2)
    assert ours.stepper.num_moved == 2, "no step was left to the definition"


@pytest.mark.usefixtures("small_rungs")
def test_answers_after_a_replayed_step_are_of_what_it_left(backbone_of, toy_task, compilations):
    """A graph changes tensors without a word: what was written for the answers before must not be read again."""
    backbone = backbone_of("bert")
    ours, _ = make_joint_cohorts(backbone, [make_joint(backbone, toy_task, max_length=8, batch_size=4)])
    take(ours, 1)
    (program,) = ours.stepper._programs.values()
    rows = ours.members[0].parts[0].dev_rows()[:2]
    backbone.model.eval()
    before = infer(ours.bank, rows)
    program.graph = SimpleNamespace(replay=lambda: ours.shared.values_SP.data.mul_(2))
    ours.stepper._launch(program)
    after = infer(ours.bank, rows)
    ours.bank.drop_generated()
    for old, new, expected in zip(before, after, infer(ours.bank, rows), strict=True):
        assert not torch.equal(old, new)
        assert torch.equal(new, expected)


@pytest.mark.usefixtures("small_rungs")
def test_compiled_steps_of_several_tasks_keep_a_run_whole_and_leave_what_is_frozen(
    backbone_of, toy_task, compilations, monkeypatch
):
    backbone, usual = backbone_of("bert"), {"max_length": 8, "batch_size": 4, "lr": 3e-4}
    runs = [make_joint(backbone, toy_task, seed=seed, joint={"batches": "mixed"}, **usual) for seed in range(2)]
    # As with `joint.trained` `task`, which wants a run to start from.
    monkeypatch.setattr(JointUpdate, "_frozen", lambda self, active: {1} & {self._run_of(each.slot) for each in active})
    # As with a token budget that holds one run; the least there is holds both of these.
    monkeypatch.setattr(compiled.CompiledStepper, "_holds", lambda self, tokens, runs: len(list(runs)) == 1)
    ours, plain = make_joint_cohorts(backbone, runs)
    before = ours.shared.values_SP.clone()
    compare_joint(ours, plain, 2)
    assert ours.stepper.num_moved == 4, "a program for each run"
    has_moved = (ours.shared.values_SP != before).any(1)
    assert has_moved.tolist() == [True, False]
    assert ours.shared.num_steps == [2, 0]


@pytest.mark.usefixtures("small_rungs")
def test_a_run_of_several_tasks_that_is_not_sound_moves_nowhere(backbone_of, toy_task, compilations):
    backbone, usual = backbone_of("bert"), {"max_length": 8, "batch_size": 4}
    runs = [make_joint(backbone, toy_task, seed=seed, joint={"batches": "mixed"}, **usual) for seed in range(2)]
    ours, plain = make_joint_cohorts(backbone, runs)
    for cohort in (ours, plain):
        with torch.no_grad():
            cohort.bank.stacks["head.bias"][0, 0] = float("nan")
    values = ours.flat.values_SP.clone()
    take(ours, 1), take(plain, 1)
    assert ours.optimizer.num_steps == plain.optimizer.num_steps
    assert [sum(ours.optimizer.num_steps[:3]), sum(ours.optimizer.num_steps[3:]) > 0] == [0, True]
    assert ours.shared.num_steps == plain.shared.num_steps == [0, 1]
    torch.testing.assert_close(ours.flat.values_SP[:3], values[:3], equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(ours.flat.values_SP[3:], plain.flat.values_SP[3:], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("layers", ["2:"])
def test_a_compiled_step_begins_above_the_frozen_layers(backbone_of, toy_task, tmp_path, compilations, layers):
    backbone = backbone_of("bert")
    runs = [
        make_run(run.task, run.config.override([f"method.layers={layers}"]), backbone)
        for run in make_runs(backbone, toy_task)[:2]
    ]
    ours, plain = Cohort(runs, backbone, SETTINGS), Cohort(runs, backbone, SETTINGS)
    plain.stepper = Stepper(plain.bank, plain.slot_update, SETTINGS.token_budget)
    ours.reuse(FrozenCache(backbone, tmp_path))
    below = []
    handle = backbone._blocks[int(layers[0]) - 1].inner.register_forward_hook(lambda *_: below.append(1))
    try:
        losses = take(ours, 2)
    finally:
        handle.remove()
    assert not below
    for one, other in zip(losses, take(plain, 2), strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours.flat.values_SP, plain.flat.values_SP, atol=1e-4, rtol=1e-3)


def test_nothing_is_compiled_again_for_a_run_that_enters_a_freed_slot(backbone_of, toy_task, compilations):
    """Sizes, label counts and kinds of heads change hands; what was compiled serves the newcomers, and is right."""
    backbone = backbone_of("bert")
    runs = make_runs(backbone, toy_task, pooling="mean")
    settings = dataclasses.replace(SETTINGS, num_slots=2)
    found, counts = [], []
    for is_plain in (False, True):
        cohort = Cohort(runs, backbone, settings)
        if is_plain:
            cohort.stepper = Stepper(cohort.bank, cohort.slot_update, SETTINGS.token_budget)
        for _ in range(2):
            take(cohort, 1)
            counts.append(len(compilations))
            cohort.members[0].progress.status = "finished"
            cohort.refill()
        found.append(cohort.flat.values_SP.clone())
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-3)
    assert counts[0] == counts[1]  # though the newcomer has a head of another kind


@pytest.mark.parametrize("family", ["bert", "mpnet"])
@pytest.mark.parametrize("method", ["full", "top"])
def test_fine_tuning_compiled_equals_the_definition(backbone_of, toy_task, compilations, family, method):
    """mpnet's position bias is trained too, which the fused attention could not."""
    backbone = backbone_of(family)
    config = RunConfig(
        method=MethodConfig(name=method, layers="-2:" if method == "top" else "all"),
        train=TrainConfig(**QUIET | {"lr": 1e-4, "pooling": "mean"}),
    )
    run = make_run(toy_task("two", num_labels=2, num_rows=22), config, backbone)
    ours, plain = Cohort([run], backbone, SETTINGS), Cohort([run], backbone, SETTINGS)
    plain.stepper = Stepper(plain.bank, plain.slot_update, SETTINGS.token_budget)
    assert isinstance(ours.stepper, compiled.CompiledStepper)
    losses = take(ours, 2), take(plain, 2)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours.flat.values_SP, plain.flat.values_SP, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.optimizer.first_SP, plain.optimizer.first_SP, atol=1e-5, rtol=1e-3)
