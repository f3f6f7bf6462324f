"""The exact GELU by a short polynomial: on a GPU the error function of the library takes longer than its memory.

erf by formula 7.1.26 of Abramowitz and Stegun, wrong by 1.5e-7 at most, in float32; bf16 has steps of 4e-3. Compilers
make one pass of it, forward and backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

_P = 0.3275911
_COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def is_exact_gelu(module: nn.Module) -> bool:
    """Whether a module is the GELU by the error function, as transformers or torch have it."""
    if isinstance(module, nn.GELU):
        return module.approximate == "none"
    return type(module).__name__ == "GELUActivation"


def quick_gelu(x: Tensor) -> Tensor:
    """x·Φ(x), in x's dtype."""
    return _Gelu.apply(x)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * _normal(wide)[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        cumulative, bell = _normal(wide)
        slope = cumulative + wide * bell * (1 / math.sqrt(2 * math.pi))
        return (grad.float() * slope).to(x.dtype)


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Φ(x) and exp(-x²/2)."""
    bell = torch.exp(-0.5 * x * x)
    t = 1 / (1 + _P * math.sqrt(0.5) * x.abs())
    tail = torch.full_like(t, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        tail = tail * t + coefficient
    upper = 0.5 * tail * t * bell  # 1 - Φ(|x|)
    return torch.where(x < 0, upper, 1 - upper), bell
