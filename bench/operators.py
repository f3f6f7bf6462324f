"""How many operators a piece of work launches: what a step costs where launches cost more than the work itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# They compute nothing: memory that is asked for, and tensors that are looked at otherwise.
FREE = frozenset(
    "alias as_strided chunk detach detach_ empty empty_like empty_strided expand expand_as flatten lift_fresh narrow "
    "new_empty new_empty_strided permute reshape resize_ resolve_conj resolve_neg select set_ slice split "
    "split_with_sizes squeeze t to transpose unbind unflatten unsafe_split unsqueeze unfold view view_as _unsafe_view "
    "_reshape_alias promote_types result_type is_nonzero item _local_scalar_dense".split()
)
# Of the runtime's calls on a GPU: what they are counted as.
RUNTIME = {
    **dict.fromkeys(("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"), "launches"),
    **dict.fromkeys(("cudaMemcpyAsync", "cudaMemcpy", "cudaMemsetAsync"), "copies"),
    **dict.fromkeys(("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"), "waits"),
    "cudaGraphLaunch": "graphs",
}


def count_operators(work: Callable[[], Any]) -> Counter[str]:
    """Operators that compute, by name: those that are composed of others are not counted, nor are views.

    On a GPU also `launches`, `copies`, `waits` and `graphs` of the runtime.
    """
    is_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as profiler:
        work()
        if is_cuda:
            torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in profiler.events() or ():
        if event.name in RUNTIME:
            found[RUNTIME[event.name]] += 1
        elif event.cpu_parent is None:
            _count(event, found)
    return found


def _count(event: Any, found: Counter[str]) -> int:
    """Add an operator, or those it is composed of; returns how many."""
    room, _, name = event.name.partition("::")
    children = [] if room == "inlay" else event.cpu_children  # a program of ours is one
    num_inside = sum(_count(child, found) for child in children)
    is_own = not num_inside and room in ("aten", "inlay") and name not in FREE
    found[event.name] += is_own
    return num_inside + is_own
