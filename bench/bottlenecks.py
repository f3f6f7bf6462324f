"""What the fused bottleneck buys on this GPU against the same composed of grouped products, in turns in one process.

    python bench/bottlenecks.py [--shape cohort …] [--direction forward] [--tile 64] [--launched] [--out FILE --resume]
    python bench/bottlenecks.py --tune [--shape cohort …]

Times are medians in microseconds of work replayed from a CUDA graph, so that launches cost nothing, as in a captured
step; `--launched` times it as Python launches it (kernel_ways.py has how, and `--ahead`). `×` is a way's time over the
fused kernel's: a kernel that is not at least 1.1 times faster than the best other way has no place, and the last lines
say whether it is. GB/s counts what must be moved at least: tokens read and written once, weights of the slots visited,
gradients of weights written once. Tokens are cut into the tiles that a step of so many has, all ways alike.

Ways: `fused` as a step has it, reading copies of the weights in bf16 whose making is part of its time; `linear` is
composed of `segment_linear`, `grouped_mm` of torch's own grouped product with biases by a product with the slots of the
tokens as ones and zeros (a gather's gradient takes ten times as long), both with casts to bf16 that are part of their
time. `float32` says that a way reads the float32 weights themselves. `fused dropout` has dropout of 0.1 in its own
programs, `dropout, …` before it as torch does it. Bottlenecks too wide for the fused programs are `linear, float32`.

`--tune` times each program alone, with copies in bf16 and dropout of 0.1, over the cuts of `CUTS`, and prints the best
of each shape: what the tables of `inlay/model/fused.py` should say on this GPU. With `TRITON_INTERPRET=1`, numpy below
2.4 and no GPU, `--shape tiny` tries this script.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from kernel_ways import DIRECTIONS, Case, Way, add_kernel_options, in_direction, measure_cases, timed_alone
from report import say
from torch import Tensor

from inlay.model.batch.buckets import Capacity, round_up_tokens
from inlay.model.batch.tiles import TILE_SIZES, Tiles, make_tiles, tile_capacity
from inlay.model.kernels import fused_bottleneck as programs
from inlay.model.kernels.fused_bottleneck import MAX_SIZE, Stacks, bottleneck, threshold_of
from inlay.model.kernels.grouped import segment_linear
from inlay.model.kernels.launch import LaunchConfig, WeightsLaunchConfig, is_available

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

    @property
    def tile(self) -> int:
        """What a step of so many tokens, in rows of 38, is cut into."""
        return Capacity(round_up_tokens(self.num_tokens), self.num_tokens // 38, self.num_slots, 128).tile

    @property
    def is_fused(self) -> bool:
        return self.size <= MAX_SIZE


SHAPES = {
    "cohort": Shape(768, 64, 32, 1216),
    "single": Shape(768, 64, 1, 1216),
    "inference": Shape(768, 64, 256, 38, num_held=2000),
    "large": Shape(1024, 64, 16, 1216),
    "wide": Shape(768, 256, 8, 1216),
    "tiny": Shape(32, 8, 3, 20),
    "tiny-wide": Shape(32, 136, 2, 20),
}
TRIAL = ("tiny", "tiny-wide")
"""shapes that measure nothing"""


@dataclass(frozen=True)
class Work:
    """The tensors of one shape. The slots visited are spread evenly over those held."""

    h: Tensor
    stacks: Stacks
    tiles: Tiles
    visited: Tensor
    slots: Tensor
    """of each token, among those visited, as ones and zeros"""
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
    slots = torch.arange(shape.num_slots, device=DEVICE)
    return Work(
        draw(shape.num_tokens, shape.width, dtype=HALF),
        stacks,
        make_tiles(segments, num_held, tile, capacity, DEVICE),
        visited.to(DEVICE),
        (slots.repeat_interleave(shape.tokens_per_slot)[:, None] == slots).to(HALF),
        starts[1:].to(DEVICE, torch.int32),
        torch.tensor([7], device=DEVICE),
    )


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
    return _composed(work.h, work, work.stacks.down_SDR.to(HALF), work.stacks.up_SRE.to(HALF))


def linear_from_float32(work: Work) -> Tensor:
    return _composed(work.h, work, work.stacks.down_SDR, work.stacks.up_SRE)


def dropout_before_linear(work: Work) -> Tensor:
    h, stacks = F.dropout(work.h, DROPOUT), work.stacks
    return _composed(h, work, stacks.down_SDR.to(HALF), stacks.up_SRE.to(HALF))


def _composed(h: Tensor, work: Work, down_SDR: Tensor, up_SRE: Tensor) -> Tensor:
    stacks = work.stacks
    z = F.gelu(segment_linear(h, down_SDR, stacks.down_bias_SR, work.tiles), approximate="tanh")
    return h + segment_linear(z, up_SRE, stacks.up_bias_SE, work.tiles)


def grouped_mm(work: Work) -> Tensor:
    stacks = work.stacks
    weights = (stacks.down_SDR, stacks.up_SRE, stacks.down_bias_SR, stacks.up_bias_SE)
    if len(stacks.down_SDR) > len(work.visited):
        weights = tuple(stack[work.visited] for stack in weights)
    down, up, down_bias, up_bias = (weight.to(HALF) for weight in weights)
    z = torch.addmm(torch._grouped_mm(work.h, down, offs=work.ends), work.slots, down_bias)
    z = F.gelu(z, approximate="tanh")
    return work.h + torch.addmm(torch._grouped_mm(z, up, offs=work.ends), work.slots, up_bias)


WAYS: dict[str, Callable[[Work], Tensor]] = {
    "fused": fused,
    "linear": linear,
    "linear, float32": linear_from_float32,
    "grouped_mm": grouped_mm,
    "fused dropout": fused_with_dropout,
    "dropout, fused": dropout_before_fused,
    "dropout, linear": dropout_before_linear,
    "linear, compiled": linear,
    "dropout, linear, compiled": dropout_before_linear,
    "grouped_mm, compiled": grouped_mm,
}
BOTTLENECK = ("fused", ("linear", "linear, float32", "grouped_mm", "linear, compiled", "grouped_mm, compiled"))
WITH_DROPOUT = ("fused dropout", ("dropout, fused", "dropout, linear", "dropout, linear, compiled"))
PRODUCTS = ("linear, float32", ("grouped_mm", "grouped_mm, compiled"))
"""ours and its rivals, of each kernel"""
COMPILED_IN = ("cohort", "single", "inference")
"""shapes whose compiled ways are measured: each takes seconds, and the others are like them"""


def rivals_of(shape: Shape, direction: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The kernels that a shape is a case of. There is dropout in training only."""
    if not shape.is_fused:
        return {"grouped products, too wide to be fused": PRODUCTS}
    has_dropout = direction == "both"
    return {"bottleneck": BOTTLENECK} | ({"bottleneck with dropout": WITH_DROPOUT} if has_dropout else {})


