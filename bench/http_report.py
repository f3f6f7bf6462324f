"""The report and the picture of `bench/over_http.py`, drawn from its records: results/http/report.md and .png."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from http_pairs import OURS
from report import compare, spread, write_whole

Record = dict[str, Any]
Parts = dict[str, list[Record]]
LOADS = {"single": "single rows, 64 connections", "lists": "lists of 32 rows, 8 connections", "open": "open loop"}
GOALS = {"vllm": 1.5, "infinity": 3.0, "litserve": 3.0, "mosec": 3.0, "ray": 5.0}
"""of rows/s with 32 tasks, single rows, by `SERVICE.md`"""
GOAL_TASKS = 32
COLOURS = ("#0b6e4f", "#73c6a4", "#8d99ae", "#b56576", "#e9a23b", "#5b7db1", "#7a5195", "#444444")


def read_parts(results: Path) -> Parts:
    """The records of every part that was measured."""
    return {
        path.stem: [json.loads(line) for line in path.read_text(encoding="utf8").splitlines() if line]
        for path in sorted(results.glob("*.jsonl"))
    }


def write_report(results: Path) -> str:
    """Draw what is there; return the text."""
    parts = read_parts(results)
    pairs = {name: records for name, records in parts.items() if any("tasks" in one for one in records[1:])}
    pairs = {name: pairs[name] for name in sorted(pairs, key=_order) if name.rsplit("-", 1)[-1].isdigit()}
    lines = ["# The service over HTTP", "", *_explain(parts), "## Goals", "", *_list_goals(parts, pairs)]
    for load, words in LOADS.items():
        if load != "open":
            lines += ["", f"## Rows a second: {words}", "", *_list_rates(pairs, load)]
    lines += ["", "## Latency in an open loop", "", *_list_latencies(pairs)]
    lines += ["", "## What each server takes up, and its answers", "", *_list_servers(pairs)]
    lines += ["", "## What was not measured, or not answered", "", *_list_missing(parts)]
    lines += ["", "## Loads on Inlay's service alone", "", *_list_alone(parts, pairs)]
    lines += ["", "## Parts", "", *_list_parts(parts)]
    text = "\n".join(lines) + "\n"
    if parts:
        write_whole(results / "report.md", text.rstrip("\n"))
    if pairs:
        draw(pairs, results / "report.png")
    return text


def _order(name: str) -> tuple[int, str]:
    count = name.rsplit("-", 1)[-1]
    return (int(count) if count.isdigit() else 0, name)


def _explain(parts: Parts) -> list[str]:
    heads = [records[0] for records in parts.values()]
    if not heads:
        return ["Nothing was measured yet.", ""]
    hardware = heads[-1]["hardware"]
    return [
        f"Drawn by `python bench/over_http.py --report`. Hardware: {hardware['processor']}, {hardware['cores']} cores, "
        f"no GPU. All servers answer the same LoRA tasks on MiniLM in float32 (bench/http_tasks.py), rows of real "
        "lengths (mean 38 tokens). Servers of a table's line were measured in turns within one run; a ratio is the "
        "median of the turns' ratios, with their range. CPU-ms a row is what all processes of a server used: it holds "
        "on a machine that others use too, where rows a second say who came onto the cores.",
        "",
        "![rows a second and memory](report.png)",
        "",
    ]


def _list_goals(parts: Parts, pairs: Parts) -> list[str]:
    rows = []
    for name, records in pairs.items():
        peer, count = name.rsplit("-", 1)
        if int(count) == GOAL_TASKS and peer in GOALS:
            for ours in OURS:
                if (ratio := _ratio(records, "single", ours, peer)) is not None:
                    what = f"rows/s over {peer}, {count} tasks ({ours})"
                    rows.append(
                        [what, _tell(ratio), f"at least {GOALS[peer]:g}", _reached(ratio["median"] >= GOALS[peer])]
                    )
    for records in parts.values():
        for record in records:
            if record["what"] == "goal":
                figure = record["figure"]
                figure = _tell(figure) if isinstance(figure, dict) else f"{figure:.3g}"
                rows.append(
                    [record["goal"], figure, f"{record['sign']} {record['limit']:g}", _reached(record["reached"])]
                )
    return _table(["what", "measured", "goal", ""], rows)


def _reached(is_reached: bool) -> str:
    return "reached" if is_reached else "**missed**"


def _list_rates(pairs: Parts, load: str) -> list[str]:
    rows = []
    for name, records in pairs.items():
        peer, count = name.rsplit("-", 1)
        theirs = _values(records, load, peer, "rows_per_s")
        if not theirs:
            continue
        row = [count, peer, *(_tell(spread(_values(records, load, one, "rows_per_s"), 1)) for one in (*OURS, peer))]
        row += [_tell(_ratio(records, load, ours, peer)) for ours in OURS]
        row += [_median(records, load, one, "cpu_ms_row") for one in (*OURS, peer)]
        row.append(_tell(_ratio(records, load, peer, OURS[0], "cpu_ms_row")))
        rows.append(row)
    words = ["tasks", "beside", "Inlay", "Inlay, 2 threads", "it", "Inlay / it", "2 threads / it"]
    return _table([*words, "CPU-ms a row: Inlay", "2 threads", "it", "CPU of it / Inlay"], rows)


def _list_latencies(pairs: Parts) -> list[str]:
    rows = []
    for name, records in pairs.items():
        peer, count = name.rsplit("-", 1)
        rates = [one["plan"]["rate"] for one in records if one["what"] == "load" and one["load"] == "open"]
        if rates:
            cells = [_median(records, "open", one, key) for one in (*OURS, peer) for key in ("p50_ms", "p99_ms")]
            rows.append([count, peer, f"{rates[0]:g}", *cells])
    text = "Requests of one row at half the rate of the slowest of the three, in ms from when each was due."
    heads = ["p50 Inlay", "p99", "p50 2 threads", "p99", "p50 it", "p99"]
    return [text, "", *_table(["tasks", "beside", "requests/s", *heads], rows)]


def _list_servers(pairs: Parts) -> list[str]:
    rows, seen = [], set()
    for records in pairs.values():
        for one in records:
            key = (one.get("server"), one.get("tasks"))
            if one["what"] == "server" and key not in seen:
                seen.add(key)
                equality = one["equality"]
                difference = f"{equality['max_difference']:.0e} in {equality['rows']}"
                cells = [
                    f"{one['pss_mb']:,.0f}",
                    str(one["processes"]),
                    f"{one['ready_s']:.0f}",
                    f"{one['idle_cpu']:.2f}",
                ]
                rows.append([one["server"], str(one["tasks"]), *cells, difference, one["about"]])
    rows.sort(key=lambda row: (int(row[1]), row[0]))
    heads = ["server", "tasks", "MB (PSS)", "processes", "s to start", "cores at rest", "largest difference", "what"]
    return _table(heads, rows)


def _list_missing(parts: Parts) -> list[str]:
    found = []
    for name, records in parts.items():
        found += [f"- {name}: {one['why']}" for one in records if one["what"] in ("failed", "skipped")]
        lost: dict[tuple[str, str], list[int]] = {}
        for one in records:
            if one["what"] == "load" and not one.get("all_answered", True):
                numbers = lost.setdefault((one["server"], one["load"]), [0, 0])
                numbers[0] += one.get("refused", 0) + one["failed"] + one["errors"]
                numbers[1] += one["answers"]
        found += [
            f"- {name}: {server} did not answer {number:,} requests beside {answers:,} answers ({load})"
            for (server, load), (number, answers) in lost.items()
        ]
    return found or ["Nothing of what was begun."]


def _list_alone(parts: Parts, pairs: Parts) -> list[str]:
    rows = []
    for name, records in parts.items():
        if name in pairs:
            continue
        loads: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            if record["what"] == "load":
                loads[record["load"]].append(record)
            elif record["what"] in ("memory", "upload", "capacity", "ratio", "in process", "noise"):
                kept = {
                    key: value for key, value in record.items() if key not in ("what", "statuses", "seconds", "samples")
                }
                loads.setdefault(f"{record['what']}: {json.dumps(kept)}", [])
        for load, found in loads.items():
            if found:
                keys = ("rows_per_s", "p50_ms", "p99_ms", "cpu_ms_row")
                rows.append([name, load, *(_tell(spread([one[key] for one in found], 1)) for key in keys)])
            else:
                rows.append([name, load, "", "", "", ""])
    return _table(["part", "load", "rows/s", "p50 ms", "p99 ms", "CPU-ms a row"], rows)


def _list_parts(parts: Parts) -> list[str]:
    rows = []
    for name, records in parts.items():
        head = records[0]
        turns = f"{head['turns']} × {head['seconds']:g} s"
        rows.append(
            [name, head["date"], head["commit"][:12], turns, f"{head['load_before']:.1f}", f"`{head['command']}`"]
        )
    return _table(["part", "date", "commit", "turns", "load before", "command"], rows)


def _values(records: Sequence[Record], load: str, server: str, key: str) -> list[float]:
    found = [one for one in records if one["what"] == "load" and one["load"] == load and one["server"] == server]
    return [one[key] for one in sorted(found, key=lambda one: one["turn"]) if key in one]


def _ratio(
    records: Sequence[Record], load: str, one: str, other: str, key: str = "rows_per_s"
) -> dict[str, float] | None:
    first, second = (_values(records, load, server, key) for server in (one, other))
    return compare(first, second) if first and len(first) == len(second) else None


def _median(records: Sequence[Record], load: str, server: str, key: str) -> str:
    values = _values(records, load, server, key)
    return f"{statistics.median(values):.3g}" if values else ""


def _tell(found: Mapping[str, float] | None) -> str:
    if found is None:
        return ""
    return f"{found['median']:.3g} ({found['low']:.3g} to {found['high']:.3g})"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return ["Nothing yet."]
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def draw(pairs: Parts, path: Path) -> None:
    """Rows a second and memory of every server, as bars; ranges are those of the turns."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), constrained_layout=True)
    _draw_bars(
        axes[0],
        pairs,
        "rows/s, single rows, 64 connections",
        lambda records, one: _values(records, "single", one, "rows_per_s"),
    )
    _draw_bars(axes[1], pairs, "rows/s, lists of 32", lambda records, one: _values(records, "lists", one, "rows_per_s"))
    _draw_bars(axes[2], pairs, "MB of all processes (PSS)", _memory_of)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _memory_of(records: Sequence[Record], server: str) -> list[float]:
    return [one["pss_mb"] for one in records if one["what"] == "server" and one["server"] == server]


def _draw_bars(axis: Any, pairs: Parts, title: str, values_of: Callable[[Sequence[Record], str], list[float]]) -> None:
    servers = [*OURS, *dict.fromkeys(name.rsplit("-", 1)[0] for name in pairs)]
    counts = sorted({int(name.rsplit("-", 1)[1]) for name in pairs})
    width = 0.8 / max(1, len(servers))
    for place, server in enumerate(servers):
        for at, count in enumerate(counts):
            of_count = [records for name, records in pairs.items() if name.endswith(f"-{count}")]
            values = [value for records in of_count for value in values_of(records, server)]
            if not values:
                continue
            middle = statistics.median(values)
            around = [[middle - min(values)], [max(values) - middle]]
            label = server if at == 0 else None
            axis.bar(
                at + place * width,
                middle,
                width,
                color=COLOURS[place % len(COLOURS)],
                label=label,
                yerr=around,
                error_kw={"lw": 0.8},
            )
    axis.set_xticks([at + 0.4 - width / 2 for at in range(len(counts))], [f"{count} tasks" for count in counts])
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
