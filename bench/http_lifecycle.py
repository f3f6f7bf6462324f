"""What happens beside answering, held against its goals: training, versions that go live, a gigabyte uploaded."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from http_load import find_percentile
from http_pairs import Record, Work, goal, tell_load, warm_up
from http_servers import Server
from http_tasks import MOVING
from http_turns import LoadPlan, MemoryWatch
from report import compare, say

NUM_TASKS = 32
TRAIN_ROWS, TINY_ROWS = 2000, 64
NUM_TOGETHER, NUM_ALONE, NUM_MOVES = 24, 6, 60
GIGABYTE = 10**9
JOB_LIMIT_S = 180.0
ENDED = ("succeeded", "failed", "cancelled")


def while_training(work: Work) -> Iterator[Record]:
    """Latencies at half of what the service can do, without and with a training beside them."""
    with Server("inlay", work.tasks, NUM_TASKS) as server:
        server.wait()
        warm_up(work, server, NUM_TASKS)
        requests = work.asker.requests(server, NUM_TASKS)
        whole = work.asker.measure(server, requests, LoadPlan(work.seconds))["rows_per_s"]
        yield {"what": "capacity", "rows_per_s": whole}
        dataset = _upload_rows(server, work, TRAIN_ROWS)
        steady = LoadPlan(work.seconds, rate=round(whole / 2, 1))
        tails: dict[str, list[float]] = {"alone": [], "training": []}
        for turn in range(work.turns):
            start = turn * len(requests) // work.turns
            found = work.asker.measure(server, requests, steady, start=start)
            tails["alone"].append(found["p99_ms"])
            yield tell_load("no training", turn, steady, found)
            job = _submit(server, dataset, f"trained-{turn}", {"epochs": 200, "seed": turn})
            _wait_for(
                server, job, lambda now: (now["progress"] or {}).get("stage") == "training" or now["state"] in ENDED
            )
            time.sleep(2.0)
            found = work.asker.measure(server, requests, steady, start=start)
            state = server.call("GET", f"/v1/jobs/{job}")
            if state["state"] != "running":
                raise RuntimeError(f"the training ended meanwhile: {state['state']}")
            tails["training"].append(found["p99_ms"])
            yield tell_load("while training", turn, steady, found) | {"progress": state["progress"]}
            server.call("POST", f"/v1/jobs/{job}/cancel")
            _wait_for(server, job, lambda now: now["state"] in ENDED)
        yield goal("p99 while training / without", compare(tails["training"], tails["alone"]), 2.0, least=False)


def going_live(work: Work) -> Iterator[Record]:
    """Seconds from a version's publishing to its being live, by the events of jobs; and moves of the alias."""
    with Server("inlay", work.tasks, NUM_TASKS) as server:
        server.wait()
        warm_up(work, server, NUM_TASKS)
        dataset = _upload_rows(server, work, TINY_ROWS)
        seconds = []
        together = [
            _submit(server, dataset, f"new-{index}", {"epochs": 1, "seed": index}) for index in range(NUM_TOGETHER)
        ]
        seconds += [_time_going_live(server, job) for job in together]
        for index in range(NUM_ALONE):
            job = _submit(server, dataset, f"alone-{index}", {"epochs": 1, "seed": index})
            seconds.append(_time_going_live(server, job))
        yield {"what": "going live", "seconds": seconds}
        yield goal(f"p99 of publish to live in s ({len(seconds)} jobs)", find_percentile(seconds, 99), 1.0, least=False)
        moves = [_time_move(server, 1 + index % 2) for index in range(NUM_MOVES)]
        yield {"what": "moves", "seconds": moves}
        what = f"p99 of a roll-back in s, until an answer names the version ({len(moves)} moves)"
        yield goal(what, find_percentile(moves, 99), 1.0, least=False)


