"""Triton programs of attention inside the rows of a pack.

A program takes one head of one row. A row that fits a block is worked on whole: every weight is computed once and
nothing is read twice. A longer row is taken block by block by one program, or by several sharing the blocks. A launch
may be for rows of some lengths only, from LOW to HIGH: what is compiled for those alone needs fewer registers, so more
programs run at once. What lies outside the row is read as zero and its scores are replaced, not multiplied: a
neighbour's NaN does not come in. Nothing is added by two programs, so there are no atomics and the bits are the same
every time.

Names: q, k, v and their kin point at the first token of the row and the head, tokens are counted from there; i are
tokens that ask, j tokens that answer. `q_n` and `q_h` are the strides of q, k, v and their gradients between tokens and
between heads, `o_n` and `o_h` those of o and its gradient: offsets in common save registers. Scores and their
logarithms are to base 2, which the processor has an instruction for.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tokens(ptr, n, stride, length, D: tl.constexpr, WIDE: tl.constexpr):
    """Tokens n [n, WIDE], zero beyond the row and beyond D."""
    d = tl.arange(0, WIDE)
    inside = (n < length)[:, None] & (d < D)[None, :]
    return tl.load(ptr + n[:, None] * stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_tokens(ptr, x, n, stride, length, D: tl.constexpr, WIDE: tl.constexpr):
    d = tl.arange(0, WIDE)
    inside = (n < length)[:, None] & (d < D)[None, :]
    tl.store(ptr + n[:, None] * stride + d[None, :], x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def score(x, y, i, j, length, scaling, bias, W):
    """The scores of tokens j for tokens i before the softmax; -inf where j is beyond the row.

    x and y are q and k with i down and j across, or k and q with i across and j down.
    """
    s = tl.dot(x, tl.trans(y), input_precision="ieee") * (scaling * LOG2E)
    if bias is not None:
        s += tl.load(bias + W // 2 + j - i, mask=(i < length) & (j < length), other=0.0).to(tl.float32) * LOG2E
    return tl.where(j < length, s, float("-inf"))


@triton.jit
def keep(seed, i, j, pair_place, dropout, MAX_LENGTH: tl.constexpr):
    """0 where a weight is dropped, else 1/(1 - dropout); the same in forward and backward."""
    place = pair_place + i * MAX_LENGTH + j
    return tl.where(tl.rand(tl.load(seed), place) < dropout, 0.0, 1 / (1 - dropout))


@triton.jit
def forward_whole(
    q, k, v, o, lse, pair_place, length, bias, seed, scaling, dropout, q_n, o_n, W,
    MAX_LENGTH: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of a row of one block."""
    i = tl.arange(0, BLOCK)
    q_i = load_tokens(q, i, q_n, length, D, WIDE)
    k_j = load_tokens(k, i, q_n, length, D, WIDE)
    v_j = load_tokens(v, i, q_n, length, D, WIDE)
    s = score(q_i, k_j, i[:, None], i[None, :], length, scaling, bias, W)
    largest = tl.max(s, 1)
    p = tl.exp2(s - largest[:, None])
    total = tl.sum(p, 1)
    if seed is not None:
        p *= keep(seed, i[:, None], i[None, :], pair_place, dropout, MAX_LENGTH)
    out = tl.dot(p.to(v_j.dtype), v_j, input_precision="ieee")
    store_tokens(o, out / total[:, None], i, o_n, length, D, WIDE)
    tl.store(lse + i, largest + tl.log2(total), mask=i < length)


