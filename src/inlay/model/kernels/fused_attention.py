"""Attention inside the rows of a pack: every token attends to the tokens of its own row, without padding.

o = dropout(softmax(scaling·q·k + bias))·v, one softmax for each row and head. Scores, softmax and sums are float32, the
products take q's dtype. The bias is one number for each head and distance, as MPNet and T5 have it: it is never laid
out for a whole pack. Weights are dropped by a counter-based generator, so that backward drops the same ones without
keeping a mask. Tokens of no row are left undefined, in the output and in the gradients.

The programs are made for short rows: packs of long ones go through torch's flash attention, where nothing is added to
scores or dropped. So does what a decoder asks of the rows of a pack, in bf16 and float16 (`cross_attention`).

Shape letters: N packed tokens, H heads, d their width, B rows, W distances, M queries of a decoder.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model.kernels.launch import block_of, chunks_of, dense, on_device_of

PROGRAMS = 2048
"""with so many heads and rows, rows of different lengths are different launches; with fewer, one block of one head is a
program, and all are one launch"""
SHORT = 128
"""longer rows are always shared among programs"""
LARGEST_BLOCK = {2: 64, 4: 16}
"""bytes of one number of q -> tokens of a block; exact float32 products use no matrix units and need the room"""
INNER = 32
"""tokens of a long row that a block meets at once; few, to leave registers for another program"""
HALF_WARPS, NUM_WARPS = 2, 4
"""warps of programs for rows of half a block, and of all others"""
WIDEST = 256
"""widest head that fits the registers"""


def segment_attention(
    q_NHd: Tensor,
    k_NHd: Tensor | None,
    v_NHd: Tensor | None,
    starts_B: Tensor,
    stops_B: Tensor,
    bias_HW: Tensor | None,
    scaling: float,
    max_length: int,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    *,
    is_long: bool = False,
) -> Tensor:
    """Attention of each token to its row [N, H, d]. Row b is tokens starts to stops (int32), at most `max_length`;
    rows lie end to end from the first token on, empty ones anywhere.

    q, k and v may be slices of one tensor. Where k and v are None, q is all three side by side [N, 3, H, d], as one
    product leaves them; their gradients lie likewise. Element [h, W//2 + key - query] of the bias is added to the
    scaled scores; it gets no gradient. `seed` [1] (int64, on the device) is needed with `dropout`, and a new one at
    every step. `is_long` says that rows are, in the mean.
    """
    assert bias_HW is None or min(bias_HW.shape[1] // 2 + 1, (bias_HW.shape[1] + 1) // 2) >= max_length
    assert not dropout or seed is not None
    assert q_NHd.shape[-1] <= WIDEST, q_NHd.shape
    rows, settings = (starts_B, stops_B, bias_HW, seed if dropout else None), (scaling, max_length, dropout, is_long)
    return _attention(q_NHd, k_NHd, v_NHd, *rows, *settings)[0]


@torch.library.custom_op("inlay::segment_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    starts: Tensor,
    stops: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    scaling: float,
    max_length: int,
    dropout: float,
    is_long: bool,
) -> tuple[Tensor, Tensor]:
    """o, and the logarithm of each softmax's denominator [H, N]: to base 2, or as flash attention has it."""
    q, k, v = q.contiguous().unbind(1) if k is None or v is None else _alike(q, k, v)
    if _can_flash(q, bias, dropout, is_long):
        rows = _offsets(stops)
        return _flash(q, k, v, rows, rows, max_length, max_length, 0.0, False, False, scale=scaling)[:2]
    from inlay.model.kernels.triton.attention_programs import attention_forward

    bias = dense(bias)
    o, lse = _output_like(q)
    with on_device_of(q):
        for grid, sizes in _cut(q, len(starts), max_length):
            attention_forward[grid](
                *(q, k, v, o, lse, starts, stops, bias, seed, scaling, dropout),
                *(*q.stride()[:2], *o.stride()[:2], len(q), 0 if bias is None else bias.shape[1]),
                **sizes,
            )
    return o, lse


_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


def _can_flash(q, bias, dropout, is_long) -> bool:
    """Tell whether a pack goes through flash attention; the same forward and backward."""
    return is_long and bias is None and not dropout and flashes(q)


def flashes(q_NHd: Tensor) -> bool:
    """Tell whether flash attention takes such queries."""
    if not q_NHd.is_cuda or q_NHd.element_size() != 2 or q_NHd.shape[-1] % 8:
        return False
    return torch.cuda.get_device_capability(q_NHd.device) >= (8, 0)


def cross_attention(
    q_MHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, stops_B: Tensor, max_length: int, scaling: float
) -> Tensor:
    """Return the attention of a decoder's queries, equally many for each row, to their row of the pack [M, H, d].

    Only where `flashes` says so. Rows end at `stops_B`, with `max_length` keys at most; empty rows are not read.
    """
    out_MHd: Tensor = _Across.apply(q_MHd, k_NHd, v_NHd, stops_B, max_length, scaling)
    return out_MHd


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        q, k, v, stops, max_length, scaling = inputs
        num_queries = len(q) // len(stops)
        keys = _offsets(stops)
        asked = torch.arange(0, len(q) + 1, num_queries, dtype=torch.int32, device=q.device)
        out, lse = _flash(q, k, v, asked, keys, num_queries, max_length, 0.0, False, False, scale=scaling)[:2]
        ctx.save_for_backward(q, k, v, out, lse, asked, keys)
        ctx.settings = num_queries, max_length, scaling
        return out

    @staticmethod
    def backward(ctx, *grads):
        *qkv_and_out, asked, keys = ctx.saved_tensors
        num_queries, max_length, scaling = ctx.settings
        given = (grads[0].contiguous(), *qkv_and_out, asked, keys, num_queries, max_length)
        by_q, by_k, by_v = _flash_backward(*given, 0.0, False, *_no_seeds(grads[0]), scale=scaling)
        # After the last row nothing was written: garbage in memory would become a gradient.
        is_behind_N11 = (torch.arange(len(by_k), device=by_k.device) >= keys[-1])[:, None, None]
        return by_q, by_k.masked_fill_(is_behind_N11, 0.0), by_v.masked_fill_(is_behind_N11, 0.0), None, None, None


def _no_seeds(like):
    """Empty seeds, for attention without dropout."""
    return torch.zeros(2, dtype=torch.uint64, device=like.device), like.new_empty(0)


def _offsets(stops: Tensor) -> Tensor:
    """The start of each row and the end of the last; empty rows, whatever their place, end where the others do."""
    return F.pad(stops, (1, 0)).cummax(0).values.int()


def _output_like(q):
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@_attention.register_fake
def _(q, k, *_args):
    return _output_like(q[:, 0] if k is None else q)


@torch.library.custom_op("inlay::segment_attention_backward", mutates_args=())
def _attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    o: Tensor,
    lse: Tensor,
    starts: Tensor,
    stops: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    scaling: float,
    max_length: int,
    dropout: float,
    is_long: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; the latter two are empty where q is all three."""
    computed = _gradients_like(do, q, k)
    if k is None or v is None:
        qkv, gradients = q.contiguous().unbind(1), computed[0].unbind(1)
    else:
        qkv, gradients = (q.contiguous(), k.contiguous(), v.contiguous()), computed  # as their gradients lie
    if _can_flash(qkv[0], bias, dropout, is_long):
        rows = _offsets(stops)
        given = (do.contiguous(), *qkv, o, lse, rows, rows, max_length, max_length)
        found = _flash_backward(*given, 0.0, False, *_no_seeds(do), scale=scaling)
        for gradient, flashed in zip(gradients, found, strict=True):
            gradient.copy_(flashed)
        return computed
    from inlay.model.kernels.triton.attention_programs import attention_backward

    o, do, bias, asked = o.contiguous(), do.contiguous(), dense(bias), qkv[0]
    with on_device_of(asked):
        for (heads, num_rows, shares), sizes in _cut(asked, len(starts), max_length):
            attention_backward[heads, num_rows, 2 * shares if shares > 1 else 1](
                *(*qkv, o, lse, do, *gradients, starts, stops, bias, seed, scaling, dropout),
                *(*asked.stride()[:2], *o.stride()[:2], len(asked), 0 if bias is None else bias.shape[1]),
                **sizes,
            )
    return computed


@_attention_backward.register_fake
def _gradients_like(do, q, k, *_args):
    return tuple(q.new_empty(q.shape if place == 0 or k is not None else (0,)) for place in range(3))


def _keep(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    *tensors, scaling, max_length, dropout, is_long = inputs
    ctx.settings = (scaling, max_length, dropout, is_long)
    ctx.save_for_backward(*tensors[:-4], *output, *tensors[-4:])


def _differentiate(ctx, do, dlse):
    saved = ctx.saved_tensors  # once: activation checkpointing gives them only once
    dq, dk, dv = _attention_backward(do, *saved, *ctx.settings)
    return *((dq, None, None) if saved[1] is None else (dq, dk, dv)), *[None] * 8


_attention.register_autograd(_differentiate, setup_context=_keep)


def _cut(q: Tensor, num_rows: int, max_length: int) -> Iterator[tuple[tuple[int, int, int], dict[str, int]]]:
    """The grid and the constants of every launch. Heads are innermost: those of a row lie side by side in memory."""
    num_heads, width = q.shape[1:]
    block = block_of(max_length, LARGEST_BLOCK[q.element_size()])
    half, shares = max(16, block // 2), chunks_of(max_length, block)
    sizes = {"MAX_LENGTH": max_length, "D": width, "WIDE": block_of(width, WIDEST), "INNER": min(INNER, block)}
    if num_heads * num_rows < PROGRAMS:
        lengths = {"LOW": 0, "HALF": half, "BLOCK": block, "HIGH": max_length}
        yield (num_heads, num_rows, shares), sizes | lengths | {"num_warps": NUM_WARPS, "num_stages": 1}
        return
    for low, whole, high in ((0, half, half), (half, block, block), (block, block, max_length)):
        if low < min(high, max_length):
            lengths = {"LOW": low, "HALF": whole, "BLOCK": whole, "HIGH": high}
            grid = (num_heads, num_rows, shares if low == block and max_length > SHORT else 1)
            warps = HALF_WARPS if high == half else NUM_WARPS
            yield grid, sizes | lengths | {"num_warps": warps, "num_stages": 1}


def _alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the three as they lie where their strides are the same, as in three dense tensors or slices of one."""
    if q.stride() == k.stride() == v.stride() and q.stride(-1) == 1:
        return q, k, v
    return q.contiguous(), k.contiguous(), v.contiguous()
