"""Triton programs of the banked layer norm.

A program takes a few tokens of one tile, so it reads its slot's scale once and no token meets another slot's. What lies
outside a tile is read as zero and never multiplied: a neighbour's NaN does not come in.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    x, residual, scale, shift, y, total, moments, slots, starts, stops, eps,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    start = tl.load(starts + tile) + tl.program_id(1) * SPAN
    stop = tl.minimum(tl.load(stops + tile), start + SPAN)
    if start < stop:
        d = tl.arange(0, WIDE)
        own = tl.load(slots + tile) * D + d
        w = tl.load(scale + own, mask=d < D, other=0.0).to(tl.float32)
        for first in range(start, stop, ROWS):
            n = first + tl.arange(0, ROWS)
            place = n.to(tl.int64)[:, None] * D + d[None, :]
            inside = (n < stop)[:, None] & (d < D)[None, :]
            h = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            if residual is not None:
                h += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
            if total is not None:
                tl.store(total + place, h.to(total.dtype.element_ty), mask=inside)
            mean = tl.sum(h, 1) / D
            away = tl.where((d < D)[None, :], h - mean[:, None], 0.0)
            rate = 1 / tl.sqrt(tl.sum(away * away, 1) / D + eps)
            tl.store(moments + n.to(tl.int64) * 2, mean, mask=n < stop)
            tl.store(moments + n.to(tl.int64) * 2 + 1, rate, mask=n < stop)
            out = away * rate[:, None] * w[None, :]
            if shift is not None:
                out += tl.load(shift + own, mask=d < D, other=0.0).to(tl.float32)[None, :]
            tl.store(y + place, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    dy, total, moments, scale, dx, partial, slots, starts, stops,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    start = tl.load(starts + tile) + tl.program_id(1) * SPAN
    stop = tl.minimum(tl.load(stops + tile), start + SPAN)
    if start < stop:
        d = tl.arange(0, WIDE)
        own = tl.load(slots + tile) * D + d
        w = tl.load(scale + own, mask=d < D, other=0.0).to(tl.float32)
        dscale = tl.zeros((ROWS, WIDE), tl.float32)
        dshift = tl.zeros((ROWS, WIDE), tl.float32)
        for first in range(start, stop, ROWS):
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
            along = tl.sum(g * normal, 1) / D
            level = tl.sum(g, 1) / D
            out = (g - level[:, None] - normal * along[:, None]) * rate[:, None]
            tl.store(dx + place, out.to(dx.dtype.element_ty), mask=inside)
        if partial is not None:
            part = tile * tl.num_programs(1) + tl.program_id(1)
            num_parts = tl.num_programs(0) * tl.num_programs(1)
            tl.store(partial + part * D + d, tl.sum(dscale, 0), mask=d < D)
            tl.store(partial + (num_parts + part) * D + d, tl.sum(dshift, 0), mask=d < D)


@triton.jit
def norm_sums(
    partial, dscale, dshift, slots, starts, stops, num_tiles,
    PARTS: tl.constexpr, SPAN: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of one slot's tiles, in the tiles' order; a slot without tokens gets zeros."""
    slot = tl.program_id(0)
    d = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    scale_sum = tl.zeros((WIDE,), tl.float32)
    shift_sum = tl.zeros((WIDE,), tl.float32)
    num_parts = num_tiles * PARTS
    for first in range(0, num_parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        tile = part // PARTS
        real = part < num_parts
        start = tl.load(starts + tile, mask=real, other=0) + part % PARTS * SPAN
        stop = tl.load(stops + tile, mask=real, other=0)
        mine = real & (start < stop) & (tl.load(slots + tile, mask=real, other=-1) == slot)
        inside = mine[:, None] & (d < D)[None, :]
        place = part[:, None] * D + d[None, :]
        scale_sum += tl.sum(tl.load(partial + place, mask=inside, other=0.0), 0)
        shift_sum += tl.sum(tl.load(partial + num_parts * D + place, mask=inside, other=0.0), 0)
    tl.store(dscale + slot * D + d, scale_sum, mask=d < D)
    tl.store(dshift + slot * D + d, shift_sum, mask=d < D)
