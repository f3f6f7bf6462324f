"""The Triton norm and attention of packed tokens against what PyTorch has for the same work, on one GPU.

    python bench/norm_attention.py [--only norm|attention] [--shape cohort …] [--direction forward] [--dtype bfloat16]
    python bench/norm_attention.py --tune [--only norm|attention]

Every way of a case is captured as a CUDA graph (a step is replayed as one) and measured in turns with the others
(kernel_ways.py has how); `×` is its time over ours: above 1, ours is faster. The last lines say whether ours is at
least 1.1 times faster than the best other way. "Padded" does not pay for padding and unpadding, the block mask of flex
attention is made beforehand.

`--tune` times our programs alone over the cuts they could have, best first: what the tables of
`inlay/model/fused_attention.py` and `fused_norm.py` should say on this GPU. The first cut of each list is theirs. With
`TRITON_INTERPRET=1` and without a GPU, `--shape tiny --dtype float32` tries this script.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from kernel_ways import Call, Case, add_kernel_options, measure_cases
from report import say
from torch import Tensor

from inlay.model import fused_attention, fused_norm
from inlay.model.fused_attention import segment_attention
from inlay.model.fused_norm import layer_norm
from inlay.model.launch import is_available
from inlay.model.tiles import make_tiles, tile_capacity

EPS, TILE, WIDTH = 1e-12, 64, 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


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


NORMS = {
    "single": NormCase(1, 1216, 768),
    "eight": NormCase(8, 1216, 768),
    "cohort": NormCase(32, 1216, 768),
    "large": NormCase(16, 1216, 1024),
    "tiny": NormCase(2, 20, 32),
}
ATTENTIONS = {
    "cohort": AttentionCase(1024, 12, 128),
    "single": AttentionCase(32, 12, 128),
    "large": AttentionCase(512, 16, 128),
    "128": AttentionCase(192, 12, 128, same=128),
    "192": AttentionCase(128, 12, 192, same=192),
    "256": AttentionCase(96, 12, 256, same=256),
    "long": AttentionCase(64, 12, 384, same=384),
    "bias": AttentionCase(1024, 12, 128, bias=True),
    "dropout": AttentionCase(1024, 12, 128, dropout=0.1),
    "tiny": AttentionCase(2, 2, 128, same=16),
}
TRIAL = ("tiny",)
"""shapes that measure nothing"""
KINDS: dict[str, dict[str, Any]] = {"norm": NORMS, "attention": ATTENTIONS}
DIRECTIONS = ("forward", "both")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = list(dict.fromkeys([*NORMS, *ATTENTIONS]))
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--shape", nargs="+", choices=shapes, default=[name for name in shapes if name not in TRIAL])
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tune", action="store_true", help="time our programs over the cuts they could have")
    parser.add_argument("--share", help="with --tune, I/N: every Nth cut, to let N processes compile first")
    add_kernel_options(parser)
    options = parser.parse_args()
    if not is_available(DEVICE):
        parser.exit(1, "the kernels run on a CUDA device with triton; there is none here\n")
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    if options.tune:
        first, _, step = (options.share or "0/1").partition("/")
        tune(options.only, dtype, slice(int(first), None, int(step)))
        return
    cases = [
        make_case(kind, name, direction, dtype)
        for kind in ([options.only] if options.only else KINDS)
        for direction in options.direction
        for name in options.shape
        if name in KINDS[kind]
    ]
    measure_cases(cases, options, settings=("dtype", "launched", "repeats"))


def make_case(kind: str, name: str, direction: str, dtype: torch.dtype) -> Case:
    shape = KINDS[kind][name]
    ways, compiled, open_ways = (
        (("ours", "F.layer_norm"), ("F.layer_norm compiled",), norm_ways)
        if kind == "norm"
        else (*names_of_attention(shape, dtype), attention_ways)
    )
    facts = {"kind": kind, "shape": name, **asdict(shape), "pass": direction}
    rivals = {kind: ("ours", (*ways[1:], *compiled))}
    opened = partial(open_direction, open_ways, shape, dtype, direction)
    return Case(f"{name} {direction} ({kind})", facts, (*ways, *compiled), compiled, opened, rivals)


@dataclass(frozen=True)
class Way:
    """How a result is computed, what it is differentiated by, and from which gradient."""

    run: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    gradient: Tensor


def open_direction(
    open_ways: Callable[..., Mapping[str, Callable[[], Way]]], shape: Any, dtype: torch.dtype, direction: str
) -> Mapping[str, Callable[[], Call]]:
    """Each way forward alone, without anything kept for backward, or forward and backward."""

    def forward(way: Way) -> Call:
        def run() -> None:
            with torch.no_grad():
                way.run()

        return run

    def both(way: Way) -> Call:
        return lambda: torch.autograd.grad(way.run(), way.leaves, way.gradient)

    prepare = forward if direction == "forward" else both
    return {name: lambda make=make: prepare(make()) for name, make in open_ways(shape, dtype).items()}


def norm_ways(case: NormCase, dtype: torch.dtype) -> dict[str, Callable[[], Way]]:
    num_tokens = case.slots * case.tokens
    segments = [(slot, slot * case.tokens, (slot + 1) * case.tokens) for slot in range(case.slots)]
    tiles = make_tiles(segments, case.slots, TILE, tile_capacity(num_tokens, case.slots, TILE), DEVICE)
    x, residual, dy = (torch.randn(num_tokens, case.width, device=DEVICE, dtype=dtype) for _ in range(3))
    scale, shift = (torch.randn(case.slots, case.width, device=DEVICE, requires_grad=True) for _ in range(2))
    leaves = (x.requires_grad_(), residual.requires_grad_(), scale, shift)
    slot_N = torch.arange(case.slots, device=DEVICE).repeat_interleave(case.tokens)

    def plain() -> Tensor:
        normal = F.layer_norm((x + residual).float(), x.shape[-1:], eps=EPS)
        return (normal * scale[slot_N] + shift[slot_N]).to(dtype)

    return {
        "ours": lambda: Way(lambda: layer_norm(x, residual, scale, shift, EPS, tiles), leaves, dy),
        "F.layer_norm": lambda: Way(plain, leaves, dy),
        "F.layer_norm compiled": lambda: Way(torch.compile(plain, fullgraph=True), leaves, dy),
    }


def names_of_attention(case: AttentionCase, dtype: torch.dtype) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The ways that can do the work of a case, and those that compile."""
    if case.dropout:
        return ("ours", "padded SDPA"), ()
    has_varlen = not case.bias and dtype is not torch.float32
    return ("ours", *(["varlen_attn"] if has_varlen else []), "padded SDPA"), ("flex_attention compiled",)


