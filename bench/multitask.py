"""What a training step of several tasks as one run costs by method, beside Adapters†, side by side in one process.

    python bench/multitask.py [--device cpu] [--backbone minilm] [--tasks 8] [--size 16] [--seeds 1] [--repeats 20]
                              [--operators]

Every method takes a step on the same rows in turns, and the median of its ratio to the step of `mahabadi-multi` is
printed. Batches are of one task each, or mixed, so that every task has rows. Texts are the shipped SMS messages. The
bar: a step of `hyperformer++` takes at most 1.3 of Adapters†'s.

With `--operators` the operators of one step are counted instead, and on a GPU its launches, copies and waits.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics

import report
import torch
from methods import step
from operators import RUNTIME, count_operators

from inlay.data import load_task
from inlay.model import load_backbone
from inlay.model.bank.methods import JOINT_METHODS
from inlay.settings import DataConfig, JointConfig, MethodConfig, RunConfig, TrainConfig
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.run.joint import make_joint_run

BESIDE = "mahabadi-multi"
METHODS = (BESIDE, "hyperformer", "hyperformer++", "full-multi")
BAR = 1.3
WARM_UP = 3
MOST_SHOWN = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None, help="cpu or cuda; default: what there is")
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=1, help="runs of a method that train together")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--batches", default="homogeneous", choices=("homogeneous", "mixed"))
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch")
    parser.add_argument("--dtype", default=None, choices=("float32", "bfloat16", "float16"), help="of the backbone")
    parser.add_argument("--operators", action="store_true", help="count the operators of a step")
    report.add_options(parser)
    options = parser.parse_args()
    methods = list(dict.fromkeys([BESIDE, *options.methods.split(",")]))
    dtype = options.dtype and getattr(torch, options.dtype)
    backbone = load_backbone(options.backbone, device=options.device, dtype=dtype)
    source = DataConfig(source=str(report.ROOT / "examples/sms_spam/sms_spam.tsv"), limit=512)
    task = load_task(source, "sms")
    tasks = [dataclasses.replace(task, name=f"sms{number}") for number in range(options.tasks)]
    cohorts = {name: make_cohort(tasks, name, backbone, options) for name in methods}
    if options.operators:
        report.finish(options, device=str(backbone.device), operators=count_steps(cohorts, backbone))
        return
    rounds = [
        {name: step(cohort, backbone, cursor) for name, cohort in cohorts.items()}
        for cursor in range(options.repeats + WARM_UP)
    ][WARM_UP:]
    relative = {name: statistics.median(took[name] / took[BESIDE] for took in rounds) for name in methods}
    report.finish(
        options,
        backbone=options.backbone,
        device=str(backbone.device),
        num_tasks=options.tasks,
        size=options.size,
        seeds=options.seeds,
        batches=options.batches,
        step_beside_s=round(statistics.median(took[BESIDE] for took in rounds), 4),
        step_relative={name: round(value, 3) for name, value in relative.items()},
        bar=BAR,
        is_within=relative.get("hyperformer++", 0.0) <= BAR,
    )


def count_steps(cohorts, backbone) -> dict[str, dict[str, object]]:
    """What a step of every method launches, the most frequent operators beside; two steps before it warm up."""
    found = {}
    for name, cohort in cohorts.items():
        for cursor in range(WARM_UP - 1):
            step(cohort, backbone, cursor)
        counts = count_operators(lambda cohort=cohort: step(cohort, backbone, WARM_UP - 1))
        runtime = {each: counts.pop(each) for each in dict.fromkeys(RUNTIME.values()) if each in counts}
        found[name] = {"operators": counts.total(), **runtime, "most": dict(counts.most_common(MOST_SHOWN))}
    return found


def make_cohort(tasks, name: str, backbone, options) -> Cohort:
    num_seeds = 1 if JOINT_METHODS[name].is_finetuned else options.seeds
    configs = [
        RunConfig(
            method=MethodConfig(name, options.size if JOINT_METHODS[name].size else None),
            train=TrainConfig(lr=1e-4, seed=seed, batch_size=options.rows),
            joint=JointConfig(batches=options.batches),
        )
        for seed in range(num_seeds)
    ]
    runs = [make_joint_run(tasks, config, backbone) for config in configs]
    return Cohort(runs, backbone, CohortSettings(10**6, torch.get_num_threads(), 10**9))


if __name__ == "__main__":
    main()
