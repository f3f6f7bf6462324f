"""Layer norm with each slot's scale and shift, its residual added in the same pass, on packed tokens; T5's too.

`reference.py` has the definition; tests hold this equal to it. Statistics, scale, shift and their gradients are
float32, everything else has x's dtype. The gradients of scale and shift are summed by program and then by slot in a
fixed order: the same bits every time. Tokens that no tile covers are left undefined.

Shape letters: S slots, N packed tokens, D width, M tiles, P programs that sum the gradients of their tokens.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inlay.model.batch.tiles import Tiles, split_tiles
from inlay.model.kernels.launch import chunks_of, dense, on_device_of


class Launch(NamedTuple):
    """The launch settings of the norm's programs."""

    block: int
    """numbers that one works on at once, in whole tokens"""
    programs: int
    """the most there are, while a tile has one at least; the fewer, the more tokens each takes in turn"""
    num_warps: int
    num_stages: int
    """blocks on their way or worked on"""
    fewest: int = 4
    """tokens of a program at least"""


class Sums(NamedTuple):
    """The launch settings of programs that add up the others' sums: columns and sums added at once."""

    width: int
    block: int
    num_warps: int


FORWARD = Launch(block=4096, programs=4096, num_warps=4, num_stages=1)
BACKWARD = Launch(block=1024, programs=1024, num_warps=4, num_stages=3)
"""smaller blocks, as the sums take registers too; fewer programs, as each writes two sums as wide as a token"""
SUMS = Sums(width=32, block=64, num_warps=8)
TILES = 1024
"""tiles that a program looks through at once for those of its slot"""


def layer_norm(
    x_ND: Tensor, residual_ND: Tensor | None, scale_SD: Tensor, shift_SD: Tensor | None, eps: float, tiles: Tiles
) -> Tensor:
    """LN(x + residual)·scale + shift, with the scale and shift of each token's slot, in x's dtype."""
    given = (x_ND, residual_ND, scale_SD, shift_SD)
    is_kept = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given)
    return _norm(*given, tiles.buffer, tiles.tile, eps, is_kept)[0]


def rms_norm(x_ND: Tensor, scale_SD: Tensor, eps: float, tiles: Tiles) -> Tensor:
    """T5's layer norm, x / √(mean of x²)·scale, with the scale of each token's slot, in x's dtype."""
    is_kept = torch.is_grad_enabled() and (x_ND.requires_grad or scale_SD.requires_grad)
    return _norm(x_ND, None, scale_SD, None, tiles.buffer, tiles.tile, eps, is_kept, is_centered=False)[0]


@torch.library.custom_op("inlay::layer_norm", mutates_args=())
def _norm(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    tiles: Tensor,
    tile: int,
    eps: float,
    is_kept: bool,
    is_centered: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """y; x + residual if backward will read it; mean (0 if it stays) and 1/deviation [N, 2]."""
    from inlay.model.kernels.triton.norm_programs import norm_forward

    x, scale, residual, shift = x.contiguous(), scale.contiguous(), dense(residual), dense(shift)
    y, total, moments = _norm_like(x, residual, scale, shift, tiles, tile, eps, is_kept)
    slots, starts, stops, *_ = split_tiles(tiles, len(scale))
    sizes = _sizes(x.shape[-1], tile, len(slots), FORWARD)
    with on_device_of(x):
        norm_forward[len(slots), tile // sizes["SPAN"]](
            *(x, residual, scale, shift, y, total if total.numel() else None, moments),
            *(slots, starts, stops, eps),
            **sizes,
            CENTERED=is_centered,
        )
    return y, total, moments


@_norm.register_fake
def _norm_like(x, residual, scale, shift, tiles, tile, eps, is_kept, is_centered=True):
    # Not len(x), which would be compiled for this number alone.
    total = x.new_empty(x.shape if is_kept and residual is not None else (0,))
    return x.new_empty(x.shape), total, x.new_empty((x.shape[0], 2), dtype=torch.float32)


@torch.library.custom_op("inlay::layer_norm_backward", mutates_args=())
def _norm_backward(
    dy: Tensor,
    total: Tensor,
    moments: Tensor,
    scale: Tensor,
    tiles: Tensor,
    tile: int,
    has_sums: bool,
    is_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x + residual and, with `has_sums`, of scale and shift in float32."""
    from inlay.model.kernels.triton.norm_programs import norm_backward, norm_sums

    dy, total, scale = dy.contiguous(), total.contiguous(), scale.contiguous()
    dx, dscale, dshift = _norm_backward_like(dy, total, moments, scale, tiles, tile, has_sums, is_centered)
    slots, starts, stops, *_ = split_tiles(tiles, len(scale))
    sizes = _sizes(dy.shape[-1], tile, len(slots), BACKWARD)
    parts, width = tile // sizes["SPAN"], dy.shape[-1]
    sums_2PD = dy.new_empty((2, len(slots) * parts, width), dtype=torch.float32) if has_sums else None
    with on_device_of(dy):
        norm_backward[len(slots), parts](
            dy, total, moments, scale, dx, sums_2PD, slots, starts, stops, **sizes, CENTERED=is_centered
        )
        if has_sums:
            norm_sums[len(scale), chunks_of(width, SUMS.width)](
                *(sums_2PD, dscale, dshift, slots, starts, stops, len(slots)),
                *(parts, width, SUMS.width, SUMS.block, TILES),
                num_warps=SUMS.num_warps,
            )
    return dx, dscale, dshift


@_norm_backward.register_fake
def _norm_backward_like(dy, total, moments, scale, tiles, tile, has_sums, is_centered):
    shape = scale.shape if has_sums else (0,)
    dscale, dshift = (scale.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return dy.new_empty(dy.shape), dscale, dshift


def _keep(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # no zeros are needed for the gradients of tensors kept for backward
    x, residual, scale, shift, tiles, ctx.tile, _, _, ctx.is_centered = inputs
    _, total, moments = output
    ctx.has_residual, ctx.shift_dtype = residual is not None, None if shift is None else shift.dtype
    ctx.save_for_backward(x if residual is None else total, moments, scale, tiles)


def _differentiate(ctx, dy, dtotal, dmoments):
    total, moments, scale, tiles = ctx.saved_tensors
    needs_scale, needs_shift = ctx.needs_input_grad[2:4]
    has_sums = needs_scale or needs_shift
    dx, dscale, dshift = _norm_backward(dy, total, moments, scale, tiles, ctx.tile, has_sums, ctx.is_centered)
    dscale = dscale.to(scale.dtype) if needs_scale else None
    dshift = dshift.to(ctx.shift_dtype) if needs_shift else None
    return dx, dx if ctx.has_residual else None, dscale, dshift, *[None] * 5


_norm.register_autograd(_differentiate, setup_context=_keep)


def _sizes(width: int, tile: int, num_tiles: int, launch: Launch) -> dict[str, int]:
    """The constants of a launch: few tokens to a program while that makes no more programs than `launch` says."""
    wide = 1 << (width - 1).bit_length()
    spans = (span for span in (1, 2, 4, 8, 16, 32) if launch.fewest <= span < tile)
    span = next((span for span in spans if num_tiles * tile // span <= launch.programs), tile)
    rows = min(span, max(1, launch.block // wide))
    sizes = {"D": width, "WIDE": wide, "ROWS": rows, "SPAN": span, "STAGES": launch.num_stages}
    return sizes | {"num_warps": launch.num_warps}
