"""The Triton norm and attention of packed tokens against what PyTorch has for the same work, on one GPU.

    python bench/norm_attention.py [--only norm|attention] [--repeats 30] [--dtype bfloat16] [--out FILE.json]
    python bench/norm_attention.py --tune [--only norm|attention]

Every way of a case is captured as a CUDA graph (a step is replayed as one) and measured in turns with the others; the
medians are printed, each with its ratio to ours: above 1, ours is faster. A way that cannot be captured is marked.
"Padded" does not pay for padding and unpadding, the block mask of flex attention is made beforehand.

`--tune` times our programs alone over the cuts they could have, best first: what the tables of
`inlay/model/fused_attention.py` and `fused_norm.py` should say on this GPU. The first cut of each list is theirs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model import fused_attention, fused_norm
from inlay.model.fused_attention import segment_attention
from inlay.model.fused_norm import layer_norm
from inlay.model.tiles import make_tiles, tile_capacity

EPS, TILE = 1e-12, 64
Way = Callable[[], object]


@dataclass(frozen=True)
class NormCase:
    slots: int
    tokens: int
    """of each slot"""
    width: int


@dataclass(frozen=True)
class AttentionCase:
    rows: int
    heads: int
    max_length: int
    same: int | None = None
    """length of every row; None: of mean 38 between 2 and 128"""
    bias: bool = False
    dropout: float = 0.0


NORMS = [NormCase(1, 1216, 768), NormCase(8, 1216, 768), NormCase(32, 1216, 768), NormCase(16, 1216, 1024)]
ATTENTIONS = [
    AttentionCase(1024, 12, 128),
    AttentionCase(32, 12, 128),
    AttentionCase(512, 16, 128),
    AttentionCase(64, 12, 384, same=384),
    AttentionCase(1024, 12, 128, bias=True),
    AttentionCase(1024, 12, 128, dropout=0.1),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("norm", "attention"))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tune", action="store_true", help="time our programs over the cuts they could have")
    parser.add_argument("--share", help="with --tune, I/N: every Nth cut, to let N processes compile first")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none here")
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    hardware = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({**hardware, "dtype": options.dtype}))
    if options.tune:
        first, _, step = (options.share or "0/1").partition("/")
        tune(options.only, dtype, slice(int(first), None, int(step)))
        return
    findings = []
    for kind, cases, ways_of in (("norm", NORMS, norm_ways), ("attention", ATTENTIONS, attention_ways)):
        for case in cases if options.only in (None, kind) else []:
            for phase, ways in ways_of(case, dtype):
                medians = measure(ways, options.repeats)
                findings.append({"kind": kind, **asdict(case), "phase": phase, "ms": medians})
                show(f"{case} {phase}", medians)
            torch.compiler.reset()  # each case has shapes of its own; nobody's dynamic shapes are measured
    if options.out:
        options.out.write_text(json.dumps({**hardware, "dtype": options.dtype, "findings": findings}, indent=1) + "\n")


def show(title: str, medians: dict[str, float]) -> None:
    print(title)
    ours = medians["ours"]
    for name, ms in medians.items():
        print(f"  {name:<28} {ms:9.4f} ms {ms / ours:7.2f}x", flush=True)


def measure(ways: dict[str, Way], repeats: int) -> dict[str, float]:
    """The median of each way in ms, measured in turns."""
    ready = dict(prepare(name, way) for name, way in ways.items())
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(repeats):
        for name, way in ready.items():
            times[name].append(timed(way))
    return {name: statistics.median(values) for name, values in times.items()}


def prepare(name: str, way: Way) -> tuple[str, Way]:
    """The way warmed up and captured; as it is, and marked, where it cannot be."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            way()
    except RuntimeError:
        torch.cuda.synchronize()
        return f"{name} (not captured)", way
    return name, graph.replay


