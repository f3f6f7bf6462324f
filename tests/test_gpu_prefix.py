"""Reuse of the frozen layers on a GPU: compiled steps begin above them, wherever the states are kept."""

from __future__ import annotations

import pytest
import torch

from inlay.model import load_backbone
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.cohort.frozen_cache import FrozenCache, Limits
from inlay.training.run.make_run import make_run
from inlay.training.step.compiled import CompiledStepper

pytestmark = pytest.mark.gpu
SETTINGS = CohortSettings(token_budget=65536, num_threads=1, save_every=100)
QUIET = {"dropout": 0.0, "head_dropout": 0.0, "batch_size": 8, "max_length": 32, "epochs": 6, "lr": 3e-3}
# The GPU's memory, then the host's, then the file; a limit holds for each of the memories alone.
LIMITS = {"gpu": Limits(), "all three": Limits(30_000, None), "file": Limits(0, None), "nothing": Limits(0, 0)}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("layers", ["1:", "2:"])
@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert"])
def test_steps_that_begin_above_the_frozen_layers_equal_whole_ones(
    backbone_folder, toy_task, tmp_path, family, layers, limits
):
    backbone = load_backbone(str(backbone_folder(family)), device="cuda", dtype=torch.float32)
    runs = [
        make_run(
            toy_task(num_rows=40, seed=seed),
            RunConfig(method=MethodConfig(size=8, layers=layers), train=TrainConfig(**QUIET, seed=seed)),
            backbone,
        )
        for seed in range(3)
    ]
    plain, reusing = Cohort(runs, backbone, SETTINGS), Cohort(runs, backbone, SETTINGS)
    assert isinstance(reusing.stepper, CompiledStepper) == backbone.packs
    reusing.reuse(FrozenCache(backbone, tmp_path, limits=LIMITS[limits]))
    for cohort in (plain, reusing):
        with cohort.training():
            for _ in range(12):
                cohort.step()
                cohort.backbone.model.eval()
                cohort.finish_epochs()
                cohort.backbone.model.train()
    for one, other in zip(plain.members, reusing.members, strict=True):
        torch.testing.assert_close(
            torch.tensor(other.progress.losses), torch.tensor(one.progress.losses), atol=2e-3, rtol=2e-2
        )
        assert [line["epoch"] for line in other.progress.history] == [line["epoch"] for line in one.progress.history]


def test_states_lie_on_the_gpu_first_then_in_the_hosts_memory(backbone_folder, toy_task, tmp_path):
    backbone = load_backbone(str(backbone_folder("bert")), device="cuda")
    run = make_run(toy_task(), RunConfig(method=MethodConfig(layers="1:"), train=TrainConfig(**QUIET)), backbone)
    for limits, kinds in ((Limits(), {"cuda"}), (Limits(30_000, 0), {"cuda", "cpu"})):
        cohort = Cohort([run], backbone, SETTINGS)
        cohort.reuse(FrozenCache(backbone, tmp_path, limits=limits))
        found = [row.prefix for row in cohort.members[0].rows(range(len(run.task.train)))]
        assert {prefix.states.device.type for prefix in found} == kinds
        assert {prefix.states.dtype for prefix in found} == {torch.bfloat16}
