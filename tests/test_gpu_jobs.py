"""Several processes on one GPU: the work of studies is done, and none takes more of the memory than its share."""

from __future__ import annotations

import pytest
import torch

from inlay.model import load_backbone
from inlay.model.backbone.tiny import make_tiny_folder
from inlay.studies.run.records import StudyDirs
from inlay.studies.run.worker_processes import JobSettings, _take_share, run_studies_in_jobs
from inlay.studies.spec.planning import load_tasks, plan_study
from inlay.studies.spec.study import find_study, read_study, study_folders
from inlay.studies.spec.toy import WORDS
from inlay.training.cohort.memory import available_bytes

pytestmark = pytest.mark.gpu


def test_three_processes_do_studies_on_one_gpu(tmp_path):
    gpu = load_backbone(str(make_tiny_folder(tmp_path / "tiny", WORDS)), device="cuda")
    plans = []
    for name in ("glue", "tradeoff", "ablation"):
        study = read_study(find_study(name, study_folders()), "tiny")
        plans.append(plan_study(study, gpu, *load_tasks(study, None)))
    outcome = run_studies_in_jobs(plans, StudyDirs(tmp_path / "results", tmp_path / "runs"), JobSettings(3, "cuda"))
    assert not outcome.failed
    assert not outcome.missing
    assert {record.hardware for record in outcome.records} == {torch.cuda.get_device_name(0)}


def test_a_process_that_may_have_a_share_of_the_gpu_counts_on_no_more():
    device = torch.device("cuda:0")
    torch.cuda.init()
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(0.1, device)
    try:
        found = available_bytes(device)
        assert found is not None
        assert found <= 0.1 * total
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_all_shares_together_leave_room_for_contexts(tmp_path):
    gpu = load_backbone(str(make_tiny_folder(tmp_path / "tiny", WORDS)), device="cuda")
    try:
        for num_jobs in (1, 2, 3, 8):
            _take_share(gpu, 0, JobSettings(num_jobs, "cuda:0"))
            assert num_jobs * torch.cuda.get_per_process_memory_fraction(gpu.device.index) <= 0.9 + 1e-6
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu.device)
