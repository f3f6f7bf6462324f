"""Does `inlay suggest` find good starts? Rank correlation of what it says with the transfer obtained, on real data.

    python results/suggest/run.py --data-root DIR [--backbone minilm] [--out results/suggest/scores.json]

Trains a Houlsby adapter (m = 64) on every task. Then each task in turn is the new one, with few training rows: it is
trained from every other task and fresh, and `suggest` ranks the same tasks by the same few rows without training. All
runs are trained in cohorts; stopped, the same command goes on. Writes one JSON file and a picture beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

from tasks import TASKS, read_task

from inlay.data.metrics import score
from inlay.explore import SuggestSettings, suggest
from inlay.model import load_backbone
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import FitSettings, fit, make_run, publish
from inlay.training.cohort.cohort import Watcher
from inlay.training.run.publish import current_commit

FRESH = "fresh"


def main() -> None:
    options = read_options()
    options.runs.mkdir(parents=True, exist_ok=True)
    backbone = load_backbone(options.backbone)
    store = Store(options.runs / "store")
    began = time.perf_counter()
    sources = train_sources(options, backbone, store)
    targets = {
        name: read_task(name, options.data_root, num_train=options.rows, num_dev=options.dev_rows)
        for name in options.tasks
    }
    found = {name: suggest_for(name, targets[name], backbone, store, options) for name in options.tasks}
    obtained = train_targets(targets, backbone, store, options)
    seconds = time.perf_counter() - began
    report = {
        "command": "python " + " ".join(sys.argv),
        "commit": options.commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "backbone": {"name": options.backbone, "fingerprint": backbone.fingerprint},
        "settings": {
            key: getattr(options, key)
            for key in (
                "rows",
                "dev_rows",
                "epochs",
                "lr",
                "seeds",
                "source_rows",
                "source_epochs",
                "source_lr",
                "size",
            )
        },
        "metrics": {name: TASKS[name].metric for name in options.tasks},
        "seconds": round(seconds, 1),
        "sources": sources,
        "targets": {name: compare(found[name], obtained[name]) for name in options.tasks},
    }
    report["summary"] = summarise(report["targets"])
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    draw(report, options.out.with_suffix(".png"))
    print(json.dumps(report["summary"], indent=1))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("scores.json"))
    parser.add_argument(
        "--runs", type=Path, default=Path("/tmp/inlay-suggest"), help="where runs and versions are kept"
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--rows", type=int, default=200, help="training rows of a new task")
    parser.add_argument("--dev-rows", type=int, default=500, help="rows a new task is scored on, at most")
    parser.add_argument("--epochs", type=int, default=8, help="of a new task")
    parser.add_argument("--lr", type=float, default=5e-4, help="of a new task")
    parser.add_argument("--seeds", type=int, default=2, help="of a new task, per start")
    parser.add_argument("--source-rows", type=int, default=4000, help="training rows of a source at most")
    parser.add_argument("--source-epochs", type=int, default=5)
    parser.add_argument("--source-lr", type=float, default=5e-4)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--commit", default=current_commit(), help="where the checkout has no .git")
    return parser.parse_args()


class Log(Watcher):
    def on_end(self, member):
        run, progress = member.run, member.progress
        start = ", ".join(run.config.train.start).partition("@")[0] or FRESH
        value = "-" if progress.best_metric is None else f"{progress.best_metric:.4f}"
        print(f"{run.task.name:18} from {start:18} seed {run.config.train.seed}  {value}", flush=True)


def train_sources(options, backbone, store: Store) -> dict[str, dict]:
    """Every task trained and published under its name; what its dev score is, on how many rows."""
    train = TrainConfig(lr=options.source_lr, epochs=options.source_epochs, pooling="mean")
    config = RunConfig(method=MethodConfig(size=options.size), train=train)
    runs = []
    for name in options.tasks:
        task = read_task(name, options.data_root, num_train=options.source_rows, num_dev=2 * options.dev_rows)
        runs.append(make_run(task, config, backbone))
    results = fit(runs, backbone, options.runs / "runs", FitSettings(save_every=500), Log())
    about = {}
    for run, result in zip(runs, results, strict=True):
        version = publish(run, result, backbone, store)
        about[run.task.name] = {
            "version": version.reference,
            "num_train": len(run.task.train),
            "num_dev": len(run.task.dev),
            "metric": run.task.metric,
            "dev": result.dev_metric,
        }
    return about


def suggest_for(name: str, task, backbone, store: Store, options) -> dict:
    """What `suggest` says of every other task, and how long it took."""
    began = time.perf_counter()
    others = [other for other in options.tasks if other != name]
    found = suggest(task, backbone, store, others, SuggestSettings(num_rows=options.rows))
    assert not found.refused, found.refused
    items = {item.reference.partition("@")[0]: item for item in found.ranked}
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "num_rows": found.num_rows,
        "plain": {"score": found.plain.score, "fit": found.plain.fit},
        "ranking": list(items),
        "scores": {other: items[other].score for other in others},
        "fits": {other: items[other].fit for other in others},
    }


def train_targets(targets: dict, backbone, store: Store, options) -> dict[str, dict[str, list[float]]]:
    """New task -> start -> its dev score with each seed: from every other task, and fresh."""
    train = TrainConfig(lr=options.lr, epochs=options.epochs, batch_size=16, pooling="mean")
    config = RunConfig(method=MethodConfig(size=options.size), train=train)
    runs, places = [], []
    for name, task in targets.items():
        task = dataclasses.replace(task, name=f"{name}-{options.rows}")
        for start in [FRESH, *(other for other in targets if other != name)]:
            for seed in range(options.seeds):
                names = () if start == FRESH else (start,)
                own = dataclasses.replace(config, train=dataclasses.replace(train, seed=seed, start=names))
                runs.append(make_run(task, own, backbone, store))
                places.append((name, start))
    results = fit(runs, backbone, options.runs / "runs", FitSettings(save_every=500), Log())
    scores: dict[str, dict[str, list[float]]] = {name: {} for name in targets}
    for (name, start), result in zip(places, results, strict=True):
        assert result.dev_metric is not None, f"{name} from {start}: {result.message}"
        scores[name].setdefault(start, []).append(result.dev_metric)
    return scores


def compare(found: dict, obtained: dict[str, list[float]]) -> dict:
    """Rank correlations over the starts, and what the first suggestion was worth beside the best and the mean start."""
    others = list(found["scores"])
    means = {start: statistics.mean(values) for start, values in obtained.items()}
    reached = np.array([means[other] for other in others])
    keys = ("scores", "fits")
    correlations = {key: score("spearman", np.array([found[key][other] for other in others]), reached) for key in keys}
    by_fit = max(others, key=lambda other: found["fits"][other])
    return {
        "correlation": {"score": correlations["scores"], "fit": correlations["fits"]},
        "fresh": means[FRESH],
        "suggested": {"start": found["ranking"][0], "reached": means[found["ranking"][0]]},
        "suggested_by_fit": {"start": by_fit, "reached": means[by_fit]},
        "best": {"start": others[int(reached.argmax())], "reached": float(reached.max())},
        "mean_start": float(reached.mean()),
        "suggestion": found,
        "obtained": obtained,
    }


def summarise(targets: dict[str, dict]) -> dict:
    """Means over the new tasks. `gain` is over training fresh, in points of each task's own metric."""

    def mean(value) -> float:
        return round(statistics.mean(value(item) for item in targets.values()), 4)

    return {
        "num_tasks": len(targets),
        "mean_correlation": {key: mean(lambda item, key=key: item["correlation"][key]) for key in ("score", "fit")},
        "gain": {
            "suggested": mean(lambda item: item["suggested"]["reached"] - item["fresh"]),
            "suggested_by_fit": mean(lambda item: item["suggested_by_fit"]["reached"] - item["fresh"]),
            "best_start": mean(lambda item: item["best"]["reached"] - item["fresh"]),
            "mean_start": mean(lambda item: item["mean_start"] - item["fresh"]),
        },
        "seconds_of_a_suggestion": mean(lambda item: item["suggestion"]["seconds"]),
    }


