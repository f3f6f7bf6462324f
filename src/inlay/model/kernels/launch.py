"""Launches on a GPU: the settings of Triton programs, CUDA graphs, and a test for out-of-memory errors.

Settings follow from shapes alone, so a captured launch is right for every route.

The files that launch programs (`fused_*.py`, `grouped.py`, `frozen_layers.py`) import them at the first launch, so
they can be imported without triton. No launch waits for the device. The programs are operators of torch with fakes and
autograd formulas: a compiler traces a step with them whole.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inlay.errors import OutOfMemory

HAS_TRITON = importlib.util.find_spec("triton") is not None
PROGRAMS = 264
"""sums over a slot's tokens are split until about so many programs run: two for each processor of an H100 or H200"""
TOKENS_OF_A_SPLIT = 128
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


class LaunchConfig(NamedTuple):
    """Launch settings of one kind of program: its chunk of the width, its warps and its pipeline stages."""

    block: int
    num_warps: int
    num_stages: int

    def options(self, *, is_wide: bool = False) -> dict[str, int]:
        """Return warps and stages as a launch takes them; a wide block has twice the warps."""
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
    """Tell whether the kernels run there: triton is installed, and the device is a GPU or Triton interprets."""
    return HAS_TRITON and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def block_of(size: int, most: int = 128) -> int:
    """Return the power of two that holds a width, up to `most`; matrix products want 16 at least."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def chunks_of(size: int, block: int) -> int:
    """Return the number of blocks that cover a width."""
    return -(-size // block)


def splits_of(num_programs: int, num_tokens: int, wanted: int = PROGRAMS, fewest: int | None = None) -> int:
    """Number of shares, of `fewest` tokens or more, that split a slot's tokens to make about `wanted` programs."""
    return max(1, min(round(wanted / num_programs), num_tokens // (fewest or TOKENS_OF_A_SPLIT)))


def dense(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor without gaps, as programs read it."""
    return None if tensor is None else tensor.contiguous()


def by_slot(stack: Tensor) -> tuple[Tensor, int]:
    """Return a stack whose slots have no gaps inside, and the distance between slots; a bank's views are not copied."""
    stack = stack if stack[:1].is_contiguous() else stack.contiguous()
    return stack, stack.stride(0)


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launch inside on the tensor's GPU, whichever is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


class GraphRecorder:
    """Captures work on a stream of its own, into memory that all its graphs share."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._pool: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def capture(self, work: Callable[[], None]) -> Any:
        """Capture the work as a graph, without running it. It must have run before: that loads all it launches."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        if not self._graphs:  # torch has released the pool of graphs that are all gone, and refuses it for new ones
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        # Not `torch.cuda.graph`, which empties the caches of the allocator every time.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                work()
            except BaseException:
                _abandon(graph, self._pool)
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs.add(graph)
        return graph


def _abandon(graph: Any, pool: Any) -> None:
    """End a failed capture. If `capture_end` fails too, end the allocator's pool by hand, and the random generator's
    capture by an empty one: torch would leave both in capture mode."""
    try:
        graph.capture_end()
    except RuntimeError:
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        nothing = torch.cuda.CUDAGraph()
        nothing.capture_begin()
        with warnings.catch_warnings():  # torch warns that it is empty
            warnings.simplefilter("ignore", UserWarning)
            nothing.capture_end()


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out; on a CPU torch has no class for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
        return True
    # Where a capture was cut short, the error is that it could not be ended.
    return error.__context__ is not None and is_out_of_memory(error.__context__)
