"""Speed must not change results: four GLUE tasks on MiniLM, three seeds, by compiled steps and by the definition.

    python results/speed/agree.py --data-root DIR --path compiled|definition --out FILE [--backbone minilm]

`compiled` is what a GPU runs: packed rows, fused kernels, compiled and captured steps. `definition` is the loop over
segments in plain PyTorch on padded batches, on the same device. Run it twice and compare the two files' means.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from inlay.config import DataConfig, MethodConfig, RunConfig, TrainConfig
from inlay.data import load_task
from inlay.model import launch, load_backbone
from inlay.training import FitSettings, fit, make_run

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import report

TASKS = {"cola": "matthews", "mrpc": "f1", "rte": "accuracy", "stsb": "spearman"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--path", choices=("compiled", "definition"), required=True)
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--runs", type=Path, default=Path("/tmp/inlay-agree"))
    report.add_options(parser)
    options = parser.parse_args()
    backbone = load_backbone(options.backbone)
    if options.path == "definition":
        launch.is_available = lambda device: False
        backbone.packs = False
    runs = [
        make_run(
            load_task(DataConfig(source=f"glue/{name}", root=options.data_root, limit=options.limit), name),
            RunConfig(
                method=MethodConfig(size=64),
                train=TrainConfig(lr=5e-4, epochs=options.epochs, seed=seed, pooling="mean", bucket=1),
            ),
            backbone,
        )
        for name in TASKS
        for seed in range(options.seeds)
    ]
    began = time.perf_counter()
    results = fit(runs, backbone, options.runs / options.path, FitSettings(save_every=10**9, max_cohort=12))
    found: dict[str, list[float]] = {name: [] for name in TASKS}
    for run, result in zip(runs, results, strict=True):
        found[run.task.name].append(round(100 * (result.dev_metric or 0.0), 2))
    report.finish(
        options,
        path=options.path,
        metrics=TASKS,
        seconds=round(time.perf_counter() - began, 1),
        scores=found,
        means={name: round(statistics.mean(scores), 2) for name, scores in found.items()},
        spread={name: round(statistics.stdev(scores), 2) if len(scores) > 1 else 0 for name, scores in found.items()},
    )


if __name__ == "__main__":
    main()
