"""What the bank buys on this machine, side by side in one process: cohorts in training, mixed batches in use.

    python bench/core.py [--backbone minilm] [--slots 8] [--repeats 5] [--out bench/core.json]

Every pair of ways is measured in turns, and the median of the ratios is printed: absolute times on a shared machine
mean little. Texts are the shipped SMS messages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import report
import torch

from inlay.data import Task, load_task
from inlay.model import Backbone, Bank, infer, load_backbone
from inlay.model.batch.route import Row
from inlay.settings.run_config import DataConfig, MethodConfig, RunConfig, TrainConfig
from inlay.training import Run, make_run
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.evaluate import encode_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    report.add_options(parser)
    options = parser.parse_args()
    backbone = load_backbone(options.backbone)
    task = load_task(DataConfig(source=str(report.ROOT / "examples/sms_spam/sms_spam.tsv")), "sms")
    findings = {
        "training: a cohort's step / its runs' steps one after another": compare(
            *training_ways(backbone, task, options.slots), options.repeats
        ),
        "use: one mixed batch / a batch for each task": compare(
            *serving_ways(backbone, task, options.slots), options.repeats
        ),
        "use: one mixed batch / the same rows for one task": compare(
            *single_task_ways(backbone, task, options.slots), options.repeats
        ),
    }
    report.finish(options, backbone=options.backbone, slots=options.slots, ratios=findings)


def compare(first: Callable[[], None], second: Callable[[], None], repeats: int) -> dict[str, float]:
    """The median and the range of first's time over second's, measured in turns after a warm-up of each."""
    taken = [(timed(first), timed(second)) for _ in range(repeats + 1)][1:]
    return report.compare([one for one, _ in taken], [other for _, other in taken])


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def training_ways(backbone: Backbone, task: Task, slots: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Four steps of a sweep's runs (seeds and rates) together, and of the same runs each alone."""
    settings = CohortSettings(token_budget=1 << 20, num_threads=torch.get_num_threads(), save_every=1000)
    runs = [make(task, backbone, seed) for seed in range(slots)]
    together, alone = Cohort(runs, backbone, settings), [Cohort([run], backbone, settings) for run in runs]

    def steps(cohorts: list[Cohort]) -> None:
        with backbone.training(None):
            for cohort in cohorts:
                for _ in range(4):
                    cohort.step()

    return lambda: steps([together]), lambda: steps(alone)


def make(task: Task, backbone: Backbone, seed: int) -> Run:
    train = TrainConfig(lr=1e-4 * (1 + seed), seed=seed, epochs=1000)
    return make_run(task, RunConfig(method=MethodConfig(size=64), train=train), backbone)


def fill(backbone: Backbone, task: Task, slots: int) -> tuple[Bank, list[Row]]:
    """A bank of tasks, and four requests for each, shuffled as they would arrive."""
    bank = Bank(backbone, slots)
    for slot in range(slots):
        bank.initialise(slot, make(task, backbone, slot).spec, seed=slot)
    rows = encode_rows(backbone, task.dev, min(128, backbone.max_length))[: 4 * slots]
    return bank, [Row(row.ids, index % slots, row.segments) for index, row in enumerate(rows)]


def serving_ways(backbone: Backbone, task: Task, slots: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """All requests in mixed batches, and a batch for each task in turn."""
    bank, rows = fill(backbone, task, slots)
    by_task = [[row for row in rows if row.slot == slot] for slot in range(slots)]

    def switch() -> None:
        for own in by_task:
            infer(bank, own)

    return lambda: drop(infer(bank, rows)), switch


def single_task_ways(backbone: Backbone, task: Task, slots: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """All requests in mixed batches, and the same texts all for one task."""
    bank, rows = fill(backbone, task, slots)
    for_one = [Row(row.ids, 0, row.segments) for row in rows]
    return lambda: drop(infer(bank, rows)), lambda: drop(infer(bank, for_one))


def drop(answers: list[torch.Tensor]) -> None:
    """An answer nobody waits for."""


if __name__ == "__main__":
    main()
