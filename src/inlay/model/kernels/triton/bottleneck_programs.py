"""Triton programs of the fused bottleneck: down, activation, up, scale and residual in one pass over a tile.

The invariants of `grouped_programs.py` hold. z is the pre-activation, kept for backward; the activation is
computed again there, and so is the mask of dropout. h is what dropout is applied to: where its rate (THRESHOLD, in
65536ths) is not zero, everything below reads d = dropout(h) in h's stead. The weights of a slot are dense; the slots
lie `stride` numbers apart. STAGES is said to the loops that add a residual: by itself the pipeline prefetches what
products read, and each step would wait for the residual's numbers.

In a loop, a tensor that the program computes itself (the dropped h) stands on the right of a product, never on the
left. On the left it would stay in registers, and Triton writes the next step's numbers into them while the product
still reads the last one's (triton-lang/triton#9433): rarely, and then anything comes out. On the right it goes through
shared memory.

Shape letters: N tokens of a tile, D width read, R bottleneck, E width written.
"""

import triton
import triton.language as tl

from inlay.model.kernels.triton.grouped_programs import (
    accumulate,
    dropped,
    kept_scale,
    load_block,
    load_keys,
    share_of,
    store_block,
)


@triton.jit
def tanh(x):
    """tanh, by its series where the quotient would cancel."""
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    square = x * x
    small = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.25, small, tl.where(x < 0, -large, large))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """The activation of `kernels.ACTIVATIONS` by that name; "none" is the identity."""
    if ACTIVATION == "gelu":
        # 0.5 (1 + tanh u) is the sigmoid of 2u, which does not cancel
        z = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACTIVATION == "gelu-exact":
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # a NaN stays one
    elif ACTIVATION == "tanh":
        z = tanh(z)
    elif ACTIVATION == "swish":
        z = z * tl.sigmoid(z)
    else:
        tl.static_assert(ACTIVATION == "none")
    return z


@triton.jit
def slope(z, ACTIVATION: tl.constexpr):
    """The derivative of the activation at z."""
    if ACTIVATION == "gelu":
        s = tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        z = s + z * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    elif ACTIVATION == "gelu-exact":
        z = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACTIVATION == "relu":
        z = tl.where(z > 0, 1.0, 0.0)
    elif ACTIVATION == "tanh":
        e = tl.exp(-2.0 * tl.abs(z))
        z = 4.0 * e / ((1.0 + e) * (1.0 + e))
    elif ACTIVATION == "swish":
        s = tl.sigmoid(z)
        z = s * (1.0 + z * (1.0 - s))
    else:
        tl.static_assert(ACTIVATION == "none")
        z = tl.full(z.shape, 1.0, tl.float32)
    return z