def attention_ways(case: AttentionCase, dtype: torch.dtype) -> dict[str, Callable[[], Way]]:
    lengths = draw_lengths(case)
    stops = lengths.cumsum(0)
    starts = stops - lengths
    shape = (int(stops[-1]), case.heads, WIDTH)
    q, k, v = qkv = tuple(torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
    do = torch.randn(shape, device=DEVICE, dtype=dtype)
    bias = torch.randn(case.heads, 2 * case.max_length, device=DEVICE) if case.bias else None
    seed = torch.tensor([1], device=DEVICE)
    rows = (starts.int(), stops.int())

    def ours() -> Tensor:
        return segment_attention(q, k, v, *rows, bias, WIDTH**-0.5, case.max_length, case.dropout, seed)

    def padded() -> Way:
        shape = (case.rows, case.heads, int(lengths.max()), WIDTH)
        inputs = tuple(torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
        return Way(padded_way(inputs, lengths, bias, case.dropout), inputs, torch.randn_like(inputs[0]))

    return {
        "ours": lambda: Way(ours, qkv, do),
        "varlen_attn": lambda: Way(varlen_way(qkv, starts, stops, case), qkv, do),
        "padded SDPA": padded,
        "flex_attention compiled": lambda: Way(flex_way(qkv, lengths, starts, bias), qkv, do),
    }


def draw_lengths(case: AttentionCase) -> Tensor:
    if case.same is not None:
        return torch.full((case.rows,), case.same, device=DEVICE)
    drawn = torch.exp(torch.randn(case.rows, generator=torch.Generator().manual_seed(0)) * 0.6 + 3.46)
    return drawn.round().clamp(2, 128).long().to(DEVICE)


def tune(only: str | None, dtype: torch.dtype, share: slice) -> None:
    """Print the times of every cut of every program, or of a share of them, for a step of a cohort and of one run."""
    for kind, cases, programs_of, module in (
        ("attention", [ATTENTIONS[name] for name in ("cohort", "single")], attention_programs, fused_attention),
        ("norm", [NORMS[name] for name in ("single", "cohort", "large")], norm_programs, fused_norm),
    ):
        for case in cases if only in (None, kind) else []:
            say(f"tuning {kind}: {case}")
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


def _product(**choices: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


TRIED = {
    "FORWARD": _product(block=(1024, 2048, 4096), programs=(4096, 16384), num_stages=(1, 2)),
    "BACKWARD": _product(block=(1024, 2048), programs=(512, 1024, 2048), num_stages=(1, 3)),
}


def timed_with(module: Any, cut: dict[str, Any], call: Call) -> float:
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


def attention_programs(case: AttentionCase, dtype: torch.dtype) -> dict[str, Call]:
    """Forward and backward of a case, each by itself, by the name of the table they are cut by."""
    lengths = draw_lengths(case)
    stops = lengths.cumsum(0)
    places = ((stops - lengths).int(), stops.int(), None, None)
    q, k, v, do = (torch.randn(int(stops[-1]), case.heads, 64, device=DEVICE, dtype=dtype) for _ in range(4))
    settings = (0.125, case.max_length, 0.0, False)
    o, lse = fused_attention._attention(q, k, v, *places, *settings)
    return {
        "FORWARD": lambda: fused_attention._attention(q, k, v, *places, *settings),
        "BACKWARD": lambda: fused_attention._attention_backward(do, q, k, v, o, lse, *places, *settings),
    }


def norm_programs(case: NormCase, dtype: torch.dtype) -> dict[str, Call]:
    """Forward and backward of a case, each by itself, by the name of the table they are cut by."""
    num_tokens = case.slots * case.tokens
    segments = [(slot, slot * case.tokens, (slot + 1) * case.tokens) for slot in range(case.slots)]
    tile = 64 if num_tokens > 8192 else 16
    tiles = make_tiles(segments, case.slots, tile, tile_capacity(num_tokens, case.slots, tile), DEVICE)
    x, dy = (torch.randn(num_tokens, case.width, device=DEVICE, dtype=dtype) for _ in range(2))
    scale, shift = (torch.randn(case.slots, case.width, device=DEVICE) for _ in range(2))
    places = (tiles.slots_M, tiles.starts_M, tiles.stops_M, tile)
    moments = fused_norm._norm(x, None, scale, shift, *places, EPS, True)[2]
    return {
        "FORWARD": lambda: fused_norm._norm(x, None, scale, shift, *places, EPS, True),
        "BACKWARD": lambda: fused_norm._norm_backward(dy, x, moments, scale, *places, True),
    }


def varlen_way(qkv: tuple[Tensor, ...], starts: Tensor, stops: Tensor, case: AttentionCase) -> Callable[[], Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    offsets = torch.cat([starts[:1], stops]).int()
    return lambda: varlen_attn(*qkv, offsets, offsets, case.max_length, case.max_length)


def flex_way(qkv: tuple[Tensor, ...], lengths: Tensor, starts: Tensor, bias: Tensor | None) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    num_tokens = len(qkv[0])
    row_N = torch.arange(len(lengths), device=DEVICE).repeat_interleave(lengths)
    mask = create_block_mask(
        lambda batch, head, i, j: row_N[i] == row_N[j], None, None, num_tokens, num_tokens, device=DEVICE, _compile=True
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
    at = torch.arange(longest, device=DEVICE)
    mask = (at < lengths[:, None])[:, None, None, :]
    if bias is not None:
        by_pair = bias[:, bias.shape[1] // 2 + at[None, :] - at[:, None]]
        mask = torch.where(mask, by_pair, float("-inf")).to(qkv[0].dtype)
    elif bool((lengths == longest).all()):
        mask = None
    return lambda: F.scaled_dot_product_attention(*qkv, attn_mask=mask, dropout_p=dropout)


if __name__ == "__main__":
    main()
