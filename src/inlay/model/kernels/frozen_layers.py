"""Dropout and GELU of frozen blocks, where torch's or transformers' are slow: dropout on a CPU, GELU on a GPU.

Dropout: torch's draws one number after another, and takes a tenth of a step for it. Here sixteen random bits for each
element, from torch's own generator, so that a resumed run draws what it would have drawn. The rate is rounded to a
65536th; kept elements are multiplied so that the mean stays exactly.

GELU: the error function of the library takes longer than its memory: erf by formula 7.1.26 of Abramowitz and Stegun,
wrong by 1.5e-7 at most, in float32; bf16 has steps of 4e-3. transformers writes GELU's tanh form, which T5 has, as
eight operations; torch has it as one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inlay.model.kernels.launch import chunks_of, on_device_of

_STEPS = 65536  # resolution of a rate of dropout
_LOWEST = -_STEPS // 2  # the least number of sixteen bits
BLOCK = 2048
"""numbers of a program"""
NUM_WARPS = 4


class Dropout(nn.Dropout):
    """`nn.Dropout` of a rate known to a 65536th, where torch's is slow."""

    def forward(self, x: Tensor) -> Tensor:
        threshold = round(self.p * _STEPS)
        is_slow = self.training and x.device.type == "cpu" and not torch.compiler.is_compiling()
        if not is_slow or not 0 < threshold < _STEPS:
            return super().forward(x)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(_LOWEST << 48, None)
        numbers = words.view(torch.int16)[: x.numel()].view(x.shape)
        # 0 or 1 by clamping to two neighbours: comparing takes four times as long.
        last = _LOWEST + threshold - 1
        kept = numbers.clamp_(last, last + 1).sub_(last)
        return x * kept.to(x.dtype).mul_(_STEPS / (_STEPS - threshold))


# transformers' name -> form: by the error function, or by tanh.
_NAMES = {"GELUActivation": "none", "NewGELUActivation": "tanh", "GELUTanh": "tanh"}


def find_gelu(module: nn.Module) -> str | None:
    """Find the form of GELU of a module, as torch names it: "none" (error function) or "tanh"; None: no GELU."""
    return module.approximate if isinstance(module, nn.GELU) else _NAMES.get(type(module).__name__)


def lean_gelu(x: Tensor, kind: str) -> Tensor | None:
    """Return a GELU where Triton runs, in one launch; None if there is no better one than the block's own."""
    if kind == "tanh":
        return F.gelu(x, approximate=kind)
    return quick_gelu(x) if x.dtype == torch.bfloat16 else None  # bf16 rounds away the polynomial's error


@torch.library.custom_op("inlay::gelu", mutates_args=())
def quick_gelu(x: Tensor) -> Tensor:
    """Compute x·Φ(x), in x's dtype, where Triton runs."""
    from inlay.model.kernels.triton.norm_programs import gelu_forward

    x = x.contiguous()
    y = torch.empty_like(x)
    with on_device_of(x):
        gelu_forward[(chunks_of(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK, num_warps=NUM_WARPS)
    return y


@torch.library.custom_op("inlay::gelu_backward", mutates_args=())
def _gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    from inlay.model.kernels.triton.norm_programs import gelu_backward

    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    with on_device_of(x):
        gelu_backward[(chunks_of(x.numel(), BLOCK),)](dy, x, dx, x.numel(), BLOCK, num_warps=NUM_WARPS)
    return dx


quick_gelu.register_fake(lambda x: x.new_empty(x.shape))
_gelu_backward.register_fake(lambda dy, x: x.new_empty(x.shape))
quick_gelu.register_autograd(
    lambda ctx, dy: _gelu_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
