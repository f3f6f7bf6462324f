"""What the fused bottleneck buys on this GPU against the same composed of grouped products, in turns in one process.

    python bench/bottlenecks.py [--shape cohort …] [--direction forward] [--tile 64] [--launched] [--out FILE --resume]
    python bench/bottlenecks.py --tune [--shape cohort …]

Times are medians in microseconds of work replayed from a CUDA graph, so that launches cost nothing, as in a captured
step; `--launched` times it as Python launches it (kernel_ways.py has how). `×` is a way's time over the fused
kernel's: a kernel that is not at least 1.1 times faster than the best other way has no place, and the last lines say
whether it is. GB/s counts what must be moved at least: tokens read and written once, weights of the slots visited,
gradients of weights written once.

Ways: `fused` as a step has it, reading copies of the weights in bf16 whose making is part of its time; `linear` is
composed of `segment_linear`, `grouped_mm` of torch's own grouped product, both with casts to bf16 that are part of
their time. `float32` says that a way reads the float32 weights themselves. `dropout, fused` has dropout of 0.1 before
it as torch does it, `fused dropout` in its own programs.

`--tune` times each program alone, with copies in bf16 and dropout of 0.1, over the cuts of `CUTS`, and prints the best
of each shape: what the tables of `inlay/model/fused.py` should say on this GPU. With `TRITON_INTERPRET=1`, numpy below
2.4 and no GPU, `--shape tiny` tries this script.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from kernel_ways import Call, Case, add_kernel_options, measure_cases
from report import say
from torch import Tensor

from inlay.model import fused as programs
from inlay.model.fused import Stacks, bottleneck, threshold_of
from inlay.model.grouped import segment_linear
from inlay.model.launch import Cut, WeightsCut, is_available
from inlay.model.tiles import Tiles, make_tiles, tile_capacity

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
"""what tokens are in; a trial in the interpreter has float32, as not every CPU has products of bf16"""
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
    "tiny": Shape(32, 8, 3, 20),
}
TRIAL = ("tiny",)
"""shapes that measure nothing"""


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
    dtype = torch.float32 if is_trained else HALF

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
        draw(shape.num_tokens, shape.width, dtype=HALF),
        stacks,
        make_tiles(segments, num_held, tile, capacity, DEVICE),
        visited.to(DEVICE),
        torch.arange(shape.num_slots, device=DEVICE).repeat_interleave(shape.tokens_per_slot),
        starts[1:].to(DEVICE, torch.int32),
        torch.tensor([7], device=DEVICE),
    )


def fused_from_float32(work: Work) -> Tensor:
    return bottleneck(work.h, work.stacks, work.tiles, "gelu")


def fused(work: Work) -> Tensor:
    return bottleneck(work.h, with_copies(work.stacks), work.tiles, "gelu")


def fused_with_dropout(work: Work) -> Tensor:
    return bottleneck(work.h, with_copies(work.stacks), work.tiles, "gelu", dropout=DROPOUT, seed=work.seed)


def dropout_before_fused(work: Work) -> Tensor:
    return bottleneck(F.dropout(work.h, DROPOUT), with_copies(work.stacks), work.tiles, "gelu")


def with_copies(stacks: Stacks) -> Stacks:
    """The same, with copies in bf16 of what is held in float32."""
    if stacks.down_SDR.dtype == HALF:
        return stacks
    return replace(stacks, copies=(stacks.down_SDR.detach().to(HALF), stacks.up_SRE.detach().to(HALF)))


def linear(work: Work) -> Tensor:
    return _composed(work, work.stacks.down_SDR.to(HALF), work.stacks.up_SRE.to(HALF))


def linear_from_float32(work: Work) -> Tensor:
    return _composed(work, work.stacks.down_SDR, work.stacks.up_SRE)


def _composed(work: Work, down_SDR: Tensor, up_SRE: Tensor) -> Tensor:
    stacks = work.stacks
    z = F.gelu(segment_linear(work.h, down_SDR, stacks.down_bias_SR, work.tiles), approximate="tanh")
    return work.h + segment_linear(z, up_SRE, stacks.up_bias_SE, work.tiles)


def grouped_mm(work: Work) -> Tensor:
    stacks = work.stacks
    weights = (stacks.down_SDR, stacks.up_SRE, stacks.down_bias_SR, stacks.up_bias_SE)
    if len(stacks.down_SDR) > len(work.visited):
        weights = tuple(stack[work.visited] for stack in weights)
    down, up, down_bias, up_bias = (weight.to(HALF) for weight in weights)
    z = F.gelu(torch._grouped_mm(work.h, down, offs=work.ends) + down_bias[work.slots], approximate="tanh")
    return work.h + torch._grouped_mm(z, up, offs=work.ends) + up_bias[work.slots]


WAYS: dict[str, Callable[[Work], Tensor]] = {
    "fused": fused,
    "fused, float32": fused_from_float32,
    "fused dropout": fused_with_dropout,
    "linear": linear,
    "linear, float32": linear_from_float32,
    "grouped_mm": grouped_mm,
}
COMPILED: dict[str, Callable[[Work], Tensor]] = {
    "grouped_mm, compiled": grouped_mm,
    "dropout, fused": dropout_before_fused,
    "linear, compiled": linear,
}
RIVALS = {
    "bottleneck": ("fused", ("linear", "linear, float32", "grouped_mm", "grouped_mm, compiled", "linear, compiled")),
    "its dropout": ("fused dropout", ("dropout, fused",)),
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


DIRECTIONS = {"forward": forward_of, "both": step_of}


def make_case(name: str, direction: str, tile: int) -> Case:
    shape = SHAPES[name]
    least = moved_bytes(shape, is_step=direction == "both")
    facts = {"shape": name, **asdict(shape), "pass": direction, "tile": tile, "least_bytes": least}
    ways = (*WAYS, *COMPILED)
    return Case(f"{name} {direction}", facts, ways, tuple(COMPILED), partial(open_ways, shape, direction, tile), RIVALS)


def open_ways(shape: Shape, direction: str, tile: int) -> Mapping[str, Callable[[], Call]]:
    work, prepare = make_work(shape, tile), DIRECTIONS[direction]
    compiled = {name: partial(torch.compile, way, dynamic=False) for name, way in COMPILED.items()}
    return {name: partial(prepare, way, work) for name, way in WAYS.items()} | {
        name: lambda make=make: prepare(make(), work) for name, make in compiled.items()
    }


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
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=[name for name in SHAPES if name not in TRIAL])
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    parser.add_argument("--tile", type=int, default=64, choices=(16, 32, 64, 128))
    parser.add_argument("--tune", action="store_true", help="time each program alone over the cuts it could have")
    add_kernel_options(parser)
    options = parser.parse_args()
    if not is_available(DEVICE):
        parser.exit(1, "the kernels run on a CUDA device with triton; there is none here\n")
    if options.tune:
        for name in [name for name in options.shape if name in TUNED]:
            say(f"tuning {name}")
            tune(name)
        return
    cases = [
        make_case(name, direction, options.tile)
        for direction in options.direction
        for name in options.shape
        if not (SHAPES[name].num_held and direction == "both")
    ]
    measure_cases(cases, options, settings=("tile", "launched", "repeats"))


if __name__ == "__main__":
    main()
