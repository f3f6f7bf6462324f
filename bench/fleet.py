"""What a fleet's placement, slots and batch time cost and buy, simulated from one measured replica.

    python bench/fleet_replica.py --out results/fleet/replica.json      measures a replica (minutes)
    python bench/fleet_check.py --out results/fleet/check.json          the simulator beside the engine's own process
    python bench/fleet.py --out results/fleet/fleet.json                this: the cells, and a picture beside the file

Every cell is a fleet under Poisson arrivals and Zipf popularity, at a share of what its replicas do when nothing is
loaded. A cell's report has latencies (as clients see them, network aside), hit rate and how busy the replicas are. Cost
is replicas for a thousand rows a second; a replica is one core. `--draw FILE` draws a report again, `--only PART` takes
the cells whose name begins so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import report
from fleet_cell import Cell, ServiceTimes
from fleet_simulator import Fleet

NUM_TASKS, ZIPF = 1_000_000, 1.0
FAR_S = 0.03
"""assumed: what it takes to fetch a version from object storage"""
LOAD, NUM_REPLICAS, NUM_SLOTS, TARGET_MS = 0.6, 50, 256, 60
ROWS = {1: 10_000, 10: 20_000, 50: 24_000, 100: 40_000, 1000: 240_000}
FAULTY_ROWS = 100_000  # failures are rare: they need a longer look
PLACEMENTS = ("random", "two-choices", "rendezvous", "bounded", "replicated")
FEW = ("two-choices", "replicated", "bounded")
COLOURS = {
    "random": "#888888",
    "two-choices": "#1f5fa8",
    "rendezvous": "#b3541e",
    "bounded": "#7a4fa3",
    "replicated": "#2b7a3d",
}
Axis = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replica", type=Path, default=report.ROOT / "results" / "fleet" / "replica.json")
    parser.add_argument("--only", default="", metavar="PART")
    parser.add_argument("--share", type=float, default=1.0, help="of the rows of every cell, for a quick look")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw what this file has, and simulate nothing")
    report.add_options(parser, resumes=True)
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.draw.read_text(encoding="utf8")), options.draw)
        return
    replica = json.loads(options.replica.read_text(encoding="utf8"))
    cells = {name: settings for name, settings in plan_cells().items() if name.startswith(options.only)}
    found = report.Report(options, list(cells), lambda parts: describe(replica), settings=("share",))
    with found:
        for name in found.missing:
            found.add(name, simulate(make_cell(replica, cells[name], options.share)))
            report.say(f"{name}: p99 {found.parts[name]['p99_ms']:.0f} ms, hit rate {found.parts[name]['hit_rate']}")
    if not found.is_stopped and options.out is not None and not options.only:
        draw(json.loads(options.out.read_text(encoding="utf8")), options.out)
    found.finish()


def plan_cells() -> Axis:
    """Return what is set in each cell, by its name."""
    cells: Axis = {}
    for number in (1, 10, 100, 1000):
        for placement in PLACEMENTS:
            cells[f"scale {number} {placement}"] = {"num_replicas": number, "placement": placement}
    for load in (0.3, 0.5, 0.7, 0.8, 0.9):
        for placement in FEW:
            cells[f"load {load} {placement}"] = {"load": load, "placement": placement}
    for slots in (16, 64, 256, 1024, 4096):
        for placement in PLACEMENTS[1:]:
            cells[f"slots {slots} {placement}"] = {"num_slots": slots, "placement": placement}
    for target_ms in (15, 30, 60, 120, 240):
        for load in (0.3, 0.5, 0.7, 0.8, 0.9):
            cells[f"batch {target_ms} {load}"] = {"target_ms": target_ms, "load": load, "placement": "bounded"}
    for placement in FEW:
        for far_ms in (0, 30, 100, 300):
            cells[f"far {far_ms} {placement}"] = {"far_s": far_ms / 1000, "placement": placement}
        for detect_s in (0.5, 2, 10):
            faults = {"detect_s": detect_s, "failures_per_hour": 12, "restart_s": 60, "num_rows": FAULTY_ROWS}
            cells[f"failures {detect_s} {placement}"] = faults | {"placement": placement}
        for number in (2, 8, 32):
            cells[f"loaders {number} {placement}"] = {"num_loaders": number, "far_s": 0.1, "placement": placement}
        for per_s in (1, 10, 100):
            cells[f"publications {per_s} {placement}"] = {"publishes_per_s": per_s, "placement": placement}
    return cells


def make_cell(replica: dict[str, Any], settings: dict[str, Any], share: float) -> Cell:
    """Return a cell: what is set, and what is usual otherwise."""
    settings = {"num_replicas": NUM_REPLICAS, "num_slots": NUM_SLOTS, "far_s": FAR_S} | settings
    load, target_ms = settings.pop("load", LOAD), settings.pop("target_ms", TARGET_MS)
    times, lengths = ServiceTimes(**replica["times"]), tuple(replica["lengths"])
    # The load is a share of the usual batch time's capacity, so that equal loads cost the same.
    capacity, _ = times.find_capacity(statistics.mean(lengths), TARGET_MS / 1000)
    return Cell(
        times,
        rows_per_s=load * capacity * settings["num_replicas"],
        target_batch_s=target_ms / 1000,
        num_rows=int(settings.pop("num_rows", ROWS[settings["num_replicas"]]) * share),
        num_tasks=NUM_TASKS,
        zipf=ZIPF,
        lengths=lengths,
        service="spread",
        spread=tuple(replica["spread"]),
        **settings,
    )


def simulate(cell: Cell) -> dict[str, Any]:
    """Return what came out of a cell, with what it costs."""
    found = Fleet(cell).run().summarise()
    rest = dataclasses.asdict(cell)
    shown = ("rows_per_s", "placement", "num_replicas", "num_slots", "target_batch_s", "num_rows", "far_s")
    cost = 1000 * cell.num_replicas / cell.rows_per_s
    return {name: rest[name] for name in shown} | {"replicas_per_1000_rows_s": round(cost, 2)} | found


def describe(replica: dict[str, Any]) -> dict[str, Any]:
    """Return what all cells have in common."""
    lengths = replica["lengths"]
    capacity, _ = ServiceTimes(**replica["times"]).find_capacity(statistics.mean(lengths), TARGET_MS / 1000)
    return {
        "replica": {name: replica[name] for name in ("commit", "date", "hardware", "times", "version_file_bytes")},
        "capacity_rows_per_s": round(capacity, 2),
        "tasks": NUM_TASKS,
        "zipf": ZIPF,
        "assumed": {"far_s": FAR_S, "failures_per_hour": "of one replica", "restart_s": 60},
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw four questions and their answers, as PNG and SVG beside the report."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "fleet", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    figure, ((one, two), (three, four)) = plt.subplots(2, 2, figsize=(10, 7.4), layout="constrained")
    parts = found["parts"]
    for placement in PLACEMENTS:
        draw_line(one, parts, "scale", placement)
        if placement not in ("random", "rendezvous"):
            draw_line(two, parts, "slots", placement)
            write_hit_rates(two, parts, placement)
    for target_ms, colour in zip((15, 30, 60, 120, 240), plt.cm.viridis([0.0, 0.22, 0.44, 0.66, 0.88]), strict=True):
        some = [part for name, part in parts.items() if name.startswith(f"batch {target_ms} ")]
        some = [part for part in some if not part["is_overloaded"]]
        xs = [part["replicas_per_1000_rows_s"] for part in some]
        three.plot(xs, [part["p99_ms"] for part in some], "o-", color=colour, label=f"{target_ms} ms")
    for placement in FEW:
        draw_line(four, parts, "failures", placement, "p999_ms")
    for axis in (one, two):
        axis.set_ylim(80, 1500)
    one.text(0.99, 0.97, "rendezvous is overloaded\nbeyond the picture", transform=one.transAxes, ha="right", va="top")
    label(one, "replicas", "p99, ms", "Placement, at 60% load", base=10)
    label(two, "slots of a replica", "p99, ms", f"Slots ({NUM_REPLICAS} replicas, a million tasks), hit rates", base=4)
    label(three, "replicas (cores) for 1,000 rows a second", "p99, ms", "Batch time: p99 against cost")
    label(four, "seconds until a lost replica is noticed", "p99.9, ms", "Failures (12 an hour, each replica)", base=10)
    for kind in ("png", "svg"):
        figure.savefig(path.with_suffix(f".{kind}"), dpi=130, metadata={"Date": None} if kind == "svg" else None)
    plt.close(figure)


def draw_line(axis: Any, parts: dict[str, Any], axis_name: str, placement: str, what: str = "p99_ms") -> None:
    """Draw one placement's line; a cell that is overloaded is marked with a cross."""
    named = [(float(name.split()[1]), part) for name, part in parts.items() if is_of(name, axis_name, placement)]
    xs, ys = [number for number, _ in named], [part[what] for _, part in named]
    axis.plot(xs, ys, "o-", color=COLOURS[placement], label=placement, markersize=4)
    over = [(x, y) for x, y, (_, part) in zip(xs, ys, named, strict=True) if part["is_overloaded"]]
    if over:
        axis.plot(*zip(*over, strict=True), "x", color="black", markersize=9)


def write_hit_rates(axis: Any, parts: dict[str, Any], placement: str) -> None:
    """Write the hit rate beside each point of a placement's line."""
    below = placement == "bounded"
    for name, part in parts.items():
        if is_of(name, "slots", placement):
            place = (float(name.split()[1]), part["p99_ms"])
            text, offset = f"{part['hit_rate']:.0%}", (0, -11 if below else 6)
            axis.annotate(
                text, place, offset, textcoords="offset points", ha="center", fontsize=7, color=COLOURS[placement]
            )


def is_of(name: str, axis_name: str, placement: str) -> bool:
    first, _, *rest = name.split()
    return first == axis_name and rest == [placement]


def label(axis: Any, x: str, y: str, title: str, base: int | None = None) -> None:
    axis.set(xlabel=x, ylabel=y, yscale="log")
    axis.set_title(title, loc="left", fontweight="bold")
    if base:
        axis.set_xscale("log", base=base)
        numbers = sorted({x for line in axis.lines for x in line.get_xdata()})
        axis.set_xticks(numbers, [f"{number:g}" for number in numbers])
        axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    main()
