"""GELUs of frozen blocks that take less on a GPU: the exact one by a short polynomial, the other in one operation.

The error function of the library takes longer than its memory: erf by formula 7.1.26 of Abramowitz and Stegun, wrong by
1.5e-7 at most, in float32; bf16 has steps of 4e-3. The programs are Triton's and are imported when first launched, so
this file imports without triton. transformers writes GELU's tanh form, which T5 has, as eight operations; torch has it
as one.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inlay.model.kernels.launch import chunks_of, on_device_of

BLOCK = 2048
"""numbers of a program"""
NUM_WARPS = 4


# transformers' name -> form: by the error function, or by tanh.
_NAMES = {"GELUActivation": "none", "NewGELUActivation": "tanh", "GELUTanh": "tanh"}


def find_gelu(module: nn.Module) -> str | None:
    """Find the form of GELU of a module, as torch names it: "none" (error function) or "tanh"; None: no GELU."""
    return module.approximate if isinstance(module, nn.GELU) else _NAMES.get(type(module).__name__)


def lean_gelu(x: Tensor, kind: str) -> Tensor | None:
    """A GELU where Triton runs, in one launch; None if there is no better one than the block's own."""
    if kind == "tanh":
        return F.gelu(x, approximate=kind)
    return quick_gelu(x) if x.dtype == torch.bfloat16 else None  # bf16 rounds away the polynomial's error


def quick_gelu(x: Tensor) -> Tensor:
    """x·Φ(x), in x's dtype, where Triton runs."""
    return _gelu(x)


@torch.library.custom_op("inlay::gelu", mutates_args=())
def _gelu(x: Tensor) -> Tensor:
    from inlay.model.kernels.triton.gelu_programs import gelu_forward

    x = x.contiguous()
    y = torch.empty_like(x)
    with on_device_of(x):
        gelu_forward[(chunks_of(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK, num_warps=NUM_WARPS)
    return y


@torch.library.custom_op("inlay::gelu_backward", mutates_args=())
def _gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    from inlay.model.kernels.triton.gelu_programs import gelu_backward

    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    with on_device_of(x):
        gelu_backward[(chunks_of(x.numel(), BLOCK),)](dy, x, dx, x.numel(), BLOCK, num_warps=NUM_WARPS)
    return dx


_gelu.register_fake(lambda x: x.new_empty(x.shape))
_gelu_backward.register_fake(lambda dy, x: x.new_empty(x.shape))
_gelu.register_autograd(
    lambda ctx, dy: _gelu_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
