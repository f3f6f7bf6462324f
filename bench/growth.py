"""How a training step's time and memory grow with the number of slots, the tokens and the bottleneck's size.

    python bench/growth.py --device cpu  --backbone minilm --batch-size 2 --steps 2
    python bench/growth.py --device cuda --backbone base

A step's rows are those of one of a few batches, of evenly spaced lengths, that return in the same order: a point meets
few shapes, is warmed up until it has met them all, and then measured three times: more often if that takes less than
half a second, less often if more than three. Its memory is the most it ever held: on a CPU a process's of its own,
libraries included; on a GPU, where one process with one backbone measures all points, and what was compiled for one
serves the next, the tensors'. Slots begin with equal values. Writes `growth-DEVICE.json` after every point, and at last
`.png`, into results/speed/. There a line of slope 1 goes through each last point: growth is linear along it, and better
than linear where points lie above. `--factor 4` halves the points; `--draw FILE` draws a report again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import report
import torch
import turns
from report import Report
from turns import Environments, Way, Worker
from workload import Workload, glue_lengths, make_workload

REPEATS, LEAST_S, MOST_S = 3, 0.5, 3.0
SMALL_ROWS, LONGER = 1024, 8
"""steps of fewer rows come in longer epochs, up to so many times"""
SETTINGS = ("backbone", "device", "batch_size", "rows", "steps", "token_budget")
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
    parser.add_argument("--rows", type=int, help="to choose from; default: as many as the largest point takes")
    parser.add_argument("--steps", type=int, default=4, help="of an epoch, which is measured again and again")
    parser.add_argument("--factor", type=int, default=2, help="between neighbouring points")
    parser.add_argument("--axis", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--token-budget", type=int, help="of one forward pass")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw what this file has, and measure nothing")
    turns.add_options(parser)
    report.add_options(parser, resumes=True)
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.draw.read_text(encoding="utf8")), options.draw.with_suffix(".png"))
        return
    options.out = options.out or report.ROOT / "results" / "speed" / f"growth-{options.device}.json"
    report.say("making rows and backbone")
    num_rows = options.rows or options.steps * max(options.batch_size, options.max_rows, SMALL_ROWS)
    work = make_workload(options.backbone, glue_lengths(num_rows), options.folder)
    jobs = {name: job for axis in options.axis for name, job in plan_axis(axis, options).items()}
    found = report.Report(options, list(jobs), lambda parts: compose(parts, options, work), settings=SETTINGS)
    with found:
        measure_points(jobs, options, work, found)
    if not found.is_stopped:
        draw(json.loads(options.out.read_text(encoding="utf8")), options.out.with_suffix(".png"))
    found.finish()


def compose(parts: dict[str, Any], options: argparse.Namespace, work: Workload) -> dict[str, Any]:
    """What the points measured so far say."""
    found = points_of(parts)
    return {
        "backbone": options.backbone,
        "device": options.device,
        "work": work.describe(),
        "points": found,
        "slope_of_last_doubling": {
            axis: {what: last_slope(points, what) for what in COLOURS} for axis, points in found.items()
        },
    }


def points_of(parts: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The points of each axis, in order."""
    found: dict[str, list[dict[str, Any]]] = {axis: [] for axis in AXES}
    for name, part in parts.items():
        axis, value = name.split()
        if "error" not in part:
            found[axis].append({"value": int(value), **part})
    return {axis: sorted(points, key=lambda point: point["value"]) for axis, points in found.items()}


