"""Steps of backbones that write, as programs of fixed shapes: equal to the definition, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inlay.model import load_backbone
from inlay.model.answers import Answers
from inlay.model.heads import lose_texts
from inlay.model.rung import Capacity
from inlay.training.cohort import Cohort, CohortSettings
from inlay.training.objectives import lose_answers
from inlay.training.steps import Stepper
from inlay.training.written import WrittenStepper
from joint_runs import make_joint

SETTINGS = CohortSettings(token_budget=1024, num_threads=1, save_every=100)


def take(cohort, num_steps):
    with cohort.training():
        for _ in range(num_steps):
            cohort.step()
    return [member.progress.losses for member in cohort.members]


@pytest.mark.triton
@pytest.mark.parametrize("method", ["hyperformer++", "mahabadi-multi"])
def test_steps_of_several_tasks_equal_the_definition(backbone_of, toy_task, method):
    backbone = backbone_of("t5")
    settings = {"max_length": 8, "batch_size": 4, "clip_norm": 0.5, "lr": 3e-4, "label_smoothing": 0.1}
    runs = [make_joint(backbone, toy_task, method, seed, {"batches": "mixed"}, **settings) for seed in range(2)]
    ours, plain = (Cohort(runs, backbone, SETTINGS) for _ in range(2))
    assert isinstance(ours.stepper, WrittenStepper)
    plain.stepper = Stepper(plain.bank, plain.mover, SETTINGS.token_budget)
    losses = take(ours, 2), take(plain, 2)
    assert ours.stepper.num_moved == 2, "no step was left to the definition"
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), atol=2e-5, rtol=1e-4)
    for one, other in ((ours.optimizer, plain.optimizer), (ours.shared, plain.shared)):
        assert one.num_steps == other.num_steps
        for found, expected in zip(one.stored, other.stored, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
