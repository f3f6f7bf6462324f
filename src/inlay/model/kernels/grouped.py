"""Grouped products on packed tokens: each token through the matrix, or beside the vector, of its own slot.

Bottlenecks that `fused_bottleneck.py` does not have are composed of these.

Shape letters: N packed tokens, D width read, E width written, S slots, M tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inlay.model.batch.tiles import Tiles, split_tiles
from inlay.model.kernels.launch import LaunchConfig, block_of, chunks_of, dense, on_device_of, splits_of

# Bytes of one number of x -> how the programs are cut; the widest block of outputs that one program holds.
FORWARD = {2: LaunchConfig(64, 4, 3), 4: LaunchConfig(32, 4, 2)}
BACKWARD_WEIGHTS = {2: LaunchConfig(64, 4, 3), 4: LaunchConfig(32, 4, 2)}
WIDEST = {2: 128, 4: 64}
VECTOR_BLOCK, VECTOR_TOKENS = 128, 32
VECTOR_PROGRAMS = 2048
"""many more than of products: one only reads, and has little on its way at once"""


def segment_linear(x_ND: Tensor, w_SDE: Tensor, bias_SE: Tensor | None, tiles: Tiles) -> Tensor:
    """x w + bias [N, E], each token through its slot, in x's type; weights may be float32 beside tokens of bf16."""
    return _segment_linear(x_ND, w_SDE, bias_SE, tiles.buffer, tiles.tile)


def slot_vectors(stack_SD: Tensor, tiles: Tiles, num_tokens: int, dtype: torch.dtype | None = None) -> Tensor:
    """Each token's slot's vector [N, D], in the stack's type or `dtype`. A gather: NaN stays put."""
    return _slot_vectors(stack_SD, tiles.buffer, tiles.tile, num_tokens, dtype or stack_SD.dtype)


@torch.library.custom_op("inlay::segment_linear", mutates_args=())
def _segment_linear(x: Tensor, w: Tensor, bias: Tensor | None, tiles: Tensor, tile: int) -> Tensor:
    return _product(x, w, bias, tiles, tile)


