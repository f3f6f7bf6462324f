"""What the fused bottleneck buys on this GPU against the same composed of grouped products, in turns in one process.

    python bench/bottleneck.py [--shape cohort …] [--repeats 5] [--tile 64] [--launched] [--out bench/bottleneck.json]
    python bench/bottleneck.py --tune [--shape cohort …]

Times are medians in microseconds of work replayed from a CUDA graph, so that launches cost nothing, as in a captured
step; `--launched` times it as Python launches it. `×` is a way's time over the fused kernel's: a kernel that is not
at least 1.1 times faster than the best other way has no place. GB/s counts what must be moved at least: tokens read
and written once, weights of the slots visited, gradients of weights written once.

Ways: `fused` reads float32 weights; `fused, copies` reads copies in bf16, whose making is part of its time; `linear`
is composed of `segment_linear`; `grouped_mm` of torch's own grouped product with explicit casts. `dropout, fused` has
dropout of 0.1 before it as torch does it, `fused dropout` in its own programs.

`--tune` times each program alone, with copies in bf16 and dropout of 0.1, over the cuts of `CUTS`, and prints the best
of each shape: what the tables of `inlay/model/fused.py` should say on this GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model import fused as programs
from inlay.model.fused import Stacks, bottleneck, threshold_of
from inlay.model.grouped import segment_linear
from inlay.model.launch import Cut, WeightsCut, is_available
from inlay.model.tiles import Tiles, make_tiles, tile_capacity
from inlay.training.publish import current_commit

DEVICE = torch.device("cuda")
DROPOUT = 0.1


@dataclass(frozen=True)
class Shape:
    """A site's bottlenecks and the tokens of a step."""

    width: int
    size: int
    num_slots: int
    """visited, each with as many tokens"""
    tokens_per_slot: int
    num_held: int = 0
    """slots in the stacks, if there are more; in bf16, for inference"""

    @property
    def num_tokens(self) -> int:
        return self.num_slots * self.tokens_per_slot


SHAPES = {
    "cohort": Shape(768, 64, 32, 1216),
    "large": Shape(1024, 64, 16, 1216),
    "single": Shape(768, 64, 1, 1216),
    "inference": Shape(768, 64, 256, 38, num_held=2000),
}


@dataclass(frozen=True)
class Work:
    """The tensors of one shape. The slots visited are spread evenly over those held."""

    h: Tensor
    stacks: Stacks
    tiles: Tiles
    visited: Tensor
    slots: Tensor
    """of each token, among those visited"""
    ends: Tensor
    """where the tokens of each slot visited end"""
    seed: Tensor


