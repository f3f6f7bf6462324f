"""How the Triton norm and attention are best cut on this GPU: `python bench/kernels_norm_attention.py --tune`.

Each kernel runs alone, many times inside one CUDA graph, with every candidate of its table in place of the constant of
the same name in `inlay.model.fused_norm` and `inlay.model.fused_attention`; the first candidate is what they have now.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inlay.model import fused_attention, fused_norm
from inlay.model.tiles import make_tiles, tile_capacity

CALLS, REPEATS, WIDTH, MAX_LENGTH = 20, 7, 64, 128
Case = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    rows: int
    heads: int
    slots: int
    tile: int


SHAPES = [Shape(1024, 12, 32, 64), Shape(32, 12, 1, 64), Shape(32, 12, 32, 16), Shape(512, 16, 16, 64)]
NOW = {
    (module, name): getattr(module, name)
    for module, names in ((fused_norm, ("FORWARD", "BACKWARD", "SUMS")), (fused_attention, ("FORWARD", "BACKWARD")))
    for name in names
}
# What differs from now. Heads, programs and a warp more or less cost no register; the others change what fits.
CANDIDATES: dict[tuple[Any, str], list[dict[str, int]]] = {
    (fused_norm, "FORWARD"): [
        {},
        {"programs": 16384, "num_stages": 1},
        {"programs": 2048},
        {"block": 1024, "num_stages": 4},
        {"block": 4096},
        {"block": 4096, "num_warps": 8, "num_stages": 3},
    ],
    (fused_norm, "BACKWARD"): [
        {},
        {"programs": 1536},
        {"num_stages": 1, "programs": 1536},
        {"num_stages": 5},
        {"block": 2048, "num_stages": 2},
        {"block": 2048, "num_warps": 8},
    ],
    (fused_norm, "SUMS"): [
        {},
        {"num_warps": 4},
        {"block": 128},
        {"width": 16, "block": 128},
        {"width": 64, "block": 32},
        {"width": 128, "block": 16},
    ],
    (fused_attention, "FORWARD"): [
        {},
        {"heads": 2},
        {"heads": 1},
        {"num_stages": 2},
        {"half": 64},
        {"inner": 64},
    ],
    (fused_attention, "BACKWARD"): [
        {},
        {"heads": 4},
        {"heads": 1},
        {"heads": 4, "num_stages": 2},
        {"half": 64},
        {"num_warps": 8},
    ],
}


def tune() -> None:
    """Print what each candidate takes at each shape, the fastest marked, and the best over all shapes."""
    began = time.monotonic()
    cases = [(shape, dict(kernels(shape))) for shape in SHAPES]
    for (module, name), changes in CANDIDATES.items():
        now = NOW[module, name]
        times: dict[Any, list[float]] = {now._replace(**change): [] for change in changes}
        print(f"{module.__name__.rpartition('.')[2]}.{name}, µs at {[tuple(vars(shape).values()) for shape in SHAPES]}")
        for launch, found in times.items():
            setattr(module, name, launch)
            found.extend(measure(kinds[module, name]) for _, kinds in cases)
            print(f"  {launch}: " + " ".join(f"{us:8.1f}" for us in found), flush=True)
        setattr(module, name, now)
        fastest = [min(column) for column in zip(*times.values(), strict=True)]
        best = min(times, key=lambda launch: sum(us / least for us, least in zip(times[launch], fastest, strict=True)))
        print(f"  best: {best}", flush=True)
    print(f"{time.monotonic() - began:.0f} s")


def measure(case: Case) -> float:
    """µs of one call, the median of graphs of many; infinite where the candidate does not fit the GPU."""
    try:
        case()
    except Exception as error:  # Triton has no common class for what a GPU refuses
        print(f"    refused: {type(error).__name__} {str(error)[:80]}")
        return float("inf")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            case()
    times = []
    for _ in range(REPEATS + 1):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / CALLS)
    return statistics.median(times[1:])


def kernels(shape: Shape) -> Iterator[tuple[tuple[Any, str], Case]]:
    """Each kernel alone at a shape; the norm's backward with the sums it leads to."""
    lengths = draw_lengths(shape.rows)
    num_tokens = -(-sum(lengths) // 256) * 256
    lengths += [64] * ((num_tokens - sum(lengths)) // 64) + [(num_tokens - sum(lengths)) % 64]
    lengths += [0] * (num_tokens // 64 + 1 + shape.rows - len(lengths))  # the empty rows of a rung
    yield from attention_kernels(shape.heads, lengths)
    yield from norm_kernels(shape, num_tokens)


def draw_lengths(rows: int) -> list[int]:
    """Of mean 38."""
    noise = torch.randn(rows, generator=torch.Generator().manual_seed(0))
    return torch.exp(noise * 0.6 + 3.46).round().clamp(2, MAX_LENGTH).int().tolist()


def attention_kernels(heads: int, lengths: list[int]) -> Iterator[tuple[tuple[Any, str], Case]]:
    stops = torch.tensor(lengths, device="cuda").cumsum(0)
    places = ((stops - torch.tensor(lengths, device="cuda")).int(), stops.int(), None, None)
    settings = (WIDTH**-0.5, MAX_LENGTH, 0.0)
    q, k, v, do = (random(sum(lengths), heads, WIDTH) for _ in range(4))
    forward, backward = torch.ops.inlay.segment_attention, torch.ops.inlay.segment_attention_backward
    o, lse = forward(q, k, v, *places, *settings)
    yield (fused_attention, "FORWARD"), lambda: forward(q, k, v, *places, *settings)
    yield (fused_attention, "BACKWARD"), lambda: backward(do, q, k, v, o, lse, *places, *settings)


def norm_kernels(shape: Shape, num_tokens: int) -> Iterator[tuple[tuple[Any, str], Case]]:
    cuts = [num_tokens * slot // shape.slots for slot in range(shape.slots + 1)]
    segments = [(slot, cuts[slot], cuts[slot + 1]) for slot in range(shape.slots)]
    capacity = tile_capacity(num_tokens, shape.slots, shape.tile)
    tiles = make_tiles(segments, shape.slots, shape.tile, capacity, "cuda")
    x, dy = (random(num_tokens, shape.heads * WIDTH) for _ in range(2))
    scale, shift = (torch.randn(shape.slots, shape.heads * WIDTH, device="cuda") for _ in range(2))
    places = (*tiles.tensors[:3], tiles.tile)
    forward, backward = torch.ops.inlay.layer_norm, torch.ops.inlay.layer_norm_backward
    _, _, moments = forward(x, None, scale, shift, *places, 1e-12, True)
    yield (fused_norm, "FORWARD"), lambda: forward(x, None, scale, shift, *places, 1e-12, True)
    yield (fused_norm, "BACKWARD"), lambda: backward(dy, x, moments, scale, *places, True)
    parts = tiles.tile // fused_norm._cut(x.shape[1], tiles.tile, capacity, fused_norm.BACKWARD)[0]
    sums = torch.randn(2, capacity * parts, x.shape[1], device="cuda")
    yield (fused_norm, "SUMS"), lambda: fused_norm.add_sums(sums, (scale, shift), tiles.tensors[:3])


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
