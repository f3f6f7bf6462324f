"""Memory of a real GPU: measured passes, real exhaustion, real savings. Run with `pytest -m gpu`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from hooks import Hooks
from inlay.model import load_backbone
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training import FitSettings, fit, make_run
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.cohort.memory import available_bytes, measure_token_bytes

pytestmark = pytest.mark.gpu
SETTINGS = CohortSettings(token_budget=1 << 20, num_threads=1, save_every=100)
QUIET = {"dropout": 0.0, "head_dropout": 0.0, "max_length": 32, "epochs": 1, "lr": 3e-3}


@pytest.fixture
def gpu(backbone_folder):
    return load_backbone(str(backbone_folder("bert")), device="cuda", dtype=torch.float32)


def make(backbone, task, **train):
    return make_run(task, RunConfig(method=MethodConfig(size=64), train=TrainConfig(**QUIET | train)), backbone)


def peak_of(cohort, num_rows):
    """The bytes that a pass of the longest row, so many times, takes."""
    (member,) = cohort.members
    row, device = int(member.train.lengths.argmax()), cohort.backbone.device
    with cohort.rehearsing(), cohort.training():
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        cohort.stepper.differentiate([member], {0: np.full(num_rows, row)})
        torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def test_measured_bytes_predict_a_larger_pass(gpu, toy_task):
    cohort = Cohort([make(gpu, toy_task())], gpu, SETTINGS)
    predicted = measure_token_bytes(cohort) * 2000 * int(cohort.members[0].train.lengths.max())
    assert predicted == pytest.approx(peak_of(cohort, 2000), rel=0.2)
    assert (available_bytes(gpu.device) or 0) > predicted


def test_checkpointing_takes_less_of_the_gpu(gpu, toy_task):
    run = make(gpu, toy_task())
    plain, less = (
        peak_of(Cohort([run], gpu, dataclasses.replace(SETTINGS, checkpointing=checkpointing)), 2000)
        for checkpointing in (False, True)
    )
    assert less < 0.75 * plain


def test_a_step_that_exhausts_the_gpu_is_taken_in_pieces(gpu, toy_task, tmp_path):
    run = make(gpu, toy_task(num_rows=4000), batch_size=2000)
    (whole,) = fit([run], gpu, tmp_path / "whole")
    told = []

    class Ear(Hooks):
        def on_fallback(self, message):
            told.append(message)

    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(gpu.device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (96 << 20)) / total)
    try:
        (pieces,) = fit([run], gpu, tmp_path / "pieces", FitSettings(token_budget=1 << 20), Ear())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert told
    for name, tensor in whole.tensors.items():
        torch.testing.assert_close(pieces.tensors[name], tensor, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_runs_that_enter_freed_slots_on_the_gpu_are_as_alone(gpu, toy_task, tmp_path, checkpointing):
    # Captured steps hold addresses: a run of another size, scale or activation must not meet its predecessor's.
    runs = []
    for seed, (size, scale, epochs) in enumerate([(8, 1.0, 3), (64, 0.5, 1), (16, 4.0, 2), (3, 1.0, 1), (32, 2.0, 1)]):
        method = MethodConfig(size=size, scale=scale, init_std=0.1)
        train = TrainConfig(**QUIET | {"seed": seed, "epochs": epochs, "batch_size": 8})
        runs.append(make_run(toy_task(), RunConfig(method=method, train=train), gpu))
    settings = FitSettings(max_cohort=2, checkpointing=checkpointing)
    queued = fit(runs, gpu, tmp_path / "queued", settings)
    for run, result in zip(runs, queued, strict=True):
        (alone,) = fit([run], gpu, tmp_path / "alone")
        found, expected = ([line["dev_loss"] for line in one.history] for one in (result, alone))
        assert found == pytest.approx(expected, abs=2e-2), run.config.method