@triton.jit
def forward_block(
    q, k, v, o, lse, pair_place, length, first, bias, seed, scaling, dropout, q_n, o_n, W,
    MAX_LENGTH: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One head of the tokens of a row from `first` on that ask, one block of them."""
    i = first + tl.arange(0, BLOCK)
    q_i = load_tokens(q, i, q_n, length, D, WIDE)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    out = tl.zeros((BLOCK, WIDE), tl.float32)
    for other in range(0, length, INNER):
        j = other + tl.arange(0, INNER)
        k_j = load_tokens(k, j, q_n, length, D, WIDE)
        s = score(q_i, k_j, i[:, None], j[None, :], length, scaling, bias, W)
        new = tl.maximum(largest, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(largest - new)
        total = total * shrink + tl.sum(p, 1)
        if seed is not None:
            p *= keep(seed, i[:, None], j[None, :], pair_place, dropout, MAX_LENGTH)
        v_j = load_tokens(v, j, q_n, length, D, WIDE)
        out = tl.dot(p.to(v_j.dtype), v_j, out * shrink[:, None], input_precision="ieee")
        largest = new
    store_tokens(o, out / total[:, None], i, o_n, length, D, WIDE)
    tl.store(lse + i, largest + tl.log2(total), mask=i < length)


@triton.jit
def attention_forward(
    q, k, v, o, lse, starts, stops, bias, seed, scaling, dropout, q_n, q_h, o_n, o_h, N, W,
    MAX_LENGTH: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    LOW: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, HIGH: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Grid: heads, rows, shares of a long row's blocks. Rows of more than LOW and at most HIGH tokens."""
    start = tl.load(starts + tl.program_id(1)).to(tl.int64)
    length = tl.load(stops + tl.program_id(1)) - start.to(tl.int32)
    own = tl.program_id(2) * BLOCK
    if (length <= tl.maximum(own, LOW)) | (length > HIGH):
        return
    head = tl.program_id(0)
    q += start * q_n + head * q_h
    k += start * q_n + head * q_h
    v += start * q_n + head * q_h
    o += start * o_n + head * o_h
    place = start + head.to(tl.int64) * N
    lse += place
    if bias is not None:
        bias += head * W
    if length <= HALF:
        if LOW < HALF:
            forward_whole(q, k, v, o, lse, place * MAX_LENGTH, length, bias, seed, scaling, dropout, q_n, o_n, W,
                          MAX_LENGTH, D, WIDE, HALF)  # fmt: skip
    elif length <= BLOCK:
        if (HALF < BLOCK) & (LOW < BLOCK):
            forward_whole(q, k, v, o, lse, place * MAX_LENGTH, length, bias, seed, scaling, dropout, q_n, o_n, W,
                          MAX_LENGTH, D, WIDE, BLOCK)  # fmt: skip
    else:
        if BLOCK < HIGH:
            for first in range(own, length, tl.num_programs(2) * BLOCK):
                forward_block(q, k, v, o, lse, place * MAX_LENGTH, length, first, bias, seed, scaling, dropout,
                              q_n, o_n, W, MAX_LENGTH, D, WIDE, BLOCK, INNER)  # fmt: skip


@triton.jit
def pair(
    x, y, g, w, i, j, lse, length, scaling, bias, W, seed, pair_place, dropout, MAX_LENGTH: tl.constexpr
):  # fmt: skip
    """The weights of tokens i and j, the weights after dropout, and the gradients of the weights.

    x, y, g, w are q, k, do, v with i down and j across, or k, q, v, do with i across and j down. Nothing is replaced
    where i is beyond the row: q and do are zero there, so that the gradients of its scores are.
    """
    p = tl.exp2(score(x, y, i, j, length, scaling, bias, W) - lse)
    dp = tl.dot(g, tl.trans(w), input_precision="ieee")
    met = p
    if seed is not None:
        kept = keep(seed, i, j, pair_place, dropout, MAX_LENGTH)
        met = p * kept
        dp *= kept
    return p, met, dp


@triton.jit
def backward_whole(
    q, k, v, do, dq, dk, dv, lse, pair_place, length, bias, seed, scaling, dropout, q_n, o_n, W,
    MAX_LENGTH: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of one head of a row of one block. do·o is the sum of weights times their gradients: o is not read.

    Each gradient is stored as soon as it is there, so that no two of them hold registers at once.
    """
    i = tl.arange(0, BLOCK)
    q_i = load_tokens(q, i, q_n, length, D, WIDE)
    k_j = load_tokens(k, i, q_n, length, D, WIDE)
    do_i = load_tokens(do, i, o_n, length, D, WIDE)
    v_j = load_tokens(v, i, q_n, length, D, WIDE)
    lse_i = tl.load(lse + i, mask=i < length, other=0.0)
    p, met, dp = pair(q_i, k_j, do_i, v_j, i[:, None], i[None, :], lse_i[:, None],
                      length, scaling, bias, W, seed, pair_place, dropout, MAX_LENGTH)  # fmt: skip
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scaling).to(q_i.dtype)
    store_tokens(dq, tl.dot(ds, k_j, input_precision="ieee"), i, q_n, length, D, WIDE)
    dv_j = tl.dot(tl.trans(met.to(q_i.dtype)), do_i, input_precision="ieee")
    store_tokens(dv, dv_j, i, q_n, length, D, WIDE)
    dk_j = tl.dot(tl.trans(ds), q_i, input_precision="ieee")
    store_tokens(dk, dk_j, i, q_n, length, D, WIDE)


@triton.jit
def backward_asking(
    q, k, v, o, do, dq, lse, pair_place, length, first, bias, seed, scaling, dropout, q_n, o_n, W,
    MAX_LENGTH: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """dq of one head of a block of a long row."""
    i = first + tl.arange(0, BLOCK)
    q_i = load_tokens(q, i, q_n, length, D, WIDE)
    do_i = load_tokens(do, i, o_n, length, D, WIDE)
    lse_i = tl.load(lse + i, mask=i < length, other=0.0)
    delta_i = tl.sum(load_tokens(o, i, o_n, length, D, WIDE).to(tl.float32) * do_i.to(tl.float32), 1)
    dq_i = tl.zeros((BLOCK, WIDE), tl.float32)
    for other in range(0, length, INNER):
        j = other + tl.arange(0, INNER)
        k_j = load_tokens(k, j, q_n, length, D, WIDE)
        v_j = load_tokens(v, j, q_n, length, D, WIDE)
        p, _, dp = pair(q_i, k_j, do_i, v_j, i[:, None], j[None, :], lse_i[:, None],
                        length, scaling, bias, W, seed, pair_place, dropout, MAX_LENGTH)  # fmt: skip
        ds = p * (dp - delta_i[:, None])
        dq_i = tl.dot(ds.to(k_j.dtype), k_j, dq_i, input_precision="ieee")
    store_tokens(dq, dq_i * scaling, i, q_n, length, D, WIDE)


@triton.jit
def backward_answering(
    q, k, v, o, do, dk, dv, lse, pair_place, length, first, bias, seed, scaling, dropout, q_n, o_n, W,
    MAX_LENGTH: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """dk and dv of one head of a block of a long row."""
    j = first + tl.arange(0, BLOCK)
    k_j = load_tokens(k, j, q_n, length, D, WIDE)
    v_j = load_tokens(v, j, q_n, length, D, WIDE)
    dk_j = tl.zeros((BLOCK, WIDE), tl.float32)
    dv_j = tl.zeros((BLOCK, WIDE), tl.float32)
    for other in range(0, length, INNER):
        i = other + tl.arange(0, INNER)
        q_i = load_tokens(q, i, q_n, length, D, WIDE)
        do_i = load_tokens(do, i, o_n, length, D, WIDE)
        lse_i = tl.load(lse + i, mask=i < length, other=0.0)
        delta_i = tl.sum(load_tokens(o, i, o_n, length, D, WIDE).to(tl.float32) * do_i.to(tl.float32), 1)
        p, met, dp = pair(k_j, q_i, v_j, do_i, i[None, :], j[:, None], lse_i[None, :],
                          length, scaling, bias, W, seed, pair_place, dropout, MAX_LENGTH)  # fmt: skip
        dv_j = tl.dot(met.to(q_i.dtype), do_i, dv_j, input_precision="ieee")
        ds = p * (dp - delta_i[None, :])
        dk_j = tl.dot(ds.to(q_i.dtype), q_i, dk_j, input_precision="ieee")
    store_tokens(dv, dv_j, j, q_n, length, D, WIDE)
    store_tokens(dk, dk_j * scaling, j, q_n, length, D, WIDE)


@triton.jit
def attention_backward(
    q, k, v, o, lse, do, dq, dk, dv, starts, stops, bias, seed, scaling, dropout, q_n, q_h, o_n, o_h, N, W,
    MAX_LENGTH: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    LOW: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, HIGH: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Gradients of one head of one row.

    The grid is that of forward, with twice the shares where there are several: a long row's tokens that ask (dq) and
    that answer (dk, dv) are then two programs'.
    """
    start = tl.load(starts + tl.program_id(1)).to(tl.int64)
    length = tl.load(stops + tl.program_id(1)) - start.to(tl.int32)
    sides = tl.minimum(tl.num_programs(2), 2)
    side = tl.program_id(2) % sides
    own = tl.program_id(2) // sides * BLOCK
    if (length <= tl.maximum(own, LOW)) | (length > HIGH) | ((side == 1) & (length <= BLOCK)):
        return
    head = tl.program_id(0)
    q += start * q_n + head * q_h
    k += start * q_n + head * q_h
    v += start * q_n + head * q_h
    dq += start * q_n + head * q_h
    dk += start * q_n + head * q_h
    dv += start * q_n + head * q_h
    o += start * o_n + head * o_h
    do += start * o_n + head * o_h
    place = start + head.to(tl.int64) * N
    lse += place
    if bias is not None:
        bias += head * W
    if length <= HALF:
        if LOW < HALF:
            backward_whole(q, k, v, do, dq, dk, dv, lse, place * MAX_LENGTH, length, bias, seed, scaling, dropout,
                           q_n, o_n, W, MAX_LENGTH, D, WIDE, HALF)  # fmt: skip
    elif length <= BLOCK:
        if (HALF < BLOCK) & (LOW < BLOCK):
            backward_whole(q, k, v, do, dq, dk, dv, lse, place * MAX_LENGTH, length, bias, seed, scaling, dropout,
                           q_n, o_n, W, MAX_LENGTH, D, WIDE, BLOCK)  # fmt: skip
    else:
        if BLOCK < HIGH:
            for first in range(own, length, tl.num_programs(2) // sides * BLOCK):
                if side == 0:
                    backward_asking(q, k, v, o, do, dq, lse, place * MAX_LENGTH, length, first, bias, seed, scaling,
                                    dropout, q_n, o_n, W, MAX_LENGTH, D, WIDE, BLOCK, INNER)  # fmt: skip
                if side == sides - 1:
                    backward_answering(q, k, v, o, do, dk, dv, lse, place * MAX_LENGTH, length, first, bias, seed,
                                       scaling, dropout, q_n, o_n, W, MAX_LENGTH, D, WIDE, BLOCK, INNER)  # fmt: skip
