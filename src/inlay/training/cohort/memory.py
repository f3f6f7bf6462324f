"""Memory: how much is free, how much training needs, which settings fit, and the retry when it runs out.

A slot's cost follows from the shapes. A token's is measured on two small forward and backward passes of the cohort
itself: on a GPU by the allocator's own peak, on a CPU, whose allocator keeps no count, by the bytes autograd saves.
Those are exact, so passes of one and of two rows are enough there, and even a run on few rows can afford them.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from inlay.errors import OutOfMemory
from inlay.model import Backbone, first_line, is_out_of_memory
from inlay.processes import count_sharers
from inlay.training.run.run import AnyRun
from inlay.training.step.eager import Stepper

if TYPE_CHECKING:
    from inlay.training.cohort.cohort import Cohort

T = TypeVar("T")

MAX_COHORT = 32
"""runs trained together at most, unless asked otherwise"""
TOKEN_BUDGET = {"cpu": 16384, "cuda": 131072}
"""tokens of a forward pass at most, unless asked otherwise: more are not faster"""
_USABLE = 0.8  # share of the free memory to use: the rest is for fragments, dev rows and other programs
_PROBED_TOKENS = (256, 1024)  # on a GPU
# A slot's numbers while gradients are taken: value, gradient, its flat copy, two moments, the best epoch's copy.
_COPIES = 6
# More of them while the optimizer steps and no activation is held: the stepped slots' own four, and two between. A CPU,
# which steps in pieces, has none; half of the memory is left to activations anyway.
_STEPPING_COPIES = 6


def available_bytes(device: torch.device) -> int | None:
    """Return the memory that this process can still take on a device; None if the system does not say."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        own = int(torch.cuda.get_per_process_memory_fraction(device.index) * total)  # torch's limit for this process
        return max(0, min(free, own - reserved)) + reserved - torch.cuda.memory_allocated(device)
    found = [number for number in (_free_in_system(), *_free_in_groups()) if number is not None]
    return min(found) // count_sharers() if found else None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory used so far: the GPU's, or this process's resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows does not say
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, Linux KiB


def limit_memory_share(device: torch.device, share: float) -> None:
    """Limit this process to a share of a GPU's memory; `available_bytes` then counts on that share."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device)


def _free_in_system() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:  # not Linux: half of the installed memory, since nothing says how much is used
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError, AttributeError):
        return None


# The files of control groups with their limit, use and droppable file cache: version 2, then 1.
_GROUP_FILES = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def _free_in_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield the memory that every control group leaves to this process; a container's limit counts."""
    lines = own.read_text(encoding="utf8").splitlines() if own.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in _GROUP_FILES:
            continue
        mount, limit, used, droppable = _GROUP_FILES[controllers]
        group_dir = root / mount / path.lstrip("/")
        for folder in (group_dir, *group_dir.parents):
            if not folder.is_relative_to(root / mount):
                break
            try:
                most, now = (int((folder / name).read_text(encoding="ascii")) for name in (limit, used))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
                yield most - now + int(stat.get(droppable, 0))
            except (OSError, ValueError):  # the word `max` means no limit
                continue


def brief_reason(error: BaseException) -> str:
    """Return the first line of an error; for CUDA's, without the list of every process's memory."""
    return first_line(error).split(". GPU ")[0]


@dataclass
class Saved:
    """Bytes that autograd keeps for backward passes."""

    num_bytes: int = 0


@contextmanager
def counting_saved(ignored: Sequence[Tensor] = ()) -> Iterator[Saved]:
    """Count the bytes that forward passes in the block save, every storage once, except `ignored` ones."""
    saved = Saved()
    seen = {tensor.untyped_storage().data_ptr() for tensor in ignored}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            saved.num_bytes += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def count_slot_bytes(runs: Sequence[AnyRun], backbone: Backbone) -> int:
    """Return the largest memory in bytes that the slots of one of the runs take while gradients are computed."""
    widest: dict[str, tuple[int, ...]] = {}
    for run in runs:
        for index, part in enumerate(run.parts):
            for item in part.spec.layout(backbone.anatomy):
                name = item.name if item.is_shared else f"{index}/{item.name}"
                widest[name] = tuple(map(max, item.shape, widest.get(name, item.shape)))
    return _COPIES * 4 * sum(map(math.prod, widest.values()))


