"""Every method on real data: four GLUE tasks on MiniLM, each method's runs as one cohort sweep.

    python results/methods/run.py --data-root DIR [--methods houlsby lora …] [--out results/methods/scores.json]

For every row of METHODS: CoLA, MRPC, RTE and STS-B × two learning rates × two seeds, best epoch on dev, trained
together (fine-tuning: one after another). Writes one JSON file with every run, and adds to it where it is there, so
that the table can be made in several calls. `--draw` makes the table and the picture of the file, and trains nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

TASKS = {"cola": "matthews", "mrpc": "f1", "rte": "accuracy", "stsb": "spearman"}
SEEDS = (0, 1)
BASELINE = "TF-IDF, no transformer"
# Where a row's name stands in the picture, in points, if another's would cover it.
LABELS_AT = {
    "bitfit": (5, -10),
    "head, cls": (5, -10),
    "parallel": (-42, 3),
    "pfeiffer": (6, -8),
    "houlsby, within-layer": (6, -3),
    "houlsby, every-3": (-20, -12),
}
EPOCHS = 5

# row -> method settings, training settings, learning rates
METHODS: dict[str, tuple[dict, dict, tuple[float, float]]] = {
    "houlsby": ({"size": 64}, {}, (5e-4, 1e-3)),
    "pfeiffer": ({"name": "pfeiffer", "size": 64}, {}, (5e-4, 1e-3)),
    "parallel": ({"name": "parallel", "size": 64}, {}, (5e-4, 1e-3)),
    "lora": ({"name": "lora", "size": 8}, {}, (1e-3, 3e-3)),
    "ia3": ({"name": "ia3"}, {}, (5e-3, 1e-2)),
    "bitfit": ({"name": "bitfit"}, {}, (1e-3, 3e-3)),
    "norms": ({"name": "norms"}, {}, (1e-3, 3e-3)),
    "head, mean": ({"name": "head"}, {}, (3e-3, 1e-2)),
    "head, cls": ({"name": "head"}, {"pooling": "cls"}, (3e-3, 1e-2)),
    "head, mix": ({"name": "head"}, {"features": "mix"}, (3e-3, 1e-2)),
    "houlsby, norms frozen": ({"size": 64, "norms": "none"}, {}, (5e-4, 1e-3)),
    "houlsby, within-layer": ({"size": 64, "sharing": "within-layer"}, {}, (5e-4, 1e-3)),
    "houlsby, every-3": ({"size": 64, "sharing": "every-3"}, {}, (5e-4, 1e-3)),
    "houlsby, all shared": ({"size": 64, "sharing": "all"}, {}, (5e-4, 1e-3)),
    "houlsby, layer norm": ({"size": 64, "inner_norm": "layer"}, {}, (5e-4, 1e-3)),
    "houlsby, batch norm": ({"size": 64, "inner_norm": "batch"}, {}, (5e-4, 1e-3)),
    "houlsby, two layers": ({"size": 64, "depth": 2}, {}, (5e-4, 1e-3)),
    "houlsby, tanh": ({"size": 64, "activation": "tanh"}, {}, (5e-4, 1e-3)),
    "houlsby, attention only": ({"size": 64, "places": ("attention",)}, {}, (5e-4, 1e-3)),
    "houlsby, in parallel": ({"size": 64, "form": "parallel"}, {}, (5e-4, 1e-3)),
    "houlsby, multiplied": ({"size": 64, "combine": "multiply"}, {}, (5e-4, 1e-3)),
    "houlsby, top half": ({"size": 64, "layers": "3:"}, {}, (5e-4, 1e-3)),
    "top 3 layers": ({"name": "top", "layers": "-3:"}, {}, (5e-5, 1e-4)),
    "full": ({"name": "full"}, {}, (5e-5, 1e-4)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root")
    parser.add_argument("--backbone", default="minilm")
    rows = [BASELINE, *METHODS]
    parser.add_argument("--methods", nargs="+", default=rows, choices=rows, metavar="ROW")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS), metavar="TASK")
    parser.add_argument("--runs", type=Path, default=Path("/tmp/inlay-method-runs"))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("scores.json"))
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--limit", type=int, help="training rows per task, for a trial of this script")
    parser.add_argument("--commit", help="where the checkout has no .git")
    parser.add_argument("--draw", action="store_true", help="print the table of --out and draw its picture")
    options = parser.parse_args()
    if not options.draw:
        train(options)
    draw(json.loads(options.out.read_text()), options.out.with_name("methods.svg"))


def train(options: argparse.Namespace) -> None:
    import torch
    import transformers

    from inlay.config import DataConfig
    from inlay.data import load_task
    from inlay.model import load_backbone
    from inlay.training.publish import current_commit

    backbone = load_backbone(options.backbone)
    report = json.loads(options.out.read_text()) if options.out.exists() else {"rows": {}}
    tasks = [
        load_task(DataConfig(source=f"glue/{name}", root=options.data_root, limit=options.limit), name)
        for name in options.tasks
    ]
    about = {
        "command": "python " + " ".join(sys.argv),
        "commit": options.commit or current_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "backbone": {"name": "minilm", "parameters": backbone.num_parameters, "fingerprint": backbone.fingerprint},
        "precision": str(backbone.dtype).removeprefix("torch."),
    }
    for row in options.methods:
        if row == BASELINE:
            report["rows"][row] = {**fit_baselines(tasks), **about, "hardware": "CPU"}
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            continue
        before = report["rows"].get(row, {"runs": []})["runs"]
        for found in train_row(row, tasks, backbone, options):
            kept = [run for run in before if run["task"] not in options.tasks]
            report["rows"][row] = {**found, "runs": [*kept, *found["runs"]], **about}
            options.out.write_text(json.dumps(report, indent=1) + "\n")


def train_row(row: str, tasks: list, backbone, options: argparse.Namespace) -> Iterator[dict]:
    """All runs of one method: as one call of `fit`, or of fine-tuning one by one, each told of when it is done."""
    from inlay.config import MethodConfig, RunConfig, TrainConfig
    from inlay.training import FitSettings, fit, make_run

    method, settings, rates = METHODS[row]
    runs = []
    for task in tasks:
        for lr in rates:
            for seed in SEEDS:
                train = TrainConfig(**{"lr": lr, "epochs": options.epochs, "seed": seed, "pooling": "mean", **settings})
                runs.append(make_run(task, RunConfig(method=MethodConfig(**method), train=train), backbone))
    groups = [[run] for run in runs] if runs[0].spec.is_solo else [runs]
    described, seconds = [], 0.0
    for group in groups:
        began = time.perf_counter()
        results = fit(group, backbone, options.runs, FitSettings(save_every=10**9))
        seconds += time.perf_counter() - began
        described += [describe(run, result, backbone) for run, result in zip(group, results, strict=True)]
        yield {
            "method": method,
            "training": settings,
            "seconds": round(seconds, 1),
            "seconds_per_epoch_and_run": round(seconds / len(described) / options.epochs, 3),
            "runs_together": len(group),
            "epochs": options.epochs,
            "runs": list(described),
        }
    print(f"{seconds:6.0f} s  {row:26} {summarise(described)}", flush=True)


def fit_baselines(tasks: list) -> dict:
    """TF-IDF and a linear model, which has no learning rate and no seed; its strength is chosen on dev."""
    from inlay.research.baseline import fit_baseline

    runs = []
    for task in tasks:
        found = fit_baseline(task)
        score = round(100 * found.metrics["dev"][found.metric], 2)
        runs.append({"task": task.name, "lr": None, "seed": None, "score": score, "seconds": round(found.seconds, 2)})
        runs[-1] |= {"trained_parameters": found.num_parameters, "stored_bytes": 0}
    return {"runs": runs, "seconds_per_epoch_and_run": None}


def describe(run, result, backbone) -> dict:
    stored = result.folder / "best.safetensors"
    return {
        "task": run.task.name,
        "lr": run.config.train.lr,
        "seed": run.config.train.seed,
        "trained_parameters": run.spec.count_parameters(backbone.anatomy),
        "stored_bytes": stored.stat().st_size if stored.exists() else 0,
        "status": result.status,
        "best_epoch": result.best_epoch,
        "score": round(100 * (result.dev_metric or 0.0), 2),
    }


def summarise(runs: list[dict]) -> dict[str, float]:
    """For each task the mean over seeds at the better of the learning rates, and the mean of the tasks."""
    means = {}
    for task in TASKS:
        by_rate: dict[float, list[float]] = {}
        for run in runs:
            if run["task"] == task:
                by_rate.setdefault(run["lr"], []).append(run["score"])
        if by_rate:
            means[task] = max(statistics.mean(scores) for scores in by_rate.values())
    rounded = {task: round(value, 1) for task, value in means.items()}
    return {**rounded, "mean": round(statistics.mean(means.values()), 1)}


def draw(report: dict, picture: Path) -> None:
    """The table as Markdown on stdout, and mean score against trained parameters as a picture."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "inlay"
    from matplotlib import pyplot

    steps = json.loads((Path(__file__).parents[2] / "bench" / "methods.json").read_text())["step_relative_to_houlsby"]
    print("| method | CoLA | MRPC | RTE | STS-B | mean | trained parameters | stored | s per epoch and run | step |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for row in (row for row in (BASELINE, *METHODS) if row in report["rows"]):
        found = report["rows"][row]
        first, scores = found["runs"][0], summarise(found["runs"])
        if not TASKS.keys() <= scores.keys():  # made in part so far
            continue
        cells = [f"{scores[name]:.1f}" for name in (*TASKS, "mean")]
        seconds, stored = found["seconds_per_epoch_and_run"], first["stored_bytes"]
        cells += [f"{first['trained_parameters']:,}", f"{stored / 1e6:.2f} MB" if stored else "not stored"]
        cells += ["–" if seconds is None else f"{seconds:.2f}"]
        step = steps.get("head" if row == "head, mean" else row)  # MiniLM pools by the mean unless told otherwise
        cells += ["–" if step is None else f"{step:.2f}"]
        print(f"| {row} | {' | '.join(cells)} |")
        is_setting = row.startswith("houlsby,")
        axes.plot(
            first["trained_parameters"],
            scores["mean"],
            "o" if not is_setting else ".",
            color="#888" if is_setting else "C0",
        )
        place = (first["trained_parameters"], scores["mean"])
        offset = LABELS_AT.get(row, (5, 4))
        axes.annotate(row, place, textcoords="offset points", xytext=offset, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("trained parameters per task")
    axes.set_ylabel("mean dev score of CoLA, MRPC, RTE, STS-B")
    axes.set_xlim(right=1e8)
    axes.set_title("Methods on MiniLM")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
