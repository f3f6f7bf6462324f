"""Calls to a service on a Ray cluster, as a customer makes them, and looks at what it has there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from running_service import RunningService, wait_until

READY_S = 240.0
TASK = "desk"
ROWS = [
    (f"{word} {index}", label)
    for index in range(10)
    for word, label in (("refund charge", "billing"), ("crash login", "support"))
]


@contextmanager
def running_on_ray(service: RunningService) -> Iterator[RunningService]:
    """Run a service, and drain it at the end, so that nothing of it stays on the cluster."""
    service.start()
    try:
        service.wait_ready(READY_S)
        yield service
    finally:
        if service.process is not None and service.process.poll() is None:
            service.stop(120.0)


def call(service: RunningService, method: str, path: str, status: int, **more: Any) -> Any:
    response = httpx.request(method, service.url + path, timeout=90, **more)
    assert response.status_code == status, response.text
    return response


def ask(service: RunningService, text: str = "refund charge 3") -> dict[str, Any]:
    (answer,) = call(service, "POST", "/v1/predict", 200, json={"task": TASK, "rows": [text]}).json()["answers"]
    return answer


def train(service: RunningService, rows: list[tuple[str, str]] = ROWS, **more: Any) -> dict[str, Any]:
    """Upload rows and train on them; the job as it ended."""
    content = "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows)
    dataset = call(service, "POST", "/v1/datasets", 201, files={"file": ("desk.csv", content, "text/csv")}).json()
    settings = {"method": "houlsby", "size": 8, "epochs": 1, "lr": 0.003, "max_length": 16}
    body = {"task": TASK, "dataset": dataset["id"], "settings": settings, "publish": "always", **more}
    return wait_for(service, call(service, "POST", "/v1/jobs", 202, json=body).headers["location"])


def wait_for(service: RunningService, path: str) -> dict[str, Any]:
    is_done = {"succeeded", "failed", "cancelled"}
    return wait_until(
        lambda: (job := call(service, "GET", path, 200).json())["state"] in is_done and job, "the end of a job", 240.0
    )


def check_same(answers: list[dict[str, Any]], first: dict[str, Any]) -> None:
    """Every answer is the first one; numbers differ by the rounding of batches."""
    for answer in answers:
        assert (answer["version"], answer["label"]) == (first["version"], first["label"])
        assert answer["probabilities"] == pytest.approx(first["probabilities"], abs=1e-5)


def roster_of(service: RunningService) -> dict[str, Any]:
    return json.loads((service.home / "service" / "run" / "roster.json").read_bytes())


def find_processes(role: str) -> list[int]:
    """The processes of engines or trainers of any service here."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if b'"name": "' + role.encode() + b"-" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
