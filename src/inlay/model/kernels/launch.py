"""Launch settings of Triton programs: they follow from shapes alone, so a captured launch is right for every route.

The files that launch programs (`fused_*.py`, `grouped.py`, `frozen_layers.py`) import them at the first launch, so
they can be imported without triton. No launch waits for the device. The programs are operators of torch with fakes and
autograd formulas: a compiler traces a step with them whole.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
PROGRAMS = 264
"""sums over a slot's tokens are split until about so many programs run: two for each processor of an H100 or H200"""
TOKENS_OF_A_SPLIT = 128


class LaunchConfig(NamedTuple):
    """Launch settings of one kind of program: its chunk of the width, its warps and its pipeline stages."""

    block: int
    num_warps: int
    num_stages: int

    def options(self, *, is_wide: bool = False) -> dict[str, int]:
        """Warps and stages as a launch takes them; a wide block has twice the warps."""
        return {"num_warps": self.num_warps * (2 if is_wide else 1), "num_stages": self.num_stages}


class WeightsLaunchConfig(NamedTuple):
    """Launch settings of the programs for the weights' gradients."""

    block: int
    """the chunk of the width whose gradient one program computes"""
    num_rows: int
    """tokens it adds at once"""
    num_warps: int
    num_stages: int
    num_programs: int = PROGRAMS
    """a slot's tokens are split until about this many programs run"""


def is_available(device: torch.device) -> bool:
    """Whether the kernels run there: triton is installed, and the device is a GPU or Triton interprets."""
    return HAS_TRITON and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def block_of(size: int, most: int = 128) -> int:
    """The power of two that holds a width, up to `most`; matrix products want 16 at least."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def chunks_of(size: int, block: int) -> int:
    """Number of blocks that cover a width."""
    return -(-size // block)


def splits_of(num_programs: int, num_tokens: int, wanted: int = PROGRAMS, fewest: int | None = None) -> int:
    """Number of shares, of `fewest` tokens or more, that split a slot's tokens to make about `wanted` programs."""
    return max(1, min(round(wanted / num_programs), num_tokens // (fewest or TOKENS_OF_A_SPLIT)))


def dense(tensor: Tensor | None) -> Tensor | None:
    """The tensor without gaps, as programs read it."""
    return None if tensor is None else tensor.contiguous()


def by_slot(stack: Tensor) -> tuple[Tensor, int]:
    """A stack whose slots have no gaps inside, and the distance between slots; a bank's views are not copied."""
    stack = stack if stack[:1].is_contiguous() else stack.contiguous()
    return stack, stack.stride(0)


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launch inside on the tensor's GPU, whichever is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
