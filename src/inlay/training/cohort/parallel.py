"""More than one process, started by `torchrun`: runs dealt out among them, or every batch's rows.

With `cohorts` each process trains runs of its own and nothing is exchanged until the end. With `rows` all processes
train every run together: each takes its rows of a batch, losses and gradients are added up, and all take the same
optimizer step. What always holds with `rows`: the weights of all processes are equal bit for bit, and a run's result is
that of one process, but for rounding and which values dropout drops.

Without `torchrun` there is a `World` of one, which exchanges nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from inlay.errors import BadConfig, InlayError, LostProcess
from inlay.model import Bank, Row, find_head, first_line, infer
from inlay.processes import Process, current_process
from inlay.settings import digest

if TYPE_CHECKING:
    from inlay.training.run.run import AnyRun

ANSWER = timedelta(minutes=10)
"""longest wait for the other processes within a step; then they count as dead"""
END = timedelta(days=100)
"""longest wait at the end for the other processes to train their runs; a dead one is noticed at once"""


class World:
    """The processes that train a cohort together, as `process` is one of; by default it is alone.

    The first one writes the runs' folders and resume states.
    """

    def __init__(self, process: Process = Process()) -> None:
        self.process = process
        self.num_sums = 0
        """number of sums over processes: after one, a step cannot be computed again"""
        self.asked = threading.Event()
        """set when this process is asked to stop"""
        self._stops: Tensor | None = None
        if process.size > 1:  # NCCL connects tensors on GPUs of their own, gloo the rest
            import torch.distributed as dist

            self._dist = dist
            with _noticing():
                self._for_words = dist.new_group(backend="gloo", timeout=ANSWER)
                self.for_the_end = dist.new_group(backend="gloo", timeout=END)

    def share(self, batch: np.ndarray, slot: int) -> np.ndarray:
        """Return the rows of a slot's batch that this process computes."""
        # Shifted by the slot: otherwise the first process would get every remainder.
        return batch[(self.process.rank + slot) % self.process.size :: self.process.size]

    def add_up(self, losses_S: Tensor, grads_SP: Tensor) -> None:
        """Make losses and gradients the sums over all processes, in place."""
        if self.process.size == 1:
            return
        told = torch.cat([losses_S, losses_S.new_full((1,), float(self.asked.is_set()))])
        self.num_sums += 1
        self._sum_up(grads_SP)
        self._sum_up(told)
        losses_S.copy_(told[:-1])
        self._stops = told[-1]  # read after the step, so that the device is not waited for

    def infer(
        self,
        bank: Bank,
        rows: Sequence[Row],
        *,
        token_budget: int | None = None,
        check_stop: Callable[[], None] | None = None,
    ) -> list[Tensor]:
        """Return the logits of every row, each computed by one of the processes; all processes get all of them.

        A process that is alone calls `check_stop` between passes, which may stop all of it.
        """
        if self.process.size > 1:
            return self._infer_together(bank, rows, token_budget)
        num_left = len(rows)

        def count(num_rows: int) -> None:
            nonlocal num_left
            num_left -= num_rows
            if check_stop is not None and num_left:
                check_stop()

        return infer(bank, rows, token_budget=token_budget, on_batch=count)

    def _infer_together(self, bank: Bank, rows: Sequence[Row], token_budget: int | None) -> list[Tensor]:
        heads = [bank.head_of(row.slot) for row in rows]
        are_pooled = [find_head(head.kind).reads == "pooled" for head in heads]
        shapes = [
            (head.num_outputs,) if is_pooled else (len(row.ids), head.num_outputs)
            for row, head, is_pooled in zip(rows, heads, are_pooled, strict=True)
        ]
        free = [index for index, head in enumerate(heads) if head.is_free_text]
        sizes = [math.prod(shape) for shape in shapes]
        flat = torch.zeros(sum(sizes))
        answers = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        own = range(self.process.rank, len(rows), self.process.size)
        computed = infer(bank, [rows[index] for index in own], token_budget=token_budget)
        for index, logits in zip(own, computed, strict=True):
            if index not in free:
                answers[index].copy_(logits)
        self.num_sums += 1
        self._sum_up(flat)  # each row is added to zeros, so the sum is exact
        if free:  # the widths of other processes' texts are not known here
            written = {index: text.tolist() for index, text in zip(own, computed, strict=True) if index in free}
            for found in self.collect(written):
                for index, letters in found.items():
                    answers[index] = torch.tensor(letters)
        return answers

    def agree(self, value: Any, what: str) -> None:
        """Wait for all processes; refuse to go on if `value` differs between them."""
        found = self.collect(value)
        others = [rank for rank, other in enumerate(found) if other != found[0]]
        if others:
            raise InlayError(
                f"process {others[0]} has other {what} than process 0: `{found[others[0]]}`, not `{found[0]}`",
                "start all with the same command; every machine must see the same data and the same store",
            )

    def reseed(self, *words: Any) -> None:
        """Give each process its own random numbers from here on. The first process keeps its generators."""
        if not self.process.is_first:
            torch.manual_seed(int(digest([*words, self.process.rank])[:12], 16))

    @property
    def is_stopping(self) -> bool:
        """Whether any process was asked to stop before the last step; all get the same answer."""
        if self.process.size == 1:
            return self.asked.is_set()
        return self._stops is not None and bool(self._stops.item())

    def _sum_up(self, tensor: Tensor) -> None:
        """Sum over all processes, in place."""
        with _noticing():
            self._dist.all_reduce(tensor, group=None if tensor.is_cuda else self._for_words)

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Copy the first process's values to all, in place."""
        if self.process.size > 1:
            with _noticing(), torch.no_grad():
                for tensor in tensors:
                    self._dist.broadcast(tensor, 0, group=None if tensor.is_cuda else self._for_words)

    def collect(self, value: Any) -> list[Any]:
        """Return every process's value, which must be plain data."""
        found = [value] * self.process.size
        if self.process.size > 1:
            with _noticing():
                self._dist.all_gather_object(found, value, group=self._for_words)
        return found


