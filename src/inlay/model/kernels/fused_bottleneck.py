"""The fused bottleneck on packed tokens: scale·up(act(down(h))) and its residual in one kernel, gradients in two.

`reference.py` has the definition; tests hold this equal to it.

Shape letters: N packed tokens, D width read, R bottleneck (at most MAX_SIZE), E width written, S slots, M tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inlay.model.batch.tiles import TILE_SIZES, Tiles, split_tiles
from inlay.model.kernels.launch import (
    LaunchConfig,
    WeightsLaunchConfig,
    block_of,
    by_slot,
    chunks_of,
    dense,
    on_device_of,
    splits_of,
)

MAX_SIZE = 128
"""the widest bottleneck whose activations a program keeps; wider ones are composed of `grouped.segment_linear`"""

# Bytes of one number of h, the tile -> how the programs are cut. Exact float32 products use no matrix units and need
# the room. Few tokens are cut into small tiles, whose programs wait for weights more than they compute.
FORWARD = {
    (2, 16): LaunchConfig(128, 4, 4),
    (2, 64): LaunchConfig(64, 4, 3),
    **{(4, tile): LaunchConfig(32, 4, 2) for tile in TILE_SIZES},
}
BACKWARD_TOKENS = dict(FORWARD)
BACKWARD_WEIGHTS = {2: WeightsLaunchConfig(128, 64, 4, 3), 4: WeightsLaunchConfig(32, 32, 4, 2)}


@dataclass(frozen=True)
class Stacks:
    """The stacked weights of one site's bottlenecks, zero beyond a slot's own size. `scale_S` gets no gradient."""

    down_SDR: Tensor
    up_SRE: Tensor
    scale_S: Tensor
    down_bias_SR: Tensor | None = None
    up_bias_SE: Tensor | None = None
    copies: tuple[Tensor, Tensor] | None = None
    """down and up in h's type, read in their stead where they are float32; the gradients are still theirs"""


def bottleneck(
    h_ND: Tensor,
    stacks: Stacks,
    tiles: Tiles,
    activation: str | None = None,
    *,
    residual: bool = True,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    salt: int = 0,
) -> Tensor:
    """h + scale·up(act(down(h))), each token through its slot; without `residual` the update alone [N, E].

    With `dropout` it is dropout(h) everywhere, also in the residual. `seed` [1] (int64, on the device) is needed with
    it, a new one at every step; `salt` tells apart the places that share a seed.
    """
    assert stacks.down_SDR.shape[-1] <= MAX_SIZE, stacks.down_SDR.shape
    assert not dropout or seed is not None
    trained = (h_ND, stacks.down_SDR, stacks.up_SRE, stacks.down_bias_SR, stacks.up_bias_SE)
    is_kept = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in trained)
    out_NE, _ = _bottleneck(
        *(h_ND, stacks.down_SDR, stacks.up_SRE, stacks.scale_S, stacks.down_bias_SR, stacks.up_bias_SE),
        *(stacks.copies or (None, None)),
        *(seed if dropout else None, tiles.buffer, tiles.tile),
        *(activation or "none", residual, threshold_of(dropout), salt, is_kept),
    )
    return out_NE


def threshold_of(dropout: float) -> int:
    """Return a rate of dropout in 65536ths, as the programs take it: sixteen random bits below it are dropped."""
    assert 0 <= dropout < 1, dropout
    return min(round(dropout * 65536), 65535)


@torch.library.custom_op("inlay::bottleneck", mutates_args=())
def _bottleneck(
    h: Tensor,
    down: Tensor,
    up: Tensor,
    scale: Tensor,
    down_bias: Tensor | None,
    up_bias: Tensor | None,
    down_copy: Tensor | None,
    up_copy: Tensor | None,
    seed: Tensor | None,
    tiles: Tensor,
    tile: int,
    activation: str,
    residual: bool,
    threshold: int,
    salt: int,
    is_kept: bool,
) -> tuple[Tensor, Tensor]:
    from inlay.model.kernels.triton.bottleneck_programs import bottleneck_forward

    h, cut = h.contiguous(), FORWARD[h.element_size(), tile]
    size_D, size_R, size_E = *down.shape[1:], up.shape[-1]
    out, z = _bottleneck_like(h, down, up, is_kept)
    stacks = (down if down_copy is None else down_copy, down_bias, up if up_copy is None else up_copy, up_bias)
    weights, strides = zip(*((None, 0) if stack is None else by_slot(stack) for stack in stacks), strict=True)
    slots, starts, stops, *_ = split_tiles(tiles, len(down))
    with on_device_of(h):
        bottleneck_forward[(len(slots),)](
            *(h, *weights, dense(scale), slots, starts, stops, out, z if is_kept else None),
            *(seed, salt, *strides, size_D, size_R, size_E),
            ACTIVATION=activation,
            RESIDUAL=residual,
            THRESHOLD=threshold,
            STAGES=cut.num_stages,
            BLOCK_N=tile,
            BLOCK_D=_chunk_of(cut, size_R),
            BLOCK_R=block_of(size_R),
            **cut.options(),
        )
    return out, z


@_bottleneck.register_fake
def _bottleneck_like(h, down, up, *args):  # type: ignore[no-untyped-def]
    num_tokens, is_kept = h.shape[0], args[-1]  # not len(h), which would be compiled for this number alone
    return h.new_empty(num_tokens, up.shape[-1]), h.new_empty(num_tokens if is_kept else 0, down.shape[-1])


