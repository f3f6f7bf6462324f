"""Inlay measured as the peers are: its own training loop and engine, behind the lines of `protocol.py`."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from ours_serving import WORK as SERVING
from ours_training import Training, matrix_rate
from protocol import answer_requests, say, versions_of

from inlay.training.cohort.memory import peak_memory_bytes

COMPILING = ("_compile.compile_inner", "backward._backward_impl")
WORK = {"train": Training, **SERVING}


class Session:
    """What this process was asked to prepare."""

    def __init__(self) -> None:
        self.work: Any = None

    def prepare(self, **job: Any) -> dict[str, Any]:
        held_bytes = self.forget()
        torch.set_num_threads(job["threads"])
        torch.manual_seed(0)
        say("loading")
        began, before = time.perf_counter(), compiled_so_far()
        self.work = WORK[job["work"]](job)
        synchronise()
        loaded = time.perf_counter()
        say("warming up")
        self.work.warm_up()
        synchronise()
        num_graphs, compile_s = (now - then for now, then in zip(compiled_so_far(), before, strict=True))
        taken = {"load_s": loaded - began, "warm_up_s": time.perf_counter() - loaded, "compile_s": compile_s}
        rounded = {name: round(seconds, 1) for name, seconds in taken.items()}
        counted = {"compiled_graphs": num_graphs, "held_bytes": held_bytes}
        return {"versions": versions_of("torch", "transformers"), **rounded, **counted, **self.work.describe()}

    def forget(self) -> int:
        """Leave no memory of what was prepared before, nor its peak; the bytes that a GPU holds all the same.

        What was compiled stays: it serves what comes.
        """
        self.work = None
        gc.collect()
        if not torch.cuda.is_available():
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def measure(self, steps: int) -> dict[str, Any]:
        synchronise()
        began = time.perf_counter()
        samples = self.work.measure(steps)
        synchronise()
        seconds = time.perf_counter() - began
        peak = peak_memory_bytes(self.work.backbone.device)
        return {"seconds": seconds, "samples": samples, "peak_memory_bytes": peak}


def compiled_so_far() -> tuple[int, float]:
    """Graphs that torch's compiler was given in this process, and the seconds it took for them and their gradients."""
    from torch._dynamo.utils import compilation_time_metrics, counters

    taken = (compilation_time_metrics.get(name, ()) for name in COMPILING)
    return counters["stats"]["unique_graphs"], sum(map(sum, taken))


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    session = Session()
    answer_requests({"prepare": session.prepare, "measure": session.measure, "matrix_rate": matrix_rate})