def measure_token_bytes(cohort: Cohort) -> float:
    """Measure the bytes a token takes between its forward and its backward pass, on the longest rows.

    The cohort is as before afterwards. Raises OutOfMemory if even the small passes do not fit.
    """
    parts = [part for member in cohort.members for part in member.parts]
    member = max(parts, key=lambda member: member.longest)
    row, length = int(member.lengths.argmax()), member.longest
    is_exact = cohort.backbone.device.type == "cpu"
    counts = [1 if is_exact else max(1, -(-tokens // length)) for tokens in _PROBED_TOKENS]
    if counts[0] == counts[1]:
        counts[1] += 1
    costs = []
    with cohort.rehearsing():
        for count in counts:
            stepper = Stepper(cohort.bank, cohort.slot_update, count * length)
            stepper.may_narrow = False  # buffers in flight are estimated from whole blocks
            batches = {member.slot: np.full(count, row)}
            costs.append(_measure(cohort, lambda: stepper.differentiate([member], batches)))  # noqa: B023 - called here
    slope = (costs[1] - costs[0]) / ((counts[1] - counts[0]) * length)
    return slope if slope > 0 else costs[1] / (counts[1] * length)


def _measure(cohort: Cohort, work: Callable[[], Any]) -> float:
    """Measure the peak memory of a training pass in bytes."""
    device = cohort.backbone.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with cohort.training():
            cohort.attempt(work)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    def count_saved(*, keeps_all: bool = False) -> int:
        ignored = [*cohort.backbone.model.parameters(), *cohort.flat.stacks]
        with cohort.training(keeps_all=keeps_all), counting_saved(ignored) as found:
            cohort.attempt(work)
        return found.num_bytes

    saved = count_saved()
    # Add outputs and gradients in flight: about half a block's, counted as a whole block's. When blocks are computed
    # again, add the activations of the current block too, which the count does not see.
    num_blocks = max(1, cohort.backbone.anatomy.num_layers - cohort.first_layer)
    if not cohort.settings.checkpointing:
        return saved + saved / num_blocks
    return saved + 2 * count_saved(keeps_all=True) / num_blocks


def choose_slots(most: int, slot_bytes: int, free_bytes: int | None) -> int:
    """Return how many slots fit, `most` at most. They may take half the memory: a pass must fit beside them."""
    if free_bytes is None:
        return most
    usable = int(_USABLE * free_bytes)
    stepping_bytes = slot_bytes * (_COPIES + _STEPPING_COPIES) // _COPIES
    return max(1, min(most, usable // 2 // slot_bytes, usable // stepping_bytes))


def find_budget(cohort: Cohort, free_bytes: int | None) -> int:
    """Find the token budget that fits beside the slots; `free_bytes` were free before the slots were made."""
    device = cohort.backbone.device
    if free_bytes is None:
        return TOKEN_BUDGET[device.type]
    num_shared = 0 if cohort.shared is None else cohort.shared.values_SP.numel()
    slot_bytes = _COPIES * 4 * (cohort.flat.values_SP.numel() + num_shared)
    try:
        token_bytes = measure_token_bytes(cohort)
    except OutOfMemory:  # fewer than the probes: the first step finds out how many fit
        return _PROBED_TOKENS[0] // 2
    return choose_budget(device.type, _USABLE * free_bytes - slot_bytes, token_bytes)


def choose_budget(device_type: str, usable_bytes: float, token_bytes: float) -> int:
    """Return the token budget that fits in `usable_bytes`: a power of two, so that compiled shapes are few."""
    fits = max(1.0, usable_bytes / token_bytes)
    return min(TOKEN_BUDGET[device_type], 2 ** int(math.log2(fits)))


def retry_smaller(
    work: Callable[[], T],
    shrink: Callable[[str], None],
    errors: tuple[type[Exception], ...] = (OutOfMemory,),
) -> T:
    """Return what `work` gives; whenever memory runs out for it, `shrink(reason)` makes it smaller and it is repeated.

    `shrink` raises OutOfMemory where nothing can be smaller. Only errors of the types `errors` are caught, and of
    those only the ones that say that memory ran out.
    """
    while True:
        try:
            return work()
        except errors as error:
            if not is_out_of_memory(error):
                raise
            reason = brief_reason(error)
        # Outside the handler, whose traceback would keep the tensors of the failed pass alive.
        shrink(reason)


def release_memory(device: torch.device) -> None:
    """Free the memory of a failed attempt."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def describe_bytes(num_bytes: int | None) -> str:
    """Return bytes as people read them: `1.4 GB`."""
    return "an unknown amount" if num_bytes is None else f"{num_bytes / 1e9:,.2f} GB"