def moved_bytes(shape: Shape, *, is_step: bool) -> int:
    """What must be moved at least: tokens of bf16, weights as they are held."""
    tokens, weights = shape.num_tokens * shape.width * 2, shape.num_slots * shape.width * shape.size * 2
    forward = 2 * tokens + weights * (2 if shape.num_held else 4)
    return forward + (3 * tokens + 2 * weights * 4 if is_step else 0)


def make_case(name: str, direction: str, tile: int | None) -> Case:
    shape = SHAPES[name]
    tile = tile or shape.tile
    least = moved_bytes(shape, is_step=direction == "both")
    facts = {"shape": name, **asdict(shape), "pass": direction, "tile": tile, "least_bytes": least}
    rivals = rivals_of(shape, direction)
    wanted = {way for ours, others in rivals.values() for way in (ours, *others)}
    ways = tuple(way for way in WAYS if way in wanted and (name in COMPILED_IN or not is_compiled(way)))
    compiled = tuple(filter(is_compiled, ways))
    return Case(f"{name} {direction}", facts, ways, compiled, partial(open_ways, shape, direction, tile), rivals)


def is_compiled(way: str) -> bool:
    return way.endswith("compiled")


def open_ways(shape: Shape, direction: str, tile: int) -> dict[str, Callable[[], Callable[[], object]]]:
    work = make_work(shape, tile)
    stacks, gradient = work.stacks, torch.randn_like(work.h)
    leaves = (work.h, stacks.down_SDR, stacks.up_SRE, stacks.down_bias_SR, stacks.up_bias_SE)

    def make(name: str) -> Way:
        way = torch.compile(WAYS[name], dynamic=False) if is_compiled(name) else WAYS[name]
        return Way(partial(way, work), leaves, gradient)

    return in_direction({name: partial(make, name) for name in WAYS}, direction)