def plan_axis(axis: str, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """The points of an axis by name, and what of the job each changes."""

    def stretched(first: int, last: int) -> list[int]:
        values = [first]
        while values[-1] * options.factor <= last:
            values.append(values[-1] * options.factor)
        return values

    changes: dict[int, dict[str, int]] = {
        "slots": {slots: {"cohort": slots} for slots in stretched(1, options.max_slots)},
        "tokens": {rows: {"cohort": 1, "batch_size": rows} for rows in stretched(8, options.max_rows)},
        "sizes": {size: {"cohort": 8, "size": size} for size in stretched(8, options.max_size)},
    }[axis]
    return {f"{axis} {value}": change for value, change in changes.items()}


def measure_points(jobs: dict[str, dict[str, int]], options: argparse.Namespace, work: Workload, found: Report) -> None:
    """Every missing point: on a GPU in one process, whose backbone and compiled blocks serve all of them."""
    common = {
        "work": "train",
        "folder": str(work.backbone),
        "rows": str(work.path),
        "device": options.device,
        "threads": torch.get_num_threads(),
        "batch_size": options.batch_size,
        "size": 64,
        "eager": False,
        "alike": True,
        "token_budget": options.token_budget,
        "warm_up": max(2, options.steps),
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    workers: list[Worker] = []
    with turns.starting(workers):
        for name in found.missing:
            job = common | jobs[name]
            way = Way(name, job | {"fixed_steps": count_steps(job, options)}, is_ours=True)
            if not workers or workers[-1].way.error or options.device == "cpu":
                for worker in workers:
                    worker.stop()
                workers[:] = [Worker(way, Environments(None, options.folder))]
            workers[-1].way = way
            found.add(name, measure_point(workers[-1], options) or {"error": way.error})
            report.say(f"{name}: {json.dumps(found.parts[name])}")


def count_steps(job: dict[str, Any], options: argparse.Namespace) -> int:
    """Steps of an epoch: more of small steps on a GPU, where the first of an epoch is laid out while the GPU waits."""
    rows = job["cohort"] * job["batch_size"]
    return options.steps * (1 if options.device == "cpu" else min(LONGER, max(1, SMALL_ROWS // rows)))


def measure_point(worker: Worker, options: argparse.Namespace) -> dict[str, Any] | None:
    """Seconds a step, the most memory in GiB and what the point took; None, with the way's error set, if it failed."""
    began, steps = time.monotonic(), worker.way.job["fixed_steps"]
    worker.ask(do="prepare", **worker.way.job)
    if (facts := worker.hear(options.prepare_limit_s)) is None:
        return None
    taken: list[float] = []
    memory = 0.0
    report.say(f"{worker.way.name}: measuring")
    while sum(taken) * steps < (MOST_S if len(taken) < REPEATS else LEAST_S):
        worker.ask(do="measure", steps=steps)
        if (answer := worker.hear(options.prepare_limit_s)) is None:
            return None
        taken.append(answer["seconds"] / steps)
        memory = answer["peak_memory_bytes"] / 2**30
    spent = {name: facts[name] for name in ("load_s", "warm_up_s", "compile_s", "compiled_graphs", "held_bytes")}
    spent["point_s"] = round(time.monotonic() - began, 1)
    found = {"seconds": statistics.median(taken), "memory": memory, "steps": steps, "repeats": len(taken)}
    return found | spent


def last_slope(points: list[dict[str, Any]], what: str) -> float | None:
    """The exponent of growth between the last two points: 1 is linear, less is better."""
    if len(points) < 2:
        return None
    before, last = points[-2:]
    return round(math.log(last[what] / before[what]) / math.log(last["value"] / before["value"]), 2)


def draw(found: dict[str, Any], path: Path) -> None:
    """A report's points as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    is_quick = found["device"] == "cuda"
    labels = {"seconds": f"{'milliseconds' if is_quick else 'seconds'} a step", "memory": "peak memory, GiB"}
    figure, axes = plt.subplots(2, len(AXES), figsize=(13, 7.5), layout="constrained")
    for column, (axis, points) in enumerate(found["points"].items()):
        for row, what in enumerate(labels):
            draw_panel(axes[row][column], points, what, 1000 if is_quick and what == "seconds" else 1)
            axes[row][column].set_xlabel(AXES[axis])
            axes[row][column].set_ylabel(labels[what] if column == 0 else "")
    hardware, backbone = found["hardware"], Path(found["backbone"]).name
    place = hardware["gpu"] if is_quick else f"{hardware['threads']} CPU threads"
    figure.suptitle(f"A training step of Inlay as it grows ({backbone}, {place})", fontsize=13)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(path, file=sys.stderr)


def draw_panel(panel: Any, points: list[dict[str, Any]], what: str, scale: float) -> None:
    """One curve on logarithmic axes, times `scale`, with the line of slope 1 through its last point."""
    if not points:
        panel.set_axis_off()
        return
    values, measured = [point["value"] for point in points], [scale * point[what] for point in points]
    panel.loglog(values, measured, "o-", color=COLOURS[what], label="measured", base=2)
    linear = [measured[-1] * value / values[-1] for value in values]
    panel.loglog(values, linear, "--", color="0.6", label="linear", base=2)
    panel.set_ylim(min(measured) / 2, max(measured) * 2)
    panel.set_xticks(values, [f"{value:,}" for value in values])
    low, high = math.floor(math.log2(min(measured) / 2)), math.ceil(math.log2(max(measured) * 2))
    ticks = [2.0**power for power in range(low, high + 1, max(1, (high - low) // 6))]
    panel.set_yticks(ticks, [f"{tick:,.0f}" if tick >= 1 else f"{tick:.3g}" for tick in ticks])
    panel.minorticks_off()
    panel.grid(alpha=0.25)
    panel.legend(frameon=False)


if __name__ == "__main__":
    main()
