"""Ray Serve with multiplexed whole models: python http_ray.py PORT FOLDER NUM_TASKS HELD REPLICAS.

A replica keeps the HELD models asked last; a request names its model in the header `serve_multiplexed_model_id`.
Rows that wait together are batched by Ray, which splits a batch by model.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import ray
from http_models import classify, load_model, load_tokenizer
from ray import serve
from starlette.requests import Request

BATCH, WAIT_S = 32, 0.005
PORT, FOLDER, NUM_TASKS, HELD, REPLICAS = int(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:6])


@serve.deployment(num_replicas=REPLICAS, max_ongoing_requests=128, ray_actor_options={"num_cpus": 2 / REPLICAS})
class ManyTasks:
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.tokenizer = load_tokenizer(self.folder / "task-000")

    @serve.multiplexed(max_num_models_per_replica=HELD)
    async def find(self, name: str) -> Any:
        # More tasks than folders: the same files stand for several, each loaded for itself.
        return load_model(self.folder / f"task-{int(name[5:]) % 32:03d}")

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT_S)
    async def answer(self, requests: list[list[str]]) -> list[list[list[float]]]:
        model = await self.find(serve.get_multiplexed_model_id())
        answers = classify(model, self.tokenizer, [text for texts in requests for text in texts])
        found, at = [], 0
        for texts in requests:
            found.append(answers[at : at + len(texts)])
            at += len(texts)
        return found

    async def __call__(self, request: Request) -> dict[str, Any]:
        rows = await self.answer((await request.json())["input"])
        return {"data": [{"probs": row} for row in rows]}


if __name__ == "__main__":
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level="warning",
        object_store_memory=100 << 20,
        _node_ip_address="127.0.0.1",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(ManyTasks.bind(str(FOLDER)), route_prefix="/classify")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()
