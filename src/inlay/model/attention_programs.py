"""Triton programs of attention inside the rows of a pack.

A program takes one head of one row: whole if the row fits a block, else block by block, one program or several sharing
the blocks. What lies outside the row is read as zero and its scores are replaced, not multiplied: a neighbour's NaN
does not come in. Nothing is added by two programs, so there are no atomics and the bits are the same every time.

Names: q, k, v and their kin point at the first token of the row and the program's head, tokens are counted from there;
i are tokens that ask, j tokens that answer. `q_n` and `q_h` are q's strides between tokens and between heads.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl


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
    """What tokens i give tokens j before the softmax; -inf beyond the row.

    x and y are q and k with i down and j across, or k and q with i across and j down.
    """
    s = tl.dot(x, tl.trans(y), input_precision="ieee") * scaling
    if bias is not None:
        s += tl.load(bias + W // 2 + j - i, mask=(i < length) & (j < length), other=0.0).to(tl.float32)
    return tl.where(j < length, s, float("-inf"))


@triton.jit
def keep(seed, i, j, row_place, dropout, MAX_LENGTH: tl.constexpr):
    """0 where a weight is dropped, else 1/(1 - dropout); the same in forward and backward."""
    place = row_place + i * MAX_LENGTH + j
    return tl.where(tl.rand(tl.load(seed), place) < dropout, 0.0, 1 / (1 - dropout))


@triton.jit
def attention_forward(
    q, k, v, o, lse, starts, stops, bias, seed, scaling, dropout,
    q_n, q_h, k_n, k_h, v_n, v_h, o_n, o_h, N, W,
    MAX_LENGTH: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    start = tl.load(starts + tl.program_id(1)).to(tl.int64)
    length = tl.load(stops + tl.program_id(1)) - start.to(tl.int32)
    q += start * q_n + head * q_h
    k += start * k_n + head * k_h
    v += start * v_n + head * v_h
    o += start * o_n + head * o_h
    lse += head.to(tl.int64) * N + start
    row_place = (head.to(tl.int64) * N + start) * MAX_LENGTH
    if bias is not None:
        bias += head * W
    for first in range(tl.program_id(2) * BLOCK, length, tl.num_programs(2) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        q_i = load_tokens(q, i, q_n, length, D, WIDE)
        largest = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        out = tl.zeros((BLOCK, WIDE), tl.float32)
        for other in range(0, length, BLOCK):
            j = other + tl.arange(0, BLOCK)
            k_j = load_tokens(k, j, k_n, length, D, WIDE)
            s = score(q_i, k_j, i[:, None], j[None, :], length, scaling, bias, W)
            new = tl.maximum(largest, tl.max(s, 1))
            p = tl.exp(s - new[:, None])
            shrink = tl.exp(largest - new)
            total = total * shrink + tl.sum(p, 1)
            if seed is not None:
                p *= keep(seed, i[:, None], j[None, :], row_place, dropout, MAX_LENGTH)
            v_j = load_tokens(v, j, v_n, length, D, WIDE)
            out = tl.dot(p.to(v_j.dtype), v_j, out * shrink[:, None], input_precision="ieee")
            largest = new
        store_tokens(o, out / total[:, None], i, o_n, length, D, WIDE)
        tl.store(lse + i, largest + tl.log(total), mask=i < length)


@triton.jit
def pair(
    x, y, g, w, i, j, lse, delta, length, scaling, bias, W, seed, row_place, dropout, MAX_LENGTH: tl.constexpr
):  # fmt: skip
    """Of tokens i and j: the weights as they met v, and the gradients of the scores, both in q's dtype.

    x, y, g, w are q, k, do, v with i down and j across, or k, q, v, do with i across and j down.
    """
    s = score(x, y, i, j, length, scaling, bias, W)
    p = tl.where((i < length) & (j < length), tl.exp(s - lse), 0.0)
    dp = tl.dot(g, tl.trans(w), input_precision="ieee")
    met = p
    if seed is not None:
        kept = keep(seed, i, j, row_place, dropout, MAX_LENGTH)
        met = p * kept
        dp *= kept
    ds = p * (dp - delta)
    return met.to(x.dtype), ds.to(x.dtype)


@triton.jit
def attention_backward(
    q, k, v, o, lse, do, dq, dk, dv, starts, stops, bias, seed, scaling, dropout,
    q_n, q_h, k_n, k_h, v_n, v_h, do_n, do_h, o_n, o_h, N, W,
    MAX_LENGTH: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of one head of one row. o, dq, dk and dv have the same strides.

    Tokens a are a program's own, as those that ask (dq) and as those that answer (dk, dv). A row of one block skips
    both loops: its weights are computed once and serve all three gradients.
    """
    head = tl.program_id(0)
    start = tl.load(starts + tl.program_id(1)).to(tl.int64)
    length = tl.load(stops + tl.program_id(1)) - start.to(tl.int32)
    q += start * q_n + head * q_h
    k += start * k_n + head * k_h
    v += start * v_n + head * v_h
    do += start * do_n + head * do_h
    o += start * o_n + head * o_h
    dq += start * o_n + head * o_h
    dk += start * o_n + head * o_h
    dv += start * o_n + head * o_h
    lse += head.to(tl.int64) * N + start
    row_place = (head.to(tl.int64) * N + start) * MAX_LENGTH
    if bias is not None:
        bias += head * W
    num_others = tl.cdiv(length, BLOCK) - 1 if MAX_LENGTH > BLOCK else 0
    for first in range(tl.program_id(2) * BLOCK, length, tl.num_programs(2) * BLOCK):
        a = first + tl.arange(0, BLOCK)
        q_a = load_tokens(q, a, q_n, length, D, WIDE)
        do_a = load_tokens(do, a, do_n, length, D, WIDE)
        lse_a = tl.load(lse + a, mask=a < length, other=0.0)
        delta_a = tl.sum(load_tokens(o, a, o_n, length, D, WIDE).to(tl.float32) * do_a.to(tl.float32), 1)
        dq_a = tl.zeros((BLOCK, WIDE), tl.float32)
        for step in range(num_others):
            b = step * BLOCK + tl.where(step * BLOCK < first, 0, BLOCK) + tl.arange(0, BLOCK)
            k_b = load_tokens(k, b, k_n, length, D, WIDE)
            v_b = load_tokens(v, b, v_n, length, D, WIDE)
            _, ds = pair(q_a, k_b, do_a, v_b, a[:, None], b[None, :], lse_a[:, None], delta_a[:, None],
                         length, scaling, bias, W, seed, row_place, dropout, MAX_LENGTH)  # fmt: skip
            dq_a = tl.dot(ds, k_b, dq_a, input_precision="ieee")

        k_a = load_tokens(k, a, k_n, length, D, WIDE)
        v_a = load_tokens(v, a, v_n, length, D, WIDE)
        p, ds = pair(q_a, k_a, do_a, v_a, a[:, None], a[None, :], lse_a[:, None], delta_a[:, None],
                     length, scaling, bias, W, seed, row_place, dropout, MAX_LENGTH)  # fmt: skip
        dq_a = tl.dot(ds, k_a, dq_a, input_precision="ieee")
        store_tokens(dq, dq_a * scaling, a, o_n, length, D, WIDE)
        dk_a = tl.dot(tl.trans(ds), q_a, input_precision="ieee")
        dv_a = tl.dot(tl.trans(p), do_a, input_precision="ieee")

        for step in range(num_others):
            b = step * BLOCK + tl.where(step * BLOCK < first, 0, BLOCK) + tl.arange(0, BLOCK)
            q_b = load_tokens(q, b, q_n, length, D, WIDE)
            do_b = load_tokens(do, b, do_n, length, D, WIDE)
            lse_b = tl.load(lse + b, mask=b < length, other=0.0)
            delta_b = tl.sum(load_tokens(o, b, o_n, length, D, WIDE).to(tl.float32) * do_b.to(tl.float32), 1)
            p, ds = pair(k_a, q_b, v_a, do_b, b[None, :], a[:, None], lse_b[None, :], delta_b[None, :],
                         length, scaling, bias, W, seed, row_place, dropout, MAX_LENGTH)  # fmt: skip
            dk_a = tl.dot(ds, q_b, dk_a, input_precision="ieee")
            dv_a = tl.dot(p, do_b, dv_a, input_precision="ieee")
        store_tokens(dk, dk_a * scaling, a, o_n, length, D, WIDE)
        store_tokens(dv, dv_a, a, o_n, length, D, WIDE)
