"""How a training step's time and memory grow with the number of slots, the tokens and the bottleneck's size.

    python bench/growth.py --device cpu  --backbone minilm --batch-size 2 --steps 2
    python bench/growth.py --device cuda --backbone base

Every point is warmed up, then measured three times. Its memory is the most it ever held: on a CPU a process's of its
own, libraries included; on a GPU, where one process measures all points, the tensors'. Writes `growth-DEVICE.json` and
`.png` into results/speed/. In the picture a line of slope 1 goes through each last point: growth is linear along it,
and better than linear where points lie above. `--factor 4` halves the points.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import report
import torch
import turns
from turns import Environments, Way, Worker
from workload import Workload, glue_lengths, make_workload

REPEATS = 3
AXES = {
    "slots": "runs trained together (slots)",
    "tokens": "rows of a step, one run (× mean length: tokens)",
    "sizes": "bottleneck size, eight runs",
}
COLOURS = {"seconds": "#1f5fa8", "memory": "#b3541e"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--backbone", default="minilm", help="base, large (random weights), a built-in name or a folder"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a run in a step")
    parser.add_argument("--max-slots", type=int, default=256)
    parser.add_argument("--max-rows", type=int, default=256, help="of one run's step")
    parser.add_argument("--max-size", type=int, default=512)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8, help="of each of the three measurements of a point")
    parser.add_argument("--factor", type=int, default=2, help="between neighbouring points")
    parser.add_argument("--token-budget", type=int, help="of one forward pass")
    turns.add_options(parser)
    report.add_options(parser)
    options = parser.parse_args()
    options.out = options.out or report.ROOT / "results" / "speed" / f"growth-{options.device}.json"
    work = make_workload(options.backbone, glue_lengths(options.rows), options.folder)
    found = {axis: measure_axis(axis, options, work) for axis in AXES}
    slopes = {axis: {what: last_slope(points, what) for what in COLOURS} for axis, points in found.items()}
    description = {"backbone": options.backbone, "device": options.device, "work": work.describe()}
    report.finish(options, **description, points=found, slope_of_last_doubling=slopes)
    draw(found, options, options.out.with_suffix(".png"))


def points_of(axis: str, options: argparse.Namespace) -> list[tuple[int, dict[str, int]]]:
    """The values of an axis, and what of the job each changes."""

    def stretched(first: int, last: int) -> list[int]:
        values = [first]
        while values[-1] * options.factor <= last:
            values.append(values[-1] * options.factor)
        return values

    if axis == "slots":
        return [(slots, {"cohort": slots}) for slots in stretched(1, options.max_slots)]
    if axis == "tokens":
        return [(rows, {"cohort": 1, "batch_size": rows}) for rows in stretched(8, options.max_rows)]
    return [(size, {"cohort": 8, "size": size}) for size in stretched(8, options.max_size)]


def measure_axis(axis: str, options: argparse.Namespace, work: Workload) -> list[dict[str, Any]]:
    common = {
        "work": "train",
        "folder": str(work.backbone),
        "rows": str(work.path),
        "device": options.device,
        "threads": torch.get_num_threads(),
        "batch_size": options.batch_size,
        "size": 64,
        "eager": False,
        "token_budget": options.token_budget,
        "warm_up": max(2, options.steps),
    }
    found = []
    worker: Worker | None = None
    for value, change in points_of(axis, options):
        way = Way(f"{axis} {value}", common | change, is_ours=True)
        if worker is None or worker.way.error or options.device == "cpu":
            if worker is not None:
                worker.stop()
            worker = Worker(way, Environments(None, options.folder))
        worker.way = way
        if point := measure_point(worker, options):
            found.append({"value": value} | point)
            print(f"{way.name}: {point['seconds']:.4f} s, {point['memory']:.2f} GiB", file=sys.stderr, flush=True)
    if worker is not None:
        worker.stop()
    return found


def measure_point(worker: Worker, options: argparse.Namespace) -> dict[str, float] | None:
    """Seconds a step and the most memory in GiB; None, with the way's error set, if it failed."""
    worker.ask(do="prepare", **worker.way.job)
    if worker.hear(options.prepare_limit_s) is None:
        return None
    taken, memory = [], 0.0
    for _ in range(REPEATS):
        worker.ask(do="measure", steps=options.steps)
        if (answer := worker.hear(options.prepare_limit_s)) is None:
            return None
        taken.append(answer["seconds"] / options.steps)
        memory = answer["peak_memory_bytes"] / 2**30
    return {"seconds": statistics.median(taken), "memory": memory}


def last_slope(points: list[dict[str, Any]], what: str) -> float | None:
    """The exponent of growth between the last two points: 1 is linear, less is better."""
    if len(points) < 2:
        return None
    before, last = points[-2:]
    return round(math.log(last[what] / before[what]) / math.log(last["value"] / before["value"]), 2)


def draw(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = {"seconds": "seconds a step", "memory": "peak memory, GiB"}
    figure, axes = plt.subplots(2, len(AXES), figsize=(13, 7.5), layout="constrained")
    for column, (axis, points) in enumerate(found.items()):
        for row, what in enumerate(labels):
            draw_panel(axes[row][column], points, what)
            axes[row][column].set_xlabel(AXES[axis])
            axes[row][column].set_ylabel(labels[what] if column == 0 else "")
    place = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    figure.suptitle(f"A training step of Inlay as it grows ({options.backbone}, {place})", fontsize=13)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(path, file=sys.stderr)


def draw_panel(panel: Any, points: list[dict[str, Any]], what: str) -> None:
    """One curve on logarithmic axes, with the line of slope 1 through its last point."""
    if not points:
        panel.set_axis_off()
        return
    values, measured = [point["value"] for point in points], [point[what] for point in points]
    panel.loglog(values, measured, "o-", color=COLOURS[what], label="measured", base=2)
    linear = [measured[-1] * value / values[-1] for value in values]
    panel.loglog(values, linear, "--", color="0.6", label="linear", base=2)
    panel.set_ylim(min(measured) / 2, max(measured) * 2)
    panel.set_xticks(values, [f"{value:,}" for value in values])
    low, high = math.floor(math.log2(min(measured) / 2)), math.ceil(math.log2(max(measured) * 2))
    ticks = [2.0**power for power in range(low, high + 1, max(1, (high - low) // 6))]
    panel.set_yticks(ticks, [f"{tick:.3g}" for tick in ticks])
    panel.minorticks_off()
    panel.grid(alpha=0.25)
    panel.legend(frameon=False)


if __name__ == "__main__":
    main()
