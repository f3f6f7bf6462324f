"""Several tasks as one run on a text-to-text backbone: steps on packed rows beside padded ones, and dev rows by texts.

    python bench/written.py --backbone T5 --data-root DIR [--method mahabadi-multi] [--runs 18] [--repeats 5]

Six tasks of GLUE with the words of T5's own training. A step's decoder attends to what was read as it lies in the pack,
or to rows padded to the longest; both ways take the same steps in turns, captured on a GPU before anything is timed.
Dev rows are answered with those of the same label texts together, and by length alone, as if texts did not matter. The
medians of the ratios count. A step of both ways without dropout, of a method that begins as the backbone is, must have
the same losses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import report
import torch
from methods import step

from inlay.data import load_task
from inlay.model import load_backbone
from inlay.model.bank.methods import JOINT_METHODS
from inlay.model.heads import inference
from inlay.model.kernels import attention
from inlay.settings import DataConfig, JointConfig, MethodConfig, RunConfig, TrainConfig
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.run.joint import make_joint_run

WORDS = {
    "cola": ("0=unacceptable", "1=acceptable"),
    "sst2": ("0=negative", "1=positive"),
    "mrpc": ("0=not_equivalent", "1=equivalent"),
    "stsb": (),
    "rte": (),
    "mnli": (),
}
CURSORS = 6
"""different steps"""
WARM_UP = 3
"""a step is launched, captured and replayed"""
NEAR = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--method", default="mahabadi-multi", choices=list(JOINT_METHODS))
    parser.add_argument("--runs", type=int, default=18)
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch")
    parser.add_argument("--scored", type=int, default=2, help="runs whose dev rows are answered")
    parser.add_argument("--most-dev", type=int, default=None, help="dev rows of a task at most")
    parser.add_argument("--repeats", type=int, default=5)
    report.add_options(parser)
    options = parser.parse_args()
    backbone = load_backbone(options.backbone)
    first = {way: first_losses(backbone, options, way) for way in ("packed", "padded")}
    apart = max(abs(one / other - 1) for one, other in zip(*first.values(), strict=True))
    assert apart <= NEAR, f"packed and padded rows have losses that are {apart:.1%} apart: {first}"
    ways = {way: make_cohort(backbone, options, options.method, options.runs) for way in first}
    report.say("made two cohorts")
    for _ in range(WARM_UP):
        for way, cohort in ways.items():
            take_steps(cohort, backbone, way)
    report.say("warmed up")
    rounds = [
        {way: take_steps(cohort, backbone, way) / CURSORS for way, cohort in ways.items()}
        for _ in range(options.repeats)
    ]
    report.say("took the steps")
    assert all(cohort.active == cohort.members for cohort in ways.values()), "a run diverged"
    scored = [compare_dev(ways["packed"], options.scored) for _ in range(options.repeats + 1)][1:]
    step_s = statistics.median(each["packed"] for each in rounds)
    report.finish(
        options,
        backbone=options.backbone,
        device=str(backbone.device),
        step_s=round(step_s, 5),
        rows_per_s=round(options.runs * options.rows / step_s),
        padded_relative=round(statistics.median(each["padded"] / each["packed"] for each in rounds), 3),
        dev_rows_per_s=round(statistics.median(each["by texts"] for each in scored)),
        dev_by_length_alone_relative=round(
            statistics.median(each["by texts"] / each["by length alone"] for each in scored), 3
        ),
        first_losses_apart=round(apart, 5),
    )


def make_cohort(
    backbone: Any, options: argparse.Namespace, name: str, num_runs: int, dropout: float | None = None
) -> Cohort:
    sources = {
        name: DataConfig(source=f"glue/{name}", root=options.data_root, answers=answers, most_dev=options.most_dev)
        for name, answers in WORDS.items()
    }
    tasks = [load_task(source, name) for name, source in sources.items()]
    method = MethodConfig(name, 16 if JOINT_METHODS[name].size else None)
    trains = [TrainConfig(lr=1e-4, seed=seed, batch_size=options.rows, dropout=dropout) for seed in range(num_runs)]
    runs = [
        make_joint_run(
            tasks, RunConfig(method=method, train=train, joint=JointConfig()), backbone, data=list(sources.values())
        )
        for train in trains
    ]
    return Cohort(runs, backbone, CohortSettings(131072, torch.get_num_threads(), 10**9))


def take_steps(cohort: Cohort, backbone: Any, way: str) -> float:
    """Seconds of a step at every cursor."""
    with nullcontext() if way == "packed" else replaced(attention, "flashes", lambda q: False):
        return sum(step(cohort, backbone, cursor) for cursor in range(CURSORS))


def first_losses(backbone: Any, options: argparse.Namespace, way: str) -> list[float]:
    """The losses of a run's first steps, without dropout."""
    cohort = make_cohort(backbone, options, "hyperformer", 1, dropout=0.0)
    take_steps(cohort, backbone, way)
    return cohort.members[0].progress.losses


def compare_dev(cohort: Cohort, num_runs: int) -> dict[str, float]:
    """Dev rows answered in a second, either way."""
    rows = [row for member in cohort.members[:num_runs] for part in member.parts for row in part.dev_rows()]
    by_length = inference.batches_by_length

    def without_kinds(lengths: Any, budget: int, *, packs: bool = False, kinds: Any = None) -> Any:
        return by_length(lengths, budget, packs=packs)

    found = {}
    for way, function in (("by texts", by_length), ("by length alone", without_kinds)):
        with replaced(inference, "batches_by_length", function):
            began = time.perf_counter()
            inference.infer(cohort.bank, rows)
            found[way] = len(rows) / (time.perf_counter() - began)
    return found


@contextmanager
def replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


if __name__ == "__main__":
    main()
