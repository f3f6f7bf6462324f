"""A Houlsby adapter on SQuAD v1.1: trained on a stated part of the training questions, scored on the whole dev set.

    python results/squad/run.py --data DIR [--limit 20000] [--backbone minilm] [--out results/squad/scores.json]

DIR holds the official train-v1.1.json and dev-v1.1.json. Exact match and F1 are those of the official script.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

from inlay.config import DataConfig, MethodConfig, RunConfig, TrainConfig
from inlay.data import load_task
from inlay.model import load_backbone
from inlay.training import FitSettings, fit, make_run
from inlay.training.cohort import Watcher
from inlay.training.publish import current_commit


class Log(Watcher):
    def on_step(self, cohort, num_rows):
        if cohort.num_steps % 100 == 0:
            loss = cohort.members[0].progress.losses[-1]
            print(f"{cohort.seconds:7.1f} s  step {cohort.num_steps:5}  loss {loss:.3f}", flush=True)

    def on_epoch(self, member, record):
        print(f"{record['seconds']:7.1f} s  epoch {record['epoch']}  {record['dev']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--limit", type=int, help="training questions; default: all")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("/tmp/inlay-squad-runs"))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("scores.json"))
    parser.add_argument("--commit", default=current_commit(), help="where the checkout has no .git")
    options = parser.parse_args()
    backbone = load_backbone(options.backbone)
    data = DataConfig(
        source=str(options.data / "train-v1.1.json"), dev=str(options.data / "dev-v1.1.json"), limit=options.limit
    )
    task = load_task(data, "squad")
    train = TrainConfig(lr=options.lr, epochs=options.epochs, seed=options.seed)
    run = make_run(task, RunConfig(method=MethodConfig(size=options.size), train=train), backbone)
    began = time.perf_counter()
    (result,) = fit([run], backbone, options.runs, FitSettings(save_every=10**9), Log())
    report = {
        "command": "python " + " ".join(sys.argv),
        "commit": options.commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "backbone": {"name": "minilm", "fingerprint": backbone.fingerprint},
        "precision": str(backbone.dtype).removeprefix("torch."),
        "seconds": round(time.perf_counter() - began, 1),
        "train_questions": len(task.train),
        "dev_questions": len(task.dev),
        "trained_parameters": run.spec.count_parameters(backbone.anatomy),
        "settings": {"size": options.size, "lr": options.lr, "epochs": options.epochs, "seed": options.seed},
        "max_length": run.config.train.max_length,
        "stride": run.config.train.stride,
        "best_epoch": result.best_epoch,
        "dev": result.dev_metrics,
        "history": result.history,
        "notes": list(task.notes),
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: report[key] for key in ("train_questions", "dev", "seconds")}, indent=1))


if __name__ == "__main__":
    main()
