"""mosec with N whole models, its dynamic batching on: python http_mosec.py PORT FOLDER NUM_TASKS WORKERS."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from http_models import Classifiers
from mosec import Server, Worker

BATCH, WAIT_MS = 32, 5
VARIABLE = "INLAY_BENCH_MOSEC"
if len(sys.argv) > 1:  # its workers are started anew, with the variables but not with the arguments
    os.environ[VARIABLE] = " ".join(sys.argv[1:])
    del sys.argv[1:]
PORT, FOLDER, NUM_TASKS, WORKERS = os.environ[VARIABLE].split()


class ManyTasks(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.classifiers = Classifiers(Path(FOLDER), int(NUM_TASKS))

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.classifiers.answer(data)


if __name__ == "__main__":
    own = {"PORT": PORT, "ADDRESS": "127.0.0.1", "TIMEOUT": "120000", "LOG_LEVEL": "warning"}
    os.environ |= {f"MOSEC_{name}": value for name, value in own.items()}
    server = Server()
    server.append_worker(ManyTasks, num=int(WORKERS), max_batch_size=BATCH, max_wait_time=WAIT_MS)
    server.run()
