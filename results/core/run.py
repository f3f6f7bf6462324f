"""The core's scores on real data: four GLUE tasks, Houlsby m=64 on MiniLM, all runs as one cohort.

    python results/core/run.py --data-root DIR [--backbone minilm] [--out results/core/scores.json]

Trains CoLA, MRPC, RTE and STS-B with two seeds each, best epoch on dev, and writes one JSON file with every run's
settings and scores, the commit, the hardware and the date. A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

from inlay.data import load_task
from inlay.model import load_backbone
from inlay.settings.run_config import DataConfig, MethodConfig, RunConfig, TrainConfig
from inlay.training import FitSettings, fit, make_run
from inlay.training.cohort.cohort import Watcher
from inlay.training.run.publish import current_commit

TASKS = {"cola": "matthews", "mrpc": "f1", "rte": "accuracy", "stsb": "spearman"}


class Log(Watcher):
    def on_epoch(self, member, record):
        run = member.run
        score = record["dev"][run.task.metric]
        where = f"{run.task.name} bucket {run.config.train.bucket} seed {run.config.train.seed}"
        print(f"{record['seconds']:7.1f} s  {where:24} epoch {record['epoch']:2}  {score:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--runs", type=Path, default=Path("/tmp/inlay-core-runs"))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("scores.json"))
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--bucket", type=int, nargs="+", default=[4], help="see `inlay train --help`")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit", type=int, help="training rows per task, for a trial of this script")
    parser.add_argument("--dtype", help="of the frozen weights: bfloat16 or float32; default: the device's own")
    parser.add_argument("--commit", default=current_commit(), help="where the checkout has no .git")
    options = parser.parse_args()
    backbone = load_backbone(options.backbone, dtype=getattr(torch, options.dtype) if options.dtype else None)
    runs = []
    for name in TASKS:
        task = load_task(DataConfig(source=f"glue/{name}", root=options.data_root, limit=options.limit), name)
        for bucket in options.bucket:
            for seed in (0, 1):
                train = TrainConfig(lr=options.lr, epochs=options.epochs, seed=seed, pooling="mean", bucket=bucket)
                runs.append(make_run(task, RunConfig(method=MethodConfig(size=64), train=train), backbone))
    began = time.perf_counter()
    results = fit(runs, backbone, options.runs, FitSettings(save_every=1000), Log())
    seconds = time.perf_counter() - began
    report = {
        "command": "python " + " ".join(sys.argv),
        "commit": options.commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "backbone": {"name": "minilm", "fingerprint": backbone.fingerprint},
        "precision": str(next(backbone.model.parameters()).dtype).removeprefix("torch."),
        "seconds": round(seconds, 1),
        "metrics": TASKS,
        "runs": [describe(run, result) for run, result in zip(runs, results, strict=True)],
    }
    report["means"] = {f"bucket {bucket}": summarise(report["runs"], bucket) for bucket in options.bucket}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["means"], indent=1))


def describe(run, result) -> dict:
    return {
        "task": run.task.name,
        "lr": run.config.train.lr,
        "bucket": run.config.train.bucket,
        "seed": run.config.train.seed,
        "epochs": run.config.train.epochs,
        "trained_parameters": sum(tensor.numel() for tensor in result.tensors.values()),
        "status": result.status,
        "best_epoch": result.best_epoch,
        "score": round(100 * (result.dev_metric or 0.0), 2),
        "dev": result.dev_metrics,
    }


def summarise(runs: list[dict], bucket: int) -> dict:
    """Each task's mean over seeds, and the mean of the four."""
    means = {
        name: statistics.mean(run["score"] for run in runs if run["task"] == name and run["bucket"] == bucket)
        for name in TASKS
    }
    return {
        **{name: round(value, 2) for name, value in means.items()},
        "mean": round(statistics.mean(means.values()), 2),
    }


if __name__ == "__main__":
    main()