def make_work(shape: Shape, tile: int) -> Work:
    torch.manual_seed(0)
    num_held, is_trained = shape.num_held or shape.num_slots, not shape.num_held
    dtype = torch.float32 if is_trained else torch.bfloat16

    def draw(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return (torch.randn(*sizes, device=DEVICE) * 0.05).to(dtype).requires_grad_(is_trained)

    visited = torch.arange(shape.num_slots) * (num_held // shape.num_slots)
    starts = torch.arange(shape.num_slots + 1) * shape.tokens_per_slot
    segments = list(zip(visited.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=True))
    capacity = tile_capacity(shape.num_tokens, shape.num_slots, tile)
    stacks = Stacks(
        draw(num_held, shape.width, shape.size),
        draw(num_held, shape.size, shape.width),
        torch.ones(num_held, device=DEVICE),
        draw(num_held, shape.size),
        draw(num_held, shape.width),
    )
    return Work(
        draw(shape.num_tokens, shape.width, dtype=torch.bfloat16),
        stacks,
        make_tiles(segments, num_held, tile, capacity, DEVICE),
        visited.to(DEVICE),
        torch.arange(shape.num_slots, device=DEVICE).repeat_interleave(shape.tokens_per_slot),
        starts[1:].to(DEVICE, torch.int32),
        torch.tensor([7], device=DEVICE),
    )


def fused(work: Work) -> Tensor:
    return bottleneck(work.h, work.stacks, work.tiles, "gelu")


def fused_with_copies(work: Work) -> Tensor:
    stacks = work.stacks
    copies = stacks.down_SDR.detach().bfloat16(), stacks.up_SRE.detach().bfloat16()
    with_copies = Stacks(stacks.down_SDR, stacks.up_SRE, stacks.scale_S, stacks.down_bias_SR, stacks.up_bias_SE, copies)
    return bottleneck(work.h, with_copies, work.tiles, "gelu")


def fused_with_dropout(work: Work) -> Tensor:
    return bottleneck(work.h, work.stacks, work.tiles, "gelu", dropout=DROPOUT, seed=work.seed)


def dropout_before_fused(work: Work) -> Tensor:
    return bottleneck(F.dropout(work.h, DROPOUT), work.stacks, work.tiles, "gelu")


def linear(work: Work) -> Tensor:
    stacks = work.stacks
    z = F.gelu(segment_linear(work.h, stacks.down_SDR, stacks.down_bias_SR, work.tiles), approximate="tanh")
    return work.h + segment_linear(z, stacks.up_SRE, stacks.up_bias_SE, work.tiles)


def grouped_mm(work: Work) -> Tensor:
    stacks = work.stacks
    weights = (stacks.down_SDR, stacks.up_SRE, stacks.down_bias_SR, stacks.up_bias_SE)
    if len(stacks.down_SDR) > len(work.visited):
        weights = tuple(stack[work.visited] for stack in weights)
    down, up, down_bias, up_bias = (weight.bfloat16() for weight in weights)
    z = F.gelu(torch._grouped_mm(work.h, down, offs=work.ends) + down_bias[work.slots], approximate="tanh")
    return work.h + torch._grouped_mm(z, up, offs=work.ends) + up_bias[work.slots]


WAYS: dict[str, Callable[[Work], Tensor]] = {
    "fused": fused,
    "fused, copies": fused_with_copies,
    "fused dropout": fused_with_dropout,
    "dropout, fused": torch.compile(dropout_before_fused, dynamic=False),
    "linear": linear,
    "linear, compiled": torch.compile(linear, dynamic=False),
    "grouped_mm": grouped_mm,
    "grouped_mm, compiled": torch.compile(grouped_mm, dynamic=False),
}


def forward_of(way: Callable[[Work], Tensor], work: Work) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad():
            way(work)

    return call


def step_of(way: Callable[[Work], Tensor], work: Work) -> Callable[[], None]:
    stacks, grad = work.stacks, torch.randn_like(work.h)
    leaves = [work.h, stacks.down_SDR, stacks.up_SRE, stacks.down_bias_SR, stacks.up_bias_SE]

    def call() -> None:
        torch.autograd.grad(way(work), leaves, grad)

    return call


def moved_bytes(shape: Shape, *, is_step: bool) -> int:
    """What must be moved at least: tokens of bf16, weights as they are held."""
    tokens, weights = shape.num_tokens * shape.width * 2, shape.num_slots * shape.width * shape.size * 2
    forward = 2 * tokens + weights * (2 if shape.num_held else 4)
    return forward + (3 * tokens + 2 * weights * 4 if is_step else 0)


def measure(calls: dict[str, Callable[[], None]], repeats: int, *, is_launched: bool) -> dict[str, float]:
    """Median microseconds of each call, measured in turns."""
    from triton.testing import do_bench, do_bench_cudagraph

    clock = do_bench if is_launched else do_bench_cudagraph
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():  # compiled before anything is captured
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(clock(call, rep=50, return_mode="median") * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def show(title: str, times: dict[str, float], least_bytes: int) -> None:
    print(f"\n{title}")
    print(f"  {'way':<24}{'µs':>10}{'×':>8}{'GB/s':>10}")
    for name, time in times.items():
        print(f"  {name:<24}{time:>10.1f}{time / times['fused']:>8.2f}{least_bytes / time / 1e3:>10.0f}")


def bench(name: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """Times of every way for one shape, forward and, where it is trained, forward and backward."""
    shape, findings = SHAPES[name], []
    work = make_work(shape, options.tile)
    for title, prepare in {"forward": forward_of, "forward and backward": step_of}.items():
        is_step = prepare is step_of
        if is_step and shape.num_held:
            continue
        calls = {way: prepare(function, work) for way, function in WAYS.items()}
        times = measure(calls, options.repeats, is_launched=options.launched)
        least = moved_bytes(shape, is_step=is_step)
        show(f"{name}: {title} {asdict(shape)}", times, least)
        findings.append({"shape": name, **asdict(shape), "pass": title, "least_bytes": least, "microseconds": times})
    return findings


# Tile -> cuts that are tried for the programs over tokens; the first is the one to beat.
_WIDE_TILE = [
    Cut(64, 4, 3),
    Cut(64, 4, 2),
    Cut(64, 4, 4),
    Cut(128, 4, 2),
    Cut(128, 4, 3),
    Cut(64, 8, 3),
    Cut(128, 8, 3),
]
_NARROW_TILE = [Cut(128, 4, 4), Cut(128, 4, 3), Cut(128, 2, 3), Cut(64, 4, 4), Cut(256, 4, 2)]
CUTS = {16: _NARROW_TILE, 32: _NARROW_TILE, 64: _WIDE_TILE, 128: [Cut(64, 8, 3), Cut(64, 8, 2), Cut(128, 8, 2)]}
WEIGHTS_CUTS = [
    WeightsCut(128, 64, 4, 3),
    WeightsCut(128, 64, 4, 4, 792),
    WeightsCut(128, 128, 8, 3),
    WeightsCut(256, 64, 8, 3, 396),
    WeightsCut(64, 64, 4, 4),
    WeightsCut(64, 128, 4, 3, 792),
    WeightsCut(128, 64, 4, 3, 528),
    WeightsCut(128, 64, 8, 4, 528),
    WeightsCut(64, 64, 4, 3, 1056),
    WeightsCut(128, 32, 4, 4, 528),
]
TUNED = {"cohort": (32, 64, 128), "large": (64, 128), "single": (16, 32, 64)}
"""the tiles that are tried of each shape"""


def alone(work: Work) -> dict[str, Callable[[], object]]:
    """Each program of the bottleneck by itself, on what the others leave for it."""
    stacks, tiles, threshold = work.stacks, work.tiles, threshold_of(DROPOUT)
    down, up = stacks.down_SDR.detach().bfloat16(), stacks.up_SRE.detach().bfloat16()
    h, scale, biases = work.h.detach(), stacks.scale_S, (stacks.down_bias_SR.detach(), stacks.up_bias_SE.detach())
    grad, flags = torch.randn_like(h), (*tiles.tensors, tiles.tile, "gelu", True, threshold, 0)
    inputs = (h, down, up, scale, *biases, None, None, work.seed, *flags, True)
    z = programs._bottleneck(*inputs)[1]
    widths, drop = (*down.shape[1:], up.shape[-1]), programs._Drop(work.seed, 0, threshold)
    read = (h, z, z, grad, scale, tiles.begins_S, tiles.ends_S)
    return {
        "forward": lambda: programs._bottleneck(*inputs),
        "backward tokens": lambda: programs._bottleneck_backward(
            grad, h, z, down, up, scale, work.seed, *flags, [True, False]
        ),
        "backward weights": lambda: programs._weight_gradients(read, widths, drop),
    }


def tune(name: str) -> None:
    """Print the times of every cut of every program for one shape."""
    for tile in TUNED[name]:
        calls = alone(make_work(SHAPES[name], tile))
        tables: dict[str, tuple[dict, object, list]] = {
            "forward": (programs.FORWARD, (2, tile), CUTS[tile]),
            "backward tokens": (programs.BACKWARD_TOKENS, (2, tile), CUTS[tile]),
        }
        if tile == 64:  # the weights' gradients know no tiles
            tables["backward weights"] = (programs.BACKWARD_WEIGHTS, 2, WEIGHTS_CUTS)
        for program, (table, key, cuts) in tables.items():
            times = {cut: timed_with(table, key, cut, calls[program]) for cut in cuts}
            best = min(times, key=lambda cut: times[cut])
            print(f"\n{name}, tile {tile}: {program}, best {tuple(best)}", flush=True)
            print("  " + "  ".join(f"{tuple(cut)} {time:.1f}" for cut, time in times.items()), flush=True)


def timed_with(table: dict, key: object, cut: object, call: Callable[[], object]) -> float:
    """Median microseconds of a call under one cut; infinite where it does not fit the processor."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench_cudagraph

    before, table[key] = table[key], cut
    try:
        call()
        return do_bench_cudagraph(call, rep=20, return_mode="median") * 1e3
    except OutOfResources:
        return float("inf")
    finally:
        table[key] = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tile", type=int, default=64, choices=(16, 32, 64, 128))
    parser.add_argument("--launched", action="store_true", help="time as Python launches, not as a graph replays")
    parser.add_argument("--tune", action="store_true", help="time each program alone over the cuts it could have")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available() or not is_available(DEVICE):
        parser.exit(1, "the kernels run on a CUDA device with triton; there is none here\n")
    import triton

    head = {
        "commit": current_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "tile": options.tile,
        "timed": "launched" if options.launched else "replayed",
    }
    print(json.dumps(head))
    if options.tune:
        for name in [name for name in options.shape if name in TUNED]:
            tune(name)
        return
    findings = [finding for name in options.shape for finding in bench(name, options)]
    if options.out:
        options.out.write_text(json.dumps({**head, "findings": findings}, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
