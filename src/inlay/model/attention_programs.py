"""Triton programs of attention inside the rows of a pack.

A program takes one head of one row: whole if the row fits a block, else block by block, one program or several sharing
the blocks. What lies outside the row is read as zero and its scores are replaced, not multiplied: a neighbour's NaN
does not come in. Nothing is added by two programs, so there are no atomics and the bits are the same every time.

Names: q, k, v and their kin point at the head; i are tokens that ask, j tokens that answer, both within start to stop.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def load_tokens(ptr, n, stride, stop, D: tl.constexpr, WIDE: tl.constexpr):
    """One head of tokens n [n, WIDE], zero from `stop` on and beyond D."""
    d = tl.arange(0, WIDE)
    inside = (n < stop)[:, None] & (d < D)[None, :]
    return tl.load(ptr + n.to(tl.int64)[:, None] * stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_tokens(ptr, x, n, stride, stop, D: tl.constexpr, WIDE: tl.constexpr):
    d = tl.arange(0, WIDE)
    inside = (n < stop)[:, None] & (d < D)[None, :]
    tl.store(ptr + n.to(tl.int64)[:, None] * stride + d[None, :], x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def score(q, k, i, j, stop, scaling, bias, W):
    """What tokens i give tokens j before the softmax; -inf beyond the row."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
    if bias is not None:
        inside = (i < stop)[:, None] & (j < stop)[None, :]
        s += tl.load(bias + W // 2 + j[None, :] - i[:, None], mask=inside, other=0.0).to(tl.float32)
    return tl.where((j < stop)[None, :], s, float("-inf"))


@triton.jit
def keep(seed, i, j, start, head, num_heads, dropout, MAX_LENGTH: tl.constexpr):
    """0 where a weight is dropped, else 1/(1 - dropout); the same in forward and backward."""
    place = (i.to(tl.int64)[:, None] * num_heads + head) * MAX_LENGTH + (j - start)[None, :]
    return tl.where(tl.rand(tl.load(seed), place) < dropout, 0.0, 1 / (1 - dropout))


@triton.jit
def attention_forward(
    q, k, v, o, lse, starts, stops, bias, seed, scaling, dropout,
    q_n, q_h, k_n, k_h, v_n, v_h, o_n, o_h, N, W,
    MAX_LENGTH: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    num_heads = tl.num_programs(0)
    start = tl.load(starts + tl.program_id(1))
    stop = tl.load(stops + tl.program_id(1))
    q += head * q_h
    k += head * k_h
    v += head * v_h
    o += head * o_h
    if bias is not None:
        bias += head * W
    for first in range(start + tl.program_id(2) * BLOCK, stop, tl.num_programs(2) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        q_i = load_tokens(q, i, q_n, stop, D, WIDE)
        largest = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        out = tl.zeros((BLOCK, WIDE), tl.float32)
        for other in range(start, stop, BLOCK):
            j = other + tl.arange(0, BLOCK)
            s = score(q_i, load_tokens(k, j, k_n, stop, D, WIDE), i, j, stop, scaling, bias, W)
            new = tl.maximum(largest, tl.max(s, 1))
            p = tl.exp(s - new[:, None])
            shrink = tl.exp(largest - new)
            total = total * shrink + tl.sum(p, 1)
            if seed is not None:
                p *= keep(seed, i, j, start, head, num_heads, dropout, MAX_LENGTH)
            v_j = load_tokens(v, j, v_n, stop, D, WIDE)
            out = tl.dot(p.to(v_j.dtype), v_j, out * shrink[:, None], input_precision="ieee")
            largest = new
        store_tokens(o, out / total[:, None], i, o_n, stop, D, WIDE)
        tl.store(lse + head.to(tl.int64) * N + i, largest + tl.log(total), mask=i < stop)


@triton.jit
def pair(
    q_i, k_j, v_j, do_i, lse_i, delta_i, i, j, start, stop, scaling, bias, W, seed, head, num_heads, dropout,
    MAX_LENGTH: tl.constexpr,
):  # fmt: skip
    """Of tokens i and j: the weights as they met v, and the gradients of the scores, both in q's dtype."""
    s = score(q_i, k_j, i, j, stop, scaling, bias, W)
    inside = (i < stop)[:, None] & (j < stop)[None, :]
    p = tl.where(inside, tl.exp(s - lse_i[:, None]), 0.0)
    dp = tl.dot(do_i, tl.trans(v_j), input_precision="ieee")
    met = p
    if seed is not None:
        kept = keep(seed, i, j, start, head, num_heads, dropout, MAX_LENGTH)
        met = p * kept
        dp *= kept
    ds = p * (dp - delta_i[:, None]) * scaling
    return met.to(q_i.dtype), ds.to(q_i.dtype)


@triton.jit
def attention_backward(
    q, k, v, o, lse, do, dq, dk, dv, starts, stops, bias, seed, scaling, dropout,
    q_n, q_h, k_n, k_h, v_n, v_h, do_n, do_h, o_n, o_h, N, W,
    MAX_LENGTH: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of one head of one row. o, dq, dk and dv have the same strides."""
    head = tl.program_id(0)
    num_heads = tl.num_programs(0)
    start = tl.load(starts + tl.program_id(1))
    stop = tl.load(stops + tl.program_id(1))
    q += head * q_h
    k += head * k_h
    v += head * v_h
    do += head * do_h
    o += head * o_h
    dq += head * o_h
    dk += head * o_h
    dv += head * o_h
    lse += head.to(tl.int64) * N
    if bias is not None:
        bias += head * W
    for first in range(start + tl.program_id(2) * BLOCK, stop, tl.num_programs(2) * BLOCK):
        # Tokens a are this program's own, as those that ask (dq) and as those that answer (dk, dv).
        a = first + tl.arange(0, BLOCK)
        q_a = load_tokens(q, a, q_n, stop, D, WIDE)
        k_a = load_tokens(k, a, k_n, stop, D, WIDE)
        v_a = load_tokens(v, a, v_n, stop, D, WIDE)
        do_a = load_tokens(do, a, do_n, stop, D, WIDE)
        lse_a = tl.load(lse + a, mask=a < stop, other=0.0)
        delta_a = tl.sum(load_tokens(o, a, o_n, stop, D, WIDE).to(tl.float32) * do_a.to(tl.float32), 1)
        # With itself first: all there is in a row of one block, and then the weights serve all three gradients.
        p, ds = pair(q_a, k_a, v_a, do_a, lse_a, delta_a, a, a, start, stop, scaling, bias, W, seed, head, num_heads,
                     dropout, MAX_LENGTH)  # fmt: skip
        dq_a = tl.dot(ds, k_a, input_precision="ieee")
        dk_a = tl.dot(tl.trans(ds), q_a, input_precision="ieee")
        dv_a = tl.dot(tl.trans(p), do_a, input_precision="ieee")
        for step in range(BLOCK, tl.cdiv(stop - start, BLOCK) * BLOCK, BLOCK):
            other = start + step - BLOCK
            other = tl.where(other >= first, other + BLOCK, other)  # the row's other blocks, in order
            b = other + tl.arange(0, BLOCK)
            q_b = load_tokens(q, b, q_n, stop, D, WIDE)
            k_b = load_tokens(k, b, k_n, stop, D, WIDE)
            v_b = load_tokens(v, b, v_n, stop, D, WIDE)
            do_b = load_tokens(do, b, do_n, stop, D, WIDE)
            lse_b = tl.load(lse + b, mask=b < stop, other=0.0)
            delta_b = tl.sum(load_tokens(o, b, o_n, stop, D, WIDE).to(tl.float32) * do_b.to(tl.float32), 1)
            p, ds = pair(q_a, k_b, v_b, do_a, lse_a, delta_a, a, b, start, stop, scaling, bias, W, seed, head,
                         num_heads, dropout, MAX_LENGTH)  # fmt: skip
            dq_a = tl.dot(ds, k_b, dq_a, input_precision="ieee")
            p, ds = pair(q_b, k_a, v_a, do_b, lse_b, delta_b, b, a, start, stop, scaling, bias, W, seed, head,
                         num_heads, dropout, MAX_LENGTH)  # fmt: skip
            dk_a = tl.dot(tl.trans(ds), q_b, dk_a, input_precision="ieee")
            dv_a = tl.dot(tl.trans(p), do_b, dv_a, input_precision="ieee")
        store_tokens(dq, dq_a, a, o_n, stop, D, WIDE)
        store_tokens(dk, dk_a, a, o_n, stop, D, WIDE)
        store_tokens(dv, dv_a, a, o_n, stop, D, WIDE)
