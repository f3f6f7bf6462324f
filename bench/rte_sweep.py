"""Houlsby's whole sweep for RTE as one `fit`: 3 rates × 2 numbers of epochs × 3 sizes × 5 seeds = 90 runs.

    python bench/rte_sweep.py --backbone DIR/mpnet-base --data-root DIR

The preset is houlsby2019 with the head on the mean of the tokens (MPNet has no pretrained pooler) and no attention
dropout unless `--attention-dropout` says so. Beside it stands what `adapters` would take: its rate, measured before and
after the sweep on batches of the same lengths, times the rows that the 90 runs train on. It was not trained 90 times,
its dev scoring is not counted, and as `adapters` 1.3 has no MPNet it is measured on a BERT of the same layers and width
with random weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
import turns
from train import MODES
from turns import Environments, Way, Worker
from workload import Workload, make_workload

from inlay.config import DataConfig, RunConfig
from inlay.data import load_task
from inlay.model import load_backbone
from inlay.model.backbone import Backbone
from inlay.presets import apply_preset
from inlay.research.sweep import make_grid, rank
from inlay.training import FitSettings, Run, fit, make_run
from inlay.training.cohort import Watcher

AXES: dict[str, list[Any]] = {
    "train.lr": [3e-5, 3e-4, 3e-3],
    "train.epochs": [3, 20],
    "method.size": [8, 64, 256],
}
PEER_STEPS = 60


class Log(Watcher):
    """A line for every run that ends."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def on_end(self, member: Any) -> None:
        train, progress = member.run.config.train, member.progress
        what = f"lr {train.lr:g}, {train.epochs} epochs, size {member.run.config.method.size}, seed {train.seed}"
        score = "none" if progress.best_metric is None else f"{progress.best_metric:.3f}"
        print(f"{time.perf_counter() - self.began:7.1f} s  {what}: {score}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backbone", required=True, help="folder of MPNet-base")
    parser.add_argument("--data-root", required=True, help="folder of the GLUE sets")
    parser.add_argument("--peers", default="adapters/eager", help="LIBRARY/MODE by commas, as in train.py, or none")
    parser.add_argument("--peer-backbone", default="base", help="what the peer is measured on")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--limit", type=int, help="training rows, for a trial of this script")
    parser.add_argument("--sizes", default=",".join(map(str, AXES["method.size"])), help="for a trial of this script")
    parser.add_argument("--attention-dropout", type=float, default=0.0)
    parser.add_argument("--runs", type=Path, help="where the runs are kept; default: nowhere, so that none is known")
    parser.add_argument("--max-cohort", type=int, help="runs trained together at most; default: as `fit` chooses")
    turns.add_options(parser)
    report.add_options(parser)
    options = parser.parse_args()
    backbone = load_backbone(options.backbone, device=options.device)
    axes = AXES | {"method.size": options.sizes.split(",")}
    runs = make_runs(backbone, axes, options)
    work = make_workload(options.peer_backbone, find_lengths(runs[0], backbone), options.folder)
    peers = [make_peer(name, work, options) for name in options.peers.split(",") if name != "none"]
    before = [measure_peer(peer, options) for peer in peers]
    seconds, results = train(runs, backbone, options)
    after = [measure_peer(peer, options) for peer in peers]
    num_samples = sum(run.config.train.epochs * len(run.task.train) for run in runs)
    ranking = rank(runs, results, list(axes))
    report.finish(
        options,
        backbone=options.backbone,
        device=options.device,
        runs=len(runs),
        samples=num_samples,
        mean_length=round(float(work.lengths.mean()), 1),
        seconds=round(seconds, 1),
        samples_per_s=round(num_samples / seconds, 1),
        status={status: sum(r.status == status for r in results) for status in {r.status for r in results}},
        best_settings=[dataclasses.asdict(setting) for setting in ranking.settings[:3]],
        peers={
            peer.name: describe_peer(peer, rates, num_samples, seconds)
            for peer, *rates in zip(peers, before, after, strict=True)
        },
    )


def make_runs(backbone: Backbone, axes: dict[str, list[Any]], options: argparse.Namespace) -> list[Run]:
    task = load_task(DataConfig(source="glue/rte", root=options.data_root, limit=options.limit), "rte")
    config = apply_preset("houlsby2019", RunConfig())
    longest = min(128, backbone.max_length)
    train = dataclasses.replace(
        config.train, pooling="mean", attention_dropout=options.attention_dropout, max_length=longest
    )
    grid = make_grid(dataclasses.replace(config, train=train), axes, options.seeds)
    return [make_run(task, point, backbone) for point in grid]


def find_lengths(run: Run, backbone: Backbone) -> np.ndarray:
    """The rows' lengths in tokens, as the runs read them."""
    rows = run.task.train
    ids = backbone.tokenizer(rows.texts, rows.pairs, truncation="longest_first", max_length=run.max_length)["input_ids"]
    return np.array([len(row) for row in ids])


def train(runs: list[Run], backbone: Backbone, options: argparse.Namespace) -> tuple[float, list[Any]]:
    chosen = {} if options.max_cohort is None else {"max_cohort": options.max_cohort}
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        results = fit(runs, backbone, options.runs or Path(scratch), FitSettings(save_every=10**9, **chosen), Log())
        return time.perf_counter() - began, results


def make_peer(name: str, work: Workload, options: argparse.Namespace) -> Way:
    library, _, mode = name.partition("/")
    job = {
        "work": "train",
        "folder": str(work.backbone),
        "rows": str(work.path),
        "device": options.device,
        "threads": torch.get_num_threads(),
        "batch_size": 32,
        "size": 64,
        "library": library,
    }
    return Way(name, job | MODES[mode])


def measure_peer(way: Way, options: argparse.Namespace) -> float | None:
    """Samples a second in a process of its own, which is gone before Inlay needs the memory."""
    options.folder.mkdir(parents=True, exist_ok=True)
    worker = Worker(way, Environments(options.adapters_python, options.folder))
    try:
        worker.ask(do="prepare", **way.job)
        facts = worker.hear(options.prepare_limit_s)
        if facts is None:
            return None
        way.facts = facts
        worker.ask(do="measure", steps=PEER_STEPS)
        answer = worker.hear(options.prepare_limit_s)
        return None if answer is None else answer["samples"] / answer["seconds"]
    finally:
        worker.stop()


def describe_peer(way: Way, rates: list[float | None], num_samples: int, seconds: float) -> dict[str, Any]:
    """What the peer would take by its better rate: an estimate, and named so."""
    measured = [rate for rate in rates if rate is not None]
    if not measured:
        return {"error": way.error}
    estimated = num_samples / max(measured)
    return {
        "measured_on": f"{way.job['folder']}, size 64",
        "samples_per_s": [round(rate, 1) for rate in measured],
        "estimated_seconds": round(estimated, 1),
        "estimated_over_measured": round(estimated / seconds, 2),
        **way.facts,
    }


if __name__ == "__main__":
    main()
