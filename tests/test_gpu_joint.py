"""Several tasks as one run on a GPU. Deselected by `make test`; run with `pytest -m gpu tests/test_gpu_joint.py`."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inlay.model import Bank, infer, load_backbone
from inlay.model.bank.methods import JOINT_METHODS as METHOD_TABLE
from inlay.model.kernels import fused_attention
from inlay.settings import JointConfig, MethodConfig, RunConfig, TrainConfig
from inlay.studies.run.records import StudyDirs
from inlay.studies.run.session import run_studies
from inlay.studies.spec.planning import load_tasks, plan_study
from inlay.studies.spec.study import find_study, read_study, study_folders
from inlay.training.cohort.cohort import Cohort
from inlay.training.cohort.fit import FitSettings, fit
from inlay.training.events import Notice
from inlay.training.run.joint import make_joint_run, materialize
from inlay.training.run.make_run import make_run
from inlay.training.step.compiled import CompiledStepper
from inlay.training.step.eager import Stepper
from joint_runs import METHODS, SETTINGS, make_joint, take_steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("family", "method"),
    # Projected attention is for encoders.
    [*(("bert", each) for each in METHODS), *(("t5", each) for each in METHODS if each != "pal-published")],
)
def test_steps_on_a_gpu_equal_those_on_a_cpu(backbone_folder, backbone_of, toy_task, family, method):
    gpu = load_backbone(str(backbone_folder(family)), device="cuda", dtype=torch.float32)
    found = []
    for backbone in (gpu, backbone_of(family)):
        cohort = Cohort([make_joint(backbone, toy_task, method, joint={"batches": "mixed"})], backbone, SETTINGS)
        take_steps(cohort, 4)
        found.append(cohort.members[0].progress.losses)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), atol=5e-3, rtol=5e-3)


def refuse_notices(event):
    """Fail where a stepper says something, such as that steps could not be captured."""
    assert not isinstance(event, Notice), event


@pytest.mark.parametrize("batches", ["homogeneous", "mixed"])
@pytest.mark.parametrize("method", ["hyperformer", "hyperformer++", "mahabadi-multi", "full-multi", "pal-published"])
@pytest.mark.parametrize("family", ["bert", "mpnet", "t5"])
def test_compiled_and_captured_steps_equal_launched_ones(backbone_folder, toy_task, family, method, batches):
    if (family, method) == ("t5", "pal-published"):
        pytest.skip("PALs are of encoders")
    gpu = load_backbone(str(backbone_folder(family)), device="cuda", dtype=torch.float32)
    joint = {"batches": batches, "steps": 16}  # four epochs of four: the last ones are replayed whole, and scored
    num_runs = 1 if METHOD_TABLE[method].is_finetuned else 3
    runs = [make_joint(gpu, toy_task, method, seed, joint, lr=3e-4, epochs=4) for seed in range(num_runs)]
    ours, plain = (Cohort(runs, gpu, SETTINGS) for _ in range(2))
    assert isinstance(ours.stepper, CompiledStepper)
    ours.stepper.emit = refuse_notices
    plain.stepper = Stepper(plain.bank, plain.slot_update, SETTINGS.token_budget)
    for cohort in (ours, plain):
        take_steps(cohort, 14)
    assert_alike(ours, plain, 2e-3)


def assert_alike(ours, plain, near):
    """Losses and dev losses, how often each was stepped, and the mean gradients, beside the largest of them."""
    assert any(program.graph is not None for program in ours.stepper._programs.values())
    for one, other in zip(ours.members, plain.members, strict=True):
        losses = (torch.tensor(member.progress.losses) for member in (one, other))
        torch.testing.assert_close(*losses, atol=near, rtol=near)
        scored = ([line["dev_loss"] for line in member.progress.history] for member in (one, other))
        assert next(scored) == pytest.approx(next(scored), abs=near)
    for one, other in ((ours.optimizer, plain.optimizer), (ours.shared, plain.shared)):
        if one is not None and one.first_SP.numel():
            assert one.num_steps == other.num_steps
            apart = (one.first_SP - other.first_SP).abs().max() / other.first_SP.abs().max()
            assert apart < 10 * near, apart


def test_the_words_of_a_vocabulary_are_scored_in_float32_from_bf16(backbone_folder):
    layer = load_backbone(str(backbone_folder("t5")), device="cuda", dtype=torch.bfloat16).model.lm_head
    weight = layer.weight.detach().clone().requires_grad_()
    x = torch.randn(3, 5, weight.shape[1], device="cuda").bfloat16().requires_grad_()
    given = torch.randn(3, 5, len(weight), device="cuda")
    logits = torch.func.functional_call(layer, {"weight": weight}, (x,))
    assert logits.dtype == torch.float32
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    expected = exact[0] @ exact[1].T
    assert (logits - expected).norm() < 1e-6 * expected.norm(), "the same sums, in another order"
    found = torch.autograd.grad(logits, (x, weight), given)
    for one, other in zip(found, torch.autograd.grad(expected, exact, given.double()), strict=True):
        assert (one - other).norm() < 5e-3 * other.norm()


@pytest.mark.parametrize("method", ["hyperformer++", "full-multi"])
def test_captured_steps_in_bf16_attend_to_packed_rows_and_equal_launched_ones(
    backbone_folder, toy_task, method, monkeypatch
):
    gpu = load_backbone(str(backbone_folder("t5")), device="cuda", dtype=torch.bfloat16)
    runs = [make_joint(gpu, toy_task, method, 0, {"batches": "mixed", "steps": 16}, lr=3e-4, epochs=4)]
    ours, plain = (Cohort(runs, gpu, SETTINGS) for _ in range(2))
    ours.stepper.emit = refuse_notices
    plain.stepper = Stepper(plain.bank, plain.slot_update, SETTINGS.token_budget)
    calls = []
    flash = fused_attention._flash

    def count(*args, **settings):  # a Mock would keep what it was called with, and the graph that made it
        calls.append(None)
        return flash(*args, **settings)

    monkeypatch.setattr(fused_attention, "_flash", count)
    take_steps(ours, 14)
    assert calls, "keys and values were padded"
    num_calls = len(calls)
    take_steps(plain, 14)
    assert len(calls) == num_calls
    assert_alike(ours, plain, 3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["houlsby", "lora", "full"])
def test_captured_steps_of_one_task_that_is_written_equal_launched_ones(backbone_folder, toy_task, method, dtype):
    gpu = load_backbone(str(backbone_folder("t5")), device="cuda", dtype=dtype)
    train = TrainConfig(
        dropout=0.0, batch_size=8, max_length=32, epochs=4, lr=3e-4, label_smoothing=0.1, head_dropout=0.0
    )
    config = RunConfig(method=MethodConfig(method, None if method == "full" else 8), train=train)
    tasks = toy_task("two", num_labels=2, num_rows=40), toy_task("number", kind="regress", num_rows=40, seed=2)
    runs = [make_run(task, config, gpu) for task in tasks[: 1 if method == "full" else 2]]
    ours, plain = (Cohort(runs, gpu, SETTINGS) for _ in range(2))
    assert isinstance(ours.stepper, CompiledStepper)
    ours.stepper.emit = refuse_notices
    plain.stepper = Stepper(plain.bank, plain.slot_update, SETTINGS.token_budget)
    for cohort in (ours, plain):
        take_steps(cohort, 14)
    assert_alike(ours, plain, 2e-3 if dtype == torch.float32 else 3e-2)


def test_captured_steps_of_a_task_that_is_written_draw_anew_for_dropout(backbone_folder, toy_task):
    gpu = load_backbone(str(backbone_folder("t5")), device="cuda")
    train = TrainConfig(dropout=0.3, batch_size=8, max_length=32, epochs=8, lr=1e-9)
    run = make_run(toy_task("two", num_rows=8), RunConfig(method=MethodConfig("houlsby", 8), train=train), gpu)
    cohort = Cohort([run], gpu, SETTINGS)
    take_steps(cohort, 7)
    (program,) = cohort.stepper._programs.values()
    assert program.graph is not None
    assert len(set(cohort.members[0].progress.losses)) == 7, "the same rows, by the same weights"


@pytest.mark.parametrize("method", ["hyperformer", "hyperformer++", "mahabadi-multi"])
@pytest.mark.parametrize("family", ["bert", "mpnet", "t5"])
def test_materialised_tasks_answer_as_in_training_in_bf16(backbone_folder, toy_task, tmp_path, family, method):
    gpu = load_backbone(str(backbone_folder(family)), device="cuda")
    runs = [make_joint(gpu, toy_task, method, seed, {"batches": "mixed", "steps": 6}, epochs=2) for seed in range(3)]
    results = fit(runs, gpu, tmp_path, FitSettings(draw_curves=False))
    for run, result in zip(runs, results, strict=True):
        trained = materialize(run, result, gpu)
        bank = Bank(gpu, 3)
        for slot, item in enumerate(trained):
            bank.put(slot, item.spec, item.result.tensors)
        cohort = Cohort([run], gpu, SETTINGS)
        for part in cohort.members[0].parts:
            cohort.bank.put(part.slot, part.run.spec, {**cohort.bank.read(part.slot), **_own(result, part.run.name)})
        rows = [row for part in cohort.members[0].parts for row in part.dev_rows()]
        for ours, theirs in zip(infer(bank, rows), infer(cohort.bank, rows), strict=True):
            torch.testing.assert_close(ours, theirs, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("method", ["hyperformer", "hyperformer++", "mahabadi-multi", "full-multi"])
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_steps_in_bf16_follow_those_in_float32(backbone_folder, toy_task, family, method):
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        gpu = load_backbone(str(backbone_folder(family)), device="cuda", dtype=dtype)
        cohort = Cohort([make_joint(gpu, toy_task, method, joint={"batches": "mixed"})], gpu, SETTINGS)
        take_steps(cohort, 6)
        found.append(cohort.members[0].progress.losses)
        assert all(torch.isfinite(stack).all() for stack in cohort.bank.stacks.values())
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_three_seeds_in_a_cohort_equal_each_alone(backbone_folder, toy_task, family):
    gpu = load_backbone(str(backbone_folder(family)), device="cuda", dtype=torch.float32)
    runs = [make_joint(gpu, toy_task, "hyperformer++", seed, {"batches": "mixed"}) for seed in range(3)]
    together = Cohort(runs, gpu, SETTINGS)
    take_steps(together, 5)
    for seat, run in enumerate(runs):
        alone = Cohort([run], gpu, SETTINGS)
        take_steps(alone, 5)
        ours, theirs = together.members[seat].progress.losses, alone.members[0].progress.losses
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=5e-3, rtol=5e-3)


def test_texts_that_tasks_of_a_hypernetwork_write_in_a_mixed_batch_are_those_written_alone(
    backbone_folder, toy_task, toy_texts
):
    gpu = load_backbone(str(backbone_folder("t5")), device="cuda", dtype=torch.float32)
    tasks = [dataclasses.replace(toy_texts(), name="echo"), toy_task("two", num_labels=2, num_rows=24)]
    config = RunConfig(
        method=MethodConfig("hyperformer++", 4), train=TrainConfig(lr=3e-3, max_length=32, batch_size=8, epochs=1),
        joint=JointConfig(batches="mixed", steps=4),
    )  # fmt: skip
    cohort = Cohort([make_joint_run(tasks, config, gpu)], gpu, SETTINGS)
    take_steps(cohort, 4)
    rows = [row for part in cohort.members[0].parts for row in part.dev_rows()[:4]]
    for row, answer in zip(rows, infer(cohort.bank, rows), strict=True):
        torch.testing.assert_close(answer, infer(cohort.bank, [row])[0], atol=1e-3, rtol=1e-3)


def test_a_study_of_several_tasks_runs_whole(backbone_folder, tmp_path):
    gpu = load_backbone(str(backbone_folder("t5")), device="cuda")
    for name in ("multitask", "fewshot"):
        study = read_study(find_study(name, study_folders()), "tiny")
        plan = plan_study(study, gpu, *load_tasks(study, None))
        outcome = run_studies([plan], StudyDirs(tmp_path / "results", tmp_path / "runs"))
        assert not outcome.missing
        assert not outcome.failed


def _own(result, task):
    return {
        name.removeprefix(f"{task}/"): tensor
        for name, tensor in result.tensors.items()
        if "/" not in name or name.startswith(f"{task}/")
    }