def draw(report: dict, path: Path) -> None:
    """Left: the correlation for every new task. Right: every start, both sides in deviations within its new task."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    targets = report["targets"]
    names = sorted(targets, key=lambda name: targets[name]["correlation"]["score"])
    figure, (bars, dots) = pyplot.subplots(1, 2, figsize=(11, 0.28 * len(names) + 2.2))
    places = np.arange(len(names))
    for shift, key, colour in ((0.2, "score", "#2a6f97"), (-0.2, "fit", "#a9c9dd")):
        values = [targets[name]["correlation"][key] for name in names]
        mean = report["summary"]["mean_correlation"][key]
        bars.barh(places + shift, values, height=0.38, color=colour, label=f"by {key}, mean {mean:.2f}")
    bars.set_yticks(places, names)
    bars.axvline(0, color="black", linewidth=0.8)
    bars.set_xlabel("rank correlation of suggestion and transfer")
    bars.legend(loc="lower right", fontsize=8)
    for name in names:
        scores, obtained = targets[name]["suggestion"]["scores"], targets[name]["obtained"]
        x = np.array(list(scores.values()))
        y = np.array([statistics.mean(obtained[other]) for other in scores])
        dots.scatter(deviations(x), deviations(y), s=12, alpha=0.6)
    dots.set_xlabel("suggested score")
    dots.set_ylabel(f"reached with {report['settings']['rows']} rows")
    dots.set_title("deviations within each new task", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def deviations(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / (values.std() or 1.0)


if __name__ == "__main__":
    main()