# Tile -> cuts that are tried for the programs over tokens; the first is the one to beat.
_WIDE_TILE = [
    LaunchConfig(64, 4, 3),
    LaunchConfig(64, 4, 2),
    LaunchConfig(64, 4, 4),
    LaunchConfig(128, 4, 2),
    LaunchConfig(128, 4, 3),
    LaunchConfig(64, 8, 3),
    LaunchConfig(128, 8, 3),
]
_NARROW_TILE = [
    LaunchConfig(128, 4, 4),
    LaunchConfig(128, 4, 3),
    LaunchConfig(128, 2, 3),
    LaunchConfig(64, 4, 4),
    LaunchConfig(256, 4, 2),
]
CUTS = {16: _NARROW_TILE, 64: _WIDE_TILE}
WEIGHTS_CUTS = [
    WeightsLaunchConfig(128, 64, 4, 3),
    WeightsLaunchConfig(128, 64, 4, 4, 792),
    WeightsLaunchConfig(128, 128, 8, 3),
    WeightsLaunchConfig(256, 64, 8, 3, 396),
    WeightsLaunchConfig(64, 64, 4, 4),
    WeightsLaunchConfig(64, 128, 4, 3, 792),
    WeightsLaunchConfig(128, 64, 4, 3, 528),
    WeightsLaunchConfig(128, 64, 8, 4, 528),
    WeightsLaunchConfig(64, 64, 4, 3, 1056),
    WeightsLaunchConfig(128, 32, 4, 4, 528),
]
TUNED = {"cohort": (64,), "single": (16, 64), "large": (64,), "tiny": (16,)}
"""the tiles that are tried of each shape"""


def alone(work: Work) -> dict[str, Callable[[], object]]:
    """Each program of the bottleneck by itself, on what the others leave for it."""
    stacks, tiles, threshold = work.stacks, work.tiles, threshold_of(DROPOUT)
    down, up = stacks.down_SDR.detach().to(HALF), stacks.up_SRE.detach().to(HALF)
    h, scale, biases = work.h.detach(), stacks.scale_S, (stacks.down_bias_SR.detach(), stacks.up_bias_SE.detach())
    grad, flags = torch.randn_like(h), (tiles.buffer, tiles.tile, "gelu", True, threshold, 0)
    inputs = (h, down, up, scale, *biases, None, None, work.seed, *flags, True)
    z = programs._bottleneck(*inputs)[1]
    widths, drop = (*down.shape[1:], up.shape[-1]), (work.seed, 0, threshold)
    read = (h, z, z, grad, scale, *tiles.tensors[3:])
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
        calls, key = alone(make_work(SHAPES[name], tile)), (HALF.itemsize, tile)
        tables: dict[str, tuple[dict, object, list]] = {
            "forward": (programs.FORWARD, key, CUTS[tile]),
            "backward tokens": (programs.BACKWARD_TOKENS, key, CUTS[tile]),
        }
        if tile == TUNED[name][0]:  # the weights' gradients know no tiles
            tables["backward weights"] = (programs.BACKWARD_WEIGHTS, HALF.itemsize, WEIGHTS_CUTS)
        for program, (table, place, cuts) in tables.items():
            times = {cut: timed_with(table, place, cut, calls[program]) for cut in cuts}
            best = min(times, key=lambda cut: times[cut])
            print(f"\n{name}, tile {tile}: {program}, best {tuple(best)}", flush=True)
            print("  " + "  ".join(f"{tuple(cut)} {time:.1f}" for cut, time in times.items()), flush=True)


def timed_with(table: dict, key: object, cut: object, call: Callable[[], object]) -> float:
    """Median microseconds of a call under one cut."""
    before, table[key] = table[key], cut
    try:
        return timed_alone(call)
    finally:
        table[key] = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=[name for name in SHAPES if name not in TRIAL])
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    parser.add_argument("--tile", type=int, choices=TILE_SIZES, help="default: what a step of so many tokens has")
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
