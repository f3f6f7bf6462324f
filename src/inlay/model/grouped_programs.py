"""Triton programs of the grouped products, one program per tile of tokens or per slot; needs triton to be imported.

What always holds: a token outside of a program's range is read as zero and never written, so a NaN stays in its slot;
sums are float32; float32 products are exact ones (no TF32).

Shape letters: N tokens of a tile, D width read, E width written. No `from __future__ import annotations` here:
Triton's interpreter wants the annotations themselves.
"""

import triton
import triton.language as tl


@triton.jit
def load_block(ptr, rows, cols, num_rows, num_cols, stride):
    """A block of a row-major matrix, zero outside of it."""
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    return tl.load(ptr + rows[:, None] * stride + cols[None, :], mask=inside, other=0.0)


@triton.jit
def store_block(ptr, block, rows, cols, num_rows, num_cols):
    """Write a block into a row-major matrix of `num_cols` columns."""
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    tl.store(ptr + rows[:, None] * num_cols + cols[None, :], block.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def accumulate(
    x_ptr,
    y_ptr,
    num_tokens,
    first_d,
    first_e,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A block of x^T y and the sum of y's columns, over the `num_tokens` first tokens of both."""
    rows = tl.arange(0, BLOCK_N)
    d = first_d + tl.arange(0, BLOCK_D)
    e = first_e + tl.arange(0, BLOCK_E)
    product_DE = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    sum_E = tl.zeros([BLOCK_E], tl.float32)
    for token in range(0, num_tokens, BLOCK_N):
        x_ND = load_block(x_ptr, token + rows, d, num_tokens, D, D)
        y_NE = load_block(y_ptr, token + rows, e, num_tokens, E, E)
        product_DE = tl.dot(tl.trans(x_ND), y_NE, product_DE, input_precision="ieee")
        sum_E += tl.sum(y_NE.to(tl.float32), 0)
    return product_DE, sum_E


@triton.jit
def share_of(begins_ptr, ends_ptr, slot, split, num_splits, BLOCK_N: tl.constexpr):
    """The first token and the number of tokens of a slot that a split works on."""
    begin = tl.load(begins_ptr + slot)
    end = tl.load(ends_ptr + slot)
    share = tl.cdiv(tl.cdiv(end - begin, num_splits), BLOCK_N) * BLOCK_N
    first = begin + split * share
    return first.to(tl.int64), tl.minimum(end - first, share)
