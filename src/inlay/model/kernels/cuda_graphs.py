"""CUDA graphs: work that is captured once and replayed; and a test for out-of-memory errors."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from inlay.errors import OutOfMemory

_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


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
    """Whether an error says that memory ran out; on a CPU torch has no class for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
        return True
    # Where a capture was cut short, the error is that it could not be ended.
    return error.__context__ is not None and is_out_of_memory(error.__context__)
