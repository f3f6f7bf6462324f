"""The service with its engines and trainer on a Ray cluster of two nodes: as on one machine, whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from running_service import RunningService, wait_until

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "attack")]
from service_calls import (
    READY_S,
    ROWS,
    TASK,
    ask,
    call,
    check_same,
    find_processes,
    roster_of,
    running_on_ray,
    train,
    wait_for,
)
from service_customer import Customer, Ledger, check_ledger
from two_nodes import add_node, run_two_nodes

pytestmark = pytest.mark.ray
LIVE_S = 2.0


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    pytest.importorskip("ray")
    with run_two_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def service(two_nodes, tmp_path_factory, tiny_bert_folder) -> Iterator[RunningService]:
    home = tmp_path_factory.mktemp("service") / "home"
    running = RunningService(home, tiny_bert_folder, "--on", "ray", "--engines", "2", "--ray-cpus", "0.5")
    with running_on_ray(running):
        yield running


def test_from_a_file_to_an_answer_feedback_a_new_version_and_back(service, tiny_bert):
    job = train(service)
    assert job["state"] == "succeeded", job
    assert (job["result"]["version"], job["result"]["is_live"]) == (1, True)
    first = ask(service)
    assert first["version"] == f"{TASK}@1"

    # the answer of the definition, in this process
    from inlay.serving import Engine, Request, describe_answer
    from inlay.store import Store

    (known,) = Engine(tiny_bert, Store(service.home)).predict([Request(f"{TASK}@1", "refund charge 3")])
    assert first["probabilities"] == pytest.approx(describe_answer(known)["probabilities"], abs=1e-5)

    items = [{"text": "my card was charged twice", "label": "billing"}]
    call(service, "POST", f"/v1/tasks/{TASK}/feedback", 201, json={"items": items})
    body = {"task": TASK, "corrections": True, "publish": "always"}
    again = call(service, "POST", "/v1/jobs", 202, json=body)
    job = wait_for(service, again.headers["location"])
    assert job["state"] == "succeeded", job
    assert ask(service)["version"] == f"{TASK}@2"

    # back to the first: on all engines within two seconds
    alias = call(service, "GET", f"/v1/tasks/{TASK}/aliases/live", 200).json()
    began = time.monotonic()
    path, known_as = f"/v1/tasks/{TASK}/aliases/live", {"if-match": alias["etag"]}
    call(service, "PUT", path, 200, json={"version": 1, "reason": "worse"}, headers=known_as)
    answers = [ask(service) for _ in range(20)]
    check_same(answers, first)
    assert time.monotonic() - began < LIVE_S + 20 * 0.5


def test_a_version_is_hot_on_every_engine_before_it_is_live(service):
    from inlay.service.engine import EngineClient, TcpAddress

    job = train(service, [(f"{text} more", label) for text, label in ROWS])
    name = f"{TASK}@{job['result']['version']}"
    assert ask(service)["version"] == name

    async def find_residents() -> list[list[str]]:
        roster = roster_of(service)
        found = []
        for replica in roster["replicas"]:
            client = EngineClient(TcpAddress(replica["host"], replica["port"], roster["token"]))
            found.append((await client.stats()).resident)
            await client.close()
        return found

    found = asyncio.run(find_residents())
    assert len(found) == 2
    assert all(name in each for each in found), found


def test_an_engine_that_is_killed_costs_nobody_an_answer(service):
    first = ask(service)
    stop, answers = threading.Event(), []

    def go_on() -> None:
        while not stop.is_set():
            answers.append(ask(service))

    threads = [threading.Thread(target=go_on) for _ in range(3)]
    for thread in threads:
        thread.start()
    before = {replica["port"] for replica in roster_of(service)["replicas"]}
    os.kill(find_processes("engine")[0], signal.SIGKILL)
    wait_until(
        lambda: len(ports := {each["port"] for each in roster_of(service)["replicas"]}) == 2 and ports != before,
        "the engine's successor",
        READY_S,
    )
    stop.set()
    for thread in threads:
        thread.join()
    assert len(answers) > 10
    check_same(answers, first)


def test_a_node_that_dies_loses_no_job_and_no_answer_is_wrong(service, two_nodes):
    ledger = Ledger()
    customer = Customer(service.url, None, "node", ledger, tasks=("tone", "topic"))
    customer.first_seed(1)
    customer.wait_for_job(customer.train("tone"))
    customer.wait_for_job(customer.train("topic"))
    jobs = [customer.train() for _ in range(4)]
    worker = next(node for node in two_nodes.list_all_nodes() if node is not two_nodes.head_node)
    two_nodes.remove_node(worker, allow_graceful=False)
    for _ in range(20):
        customer.predict()
        customer.correct()
    add_node(two_nodes)
    for job in jobs:
        customer.wait_for_job(job)
    known = {job["id"] for job in customer.list_all("/v1/jobs")}
    assert known >= {job for job, _ in ledger.jobs.values()}
    problems = [each for each in check_ledger(customer, ledger) if "for a call that had another" not in each]
    assert [each for each in problems if "was not asked for" not in each] == []
    customer.close()
    wait_until(lambda: len(roster_of(service)["replicas"]) == 2, "both engines", READY_S)


def test_a_drained_service_leaves_nothing_on_the_cluster_and_comes_again(service):
    first = ask(service)
    assert service.stop(120.0) == 0, service.tail()
    wait_until(lambda: not find_processes("engine") + find_processes("trainer"), "the end of all members", 60.0)
    service.start()
    service.wait_ready(READY_S)
    check_same([ask(service)], first)


def test_a_cluster_that_cannot_be_reached_is_refused_at_the_start(tmp_path, tiny_bert_folder, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    alone = RunningService(tmp_path / "home", tiny_bert_folder, "--on", "ray")
    alone.start()
    assert alone.process.wait(120) == 9
    assert "no Ray cluster at `127.0.0.1:1`" in alone.tail()
    assert "hint: start one with `ray start --head`" in alone.tail()
