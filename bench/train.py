"""Training speed beside the peers': `adapters`, LoRA in `peft`, full fine-tuning; Inlay with one run and with cohorts.

    python bench/train.py --device cpu  --backbone minilm --cohort 1
    python bench/train.py --device cuda --backbone base   --cohort 1,8,32
    python bench/train.py --device cuda --backbone large  --cohort 16 --peers adapters/eager

Every way trains on the same rows (a turn is an epoch) with batch 32, AdamW, clipped gradients, hidden dropout 0.1 and
no attention dropout, collation included. Houlsby's adapters of size 64 on both sides; Inlay trains the layer norms too,
which `adapters` cannot. Ways of a peer, as LIBRARY/MODE:

    eager     bucketed by length (32 batches at a time); on a GPU everything in bf16, trained parameters too: fastest
    padded    eager, but batches drawn from all rows, padded to their longest
    float32   eager, trained parameters in float32 under autocast (frozen weights still bf16)
    compiled  eager through torch.compile(dynamic=True)
    graphs    torch.compile(mode="reduce-overhead") with lengths padded to multiples of 16, so that shapes are few; each
              is compiled, which takes minutes
    replays   the same compiled once with dynamic=True, and recorded for each shape
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import report
import torch
import turns
from turns import Way
from workload import Workload, glue_lengths, make_workload

MODES: dict[str, dict[str, Any]] = {
    "eager": {"compile": None, "bucket": 32, "pad_to": 1, "trained_dtype": "bfloat16"},
    "padded": {"compile": None, "bucket": 1, "pad_to": 1, "trained_dtype": "bfloat16"},
    "float32": {"compile": None, "bucket": 32, "pad_to": 1, "trained_dtype": "float32"},
    "compiled": {"compile": "dynamic", "bucket": 32, "pad_to": 1, "trained_dtype": "bfloat16"},
    "graphs": {"compile": "reduce-overhead", "bucket": 32, "pad_to": 16, "trained_dtype": "bfloat16"},
    "replays": {"compile": "replays", "bucket": 32, "pad_to": 16, "trained_dtype": "bfloat16"},
}
COMPILED = ("compiled", "graphs", "replays")
LIBRARIES = ("adapters", "lora", "full")
PEERS = {
    "cpu": "adapters/eager,adapters/padded",
    "cuda": "adapters/padded,adapters/float32,"
    + ",".join(f"{library}/{mode}" for library in LIBRARIES for mode in ("eager", "compiled", "graphs")),
}
ROWS = {"cpu": 1024, "cuda": 4096}
PRODUCT = "matrix rate"
SETTINGS = ("backbone", "device", "rows", "batch_size", "size", "cohort", "peers", "ours_eager", "token_budget")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--backbone", default="minilm", help="base, large (random weights), a built-in name or a folder"
    )
    parser.add_argument("--cohort", default="1", help="sizes of Inlay's cohorts, by commas")
    parser.add_argument("--peers", help="LIBRARY/MODE by commas, or none; default: all that suit the device")
    parser.add_argument("--ours-eager", action="store_true", help="measure Inlay's eager steps beside its own choice")
    parser.add_argument("--rows", type=int, help="of an epoch, which is a turn")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--size", type=int, default=64, help="of the bottleneck")
    parser.add_argument("--token-budget", type=int, help="of one forward pass of Inlay")
    turns.add_options(parser)
    report.add_options(parser, resumes=True)
    options = parser.parse_args()
    report.say("making rows and backbone")
    work = make_workload(options.backbone, glue_lengths(options.rows or ROWS[options.device]), options.folder)
    ways = make_ways(options, work)
    steps = {way.name: work.num_rows // options.batch_size for way in ways}
    planned = turns.plan_turns(options) + ([PRODUCT] if options.device == "cuda" else [])
    found = report.Report(options, planned, lambda parts: compose(parts, ways, options, work), settings=SETTINGS)
    with found:
        turns.measure_in_turns(ways, options, steps, found)
        if PRODUCT in found.missing:
            report.say("measuring the chip's matrix rate")
            found.add(PRODUCT, _measure_matrix_rate())
    show(ways, turns.ratios(ways))
    found.finish()


def compose(parts: dict[str, Any], ways: list[Way], options: argparse.Namespace, work: Workload) -> dict[str, Any]:
    """What the turns measured so far say."""
    compared = turns.ratios(ways)
    return {
        "backbone": options.backbone,
        "device": options.device,
        "work": work.describe(),
        "ways": turns.describe(ways),
        "ratios": compared,
        "bars": find_bars(ways, compared),
        "matrix_rate": find_matrix_rate(ways, work, parts[PRODUCT]) if PRODUCT in parts else None,
    }


def make_ways(options: argparse.Namespace, work: Workload) -> list[Way]:
    common = {
        "work": "train",
        "folder": str(work.backbone),
        "rows": str(work.path),
        "device": options.device,
        "threads": torch.get_num_threads(),
        "batch_size": options.batch_size,
        "size": options.size,
    }
    ours = {"token_budget": options.token_budget}
    ways = []
    for size in options.cohort.split(","):
        for eager in (False, True) if options.ours_eager else (False,):
            name = f"inlay/{size}{' eager' if eager else ''}"
            ways.append(Way(name, common | ours | {"cohort": int(size), "eager": eager}, is_ours=True))
    names = PEERS[options.device] if options.peers is None else options.peers
    for name in names.split(",") if names != "none" else ():
        library, _, mode = name.partition("/")
        if library not in LIBRARIES or mode not in MODES:
            sys.exit(f"no way `{name}`: a peer is one of {', '.join(LIBRARIES)}, a mode one of {', '.join(MODES)}")
        ways.append(Way(name, common | {"library": library} | MODES[mode]))
    return ways


def find_bars(ways: list[Way], compared: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each of ours beside eager `adapters`, and beside the best peer of all and the best compiled one."""
    bars: dict[str, dict[str, Any]] = {}
    for name, over in compared.items():
        slowest = {peer: ratio["median"] for peer, ratio in sorted(over.items(), key=lambda item: item[1]["median"])}
        found = bars[name] = {
            peer: over[peer]["median"] for peer in over if peer in ("adapters/eager", "adapters/padded")
        }
        for what, modes in (("best peer", tuple(MODES)), ("best compiled peer", COMPILED)):
            best = next((peer for peer in slowest if peer.endswith(modes)), None)
            if best:
                found[f"{what} ({best})"] = slowest[best]
    return bars


