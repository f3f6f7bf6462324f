"""What a training step of each method costs on this machine, beside Houlsby's, side by side in one process.

    python bench/methods.py [--backbone minilm] [--repeats 5] [--out bench/methods.json]

Every method takes a step on the same batch in turns, and the median of its ratio to Houlsby's step is printed: absolute
times on a shared machine mean little. Texts are the shipped SMS messages; one run at a time, batch 32.
"""

from __future__ import annotations

import argparse
import statistics
import time

import report
import torch

from inlay.data import load_task
from inlay.model import load_backbone
from inlay.settings.run_config import DataConfig, MethodConfig, RunConfig, TrainConfig
from inlay.training import make_run
from inlay.training.cohort.cohort import Cohort, CohortSettings

METHODS = {
    "houlsby": {},
    "pfeiffer": {"name": "pfeiffer"},
    "parallel": {"name": "parallel"},
    "lora": {"name": "lora"},
    "ia3": {"name": "ia3"},
    "bitfit": {"name": "bitfit"},
    "norms": {"name": "norms"},
    "head": {"name": "head"},
    "houlsby, every-3": {"sharing": "every-3"},
    "houlsby, batch norm": {"inner_norm": "batch"},
    "houlsby, top half": {"layers": "3:"},
    "top 3 layers": {"name": "top", "layers": "-3:"},
    "full": {"name": "full"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--repeats", type=int, default=5)
    report.add_options(parser)
    options = parser.parse_args()
    backbone = load_backbone(options.backbone)
    task = load_task(DataConfig(source=str(report.ROOT / "examples/sms_spam/sms_spam.tsv"), limit=512), "sms")
    settings = CohortSettings(10**6, torch.get_num_threads(), 10**9)
    cohorts = {
        name: Cohort(
            [make_run(task, RunConfig(method=MethodConfig(**method), train=TrainConfig(lr=1e-4)), backbone)],
            backbone,
            settings,
        )
        for name, method in METHODS.items()
    }
    rounds = [
        {name: step(cohort, backbone, cursor) for name, cohort in cohorts.items()}
        for cursor in range(options.repeats + 1)
    ][1:]  # the first warms up
    ratios = {name: round(statistics.median(took[name] / took["houlsby"] for took in rounds), 2) for name in METHODS}
    report.finish(
        options,
        backbone=options.backbone,
        step_of_houlsby_s=round(statistics.median(took["houlsby"] for took in rounds), 3),
        step_relative_to_houlsby=ratios,
    )


def step(cohort: Cohort, backbone, cursor: int) -> float:
    """Seconds of a cohort's step on the batches at `cursor`."""
    for member in cohort.members:
        member.progress.cursor = cursor
    with cohort.training():
        began = time.perf_counter()
        cohort.step()
        if backbone.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
