"""Houlsby's whole sweep for RTE as one `fit`: 3 rates × 2 numbers of epochs × 3 sizes × 5 seeds = 90 runs.

    python bench/rte_sweep.py --backbone DIR/mpnet-base --data-root DIR [--runs DIR --out FILE --resume]

The preset is houlsby2019 with the head on the mean of the tokens (MPNet has no pretrained pooler) and no attention
dropout unless `--attention-dropout` says so. Beside it stands what `adapters` would take: its rate, measured before and
after the sweep on batches of the same lengths, times the rows that the 90 runs train on. It was not trained 90 times,
its dev scoring is not counted, and as `adapters` 1.3 has no MPNet it is measured on a BERT of the same layers and width
with random weights.

Every ten seconds a line says what was done since the last. With `--runs` the runs are kept, with a state a minute: a
sweep that was stopped, or killed, goes on where it was, and its sittings' seconds are added up (`sittings.json` beside
the runs). `--resume` does the same for the report, with the peers' rates in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import tempfile
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
import turns
from report import Report
from sittings import Sittings
from train import MODES
from turns import Environments, Way, Worker
from workload import Workload, make_workload

from inlay.data import load_task
from inlay.explore.sweep import make_grid, rank
from inlay.model import load_backbone
from inlay.model.backbone.backbone import Backbone
from inlay.settings.presets import apply_preset
from inlay.settings.run_config import DataConfig, RunConfig
from inlay.training import FitSettings, Run, fit, make_run

AXES: dict[str, list[Any]] = {
    "train.lr": [3e-5, 3e-4, 3e-3],
    "train.epochs": [3, 20],
    "method.size": [8, 64, 256],
}
PEER_STEPS = 60
SWEEP = "sweep"
SAVING_S = 120  # a cohort's state may be gigabytes
SETTINGS = ("backbone", "device", "seeds", "limit", "sizes", "attention_dropout", "peer_backbone", "max_cohort")


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
    parser.add_argument("--runs", type=Path, help="where runs are kept, to be gone on with; default: nowhere")
    parser.add_argument("--save-seconds", type=float, default=60, help="between states of --runs at least")
    parser.add_argument("--max-cohort", type=int, help="runs trained together at most; default: as `fit` chooses")
    turns.add_options(parser)
    report.add_options(parser, resumes=True)
    options = parser.parse_args()
    peers = [make_peer(name, options) for name in options.peers.split(",") if name != "none"]
    planned = [f"{way.name} before" for way in peers] + [SWEEP] + [f"{way.name} after" for way in peers]
    found: list[Sweep] = []
    kept = report.Report(
        options,
        planned,
        lambda parts: found[0].compose(parts, peers) if found else {},
        settings=SETTINGS,
        grace_s=SAVING_S if options.runs else report.GRACE_S,
    )
    with kept:
        # `fit` listens for the other one, finishes its step and writes its state.
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        report.say("loading backbone and rows")
        found.append(Sweep(options, kept))
        measure_peers("before", peers, found[0].work, kept)
        if SWEEP in kept.missing:
            kept.add(SWEEP, found[0].train())
        measure_peers("after", peers, found[0].work, kept)
    kept.finish()


class Sweep:
    """The 90 runs, and what they come to."""

    def __init__(self, options: argparse.Namespace, kept: Report) -> None:
        self._options, self._kept = options, kept
        self._backbone = load_backbone(options.backbone, device=options.device)
        self._axes = AXES | {"method.size": options.sizes.split(",")}
        self._runs = make_runs(self._backbone, self._axes, options)
        lengths = find_lengths(self._runs[0], self._backbone)
        self.work = make_workload(options.peer_backbone, lengths, options.folder)
        self.sittings: Sittings | None = None

    def train(self) -> dict[str, Any]:
        """All runs as one `fit`, in this sitting and those before; what came out."""
        options = self._options
        chosen = {} if options.max_cohort is None else {"max_cohort": options.max_cohort}
        # A state is gigabytes, and an epoch's end would be a time for one: seldom, and never where nothing is kept.
        save_s = options.save_seconds if options.runs else math.inf
        settings = FitSettings(save_every=10**9, save_seconds=save_s, draw_curves=False, **chosen)
        if options.runs is None:
            report.say("nothing is kept of the runs: with `--runs DIR` they could be gone on with")
        self.sittings = Sittings(len(self._runs), options.runs, self._kept)
        with _place(options) as place, self.sittings as heard:
            results = fit(self._runs, self._backbone, Path(place), settings, heard)
        ranking = rank(self._runs, results, list(self._axes))
        statuses = Counter(result.status for result in results)
        best = [dataclasses.asdict(setting) for setting in ranking.settings[:3]]
        return self.sittings.describe() | {"status": dict(statuses), "best_settings": best}

    @property
    def num_samples(self) -> int:
        return sum(run.config.train.epochs * len(run.task.train) for run in self._runs)

    def compose(self, parts: dict[str, Any], peers: list[Way]) -> dict[str, Any]:
        """What is known by now: of the sweep, or of as much of it as was done; and of the peers."""
        so_far = {} if self.sittings is None else self.sittings.describe()
        done = parts.get(SWEEP, so_far)
        whole = {"samples_per_s": round(self.num_samples / done["seconds"], 1)} if SWEEP in parts else {}
        seconds = parts[SWEEP]["seconds"] if SWEEP in parts else None
        rates = {way.name: [parts.get(f"{way.name} {when}") for when in ("before", "after")] for way in peers}
        return {
            "backbone": self._options.backbone,
            "device": self._options.device,
            "runs": len(self._runs),
            "samples": self.num_samples,
            "mean_length": round(float(self.work.lengths.mean()), 1),
            **done,
            **whole,
            "peers": {way.name: describe_peer(way, rates[way.name], self.num_samples, seconds) for way in peers},
        }


def _place(options: argparse.Namespace) -> AbstractContextManager[Any]:
    """Where the runs are kept: a folder of their own, or one that is gone with the sweep."""
    return nullcontext(options.runs) if options.runs else tempfile.TemporaryDirectory(dir=options.folder)


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


def make_peer(name: str, options: argparse.Namespace) -> Way:
    library, _, mode = name.partition("/")
    job = {
        "work": "train",
        "device": options.device,
        "threads": torch.get_num_threads(),
        "batch_size": 32,
        "size": 64,
        "library": library,
    }
    return Way(name, job | MODES[mode])


def measure_peers(when: str, peers: list[Way], work: Workload, kept: Report) -> None:
    """Samples a second, each in a process of its own, which is gone before Inlay needs the memory."""
    for way in peers:
        if (name := f"{way.name} {when}") in kept.missing:
            way.job |= {"folder": str(work.backbone), "rows": str(work.path)}
            report.say(f"measuring {name} the sweep")
            kept.add(name, measure_peer(way, kept.options) or {"error": way.error})


def measure_peer(way: Way, options: argparse.Namespace) -> dict[str, Any] | None:
    options.folder.mkdir(parents=True, exist_ok=True)
    workers = [Worker(way, Environments(options.adapters_python, options.folder))]
    with turns.starting(workers):
        workers[0].ask(do="prepare", **way.job)
        facts = workers[0].hear(options.prepare_limit_s)
        if facts is None:
            return None
        workers[0].ask(do="measure", steps=PEER_STEPS)
        answer = workers[0].hear(options.prepare_limit_s)
        return None if answer is None else {"samples_per_s": answer["samples"] / answer["seconds"], "facts": facts}


def describe_peer(way: Way, found: list[Any], num_samples: int, seconds: float | None) -> dict[str, Any]:
    """What the peer would take by its better rate: an estimate, and named so."""
    measured = [part for part in found if part is not None and "error" not in part]
    if not measured:
        return {"error": way.error or "not measured yet"}
    rates = [part["samples_per_s"] for part in measured]
    estimated = num_samples / max(rates)
    return {
        "measured_on": f"{way.job.get('folder', 'base')}, size 64",
        "samples_per_s": [round(rate, 1) for rate in rates],
        "estimated_seconds": round(estimated, 1),
        "estimated_over_measured": None if seconds is None else round(estimated / seconds, 2),
        **measured[-1]["facts"],
    }


if __name__ == "__main__":
    main()