def find_matrix_rate(ways: list[Way], work: Workload, rate: float) -> dict[str, Any]:
    """The share of the chip's matrix rate that the frozen matrices alone reach: 2 operations a weight and token forward
    and 2 backward (towards the input only). Adapters, heads and attention are not counted."""
    mean = float(work.lengths.mean())
    shares = {}
    for way in ways:
        if way.is_ours and way.rates and not way.error:
            flops = 4 * way.facts["matrix_parameters"] * mean * report.spread(way.rates)["median"]
            shares[way.name] = {"tflops_per_s": round(flops / 1e12, 1), "share": round(flops / rate, 3)}
    return {"product_tflops_per_s": round(rate / 1e12, 1), "product": "8192³, bf16, random data", "reached": shares}


def _measure_matrix_rate() -> float:
    """In a process of its own, when all others have ended."""
    request = b'{"do": "matrix_rate"}\n'
    answer = subprocess.run([sys.executable, str(turns.OURS)], input=request, capture_output=True, check=True)
    return float(json.loads(answer.stdout)["flops_per_s"])


def show(ways: list[Way], compared: dict[str, dict[str, Any]]) -> None:
    header = ["", "samples/s", *(f"× of {name}" for name in compared)]
    rows = {}
    for way in ways:
        if way.error or not way.rates:
            rows[way.name] = ["failed" if way.error else "none yet", *("" for _ in compared)]
            continue
        over = [f"{ratios[way.name]['median']:.2f}" if way.name in ratios else "" for ratios in compared.values()]
        rows[way.name] = [f"{report.spread(way.rates)['median']:,.0f}", *over]
    report.print_table(rows, header)


if __name__ == "__main__":
    main()
