"""Triton programs of the exact GELU by a short polynomial.

Shape letters: none; a tensor is taken as its numbers in a row.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

P = tl.constexpr(0.3275911 * 0.7071067811865476)
"""p of formula 7.1.26, for x instead of x/√2"""
HALF_LOG2E = tl.constexpr(0.7213475204444817)


@triton.jit
def normal(x):
    """Φ(x) and exp(-x²/2)."""
    bell = tl.exp2(-HALF_LOG2E * x * x)
    t = 1.0 / (1.0 + P * tl.abs(x))
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    upper = 0.5 * tail * bell  # 1 - Φ(|x|)
    return tl.where(x < 0, upper, 1.0 - upper), bell


@triton.jit
def gelu_forward(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    cumulative, _ = normal(x)
    tl.store(y_ptr + place, (x * cumulative).to(y_ptr.dtype.element_ty), mask=place < size)


@triton.jit
def gelu_backward(dy_ptr, x_ptr, dx_ptr, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    cumulative, bell = normal(x)
    slope = cumulative + x * bell * 0.3989422804014327
    tl.store(dx_ptr + place, (dy * slope).to(dx_ptr.dtype.element_ty), mask=place < size)
