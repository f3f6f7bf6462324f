"""Inlay's engine in this process, without a service: python http_engine.py HOME NUM_TASKS THREADS BATCH.

Answers rows of a file in batches and speaks the lines of `protocol.py`. Its `steps` are tenths of a second, so that a
turn lasts as long as that of a server.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from protocol import answer_requests

from inlay import Engine
from inlay.model import load_backbone
from inlay.serving import Request
from inlay.store import Store

HOME, NUM_TASKS, THREADS, BATCH = Path(sys.argv[1]), *map(int, sys.argv[2:5])


class Session:
    """The engine, and where in the rows it is."""

    def prepare(self, rows: str) -> dict[str, Any]:
        torch.set_num_threads(THREADS)
        self.engine = Engine(load_backbone("minilm"), Store(HOME), num_slots=max(64, NUM_TASKS))
        pairs = json.loads(Path(rows).read_text(encoding="utf8"))
        self.requests = [Request(task, text) for task, text in pairs]
        names = sorted({task for task, _ in pairs})
        self.engine.predict([Request(name, "are you there") for name in names])
        self.at = 0
        self.measure(20)
        return {"threads": torch.get_num_threads(), "batch": BATCH}

    def measure(self, steps: int) -> dict[str, Any]:
        began, num_rows = time.perf_counter(), 0
        used = time.process_time()
        while time.perf_counter() - began < steps / 10:
            batch = self.requests[self.at : self.at + BATCH]
            answers = self.engine.predict(batch)
            assert all(answer.error is None for answer in answers)
            num_rows += len(batch)
            self.at = (self.at + BATCH) % (len(self.requests) - BATCH)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "samples": num_rows, "cpu_ms_row": 1000 * (time.process_time() - used) / num_rows}


if __name__ == "__main__":
    session = Session()
    answer_requests({"prepare": session.prepare, "measure": session.measure})