@torch.library.custom_op("inlay::bottleneck_backward", mutates_args=())
def _bottleneck_backward(
    grad: Tensor,
    h: Tensor,
    z: Tensor,
    down: Tensor,
    up: Tensor,
    scale: Tensor,
    seed: Tensor | None,
    tiles: Tensor,
    tile: int,
    activation: str,
    residual: bool,
    threshold: int,
    salt: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """The gradient of h, and those of down, up and their biases end to end; `needs`: whether h's, whether theirs."""
    from inlay.model.kernels.triton.bottleneck_programs import bottleneck_backward_tokens

    grad, h, scale = (tensor.contiguous() for tensor in (grad, h, scale))
    (down, down_stride), (up, up_stride) = by_slot(down), by_slot(up)
    slots, starts, stops, begins, ends = split_tiles(tiles, len(down))
    widths = (*down.shape[1:], up.shape[-1])
    dh, _ = _backward_like(grad, h, z, down, up, needs)
    a, dz = torch.empty_like(z), torch.empty_like(z)
    cut = BACKWARD_TOKENS[h.element_size(), tile]
    with on_device_of(h):
        bottleneck_backward_tokens[(len(slots),)](
            *(grad, z, down, up, scale, slots, starts, stops, a, dz, dh if needs[0] else None),
            *(seed, salt, down_stride, up_stride, *widths),
            ACTIVATION=activation,
            RESIDUAL=residual,
            THRESHOLD=threshold,
            STAGES=cut.num_stages,
            BLOCK_N=tile,
            BLOCK_D=_chunk_of(cut, widths[1]),
            BLOCK_R=block_of(widths[1]),
            **cut.options(),
        )
        read = (h, dz, a, grad, scale, begins, ends)
        drop = (seed, salt, threshold)
        weights = _weight_gradients(read, widths, drop) if needs[1] else h.new_empty(0)
    return dh, weights.float()


@_bottleneck_backward.register_fake
def _backward_like(grad, h, z, down, up, *args):  # type: ignore[no-untyped-def]
    needs = args[-1]
    size = sum(_weight_sizes((*down.shape[1:], up.shape[-1]), down.shape[0])) if needs[1] else 0
    return h.new_empty(h.shape if needs[0] else (0,)), h.new_empty(size, dtype=torch.float32)


def _weight_gradients(
    read: tuple[Tensor, ...], widths: tuple[int, int, int], drop: tuple[Tensor | None, int, int]
) -> Tensor:
    """Return the gradients of down, up, down's bias and up's bias, end to end. `drop`: seed, salt and threshold."""
    from inlay.model.kernels.triton.bottleneck_programs import bottleneck_backward_weights

    h, num_slots, (size_D, size_R, size_E) = read[0], len(read[-1]), widths
    cut = BACKWARD_WEIGHTS[h.element_size()]
    num_chunks = chunks_of(size_D, cut.block) + chunks_of(size_E, cut.block)
    num_splits = splits_of(num_chunks * num_slots, len(h), cut.num_programs)
    sizes = _weight_sizes(widths, num_slots)
    parts = torch.empty(num_splits, sum(sizes), dtype=torch.float32, device=h.device)
    down, up, down_bias, up_bias = parts[0].split(sizes)
    seed, salt, threshold = drop
    bottleneck_backward_weights[(num_chunks, num_slots, num_splits)](
        *(*read, down, down_bias, up, up_bias, seed, salt),
        *(sum(sizes), *widths),
        THRESHOLD=threshold,
        BLOCK_N=cut.num_rows,
        BLOCK_D=cut.block,
        BLOCK_R=block_of(size_R),
        num_warps=cut.num_warps * (2 if size_R > 64 else 1),
        num_stages=cut.num_stages,
    )
    return parts[0] if num_splits == 1 else parts.sum(0)


def _chunk_of(cut: LaunchConfig, size_R: int) -> int:
    """The chunk of a launch, or half of a large one where a bottleneck is wide, so that its weights fit a GPU."""
    return cut.block // 2 if size_R > 64 and cut.block > 64 else cut.block


def _weight_sizes(widths: tuple[int, int, int], num_slots: int) -> list[int]:
    """Return the sizes of the gradients of down, up and their biases."""
    size_D, size_R, size_E = widths
    return [num_slots * size for size in (size_D * size_R, size_R * size_E, size_R, size_E)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    h, down, up, scale, down_bias, up_bias, down_copy, up_copy, seed, tiles, *flags, _ = inputs
    down_read, up_read = down if down_copy is None else down_copy, up if up_copy is None else up_copy
    ctx.save_for_backward(h, output[1], down_read, up_read, scale, seed, tiles)
    ctx.flags = flags
    ctx.dtypes = [None if weight is None else weight.dtype for weight in (down, up, down_bias, up_bias)]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing gives them only once
    _h, _z, down, up, *_rest = saved
    needs = [ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:6])]
    dh, weights = _bottleneck_backward(grad, *saved, *ctx.flags, needs)
    d_weights: list[Tensor | None] = [None] * 4
    if needs[1]:
        num_slots, size_D, size_R = down.shape
        size_E = up.shape[-1]
        shapes = [down.shape, up.shape, (num_slots, size_R), (num_slots, size_E)]
        flat = weights.split(_weight_sizes((size_D, size_R, size_E), num_slots))
        d_weights = [
            None if dtype is None else part.view(shape).to(dtype)
            for part, shape, dtype in zip(flat, shapes, ctx.dtypes, strict=True)
        ]
    d_down, d_up, d_down_bias, d_up_bias = d_weights
    return dh if needs[0] else None, d_down, d_up, None, d_down_bias, d_up_bias, *[None] * 10


_bottleneck.register_autograd(_gradients, setup_context=_keep)
