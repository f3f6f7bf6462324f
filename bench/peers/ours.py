"""Inlay measured as the peers are: its own training loop and engine, behind the lines of `protocol.py`."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from ours_serving import WORK as SERVING
from ours_training import Training, matrix_rate
from protocol import answer_requests, say, versions_of

from inlay.training.cohort import peak_memory_bytes

WORK = {"train": Training, **SERVING}


class Session:
    """What this process was asked to prepare."""

    def __init__(self) -> None:
        self.work: Any = None

    def prepare(self, **job: Any) -> dict[str, Any]:
        self.forget()
        torch.set_num_threads(job["threads"])
        torch.manual_seed(0)
        say("loading")
        began = time.perf_counter()
        self.work = WORK[job["work"]](job)
        synchronise()
        loaded = time.perf_counter()
        say("warming up")
        self.work.warm_up()
        synchronise()
        taken = {"load_s": loaded - began, "warm_up_s": time.perf_counter() - loaded}
        rounded = {name: round(seconds, 1) for name, seconds in taken.items()}
        return {"versions": versions_of("torch", "transformers"), **rounded, **self.work.describe()}

    def forget(self) -> None:
        """Leave no memory of what was prepared before, nor its peak. What was compiled stays: it serves what comes."""
        self.work = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def measure(self, steps: int) -> dict[str, Any]:
        synchronise()
        began = time.perf_counter()
        samples = self.work.measure(steps)
        synchronise()
        seconds = time.perf_counter() - began
        peak = peak_memory_bytes(self.work.backbone.device)
        return {"seconds": seconds, "samples": samples, "peak_memory_bytes": peak}


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    session = Session()
    answer_requests({"prepare": session.prepare, "measure": session.measure, "matrix_rate": matrix_rate})