@triton.jit(do_not_specialize=["salt"])
def bottleneck_forward(
    h_ptr,
    down_ptr,
    down_bias_ptr,
    up_ptr,
    up_bias_ptr,
    scale_ptr,
    slots_ptr,
    starts_ptr,
    stops_ptr,
    out_ptr,
    z_ptr,
    seed_ptr,
    salt,
    down_stride,
    down_bias_stride,
    up_stride,
    up_bias_stride,
    D: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    THRESHOLD: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One tile: out = scale·(up(act(down(h)))), plus h with RESIDUAL; z is written unless its pointer is None."""
    start = tl.load(starts_ptr + tl.program_id(0))
    num_tokens = tl.load(stops_ptr + tl.program_id(0)) - start
    if num_tokens <= 0:
        return
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    start = start.to(tl.int64)
    h_ptr += start * D
    rows = tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    keys = load_keys(seed_ptr, salt, THRESHOLD)

    z_RN = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        h_ND = load_block(h_ptr, rows, d, num_tokens, D, D)
        h_ND = dropped(h_ND, keys, start + rows, first, D, THRESHOLD)
        down_DR = load_block(down_ptr + slot * down_stride, d, r, D, R, R).to(h_ptr.dtype.element_ty)
        z_RN = tl.dot(tl.trans(down_DR), tl.trans(h_ND), z_RN, input_precision="ieee")
    z_NR = tl.trans(z_RN) * kept_scale(THRESHOLD)
    if down_bias_ptr is not None:
        z_NR += tl.load(down_bias_ptr + slot * down_bias_stride + r, mask=r < R, other=0.0).to(tl.float32)[None, :]
    if z_ptr is not None:
        store_block(z_ptr + start * R, z_NR, rows, r, num_tokens, R)

    a_NR = activate(z_NR, ACTIVATION).to(h_ptr.dtype.element_ty)
    scale = tl.load(scale_ptr + slot).to(tl.float32)
    for first in tl.range(0, E, BLOCK_D, num_stages=STAGES):
        e = first + tl.arange(0, BLOCK_D)
        up_RE = load_block(up_ptr + slot * up_stride, r, e, R, E, E).to(h_ptr.dtype.element_ty)
        y_NE = tl.dot(a_NR, up_RE, input_precision="ieee")
        if up_bias_ptr is not None:
            y_NE += tl.load(up_bias_ptr + slot * up_bias_stride + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
        y_NE *= scale
        if RESIDUAL:
            h_NE = load_block(h_ptr, rows, e, num_tokens, E, E)
            h_NE = dropped(h_NE, keys, start + rows, first, E, THRESHOLD)
            y_NE += h_NE.to(tl.float32) * kept_scale(THRESHOLD)
        store_block(out_ptr + start * E, y_NE, rows, e, num_tokens, E)


@triton.jit(do_not_specialize=["salt"])
def bottleneck_backward_tokens(
    grad_ptr,
    z_ptr,
    down_ptr,
    up_ptr,
    scale_ptr,
    slots_ptr,
    starts_ptr,
    stops_ptr,
    a_ptr,
    dz_ptr,
    dh_ptr,
    seed_ptr,
    salt,
    down_stride,
    up_stride,
    D: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    THRESHOLD: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One tile: the activations again, the gradient of z, and the gradient of h unless its pointer is None."""
    start = tl.load(starts_ptr + tl.program_id(0))
    num_tokens = tl.load(stops_ptr + tl.program_id(0)) - start
    if num_tokens <= 0:
        return
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    start = start.to(tl.int64)
    grad_ptr += start * E
    rows = tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)

    da_NR = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for first in range(0, E, BLOCK_D):
        e = first + tl.arange(0, BLOCK_D)
        grad_NE = load_block(grad_ptr, rows, e, num_tokens, E, E)
        up_RE = load_block(up_ptr + slot * up_stride, r, e, R, E, E).to(grad_ptr.dtype.element_ty)
        da_NR = tl.dot(grad_NE, tl.trans(up_RE), da_NR, input_precision="ieee")
    z_NR = load_block(z_ptr + start * R, rows, r, num_tokens, R, R).to(tl.float32)
    dz_NR = tl.load(scale_ptr + slot).to(tl.float32) * da_NR * slope(z_NR, ACTIVATION)
    dz_NR = dz_NR.to(grad_ptr.dtype.element_ty)
    store_block(a_ptr + start * R, activate(z_NR, ACTIVATION), rows, r, num_tokens, R)
    store_block(dz_ptr + start * R, dz_NR, rows, r, num_tokens, R)

    if dh_ptr is not None:
        keys = load_keys(seed_ptr, salt, THRESHOLD)
        for first in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            d = first + tl.arange(0, BLOCK_D)
            down_DR = load_block(down_ptr + slot * down_stride, d, r, D, R, R).to(grad_ptr.dtype.element_ty)
            dh_ND = tl.dot(dz_NR, tl.trans(down_DR), input_precision="ieee")
            if RESIDUAL:
                dh_ND += load_block(grad_ptr, rows, d, num_tokens, D, D).to(tl.float32)
            dh_ND = dropped(dh_ND, keys, start + rows, first, D, THRESHOLD) * kept_scale(THRESHOLD)
            store_block(dh_ptr + start * D, dh_ND, rows, d, num_tokens, D)


@triton.jit(do_not_specialize=["salt"])
def bottleneck_backward_weights(
    h_ptr,
    dz_ptr,
    a_ptr,
    grad_ptr,
    scale_ptr,
    begins_ptr,
    ends_ptr,
    down_ptr,
    down_bias_ptr,
    up_ptr,
    up_bias_ptr,
    seed_ptr,
    salt,
    split_size,
    D: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One chunk of one slot's gradients over one share of its tokens: first the chunks of down, then those of up.

    The four gradients lie in one buffer of `split_size` numbers for each split.
    """
    chunk = tl.program_id(0)
    slot = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    first, num_tokens = share_of(begins_ptr, ends_ptr, slot, tl.program_id(2), tl.num_programs(2), BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    block = tl.arange(0, BLOCK_D)
    num_down = tl.cdiv(D, BLOCK_D)
    if chunk < num_down:
        d = chunk * BLOCK_D
        keys = load_keys(seed_ptr, salt, THRESHOLD)
        down_DR, bias_R = accumulate(
            h_ptr, dz_ptr, first, num_tokens, d, 0, keys, D, R, THRESHOLD, BLOCK_N, BLOCK_D, BLOCK_R
        )
        down_DR *= kept_scale(THRESHOLD)
        store_block(down_ptr + split * split_size + slot * D * R, down_DR, d + block, r, D, R)
        if down_bias_ptr is not None:
            tl.store(down_bias_ptr + split * split_size + slot * R + r, bias_R, mask=(r < R) & (chunk == 0))
    else:
        e = (chunk - num_down) * BLOCK_D
        up_RE, bias_E = accumulate(a_ptr, grad_ptr, first, num_tokens, 0, e, None, R, E, 0, BLOCK_N, BLOCK_R, BLOCK_D)
        scale = tl.load(scale_ptr + slot).to(tl.float32)
        store_block(up_ptr + split * split_size + slot * R * E, up_RE * scale, r, e + block, R, E)
        if up_bias_ptr is not None:
            tl.store(up_bias_ptr + split * split_size + slot * E + e + block, bias_E * scale, mask=e + block < E)
