"""Triton programs of the banked layer norm, of T5's, which takes no mean away (CENTERED is false), and of GELU.

A program takes a few tokens of one tile, so it reads its slot's scale once and no token meets another slot's. What lies
outside a tile is read as zero and never multiplied: a neighbour's NaN does not come in.

GELU is the exact one by a short polynomial; a tensor is taken as its numbers in a row.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    x, residual, scale, shift, y, total, moments, slots, starts, stops, eps,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
    CENTERED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    start = tl.load(starts + tile) + tl.program_id(1) * SPAN
    stop = tl.minimum(tl.load(stops + tile), start + SPAN)
    if start < stop:
        d = tl.arange(0, WIDE)
        own = tl.load(slots + tile) * D + d
        w = tl.load(scale + own, mask=d < D, other=0.0).to(tl.float32)
        if shift is not None:
            b = tl.load(shift + own, mask=d < D, other=0.0).to(tl.float32)
        for first in tl.range(start, stop, ROWS, num_stages=STAGES):
            n = first + tl.arange(0, ROWS)
            place = n.to(tl.int64)[:, None] * D + d[None, :]
            inside = (n < stop)[:, None] & (d < D)[None, :]
            h = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            if residual is not None:
                h += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
            if total is not None:
                tl.store(total + place, h.to(total.dtype.element_ty), mask=inside)
            mean = tl.zeros((ROWS,), tl.float32)
            if CENTERED:
                mean = tl.sum(h, 1) / D
            away = tl.where((d < D)[None, :], h - mean[:, None], 0.0)
            rate = 1 / tl.sqrt(tl.sum(away * away, 1) / D + eps)
            tl.store(moments + n.to(tl.int64) * 2, mean, mask=n < stop)
            tl.store(moments + n.to(tl.int64) * 2 + 1, rate, mask=n < stop)
            out = away * rate[:, None] * w[None, :]
            if shift is not None:
                out += b[None, :]
            tl.store(y + place, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def norm_backward(
    dy, total, moments, scale, dx, partial, slots, starts, stops,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
    CENTERED: tl.constexpr,
):  # fmt: skip
    """Every program writes its sums, zeros where it has no tokens: `norm_sums` need not ask."""
    tile = tl.program_id(0)
    start = tl.load(starts + tile) + tl.program_id(1) * SPAN
    stop = tl.minimum(tl.load(stops + tile), start + SPAN)
    d = tl.arange(0, WIDE)
    own = tl.load(slots + tile) * D + d
    w = tl.load(scale + own, mask=d < D, other=0.0).to(tl.float32)
    dscale = tl.zeros((ROWS, WIDE), tl.float32)
    dshift = tl.zeros((ROWS, WIDE), tl.float32)
    for first in tl.range(start, stop, ROWS, num_stages=STAGES):
        n = first + tl.arange(0, ROWS)
        place = n.to(tl.int64)[:, None] * D + d[None, :]
        inside = (n < stop)[:, None] & (d < D)[None, :]
        mean = tl.load(moments + n.to(tl.int64) * 2, mask=n < stop, other=0.0)
        rate = tl.load(moments + n.to(tl.int64) * 2 + 1, mask=n < stop, other=0.0)
        h = tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        normal = tl.where((d < D)[None, :], (h - mean[:, None]) * rate[:, None], 0.0)
        if partial is not None:
            dscale += g * normal
            dshift += g
        g = g * w[None, :]
        along, level = tl.reduce((g * normal, g), 1, add_both)  # one wait for the other warps, not two
        if CENTERED:
            g -= (level / D)[:, None]
        out = (g - normal * (along / D)[:, None]) * rate[:, None]
        tl.store(dx + place, out.to(dx.dtype.element_ty), mask=inside)
    if partial is not None:
        part = tile * tl.num_programs(1) + tl.program_id(1)
        num_parts = tl.num_programs(0) * tl.num_programs(1)
        tl.store(partial + part * D + d, tl.sum(dscale, 0), mask=d < D)
        tl.store(partial + (num_parts + part) * D + d, tl.sum(dshift, 0), mask=d < D)


@triton.jit
def norm_sums(
    partial, dscale, dshift, slots, starts, stops, num_tiles,
    PARTS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The sums of one slot's tiles, in the tiles' order; a slot without tokens gets zeros.

    A slot's tiles follow each other, so it is enough to find the first and to count them.
    """
    slot = tl.program_id(0)
    d = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    first_tile = num_tiles
    count = 0
    for at in range(0, num_tiles, TILES):
        tile = at + tl.arange(0, TILES)
        real = tile < num_tiles
        start = tl.load(starts + tile, mask=real, other=0)
        stop = tl.load(stops + tile, mask=real, other=0)
        mine = (start < stop) & (tl.load(slots + tile, mask=real, other=-1) == slot)
        first_tile = tl.minimum(first_tile, tl.min(tl.where(mine, tile, num_tiles), 0))
        count += tl.sum(mine.to(tl.int32), 0)
    scale_sum = tl.zeros((BLOCK, WIDE), tl.float32)
    shift_sum = tl.zeros((BLOCK, WIDE), tl.float32)
    stop_part = (first_tile + count) * PARTS
    for first in range(first_tile * PARTS, stop_part, BLOCK):
        part = first + tl.arange(0, BLOCK)
        inside = (part < stop_part)[:, None] & (d < D)[None, :]
        place = part[:, None] * D + d[None, :]
        scale_sum += tl.load(partial + place, mask=inside, other=0.0)
        shift_sum += tl.load(partial + num_tiles * PARTS * D + place, mask=inside, other=0.0)
    tl.store(dscale + slot * D + d, tl.sum(scale_sum, 0), mask=d < D)
    tl.store(dshift + slot * D + d, tl.sum(shift_sum, 0), mask=d < D)


P = tl.constexpr(0.3275911 * 0.7071067811865476)
"""p of formula 7.1.26, for x instead of x/√2"""
HALF_LOG2E = tl.constexpr(0.7213475204444817)


@triton.jit
def gaussian(x):
    """Φ(x) and exp(-x²/2)."""
    bell = tl.exp2(-HALF_LOG2E * x * x)
    t = 1.0 / (1.0 + P * tl.abs(x))
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    upper = 0.5 * tail * bell  # 1 - Φ(|x|)
    return tl.where(x < 0, upper, 1.0 - upper), bell


@triton.jit
def gelu_forward(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    cumulative, _ = gaussian(x)
    tl.store(y_ptr + place, (x * cumulative).to(y_ptr.dtype.element_ty), mask=place < size)


@triton.jit
def gelu_backward(dy_ptr, x_ptr, dx_ptr, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    cumulative, bell = gaussian(x)
    slope = cumulative + x * bell * 0.3989422804014327
    tl.store(dx_ptr + place, (dy * slope).to(dx_ptr.dtype.element_ty), mask=place < size)
