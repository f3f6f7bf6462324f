"""What a compiled step asks of the host, and what of it the GPU waits for: no GPU is needed, nothing is computed.

    python bench/host.py --data-root DIR [--backbone minilm] [--out results/speed/host.json]

Steps of a cohort are laid out as for a GPU, and their programs are not launched: what is left is Python. `ahead` is
what the host does for the next step while the GPU works on this one; `between` is the rest, from the end of one step to
the launch of the next, but for the launches themselves. Runs are Houlsby's, m = 64, batch 32, on four GLUE tasks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import report
import torch

from inlay.data import load_task
from inlay.model import load_backbone
from inlay.model.kernels import launch
from inlay.settings.run_config import DataConfig, MethodConfig, RunConfig, TrainConfig
from inlay.training import make_run
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.step import compiled

TASKS = ("cola", "rte", "mrpc", "stsb")
SLOTS = (1, 8, 32)
STEPS, REPEATS = 20, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--backbone", default="minilm")
    report.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    launch.is_available = lambda device: True
    ahead = Clock(compiled.CompiledStepper, "_prepare_ahead")
    compiled.CompiledStepper._launch = lambda self, program: None  # type: ignore[method-assign]
    backbone = load_backbone(options.backbone)
    tasks = [load_task(DataConfig(source=f"glue/{name}", root=options.data_root), name) for name in TASKS]
    found = {}
    for slots in SLOTS:
        runs = [
            make_run(
                tasks[number % len(tasks)],
                RunConfig(method=MethodConfig(size=64), train=TrainConfig(lr=1e-3, epochs=9, seed=number)),
                backbone,
            )
            for number in range(slots)
        ]
        found[slots] = measure(Cohort(runs, backbone, CohortSettings(131072, 1, 10**9)), ahead)
        print(f"{slots} slots: {found[slots]}")
    report.finish(options, milliseconds_a_step=found)


class Clock:
    """Adds up the seconds spent in a method."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds, timed = 0.0, getattr(owner, name)

        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return timed(*args)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(owner, name, call)


def measure(cohort: Cohort, ahead: Clock) -> dict[str, float]:
    """Milliseconds of a step: the medians of a few turns."""
    assert isinstance(cohort.stepper, compiled.CompiledStepper)
    turns = []
    with cohort.training():
        for _ in range(REPEATS + 1):
            ahead.seconds, began = 0.0, time.perf_counter()
            for _ in range(STEPS):
                cohort.step()
            whole = time.perf_counter() - began
            turns.append((ahead.seconds, whole - ahead.seconds))
            for member in cohort.members:  # what comes at an epoch's end is not measured here
                member.progress.cursor = 0
    columns = zip(*turns[1:], strict=True)
    return {
        name: round(statistics.median(column) / STEPS * 1e3, 3)
        for name, column in zip(("ahead", "between"), columns, strict=True)
    }


if __name__ == "__main__":
    main()