@contextmanager
def spread_over(runs: list[AnyRun], device: torch.device, spread: str) -> Iterator[tuple[list[AnyRun], World]]:
    """Yield the runs of this process and the processes that train them with it; wait for all processes at the end.

    `runs` are the same in all processes.
    """
    process = current_process()
    if process.size == 1:
        yield runs, World()
        return
    import torch.distributed as dist

    # Processes share every batch's rows if asked to, or if there are fewer runs than processes.
    has_batch_norm = any(run.config.method.inner_norm == "batch" for run in runs)
    if spread == "rows" and has_batch_norm:
        raise BadConfig(
            f"batch norm sees a run's batch whole, but `rows` cuts it over {process.size} processes",
            "use `--spread cohorts`, or `--set method.inner_norm=layer`",
        )
    is_together = spread == "rows" or (spread == "auto" and len(runs) < process.size and not has_batch_norm)
    with _joined(process, device):
        everyone = World(process)
        everyone.agree([run.id for run in runs], "runs")
        yield (runs, everyone) if is_together else (deal(runs, process), World())
        with _noticing():
            dist.barrier(group=everyone.for_the_end)


def deal(runs: Sequence[AnyRun], process: Process) -> list[AnyRun]:
    """Return the runs that this process trains. The longest are dealt first, each to the process with the least work.

    It does not depend on what is finished, so that a process finds its own cohorts again after a kill.
    """
    loads = [0] * process.size
    costs = {run.id: run.num_rows * run.config.train.num_epochs for run in runs}
    own = set()
    for run in sorted(runs, key=lambda run: -costs[run.id]):  # a stable sort: the same in all processes
        rank = loads.index(min(loads))
        loads[rank] += costs[run.id]
        if rank == process.rank:
            own.add(run.id)
    return [run for run in runs if run.id in own]


@contextmanager
def _joined(process: Process, device: torch.device) -> Iterator[None]:
    """Connect the processes for the time of the block."""
    import torch.distributed as dist

    if dist.is_initialized():  # joined by the caller's own script, which closes the group too
        yield
        return
    backend, has_ended = "gloo", False
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the current device
        # NCCL refuses processes that share a GPU.
        backend = "gloo" if process.num_local > torch.cuda.device_count() else "nccl"
    with _noticing():
        store = dist.PrefixStore(f"inlay-{next(_NUM_JOINED)}", _meeting_place())
        dist.init_process_group(backend, store=store, rank=process.rank, world_size=process.size, timeout=ANSWER)
    try:
        yield
        has_ended = True
    finally:
        # After a failure the others hang in NCCL until `torchrun` ends them, and closing would wait for them; gloo's
        # closed connections are what tells them.
        if has_ended or backend == "gloo":
            dist.destroy_process_group()


_NUM_JOINED = itertools.count()
"""makes each rendezvous key unique: the keys of the last group point at closed sockets"""


@functools.cache
def _meeting_place() -> Any:
    """Return the store through which the processes find each other; `torchrun` gives its address."""
    import torch.distributed as dist

    return next(dist.rendezvous("env://", timeout=ANSWER))[0]


@contextmanager
def _noticing() -> Iterator[None]:
    """Raise LostProcess if an exchange inside the block fails. Wrap only exchanges, not a step's own work."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # raised by gloo and the store; ValueError for a missing address
        raise LostProcess(
            f"the processes of this training lost each other: {first_line(error).partition('. ')[0]}",
            "look for the error of the one that ended first; the same command goes on from the last saved step",
        ) from error