def upload(work: Work) -> Iterator[Record]:
    """Memory of the whole service while a gigabyte of rows is uploaded and looked into."""
    file = work.tasks.folder / "gigabyte.csv"
    _write_gigabyte(file, work.tasks.texts())
    try:
        with Server("inlay", work.tasks, NUM_TASKS) as server:
            server.wait()
            warm_up(work, server, NUM_TASKS)
            _upload_rows(server, work, TINY_ROWS)  # what the first upload imports is no growth of the second
            time.sleep(2.0)
            began = time.monotonic()
            with MemoryWatch(server) as watch:
                answer = _upload(server, file, "gigabyte.csv")
            seconds = time.monotonic() - began
            yield {
                "what": "upload",
                "size_bytes": file.stat().st_size,
                "rows": answer.get("num_rows"),
                "seconds": seconds,
                "before_mb": watch.before_mb,
                "most_mb": watch.most_mb,
            }
            yield goal("MB that a gigabyte's upload adds", watch.most_mb - watch.before_mb, 64, least=False)
    finally:
        file.unlink(missing_ok=True)


def _write_gigabyte(file: Path, texts: list[str]) -> None:
    """Rows of about 1,100 letters, so that they are fewer than a million."""
    with file.open("w", encoding="utf8") as out:
        out.write("text,label\n")
        written, at = 11, 0
        while written < GIGABYTE:
            text = f"{at} "
            while len(text) < 1100:
                text += texts[(at * 7 + len(text)) % len(texts)] + " "
            written += out.write(f"{text[:1100]},{'yes' if at % 2 else 'no'}\n")
            at += 1


def _upload_rows(server: Server, work: Work, count: int) -> str:
    """A dataset of so many rows with two labels; its id."""
    texts = work.tasks.texts()[:count]
    lines = ["text,label", *(f"{text},{'good' if 'a' in text[:6] else 'bad'}" for text in texts)]
    return str(_upload(server, ("\n".join(lines) + "\n").encode(), f"rows-{count}.csv")["id"])


def _upload(server: Server, body: Path | bytes, name: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=900)
    length = len(body) if isinstance(body, bytes) else body.stat().st_size
    headers = {"Content-Type": "text/csv", "Content-Length": str(length)}
    try:
        if isinstance(body, bytes):
            connection.request("POST", f"/v1/datasets?name={name}", body, headers)
        else:
            with body.open("rb") as file:
                connection.request("POST", f"/v1/datasets?name={name}", file, headers)
        response = connection.getresponse()
        content = response.read()
        if response.status != 201:
            raise RuntimeError(f"the upload was answered {response.status}: {content[:300]!r}")
        return json.loads(content)  # type: ignore[no-any-return]
    finally:
        connection.close()


def _submit(server: Server, dataset: str, task: str, settings: dict[str, Any]) -> str:
    job = server.call("POST", "/v1/jobs", {"task": task, "dataset": dataset, "settings": settings, "publish": "always"})
    return str(job["id"])


def _wait_for(server: Server, job: str, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    ends = time.monotonic() + JOB_LIMIT_S
    while time.monotonic() < ends:
        now: dict[str, Any] = server.call("GET", f"/v1/jobs/{job}")
        if is_reached(now):
            return now
        time.sleep(0.1)
    raise RuntimeError(f"job {job} was still {now['state']} after {JOB_LIMIT_S:.0f} s: {now['progress']}")


def _time_going_live(server: Server, job: str) -> float:
    """Seconds between the events `published` and `live` of a job that succeeded."""
    ended = _wait_for(server, job, lambda now: now["state"] in ENDED)
    if ended["state"] != "succeeded":
        raise RuntimeError(f"a job {ended['state']}: {ended['error']}")
    at = {event["kind"]: event["at"] for event in server.call("GET", f"/v1/jobs/{job}/events")["items"]}
    if "live" not in at:
        raise RuntimeError(f"a job did not go live: {list(at)}")
    return _seconds_of(at["live"]) - _seconds_of(at["published"])


def _seconds_of(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def _time_move(server: Server, version: int) -> float:
    """Seconds from asking for a version to be live until an answer names it."""
    began = time.monotonic()
    server.call("PUT", f"/v1/tasks/{MOVING}/aliases/live", {"version": version, "reason": "measured"})
    while True:
        (answer,) = server.call("POST", "/v1/predict", {"task": MOVING, "rows": ["are you there"]})["answers"]
        if answer["version"] == f"{MOVING}@{version}":
            return time.monotonic() - began
        if time.monotonic() - began > 30:
            say(f"{MOVING}@{version} did not answer within 30 s")
            return time.monotonic() - began


PARTS: dict[str, Callable[[Work], Iterator[Record]]] = {
    "training": while_training,
    "going-live": going_live,
    "upload": upload,
}
