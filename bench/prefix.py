"""Adapters in the upper half of the layers, with the frozen lower half computed once: whole trainings, in turns.

    python bench/prefix.py --device cpu          MiniLM, 10 epochs of 512 rows of GLUE-like lengths

Each way is `fit` from nothing to the end, dev scores after every epoch and the first pass of the lower half included.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

import report
import torch
from workload import glue_lengths, make_workload

from inlay.model import load_backbone
from inlay.model.backbone.backbone import Backbone
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training import FitSettings, fit, make_run

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from ours_training import read_task

# Way -> whether only the upper half is adapted, and whether the lower half is computed once.
WAYS = {"full depth": (False, False), "upper half": (True, False), "upper half, reused": (True, True)}
PAIRS = [("full depth", "upper half, reused"), ("upper half", "upper half, reused"), ("full depth", "upper half")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--backbone", default="minilm", help="base, large (random weights), a built-in name or a folder"
    )
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/inlay-bench"))
    report.add_options(parser)
    options = parser.parse_args()
    work = make_workload(options.backbone, glue_lengths(options.rows), options.folder)
    backbone = load_backbone(str(work.backbone), device=options.device)
    ways = {name: way for name, way in WAYS.items() if not way[1] or reuse(True)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    train(backbone, str(work.path), options, *WAYS["full depth"])  # warms up
    for turn in range(options.turns):
        for name, way in ways.items():
            seconds[name].append(train(backbone, str(work.path), options, *way))
            print(f"turn {turn + 1}: {name}: {seconds[name][-1]:.1f} s", file=sys.stderr, flush=True)
    pairs = [pair for pair in PAIRS if set(pair) <= ways.keys()]
    report.finish(
        options,
        work=work.describe() | {"epochs": options.epochs},
        seconds={name: report.spread(taken) for name, taken in seconds.items()},
        ratios={f"{slow} / {fast}": report.compare(seconds[slow], seconds[fast]) for slow, fast in pairs},
    )


def train(backbone: Backbone, rows: str, options: argparse.Namespace, is_upper: bool, is_reused: bool) -> float:
    """Seconds of one run, begun from nothing."""
    layers = f"{backbone.anatomy.num_layers // 2}:" if is_upper else "all"
    method = MethodConfig(size=options.size, layers=layers)
    config = RunConfig(method=method, train=TrainConfig(lr=1e-4, epochs=options.epochs, pooling="cls"))
    run = make_run(read_task({"rows": rows}), config, backbone)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        began = time.perf_counter()
        fit([run], backbone, Path(folder), FitSettings(save_every=10**9, **reuse(is_reused)))
        return time.perf_counter() - began


def reuse(is_reused: bool) -> dict[str, bool]:
    """The setting that switches it, where this Inlay has it."""
    known = {item.name for item in dataclasses.fields(FitSettings)}
    return {"reuse_prefix": is_reused} if "reuse_prefix" in known else {}


if __name__ == "__main__":
    main()
