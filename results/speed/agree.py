"""Speed must not change results: four GLUE tasks on MiniLM, three seeds, by compiled steps and by the definition.

    python results/speed/agree.py --data-root DIR --path compiled|definition --out FILE [--backbone minilm] [--tasks T]
    python results/speed/agree.py --merge FILE… --out FILE

`compiled` is what a GPU runs: packed rows, fused kernels, compiled and captured steps. `definition` is the loop over
segments in plain PyTorch on padded batches, on the same device. The files of both, of all tasks or of some each, are
merged into one, which has the difference of the means and its standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from inlay.data import load_task
from inlay.model import load_backbone
from inlay.model.kernels import launch
from inlay.settings.run_config import DataConfig, MethodConfig, RunConfig, TrainConfig
from inlay.training import FitSettings, fit, make_run

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import report

TASKS = {"cola": "matthews", "mrpc": "f1", "rte": "accuracy", "stsb": "spearman"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root")
    parser.add_argument("--path", choices=("compiled", "definition"))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--merge", type=Path, nargs="+", help="files of both paths")
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--runs", type=Path, default=Path("/tmp/inlay-agree"))
    report.add_options(parser)
    options = parser.parse_args()
    if options.merge:
        merge(options)
    elif options.path and options.data_root:
        measure(options)
    else:
        parser.error("give --data-root and --path, or --merge")


def measure(options: argparse.Namespace) -> None:
    tasks = options.tasks.split(",")
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
        for name in tasks
        for seed in range(options.seeds)
    ]
    began = time.perf_counter()
    results = fit(
        runs, backbone, options.runs / options.path, FitSettings(save_every=10**9, max_cohort=12, draw_curves=False)
    )
    found: dict[str, list[float]] = {name: [] for name in tasks}
    for run, result in zip(runs, results, strict=True):
        found[run.task.name].append(round(100 * (result.dev_metric or 0.0), 2))
    report.finish(
        options,
        path=options.path,
        metrics=TASKS,
        seconds=round(time.perf_counter() - began, 1),
        epochs=options.epochs,
        scores=found,
    )


def merge(options: argparse.Namespace) -> None:
    """Both paths' scores of every task, side by side."""
    files = [json.loads(path.read_text(encoding="utf8")) for path in options.merge]
    scores: dict[str, dict[str, list[float]]] = {"compiled": {}, "definition": {}}
    for file in files:
        scores[file["path"]] |= file["scores"]
    report.finish(
        options,
        made_from=[{name: file[name] for name in ("command", "commit", "hardware", "versions")} for file in files],
        metrics=TASKS,
        epochs=sorted({file["epochs"] for file in files}),
        seconds={path: sum(file["seconds"] for file in files if file["path"] == path) for path in scores},
        scores=scores,
        compared={
            name: compare(scores["compiled"][name], scores["definition"][name])
            for name in TASKS
            if name in scores["compiled"] and name in scores["definition"]
        },
    )


def compare(compiled: list[float], definition: list[float]) -> dict[str, float | bool]:
    """The means, their difference, its standard error, and whether it is within two of these."""
    means = statistics.mean(compiled), statistics.mean(definition)
    error = (statistics.variance(compiled) / len(compiled) + statistics.variance(definition) / len(definition)) ** 0.5
    difference = means[0] - means[1]
    return {
        "compiled": round(means[0], 2),
        "definition": round(means[1], 2),
        "difference": round(difference, 2),
        "standard_error": round(error, 2),
        "is_within_two_errors": abs(difference) <= 2 * error,
    }


if __name__ == "__main__":
    main()
