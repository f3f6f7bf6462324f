"""Triton programs of the grouped products, one program per tile of tokens or per slot, and the mask of dropout.

Invariants: a token outside of a program's range is read as zero and never written, so a NaN stays in its slot;
sums are float32; float32 products are exact ones (no TF32).

The mask comes from a counter: it is the same wherever it is computed, so that none is ever stored. One 32-bit word for
every two neighbouring columns, sixteen bits each, from a mixer of 32-bit numbers (two rounds of multiply and xor-shift,
the constants of Wellons' lowbias32) keyed by 64 bits. The pair is found by shifting the column, so a program whose
threads hold neighbours, as every layout of bf16 does, computes the word once for both: about seven integer instructions
for a number, where Philox takes tens.

Shape letters: N tokens of a tile, D width read, E width written. No `from __future__ import annotations` here:
Triton's interpreter wants the annotations themselves.
"""

import triton
import triton.language as tl


@triton.jit
def mixed(x, key):
    """Thirty-two bits that look random, of a counter; `key` comes in between its two rounds."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= (x >> 15) ^ key
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def load_keys(seed_ptr, salt, THRESHOLD: tl.constexpr):
    """Two keys of 32 bits, as blocks of one, from a seed of 64 and the place where it is used."""
    zero = tl.arange(0, 1)
    keys = zero, zero
    if THRESHOLD > 0:
        seed = tl.load(seed_ptr + zero)
        place = (zero + salt).to(tl.uint32)
        key = mixed(seed.to(tl.uint32), place)
        keys = key, mixed((seed >> 32).to(tl.uint32) ^ key, place)
    return keys


@triton.jit
def kept_scale(THRESHOLD: tl.constexpr):
    """The factor of kept elements, which preserves the mean."""
    return 65536.0 / (65536 - THRESHOLD)


@triton.jit
def dropped(x_ND, keys, rows, first, D: tl.constexpr, THRESHOLD: tl.constexpr):
    """A block of a [N, D] matrix with zeros where dropout puts them; the others are to be multiplied by `kept_scale`.

    `rows` count from the matrix' first; the block's columns from the even number `first`. THRESHOLD is the rate in
    65536ths; of 0 leaves everything.
    """
    if THRESHOLD > 0:
        columns = tl.arange(0, x_ND.shape[1])
        key, between = keys
        pairs_N = rows.to(tl.uint32) * ((D + 1) // 2) + key
        word_ND = mixed(pairs_N[:, None] + (first // 2 + (columns >> 1)).to(tl.uint32)[None, :], between[None, :])
        number_ND = tl.where((columns & 1)[None, :] == 1, word_ND >> 16, word_ND & 0xFFFF)
        x_ND = tl.where(number_ND >= THRESHOLD, x_ND, 0.0)
    return x_ND


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
    start,
    num_tokens,
    first_d,
    first_e,
    keys,
    D: tl.constexpr,
    E: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A block of x^T y and the sum of y's columns, over `num_tokens` tokens from `start`; x as dropout leaves it.

    Computed as y^T x: a tensor that the program computes must stand on the right (see `bottleneck_programs.py`).
    """
    rows = tl.arange(0, BLOCK_N)
    d = first_d + tl.arange(0, BLOCK_D)
    e = first_e + tl.arange(0, BLOCK_E)
    x_ptr += start * D
    y_ptr += start * E
    product_ED = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    # A product with ones: a sum over rows is one across warps, with a barrier at every step.
    ones_N16 = tl.full([BLOCK_N, 16], 1.0, y_ptr.dtype.element_ty)
    sums_E16 = tl.zeros([BLOCK_E, 16], tl.float32)
    for token in range(0, num_tokens, BLOCK_N):
        x_ND = load_block(x_ptr, token + rows, d, num_tokens, D, D)
        x_ND = dropped(x_ND, keys, start + token + rows, first_d, D, THRESHOLD)
        y_NE = load_block(y_ptr, token + rows, e, num_tokens, E, E)
        product_ED = tl.dot(tl.trans(y_NE), x_ND, product_ED, input_precision="ieee")
        sums_E16 = tl.dot(tl.trans(y_NE), ones_N16, sums_E16, input_precision="ieee")
    return tl.trans(product_ED), tl.sum(sums_E16, 1) * 0.0625


