"""Dropout while a backbone trains on a CPU: torch's draws one number after another, and takes a tenth of a step for it.

Sixteen random bits for each element, from torch's own generator, so that a resumed run draws what it would have drawn.
The rate is rounded to a 65536th; kept elements are multiplied so that the mean stays exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_STEPS = 65536  # resolution of a rate
_LOWEST = -_STEPS // 2  # the least number of sixteen bits


class Dropout(nn.Dropout):
    """`nn.Dropout` of a rate known to a 65536th, where torch's is slow."""

    def forward(self, x: Tensor) -> Tensor:
        threshold = round(self.p * _STEPS)
        is_slow = self.training and x.device.type == "cpu" and not torch.compiler.is_compiling()
        if not is_slow or not 0 < threshold < _STEPS:
            return super().forward(x)
        return x * draw_factors(x, threshold)


def draw_factors(x: Tensor, threshold: int) -> Tensor:
    """The factors that dropout multiplies the elements of x by, at a rate of `threshold` 65536ths."""
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(_LOWEST << 48, None)
    numbers = words.view(torch.int16)[: x.numel()].view(x.shape)
    # 0 or 1 by clamping to two neighbours: comparing takes four times as long.
    last = _LOWEST + threshold - 1
    kept = numbers.clamp_(last, last + 1).sub_(last)
    return kept.to(x.dtype).mul_(_STEPS / (_STEPS - threshold))
