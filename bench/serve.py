"""Answering for many tasks beside `adapters`: switching the active adapter for each request, or its BatchSplit.

    python bench/serve.py --device cpu                            32 requests for 32 tasks, MiniLM
    python bench/serve.py --device cuda --backbone base           256 rows of 256 tasks, 2,000 held

On a CPU a step is one call of Inlay's engine with 32 texts, and the peers tokenise the same texts too. On a GPU a step
is 256 tokenised rows: Inlay's bank holds 2,000 tasks and every step asks another 256 of them, beside the same rows for
one task; `adapters` holds 64, as each of its tasks is a set of small modules. `inlay/engine` is what users call there:
`inlay.Engine(is_compiled=True)` on 256 texts, tokenising, looking up and phrasing included, from a store of 512 tasks
(files of ten megabytes each, which are read before the clock runs). Answers end on the CPU on every side.
BatchSplit takes all rows in one padded batch (`split`), or in four of similar lengths (`split-by-length`). Switching
takes each row by itself, at about 22 rows a second on an H200: there a step of it is 32 of the 256 rows, of evenly
spaced lengths, and the report says so.
"""

from __future__ import annotations

import argparse
from typing import Any

import report
import torch
import turns
from turns import Way
from workload import Workload, glue_lengths, make_workload

REQUESTS = {"cpu": 32, "cuda": 256}
HELD = {"cpu": 32, "cuda": 2000}
ENGINE_HELD = {"cpu": 32, "cuda": 512}
PEER_HELD = {"cpu": 32, "cuda": 64}
STEPS = {"cpu": 4, "cuda": 20}
SWITCH_ROWS = {"cpu": None, "cuda": 32}
SETTINGS = (
    "backbone",
    "device",
    "requests",
    "held",
    "engine_held",
    "peer_held",
    "steps",
    "size",
    "switch_rows",
    "no_peers",
)
STYLES = ("switch", "split", "split-by-length")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--backbone", default="minilm", help="base, large (random weights), a built-in name or a folder"
    )
    parser.add_argument("--requests", type=int, help="rows of a step")
    parser.add_argument("--held", type=int, help="tasks that Inlay holds")
    parser.add_argument("--engine-held", type=int, help="tasks in the store of Inlay's engine")
    parser.add_argument("--peer-held", type=int, help="tasks that `adapters` holds")
    parser.add_argument("--steps", type=int, help="of a turn; a peer that switches, or runs on a GPU, takes one")
    parser.add_argument("--size", type=int, default=64, help="of the bottleneck")
    parser.add_argument("--switch-rows", type=int, help="rows of a step of `adapters/switch`; default on a GPU: 32")
    parser.add_argument("--no-peers", action="store_true", help="measure Inlay's own ways alone")
    turns.add_options(parser)
    report.add_options(parser, resumes=True)
    options = parser.parse_args()
    report.say("making rows and backbone")
    work = make_workload(options.backbone, glue_lengths(options.requests or REQUESTS[options.device]), options.folder)
    ways = make_ways(options, work)
    num_steps = options.steps or STEPS[options.device]
    # A step of a peer on a GPU is hundreds of small launches for each row: one is long enough.
    is_slow = {
        way.name: way.name == "adapters/switch" or (options.device == "cuda" and not way.is_ours) for way in ways
    }
    steps = {way.name: 1 if is_slow[way.name] else num_steps for way in ways}
    planned = turns.plan_turns(options)
    found = report.Report(options, planned, lambda parts: compose(ways, options, work), settings=SETTINGS)
    with found:
        turns.measure_in_turns(ways, options, steps, found)
    for way in ways:
        rate = way.error or (f"{report.spread(way.rates)['median']:,.0f} rows/s" if way.rates else "none yet")
        report.say(f"{way.name}: {rate}")
    found.finish()


def compose(ways: list[Way], options: argparse.Namespace, work: Workload) -> dict[str, Any]:
    """What the turns measured so far say."""
    return {
        "backbone": options.backbone,
        "device": options.device,
        "work": work.describe() | {"rows_of_a_step": {way.name: way.job["answered"] for way in ways}},
        "ways": turns.describe(ways),
        "ratios": turns.ratios(ways),
        "mixed_over_one_task": _mixed_over_one(ways),
    }


def make_ways(options: argparse.Namespace, work: Workload) -> list[Way]:
    common = {
        "folder": str(work.backbone),
        "rows": str(work.path),
        "device": options.device,
        "threads": torch.get_num_threads(),
        "size": options.size,
        "requests": work.num_rows,
        "answered": work.num_rows,
    }
    held = options.held or HELD[options.device]
    in_store = options.engine_held or ENGINE_HELD[options.device]
    peer = {"work": "answer", "library": "adapters", "texts": options.device == "cpu"}
    peer["tasks"] = options.peer_held or PEER_HELD[options.device]
    switched = min(options.switch_rows or SWITCH_ROWS[options.device] or work.num_rows, work.num_rows)
    fewer = {"switch": {"answered": switched}}
    ours: dict[str, dict[str, Any]] = {
        "inlay/engine": {"work": "engine", "tasks": in_store, "compiled": options.device == "cuda"},
        "inlay/mixed": {"work": "bank", "tasks": held, "mixed": True, "compiled": True},
        "inlay/one task": {"work": "bank", "tasks": held, "mixed": False, "compiled": True},
        "inlay/mixed, launched": {"work": "bank", "tasks": held, "mixed": True},
    }
    names = ("inlay/engine",) if options.device == "cpu" else tuple(ours)
    styles = () if options.no_peers else STYLES
    return [
        *(Way(name, common | ours[name], is_ours=True) for name in names),
        *(Way(f"adapters/{style}", common | peer | {"style": style} | fewer.get(style, {})) for style in styles),
    ]


def _mixed_over_one(ways: list[Way]) -> dict[str, float] | None:
    rates = {way.name: way.rates for way in ways if way.rates and not way.error}
    if "inlay/mixed" not in rates or "inlay/one task" not in rates:
        return None
    return report.compare(rates["inlay/mixed"], rates["inlay/one task"])


if __name__ == "__main__":
    main()