def timed(way: Way, inner: int = 10) -> float:
    """ms of one call, of several in a row."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    way()
    start.record()
    for _ in range(inner):
        way()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / inner


def phases(ways: dict[str, Callable[[], Tensor]], leaves: dict[str, tuple[Tensor, ...]], gradients: dict[str, Tensor]):
    """Each way forward alone, without anything kept for backward, and forward and backward."""

    def forward(way: Callable[[], Tensor]) -> Way:
        def run() -> None:
            with torch.no_grad():
                way()

        return run

    def both(name: str) -> Way:
        return lambda: torch.autograd.grad(ways[name](), leaves[name], gradients[name])

    yield "forward", {name: forward(way) for name, way in ways.items()}
    yield "forward+backward", {name: both(name) for name in ways}


def norm_ways(case: NormCase, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Way]]]:
    num_tokens = case.slots * case.tokens
    segments = [(slot, slot * case.tokens, (slot + 1) * case.tokens) for slot in range(case.slots)]
    tiles = make_tiles(segments, case.slots, TILE, tile_capacity(num_tokens, case.slots, TILE), "cuda")
    x, residual, dy = (torch.randn(num_tokens, case.width, device="cuda", dtype=dtype) for _ in range(3))
    scale, shift = (torch.randn(case.slots, case.width, device="cuda", requires_grad=True) for _ in range(2))
    leaves = (x.requires_grad_(), residual.requires_grad_(), scale, shift)
    slot_N = torch.arange(case.slots, device="cuda").repeat_interleave(case.tokens)

    def plain() -> Tensor:
        normal = F.layer_norm((x + residual).float(), x.shape[-1:], eps=EPS)
        return (normal * scale[slot_N] + shift[slot_N]).to(dtype)

    ways = {
        "ours": lambda: layer_norm(x, residual, scale, shift, EPS, tiles),
        "F.layer_norm": plain,
        "F.layer_norm compiled": torch.compile(plain, fullgraph=True),
    }
    yield from phases(ways, dict.fromkeys(ways, leaves), dict.fromkeys(ways, dy))


def attention_ways(case: AttentionCase, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Way]]]:
    width = 64
    lengths = draw_lengths(case)
    stops = lengths.cumsum(0)
    starts = stops - lengths
    num_tokens = int(stops[-1])
    shape = (num_tokens, case.heads, width)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    do = torch.randn(shape, device="cuda", dtype=dtype)
    bias = torch.randn(case.heads, 2 * case.max_length, device="cuda") if case.bias else None
    seed = torch.tensor([1], device="cuda")
    rows = (starts.int(), stops.int())

    def ours() -> Tensor:
        return segment_attention(q, k, v, *rows, bias, width**-0.5, case.max_length, case.dropout, seed)

    ways: dict[str, Callable[[], Tensor]] = {"ours": ours}
    leaves, gradients = {"ours": (q, k, v)}, {"ours": do}

    def add(name: str, way: Callable[[], Tensor], inputs: tuple[Tensor, ...], gradient: Tensor) -> None:
        ways[name], leaves[name], gradients[name] = way, inputs, gradient

    if not case.dropout:
        if not case.bias and dtype is not torch.float32 and (varlen := varlen_way((q, k, v), starts, stops, case)):
            add("varlen_attn", varlen, (q, k, v), do)
        add("flex_attention compiled", flex_way((q, k, v), lengths, starts, bias), (q, k, v), do)
    padded = tuple(
        torch.randn(case.rows, case.heads, int(lengths.max()), width, device="cuda", dtype=dtype) for _ in range(4)
    )
    inputs = tuple(tensor.requires_grad_() for tensor in padded[:3])
    add("padded SDPA", padded_way(inputs, lengths, bias, case.dropout), inputs, padded[3])
    yield from phases(ways, leaves, gradients)


def draw_lengths(case: AttentionCase) -> Tensor:
    if case.same is not None:
        return torch.full((case.rows,), case.same, device="cuda")
    drawn = torch.exp(torch.randn(case.rows, generator=torch.Generator().manual_seed(0)) * 0.6 + 3.46)
    return drawn.round().clamp(2, 128).long().cuda()


def tune(only: str | None, dtype: torch.dtype, share: slice) -> None:
    """Print the times of every cut of every program, or of a share of them, for a step of a cohort and of one run."""
    for kind, cases, programs_of, module in (
        ("attention", ATTENTIONS[:2], attention_programs, fused_attention),
        ("norm", NORMS[::2] + NORMS[3:], norm_programs, fused_norm),
    ):
        for case in cases if only in (None, kind) else []:
            for table, call in programs_of(case, dtype).items():
                times = {str(cut): timed_with(module, cut, call) for cut in cuts_of(module, table)[share]}
                print(f"{case} {table}, now {times.get(str({}), float('nan')):.1f} µs", flush=True)
                for cut, time in sorted(times.items(), key=lambda item: item[1])[:6]:
                    print(f"  {time:8.1f} {cut}", flush=True)


def cuts_of(module: Any, table: str) -> list[dict[str, Any]]:
    """What may be set in a module that cuts launches: nothing, which is what it has, and what is tried."""
    if module is fused_attention:
        return [{}, *_product(HALF_WARPS=(1, 2, 4), NUM_WARPS=(4, 8), PROGRAMS=(2048, 2**30))]
    now = getattr(module, table)
    return [{}, *({table: now._replace(**change)} for change in TRIED[table])]


def _product(**choices: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


TRIED = {
    "FORWARD": _product(block=(1024, 2048, 4096), programs=(4096, 16384), num_stages=(1, 2)),
    "BACKWARD": _product(block=(1024, 2048), programs=(512, 1024, 2048), num_stages=(1, 3)),
}


def timed_with(module: Any, cut: dict[str, Any], call: Way) -> float:
    """Median microseconds of a call under one cut; infinite where it does not fit the processor."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench_cudagraph

    before = {name: getattr(module, name) for name in cut}
    try:
        for name, value in cut.items():
            setattr(module, name, value)
        call()
        return do_bench_cudagraph(call, rep=20, return_mode="median") * 1e3
    except OutOfResources:
        return float("inf")
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def attention_programs(case: AttentionCase, dtype: torch.dtype) -> dict[str, Way]:
    """Forward and backward of a case, each by itself, by the name of the table they are cut by."""
    lengths = draw_lengths(case)
    stops = lengths.cumsum(0)
    places = ((stops - lengths).int(), stops.int(), None, None)
    q, k, v, do = (torch.randn(int(stops[-1]), case.heads, 64, device="cuda", dtype=dtype) for _ in range(4))
    settings = (0.125, case.max_length, 0.0)
    o, lse = fused_attention._attention(q, k, v, *places, *settings)
    return {
        "FORWARD": lambda: fused_attention._attention(q, k, v, *places, *settings),
        "BACKWARD": lambda: fused_attention._attention_backward(do, q, k, v, o, lse, *places, *settings),
    }


