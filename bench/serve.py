"""Answering for many tasks beside `adapters`: switching the active adapter for each request, or its BatchSplit.

    python bench/serve.py --device cpu                            32 requests for 32 tasks, MiniLM
    python bench/serve.py --device cuda --backbone base           256 rows of 256 tasks, 2,000 held

On a CPU a step is one call of Inlay's engine with 32 texts, and the peers tokenise the same texts too. On a GPU a step
is 256 tokenised rows: Inlay's bank holds 2,000 tasks and every step asks another 256 of them, beside the same rows for
one task; `adapters` holds 64, as each of its tasks is a set of small modules. Answers end on the CPU on every side.
BatchSplit takes all rows in one padded batch (`split`), or in four of similar lengths (`split-by-length`).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import report
import torch
import turns
from turns import Way
from workload import Workload, glue_lengths, make_workload

REQUESTS = {"cpu": 32, "cuda": 256}
HELD = {"cpu": 32, "cuda": 2000}
PEER_HELD = {"cpu": 32, "cuda": 64}
STEPS = {"cpu": 4, "cuda": 20}
STYLES = ("switch", "split", "split-by-length")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--backbone", default="minilm", help="base, large (random weights), a built-in name or a folder"
    )
    parser.add_argument("--requests", type=int, help="rows of a step")
    parser.add_argument("--held", type=int, help="tasks that Inlay holds")
    parser.add_argument("--peer-held", type=int, help="tasks that `adapters` holds")
    parser.add_argument("--steps", type=int, help="of a turn; a peer that switches, or runs on a GPU, takes one")
    parser.add_argument("--size", type=int, default=64, help="of the bottleneck")
    turns.add_options(parser)
    report.add_options(parser)
    options = parser.parse_args()
    requests = options.requests or REQUESTS[options.device]
    work = make_workload(options.backbone, glue_lengths(requests), options.folder)
    ways = make_ways(options, work)
    num_steps = options.steps or STEPS[options.device]
    # A step of a peer on a GPU is hundreds of small launches for each row: one is long enough.
    is_slow = {
        way.name: way.name == "adapters/switch" or (options.device == "cuda" and not way.is_ours) for way in ways
    }
    steps = {way.name: 1 if is_slow[way.name] else num_steps for way in ways}
    turns.measure_in_turns(ways, options, steps)
    compared = turns.ratios(ways)
    for way in ways:
        rate = way.error or f"{report.spread(way.rates)['median']:,.0f} rows/s"
        print(f"{way.name}: {rate}", flush=True, file=sys.stderr)
    report.finish(
        options,
        backbone=options.backbone,
        device=options.device,
        work=work.describe() | {"rows_of_a_step": requests},
        ways=turns.describe(ways),
        ratios=compared,
        mixed_over_one_task=_mixed_over_one(ways),
    )


def make_ways(options: argparse.Namespace, work: Workload) -> list[Way]:
    common = {
        "folder": str(work.backbone),
        "rows": str(work.path),
        "device": options.device,
        "threads": torch.get_num_threads(),
        "size": options.size,
        "requests": work.num_rows,
    }
    held = options.held or HELD[options.device]
    peer = {"work": "answer", "library": "adapters", "texts": options.device == "cpu"}
    peer["tasks"] = options.peer_held or PEER_HELD[options.device]
    ours: dict[str, dict[str, Any]] = {
        "inlay/engine": {"work": "engine", "tasks": held},
        "inlay/mixed": {"work": "bank", "tasks": held, "mixed": True, "compiled": True},
        "inlay/one task": {"work": "bank", "tasks": held, "mixed": False, "compiled": True},
        "inlay/mixed, launched": {"work": "bank", "tasks": held, "mixed": True},
    }
    names = ("inlay/engine",) if options.device == "cpu" else tuple(name for name in ours if name != "inlay/engine")
    return [
        *(Way(name, common | ours[name], is_ours=True) for name in names),
        *(Way(f"adapters/{style}", common | peer | {"style": style}) for style in STYLES),
    ]


def _mixed_over_one(ways: list[Way]) -> dict[str, float] | None:
    rates = {way.name: way.rates for way in ways if not way.error}
    if "inlay/mixed" not in rates or "inlay/one task" not in rates:
        return None
    return report.compare(rates["inlay/mixed"], rates["inlay/one task"])


if __name__ == "__main__":
    main()
