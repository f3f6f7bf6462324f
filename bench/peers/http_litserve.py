"""LitServe with N whole models, its dynamic batching on: python http_litserve.py PORT FOLDER NUM_TASKS WORKERS."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import litserve
from http_models import Classifiers

BATCH, WAIT_S = 32, 0.005


class ManyTasks(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.classifiers = Classifiers(FOLDER, NUM_TASKS)

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # LitServe would read a type as a schema
        return request

    def predict(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.classifiers.answer(requests)

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output

    def batch(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return list(inputs)

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


PORT, FOLDER, NUM_TASKS, WORKERS = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

if __name__ == "__main__":
    api = ManyTasks(max_batch_size=BATCH, batch_timeout=WAIT_S)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=WORKERS, timeout=120)
    server.run(host="127.0.0.1", port=PORT, generate_client_file=False, log_level="warning", access_log=False)