@triton.jit
def share_of(begins_ptr, ends_ptr, slot, split, num_splits, BLOCK_N: tl.constexpr):
    """The first token and the number of tokens of a slot that a split works on."""
    begin = tl.load(begins_ptr + slot)
    end = tl.load(ends_ptr + slot)
    share = tl.cdiv(tl.cdiv(end - begin, num_splits), BLOCK_N) * BLOCK_N
    first = begin + split * share
    return first.to(tl.int64), tl.minimum(end - first, share)


@triton.jit
def linear_forward(
    x_ptr,
    w_ptr,
    bias_ptr,
    slots_ptr,
    starts_ptr,
    stops_ptr,
    y_ptr,
    D: tl.constexpr,
    E: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One chunk of one tile's x w + bias; the weights lie as [E, D] where they are transposed."""
    tile = tl.program_id(1)
    start = tl.load(starts_ptr + tile)
    num_tokens = tl.load(stops_ptr + tile) - start
    if num_tokens <= 0:
        return
    slot = tl.load(slots_ptr + tile).to(tl.int64)
    start = start.to(tl.int64)
    rows = tl.arange(0, BLOCK_N)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)

    y_NE = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        x_ND = load_block(x_ptr + start * D, rows, d, num_tokens, D, D)
        if IS_TRANSPOSED:
            w_DE = tl.trans(load_block(w_ptr + slot * D * E, e, d, E, D, D).to(x_ptr.dtype.element_ty))
        else:
            w_DE = load_block(w_ptr + slot * D * E, d, e, D, E, E).to(x_ptr.dtype.element_ty)
        y_NE = tl.dot(x_ND, w_DE, y_NE, input_precision="ieee")
    if bias_ptr is not None:
        y_NE += tl.load(bias_ptr + slot * E + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    store_block(y_ptr + start * E, y_NE, rows, e, num_tokens, E)


@triton.jit
def linear_backward_weights(
    x_ptr,
    grad_ptr,
    begins_ptr,
    ends_ptr,
    w_ptr,
    bias_ptr,
    split_size,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One block of one slot's gradients over one share of its tokens, both in one buffer for each split."""
    num_across = tl.cdiv(E, BLOCK_E)
    first_d = tl.program_id(0) // num_across * BLOCK_D
    first_e = tl.program_id(0) % num_across * BLOCK_E
    slot = tl.program_id(1).to(tl.int64)
    offset = tl.program_id(2).to(tl.int64) * split_size
    first, num_tokens = share_of(begins_ptr, ends_ptr, slot, tl.program_id(2), tl.num_programs(2), BLOCK_N)
    w_DE, bias_E = accumulate(
        x_ptr, grad_ptr, first, num_tokens, first_d, first_e, None, D, E, 0, BLOCK_N, BLOCK_D, BLOCK_E
    )
    d, e = first_d + tl.arange(0, BLOCK_D), first_e + tl.arange(0, BLOCK_E)
    store_block(w_ptr + offset + slot * D * E, w_DE, d, e, D, E)
    tl.store(bias_ptr + offset + slot * E + e, bias_E, mask=(e < E) & (first_d == 0))


@triton.jit
def vectors_forward(
    stack_ptr, slots_ptr, starts_ptr, stops_ptr, out_ptr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One chunk of one tile: the slot's vector for each of its tokens."""
    tile = tl.program_id(1)
    start = tl.load(starts_ptr + tile)
    num_tokens = tl.load(stops_ptr + tile) - start
    slot = tl.load(slots_ptr + tile).to(tl.int64)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    vector_D = tl.load(stack_ptr + slot * D + d, mask=d < D, other=0.0)
    block_ND = tl.broadcast_to(vector_D[None, :], [BLOCK_N, BLOCK_D])
    store_block(out_ptr + start.to(tl.int64) * D, block_ND, tl.arange(0, BLOCK_N), d, num_tokens, D)


@triton.jit
def vectors_backward(
    grad_ptr, begins_ptr, ends_ptr, sums_ptr, split_size, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One chunk of the sum of one share of a slot's tokens."""
    slot = tl.program_id(1).to(tl.int64)
    first, num_tokens = share_of(begins_ptr, ends_ptr, slot, tl.program_id(2), tl.num_programs(2), BLOCK_N)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    for token in range(0, num_tokens, BLOCK_N):
        rows = token + tl.arange(0, BLOCK_N)
        sum_D += tl.sum(load_block(grad_ptr + first * D, rows, d, num_tokens, D, D).to(tl.float32), 0)
    tl.store(sums_ptr + tl.program_id(2).to(tl.int64) * split_size + slot * D + d, sum_D, mask=d < D)