@torch.library.custom_op("inlay::segment_linear_backward", mutates_args=())
def _segment_linear_backward(
    grad: Tensor, x: Tensor, w: Tensor, tiles: Tensor, tile: int, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and those of w and the bias end to end; `needs` says whether x's, and whether theirs."""
    dx = _product(grad, w, None, tiles, tile, is_transposed=True) if needs[0] else x.new_empty(0)
    weights = _weight_gradients(x, grad, tiles, len(w)) if needs[1] else x.new_empty(0, dtype=torch.float32)
    return dx, weights


def _product(
    x: Tensor, w: Tensor, bias: Tensor | None, tiles: Tensor, tile: int, *, is_transposed: bool = False
) -> Tensor:
    from inlay.model.kernels.triton.grouped_programs import linear_forward

    if not w.is_contiguous() and w.mT.is_contiguous():  # as it lies: a bank's stack is large
        w, is_transposed = w.mT, not is_transposed
    size_D, size_E = reversed(w.shape[1:]) if is_transposed else w.shape[1:]
    y, cut = x.new_empty(len(x), size_E), FORWARD[x.element_size()]
    block_e = block_of(size_E, WIDEST[x.element_size()])
    slots, starts, stops, *_ = split_tiles(tiles, len(w))
    with on_device_of(x):
        linear_forward[(chunks_of(size_E, block_e), len(slots))](
            *(x.contiguous(), w.contiguous(), dense(bias), slots, starts, stops, y),
            *(size_D, size_E),
            IS_TRANSPOSED=is_transposed,
            BLOCK_N=tile,
            BLOCK_D=block_of(size_D, cut.block),
            BLOCK_E=block_e,
            **cut.options(),
        )
    return y


def _weight_gradients(x: Tensor, grad: Tensor, tiles: Tensor, num_slots: int) -> Tensor:
    """Return the gradients of w and the bias, end to end."""
    from inlay.model.kernels.triton.grouped_programs import linear_backward_weights

    *_, begins, ends = split_tiles(tiles, num_slots)
    size_D, size_E = x.shape[1], grad.shape[1]
    cut, widest = BACKWARD_WEIGHTS[x.element_size()], WIDEST[x.element_size()]
    block_d, block_e = block_of(size_D, widest), block_of(size_E, widest)
    num_blocks = chunks_of(size_D, block_d) * chunks_of(size_E, block_e)
    num_splits = splits_of(num_blocks * num_slots, len(x))
    sizes = [num_slots * size_D * size_E, num_slots * size_E]
    parts = x.new_empty(num_splits, sum(sizes), dtype=torch.float32)
    w, bias = parts[0].split(sizes)
    with on_device_of(x):
        linear_backward_weights[(num_blocks, num_slots, num_splits)](
            *(x.contiguous(), grad.contiguous(), begins, ends, w, bias),
            *(sum(sizes), size_D, size_E),
            BLOCK_N=cut.block,
            BLOCK_D=block_d,
            BLOCK_E=block_e,
            **cut.options(is_wide=block_d * block_e > 64 * 128),
        )
    return parts[0] if num_splits == 1 else parts.sum(0)


@torch.library.custom_op("inlay::slot_vectors", mutates_args=())
def _slot_vectors(stack: Tensor, tiles: Tensor, tile: int, num_tokens: int, dtype: torch.dtype) -> Tensor:
    from inlay.model.kernels.triton.grouped_programs import vectors_forward

    size_D = stack.shape[1]
    out, block = stack.new_empty(num_tokens, size_D, dtype=dtype), block_of(size_D, VECTOR_BLOCK)
    slots, starts, stops, *_ = split_tiles(tiles, len(stack))
    with on_device_of(stack):
        vectors_forward[(chunks_of(size_D, block), len(slots))](
            stack.contiguous(), slots, starts, stops, out, size_D, BLOCK_N=tile, BLOCK_D=block
        )
    return out


@torch.library.custom_op("inlay::slot_sums", mutates_args=())
def _slot_sums(grad: Tensor, tiles: Tensor, num_slots: int) -> Tensor:
    """Return the sum of each slot's tokens [S, D], float32."""
    from inlay.model.kernels.triton.grouped_programs import vectors_backward

    *_, begins, ends = split_tiles(tiles, num_slots)
    num_tokens, size_D = grad.shape
    block = block_of(size_D, VECTOR_BLOCK)
    num_splits = splits_of(chunks_of(size_D, block) * num_slots, num_tokens, VECTOR_PROGRAMS, 2 * VECTOR_TOKENS)
    parts = grad.new_empty(num_splits, num_slots, size_D, dtype=torch.float32)
    with on_device_of(grad):
        vectors_backward[(chunks_of(size_D, block), num_slots, num_splits)](
            *(grad.contiguous(), begins, ends, parts, num_slots * size_D, size_D),
            BLOCK_N=VECTOR_TOKENS,
            BLOCK_D=block,
        )
    return parts[0] if num_splits == 1 else parts.sum(0)


@_segment_linear.register_fake
def _(x, w, *_args):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], w.shape[-1])  # not len(x), which would be compiled for this number alone


@_segment_linear_backward.register_fake
def _(grad, x, w, *args):  # type: ignore[no-untyped-def]
    needs = args[-1]
    size = w.numel() + w.shape[0] * w.shape[-1] if needs[1] else 0
    return x.new_empty(x.shape if needs[0] else (0,)), x.new_empty(size, dtype=torch.float32)


@_slot_vectors.register_fake
def _(stack, *args):  # type: ignore[no-untyped-def]
    num_tokens, dtype = args[-2:]
    return stack.new_empty(num_tokens, stack.shape[1], dtype=dtype)


@_slot_sums.register_fake
def _(grad, _tiles, num_slots):  # type: ignore[no-untyped-def]
    return grad.new_empty(num_slots, grad.shape[1], dtype=torch.float32)


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, tiles, ctx.tile = inputs
    ctx.save_for_backward(x, w, tiles)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, tiles = ctx.saved_tensors  # once: activation checkpointing gives them only once
    needs = [ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])]
    dx, weights = _segment_linear_backward(grad, x, w, tiles, ctx.tile, needs)
    d_w = d_bias = None
    if needs[1]:
        flat_w, flat_bias = weights.split([w.numel(), w.shape[0] * w.shape[-1]])
        d_w = flat_w.view(w.shape).to(w.dtype)
        d_bias = None if ctx.bias_dtype is None else flat_bias.view(w.shape[0], -1).to(ctx.bias_dtype)
    return dx if needs[0] else None, d_w, d_bias, None, None


def _keep_vectors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    stack, tiles, *_rest = inputs
    ctx.save_for_backward(tiles)
    ctx.num_slots, ctx.dtype = stack.shape[0], stack.dtype


def _vector_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _slot_sums(grad, *ctx.saved_tensors, ctx.num_slots).to(ctx.dtype), *[None] * 4


_segment_linear.register_autograd(_linear_gradients, setup_context=_keep_linear)
_slot_vectors.register_autograd(_vector_gradients, setup_context=_keep_vectors)
