"""Attention inside the rows of a pack: every token attends to the tokens of its own row, without padding.

o = dropout(softmax(scaling·q·k + bias))·v, one softmax for each row and head. Scores, softmax and sums are float32, the
products take q's dtype. The bias is one number for each head and distance, as MPNet and T5 have it: it is never laid
out for a whole pack. Weights are dropped by a counter-based generator, so that backward drops the same ones without
keeping a mask. Tokens of no row are left undefined, in the output and in the gradients.

The programs are Triton's and are imported when first launched, so this file imports without triton. A launch depends
on shapes only and never waits for the device.

Shape letters: N packed tokens, H heads, d their width, B rows, W distances.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
from torch import Tensor

from inlay.model.launch import block_of, chunks_of, dense, on_device_of

PROGRAMS = 2048
"""with so many heads and rows a program takes a whole row; with fewer, each block of a row has a program of its own"""
SHORT = 128
"""rows of so many tokens may be one program's, and have too few blocks to fetch one while another is worked on"""
LARGEST_BLOCK = {2: 64, 4: 16}
"""bytes of one number of q -> tokens of a block; exact float32 products use no matrix units and need the room"""
WIDEST = 256
"""widest head that fits the registers"""


def segment_attention(
    q_NHd: Tensor,
    k_NHd: Tensor,
    v_NHd: Tensor,
    starts_B: Tensor,
    stops_B: Tensor,
    bias_HW: Tensor | None,
    scaling: float,
    max_length: int,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """What each token takes from its row [N, H, d]. Row b is tokens starts to stops (int32), at most `max_length`.

    q, k and v may be slices of one tensor. Element [h, W//2 + key - query] of the bias is added to the scaled scores;
    it gets no gradient. `seed` [1] (int64, on the device) is needed with `dropout`, and a new one at every step.
    """
    assert bias_HW is None or min(bias_HW.shape[1] // 2 + 1, (bias_HW.shape[1] + 1) // 2) >= max_length
    assert not dropout or seed is not None
    assert q_NHd.shape[-1] <= WIDEST, q_NHd.shape
    places, settings = (starts_B, stops_B), (scaling, max_length, dropout)
    return _attention(q_NHd, k_NHd, v_NHd, *places, bias_HW, seed if dropout else None, *settings)[0]


@torch.library.custom_op("inlay::segment_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    stops: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    scaling: float,
    max_length: int,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """o, and the logarithm of each softmax's denominator [H, N]."""
    from inlay.model.attention_programs import attention_forward

    q, k, v, bias = _unit_stride(q), _unit_stride(k), _unit_stride(v), dense(bias)
    o, lse = _attention_like(q, k, v, starts, stops, bias, seed, scaling, max_length, dropout)
    sizes = {**_sizes(q, max_length), "num_stages": 1 if max_length <= SHORT else 2}
    with on_device_of(q):
        attention_forward[_grid(q, starts, max_length, sizes["BLOCK"])](
            *(q, k, v, o, lse, starts, stops, bias, seed, scaling, dropout),
            *(stride for tensor in (q, k, v, o) for stride in tensor.stride()[:2]),
            *(len(q), 0 if bias is None else bias.shape[1]),
            **sizes,
        )
    return o, lse


@_attention.register_fake
def _attention_like(q, k, v, starts, stops, bias, seed, scaling, max_length, dropout):
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("inlay::segment_attention_backward", mutates_args=())
def _attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    starts: Tensor,
    stops: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    scaling: float,
    max_length: int,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    from inlay.model.attention_programs import attention_backward

    q, k, v, do = _unit_stride(q), _unit_stride(k), _unit_stride(v), _unit_stride(do)
    o, bias = o.contiguous(), dense(bias)
    dq, dk, dv = (q.new_empty(q.shape) for _ in range(3))
    sizes = {**_sizes(q, max_length), "num_stages": 1}  # two would not fit the registers
    with on_device_of(q):
        attention_backward[_grid(q, starts, max_length, sizes["BLOCK"])](
            *(q, k, v, o, lse, do, dq, dk, dv, starts, stops, bias, seed, scaling, dropout),
            *(stride for tensor in (q, k, v, do, o) for stride in tensor.stride()[:2]),
            *(len(q), 0 if bias is None else bias.shape[1]),
            **sizes,
        )
    return dq, dk, dv


@_attention_backward.register_fake
def _attention_backward_like(do, q, k, v, o, lse, starts, stops, bias, seed, scaling, max_length, dropout):
    return tuple(q.new_empty(q.shape) for _ in range(3))


def _keep(ctx, inputs, output):
    *tensors, scaling, max_length, dropout = inputs
    ctx.settings = (scaling, max_length, dropout)
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _differentiate(ctx, do, dlse):
    return *_attention_backward(do, *ctx.saved_tensors, *ctx.settings), *[None] * 7


_attention.register_autograd(_differentiate, setup_context=_keep)


def _sizes(q: Tensor, max_length: int) -> dict[str, int]:
    """The constants of a launch."""
    width, block = q.shape[-1], block_of(max_length, LARGEST_BLOCK[q.element_size()])
    return {"MAX_LENGTH": max_length, "D": width, "WIDE": block_of(width, WIDEST), "BLOCK": block, "num_warps": 4}


def _grid(q: Tensor, starts: Tensor, max_length: int, block: int) -> tuple[int, int, int]:
    """Heads innermost: those of a row lie side by side in memory."""
    num_heads, num_rows = q.shape[1], len(starts)
    is_whole = max_length <= SHORT and num_heads * num_rows >= PROGRAMS
    return num_heads, num_rows, 1 if is_whole else chunks_of(max_length, block)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
