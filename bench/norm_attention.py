"""The Triton norms, attention and other passes over packed tokens against what PyTorch has for the same work, on a GPU.

    python bench/norm_attention.py [--only norm …] [--shape cohort …] [--direction forward] [--dtype bfloat16]
    python bench/norm_attention.py --tune [--only norm vectors attention]

Every way of a case is captured as a CUDA graph (a step is replayed as one) and measured in turns with the others
(kernel_ways.py has how, and `--ahead`); `×` is its time over ours: above 1, ours is faster. The last lines say whether
ours is at least 1.1 times faster than the best other way. What the ways are is in norm_ways.py and attention_ways.py.
What decides comes first: a step of one run and of a cohort, with dropout and with bias, forward and backward; then
other shapes, then rows of one length.

`--tune` times our programs alone over the cuts they could have, best first: what the tables of
`inlay/model/fused_attention.py`, `fused_norm.py` and `grouped.py` should say on this GPU. The first cut of each list is
theirs. With `TRITON_INTERPRET=1` and without a GPU, `--shape tiny --dtype float32` tries this script.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from attention_ways import AttentionCase, attention_programs, attention_ways, kernel_of, names_of_attention
from kernel_ways import (
    DIRECTIONS,
    Call,
    Case,
    Way,
    add_kernel_options,
    in_direction,
    measure_cases,
    share_of,
    timed_alone,
)
from norm_ways import DEVICE, Tokens, gelu_ways, norm_programs, norm_ways, rms_ways, vector_programs, vector_ways
from report import say

from inlay.model.kernels import fused_attention, fused_norm, grouped
from inlay.model.kernels.launch import is_available

NORMS = {
    "single": Tokens(1, 1216, 768),
    "cohort": Tokens(32, 1216, 768),
    "eight": Tokens(8, 1216, 768),
    "large": Tokens(16, 1216, 1024),
    "tiny": Tokens(2, 20, 32),
    "tiny-single": Tokens(1, 20, 32),
}
T5_NORMS = {name: NORMS[name] for name in ("single", "cohort", "tiny", "tiny-single")}
GELUS = {"single": Tokens(1, 1216, 3072), "cohort": Tokens(32, 1216, 3072), "tiny": Tokens(1, 20, 32)}
VECTORS = {name: NORMS[name] for name in ("single", "cohort", "tiny")}
ATTENTIONS = {
    "single": AttentionCase(32, 12, 128),
    "cohort": AttentionCase(1024, 12, 128),
    "dropout": AttentionCase(1024, 12, 128, dropout=0.1),
    "bias": AttentionCase(1024, 12, 128, bias=True),
    "large": AttentionCase(512, 16, 128),
    "128": AttentionCase(192, 12, 128, same=128),
    "192": AttentionCase(128, 12, 192, same=192),
    "256": AttentionCase(96, 12, 256, same=256),
    "long": AttentionCase(64, 12, 384, same=384),
    "long-bias": AttentionCase(64, 12, 384, same=384, bias=True),
    "tiny": AttentionCase(2, 2, 128, same=16),
}
TRIAL = ("tiny", "tiny-single")
"""shapes that measure nothing"""
FIRST = ("single", "cohort", "dropout", "bias")
"""the shapes that decide; of these alone the compiled ways are measured, as each takes seconds"""
LAST = ("128", "192", "256", "long", "long-bias")


@dataclass(frozen=True)
class Kind:
    """A kind of work."""

    shapes: dict[str, Any]
    open: Callable[[Any, torch.dtype], dict[str, Callable[[], Way]]]
    kernel_of: Callable[[Any], str]
    """what the verdict of a case is about"""
    names: Callable[[Any, torch.dtype], tuple[str, ...]]
    """the ways that a case has, ours first"""
    compiled_in: tuple[str, ...] = DIRECTIONS
    """the directions whose compiled ways are measured"""


def names_of_norm(case: Tokens, dtype: torch.dtype) -> tuple[str, ...]:
    if case.slots == 1:
        return "ours", "of one slot", "addcmul", "gathered", "of one slot, compiled"
    return "ours", "one-hot", "slot vectors", "addcmul", "gathered", "gathered, compiled", "one-hot, compiled"


def names_of_rms(case: Tokens, dtype: torch.dtype) -> tuple[str, ...]:
    return tuple(name for name in names_of_norm(case, dtype) if name not in ("addcmul", "one-hot, compiled"))


KINDS = {
    "norm": Kind(NORMS, norm_ways, lambda case: "layer norm", names_of_norm),
    "rms": Kind(T5_NORMS, rms_ways, lambda case: "rms norm", names_of_rms),
    "gelu": Kind(GELUS, gelu_ways, lambda case: "exact GELU", lambda *_: ("ours", "F.gelu", "F.gelu, compiled")),
    "vectors": Kind(
        VECTORS,
        vector_ways,
        lambda case: "slot vectors",
        lambda *_: ("ours", "one-hot", "index_select"),
    ),
    "attention": Kind(ATTENTIONS, attention_ways, kernel_of, names_of_attention, compiled_in=("both",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = list(dict.fromkeys(name for kind in KINDS.values() for name in kind.shapes))
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--shape", nargs="+", choices=shapes, default=[name for name in shapes if name not in TRIAL])
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tune", action="store_true", help="time our programs over the cuts they could have")
    add_kernel_options(parser)
    options = parser.parse_args()
    if not is_available(DEVICE):
        parser.exit(1, "the kernels run on a CUDA device with triton; there is none here\n")
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    if options.tune:
        tune(options, dtype)
        return
    measure_cases(plan_cases(options, dtype), options, settings=("dtype", "launched", "repeats"))


def plan_cases(options: argparse.Namespace, dtype: torch.dtype) -> list[Case]:
    """The cases in order: what decides first, rows of one length last."""
    found = [
        (kind, name, direction)
        for direction in options.direction
        for kind in options.only
        for name in KINDS[kind].shapes
        if name in options.shape
    ]
    found.sort(key=lambda case: 0 if case[1] in FIRST else 2 if case[1] in LAST else 1)
    return [make_case(*case, dtype) for case in found]


def make_case(kind_name: str, name: str, direction: str, dtype: torch.dtype) -> Case:
    kind = KINDS[kind_name]
    shape = kind.shapes[name]
    ways = kind.names(shape, dtype)
    if name not in (*FIRST, *TRIAL) or direction not in kind.compiled_in:
        ways = tuple(way for way in ways if not way.endswith("compiled"))
    compiled = tuple(way for way in ways if way.endswith("compiled"))
    facts = {"kind": kind_name, "shape": name, **asdict(shape), "pass": direction}
    rivals = {kind.kernel_of(shape): ("ours", ways[1:])}
    opened = partial(open_case, kind, shape, dtype, direction)
    return Case(f"{name} {direction} ({kind_name})", facts, ways, compiled, opened, rivals)


def open_case(kind: Kind, shape: Any, dtype: torch.dtype, direction: str) -> dict[str, Callable[[], Call]]:
    return in_direction(kind.open(shape, dtype), direction)


TUNED: dict[str, tuple[tuple[str, ...], Callable[..., dict[str, Call]], Any]] = {
    "attention": (("cohort", "single", "tiny"), attention_programs, fused_attention),
    "norm": (("single", "cohort", "large", "tiny"), norm_programs, fused_norm),
    "vectors": (("single", "cohort", "tiny"), vector_programs, grouped),
}
"""kind -> the shapes that are tried of it, what makes its programs, the module that cuts them"""


def tune(options: argparse.Namespace, dtype: torch.dtype) -> None:
    """Print the times of every cut of every program, or of a share of them, for steps of a cohort and of one run."""
    share = share_of(options.share or "0/1")
    for kind, (names, programs_of, module) in TUNED.items():
        for name in names if kind in options.only else ():
            if name not in options.shape:
                continue
            say(f"tuning {kind}: {name}")
            for table, call in programs_of(KINDS[kind].shapes[name], dtype).items():
                times = {str(cut): timed_with(module, cut, call) for cut in cuts_of(module, table)[share]}
                print(f"{kind} {name} {table}, now {times.get(str({}), float('nan')):.1f} µs", flush=True)
                for cut, time in sorted(times.items(), key=lambda item: item[1])[:6]:
                    print(f"  {time:8.1f} {cut}", flush=True)


def cuts_of(module: Any, table: str) -> list[dict[str, Any]]:
    """What may be set in a module that cuts launches: nothing, which is what it has, and what is tried."""
    if module is fused_attention:
        return [{}, *_product(HALF_WARPS=(1, 2, 4), NUM_WARPS=(4, 8), PROGRAMS=(2048, 2**30))]
    if module is grouped:
        return [{}, *_product(VECTOR_PROGRAMS=(264, 1024, 2048, 4096), VECTOR_BLOCK=(128, 256), VECTOR_TOKENS=(16, 32))]
    now = getattr(module, table)
    return [{}, *({table: now._replace(**change)} for change in TRIED[table])]


def _product(**choices: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


TRIED = {
    "FORWARD": _product(block=(1024, 2048, 4096), programs=(4096, 16384), num_stages=(1, 2), fewest=(1, 2, 4)),
    "BACKWARD": _product(block=(1024, 2048), programs=(512, 1024, 2048), num_stages=(1, 3)),
}


def timed_with(module: Any, cut: dict[str, Any], call: Call) -> float:
    """Median microseconds of a call under one cut."""
    before = {name: getattr(module, name) for name in cut}
    try:
        for name, value in cut.items():
            setattr(module, name, value)
        return timed_alone(call)
    finally:
        for name, value in before.items():
            setattr(module, name, value)


if __name__ == "__main__":
    main()