def norm_programs(case: NormCase, dtype: torch.dtype) -> dict[str, Way]:
    """Forward and backward of a case, each by itself, by the name of the table they are cut by."""
    num_tokens = case.slots * case.tokens
    segments = [(slot, slot * case.tokens, (slot + 1) * case.tokens) for slot in range(case.slots)]
    tile = 64 if num_tokens > 8192 else 16
    tiles = make_tiles(segments, case.slots, tile, tile_capacity(num_tokens, case.slots, tile), "cuda")
    x, dy = (torch.randn(num_tokens, case.width, device="cuda", dtype=dtype) for _ in range(2))
    scale, shift = (torch.randn(case.slots, case.width, device="cuda") for _ in range(2))
    places = (tiles.slots_M, tiles.starts_M, tiles.stops_M, tile)
    moments = fused_norm._norm(x, None, scale, shift, *places, EPS, True)[2]
    return {
        "FORWARD": lambda: fused_norm._norm(x, None, scale, shift, *places, EPS, True),
        "BACKWARD": lambda: fused_norm._norm_backward(dy, x, moments, scale, *places, True),
    }


def varlen_way(qkv: tuple[Tensor, ...], starts: Tensor, stops: Tensor, case: AttentionCase) -> Callable | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    offsets = torch.cat([starts[:1], stops]).int()
    return lambda: varlen_attn(*qkv, offsets, offsets, case.max_length, case.max_length)


def flex_way(qkv: tuple[Tensor, ...], lengths: Tensor, starts: Tensor, bias: Tensor | None) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    num_tokens = len(qkv[0])
    row_N = torch.arange(len(lengths), device="cuda").repeat_interleave(lengths)
    mask = create_block_mask(
        lambda batch, head, i, j: row_N[i] == row_N[j], None, None, num_tokens, num_tokens, device="cuda", _compile=True
    )
    middle = 0 if bias is None else bias.shape[1] // 2
    score = None
    if bias is not None:

        def score(s, batch, head, i, j):
            # Pairs of other rows are masked afterwards, but the bias is read for them too.
            return s + bias[head, (middle + j - i).clamp(0, bias.shape[1] - 1)]

    compiled = torch.compile(flex_attention, fullgraph=True)

    def attend() -> Tensor:
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in qkv)
        return compiled(q, k, v, score_mod=score, block_mask=mask)[0].transpose(0, 1)

    return attend


def padded_way(qkv: tuple[Tensor, ...], lengths: Tensor, bias: Tensor | None, dropout: float) -> Callable[[], Tensor]:
    longest = qkv[0].shape[2]
    at = torch.arange(longest, device="cuda")
    mask = (at < lengths[:, None])[:, None, None, :]
    if bias is not None:
        by_pair = bias[:, bias.shape[1] // 2 + at[None, :] - at[:, None]]
        mask = torch.where(mask, by_pair, float("-inf")).to(qkv[0].dtype)
    elif bool((lengths == longest).all()):
        mask = None
    return lambda: F.scaled_dot_product_attention(*qkv, attn_mask=mask, dropout_p=dropout)


if __name__ == "__main__":
    main()
