"""Several tasks as one run on a GPU. Deselected by `make test`; run with `pytest -m gpu tests/test_gpu_joint.py`."""

from __future__ import annotations

import pytest
import torch

from inlay.model import Bank, infer, load_backbone
from inlay.training.cohort import Cohort
from inlay.training.fit import FitSettings, fit
from inlay.training.materialize import materialize
from joint_runs import METHODS, SETTINGS, make_joint, take_steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_steps_on_a_gpu_equal_those_on_a_cpu(backbone_folder, backbone_of, toy_task, family, method):
    if (family, method) == ("t5", "pal-published"):
        return  # projected attention is for encoders
    gpu = load_backbone(str(backbone_folder(family)), device="cuda", dtype=torch.float32)
    found = []
    for backbone in (gpu, backbone_of(family)):
        cohort = Cohort([make_joint(backbone, toy_task, method, joint={"batches": "mixed"})], backbone, SETTINGS)
        take_steps(cohort, 4)
        found.append(cohort.members[0].progress.losses)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), atol=5e-3, rtol=5e-3)


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


def _own(result, task):
    return {
        name.removeprefix(f"{task}/"): tensor
        for name, tensor in result.tensors.items()
        if "/" not in name or name.startswith(f"{task}/")
    }
