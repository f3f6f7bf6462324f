"""Steps of backbones that write, as programs of fixed shapes: their parts, and that they equal the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inlay.model.batch import buckets as rungs
from inlay.model.batch.buckets import BucketBuffers, Capacity, DecoderTargets, PackedRows
from inlay.model.batch.route import Row, pack
from inlay.model.heads.head_losses import text_losses
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.run.make_run import make_run
from inlay.training.step.eager import Stepper
from inlay.training.step.losses import answer_losses
from inlay.training.step.seq2seq import Seq2SeqStepper
from joint_runs import QUIET, make_joint

SETTINGS = CohortSettings(token_budget=1024, num_threads=1, save_every=100)
CPU = torch.device("cpu")


def test_losses_of_answers_and_their_gradients_equal_the_definition():
    drawn = torch.Generator().manual_seed(0)
    written = torch.tensor([[3, 1, -100], [7, 0, 2], [4, -100, -100], [-100, -100, -100]])
    smoothing = torch.tensor([0.0, 0.1, 0.3, 0.1], dtype=torch.float64)
    logits = torch.randn(4, 3, 9, generator=drawn, dtype=torch.float64, requires_grad=True)
    ours = answer_losses(logits, written.int(), smoothing)
    (by_ours,) = torch.autograd.grad((ours * torch.arange(4)).sum(), logits)
    plain = torch.cat(
        [text_losses(logits[row : row + 1], written[row : row + 1], s) for row, s in enumerate(smoothing)]
    )
    (by_plain,) = torch.autograd.grad((plain * torch.arange(4)).sum(), logits)
    torch.testing.assert_close(ours, plain.double(), atol=1e-6, rtol=1e-6)  # the definition computes in float32
    torch.testing.assert_close(by_ours, by_plain, atol=1e-6, rtol=1e-6)


def test_answers_lie_as_their_rows_do_and_padding_goes_through_the_last_slot():
    capacity = Capacity(num_tokens=256, num_rows=4, num_slots=3, max_length=64)
    answers = DecoderTargets(capacity, width=4, device=CPU)
    answers.fill(answers.lay([np.array([5, 6]), np.array([7]), np.array([8, 9, 1, 1])], np.array([0, 0, 2])))
    written, tiling = answers.written_RT, answers.route.tiling
    assert written[:3].tolist() == [[5, 6, -100, -100], [7, -100, -100, -100], [8, 9, 1, 1]]
    assert written[3:].tolist() == [[-100] * 4]
    assert tiling.slots_N.tolist() == [0] * 8 + [2] * 8
    ranges = [(int(a), int(b)) for a, b in zip(*tiling.tiles.tensors[3:], strict=True)]
    assert ranges == [(0, 8), (0, 0), (8, 16)]
    covered = [
        (int(slot), token)
        for slot, start, stop in zip(*tiling.tiles.tensors[:3], strict=True)
        for token in range(int(start), int(stop))
    ]
    assert covered == list(zip(tiling.slots_N.tolist(), range(16), strict=True))


def test_rows_of_a_rung_are_unpacked_as_those_of_a_pack():
    lengths = [1, 3, 5]
    rows = [Row(np.arange(length), slot=0) for length in lengths]
    rung = BucketBuffers(Capacity(num_tokens=256, num_rows=4, num_slots=1, max_length=64), 0, 0, CPU)
    ids = np.concatenate([row.ids for row in rows])
    rung.fill(rung.lay(PackedRows(ids, None, np.array(lengths), np.zeros(3, int))))
    values = torch.randn(256, 2)
    found, is_real = rung.route.tiling.unpack(values, 4)
    assert found.shape == (4, 64, 2)
    assert is_real[3].all(), "a row of padding"
    packed = pack(rows, 0).pack
    assert torch.equal(found[:3, :5], packed.unpack(values))
    assert torch.equal(is_real[:3, :5], packed.is_real_BT)
    assert (found[:3, 5:] == found[:3, 4:5]).all(), "a row's own last token: of no other's slot"


@pytest.fixture
def small_rungs(monkeypatch):
    """The interpreter takes its time for every row of padding."""
    monkeypatch.setattr(rungs, "SMALLEST", 64)


def take(cohort, num_steps):
    with cohort.training():
        for _ in range(num_steps):
            cohort.step()
    return torch.tensor([member.progress.losses for member in cohort.members])


def compare(backbone, runs, num_steps=2):
    ours, plain = (Cohort(runs, backbone, SETTINGS) for _ in range(2))
    assert isinstance(ours.stepper, Seq2SeqStepper)
    plain.stepper = Stepper(plain.bank, plain.slot_update, SETTINGS.token_budget)
    torch.testing.assert_close(take(ours, num_steps), take(plain, num_steps), atol=2e-5, rtol=1e-4)
    assert ours.stepper.num_moved == num_steps, "no step was left to the definition"
    for one, other in ((ours.optimizer, plain.optimizer), (ours.shared, plain.shared)):
        if one is not None:
            assert one.num_steps == other.num_steps
            for found, expected in zip(one.stored, other.stored, strict=True):
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.triton
@pytest.mark.parametrize(("method", "num_runs"), [("hyperformer++", 2), ("full-multi", 1)])
def test_steps_of_several_tasks_equal_the_definition(backbone_of, toy_task, small_rungs, method, num_runs):
    settings = {"max_length": 8, "batch_size": 4, "clip_norm": 0.5, "lr": 3e-4, "label_smoothing": 0.1}
    backbone = backbone_of("t5")
    runs = [make_joint(backbone, toy_task, method, seed, {"batches": "mixed"}, **settings) for seed in range(num_runs)]
    compare(backbone, runs)


@pytest.mark.triton
def test_steps_of_runs_of_one_task_equal_the_definition(backbone_of, toy_task, small_rungs):
    backbone, quiet = backbone_of("t5"), QUIET | {"max_length": 8, "batch_size": 4, "lr": 3e-4}
    tasks = toy_task("two", num_labels=2, num_rows=8), toy_task("number", kind="regress", num_rows=8, seed=2)
    runs = [
        make_run(
            task,
            RunConfig(method=MethodConfig("houlsby", 4), train=TrainConfig(**quiet, label_smoothing=smoothing)),
            backbone,
        )
        for task, smoothing in zip(tasks, (0.0, 0.2), strict=True)
    ]
    compare(backbone, runs)
