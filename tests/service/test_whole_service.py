"""The whole service, in processes of its own on the tiny backbone: from a file to an answer, over a restart.

With $INLAY_TEST_ON_RAY its engines and trainer are on a Ray cluster of two nodes (`make ray`), and all of it holds too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from running_service import ON_RAY, START_S, RunningService, wait_until

sys.path += [str(Path(__file__).parents[1] / name) for name in ("attack", "cluster")]
from service_customer import Customer, Ledger, Stopped, check_ledger
from two_nodes import run_two_nodes

ROWS = "".join(
    f"{word} {index},{label}\n"
    for index in range(10)
    for word, label in (("refund charge", "billing"), ("crash login", "support"))
)


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[None]:
    """The cluster that services find, if they are to run on one."""
    if not ON_RAY:
        yield
        return
    with run_two_nodes():
        yield


@pytest.fixture(scope="module")
def service(nodes, tmp_path_factory, tiny_bert_folder) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("service")
    with RunningService(folder / "home", tiny_bert_folder) as running:
        yield running
        if ON_RAY and running.process is not None and running.process.poll() is None:
            running.stop()  # else its engines keep the room for a minute


def ask(service: RunningService, text: str = "refund charge 3") -> httpx.Response:
    body = {"task": "desk", "rows": [text]}
    return httpx.post(f"{service.url}/v1/predict", json=body, timeout=30)


def train(service: RunningService, **settings: object) -> dict:
    """Upload the rows, train on them, and return the job as it ended."""
    with httpx.Client(base_url=service.url, timeout=30) as client:
        uploaded = client.post("/v1/datasets", files={"file": ("desk.csv", f"text,label\n{ROWS}", "text/csv")})
        assert uploaded.status_code == 201, uploaded.text
        settings = {"method": "houlsby", "size": 8, "epochs": 1, "lr": 0.003, "max_length": 16, **settings}
        body = {"task": "desk", "dataset": uploaded.json()["id"], "settings": settings, "publish": "always"}
        asked = client.post("/v1/jobs", json=body)
        assert asked.status_code == 202, asked.text
        path = asked.headers["location"]
        is_done = {"succeeded", "failed", "cancelled"}
        return wait_until(
            lambda: (job := client.get(path).json())["state"] in is_done and job, "the end of the job", 120.0
        )


@pytest.mark.slow
def test_what_a_customer_was_told_is_there_after_kills(service):
    """A short run of `make kill-service`; the first test here, as it knows of every job of this service."""
    ledger = Ledger()
    customer = Customer(service.url, None, "0", ledger, tasks=("tone",))
    customer.wait_for_job(customer.train())
    actions = (customer.predict, customer.correct, customer.forget, customer.move, customer.train, customer.cancel)
    for name in ("web", "supervisor"):
        customer.train()
        service.kill(name)
        if name == "supervisor":
            service.start()
        for act in actions:
            with suppress(Stopped):
                act()
    for job, _ in ledger.jobs.values():
        customer.wait_for_job(job)
    assert check_ledger(customer, ledger) == []
    assert len(ledger.jobs) == 7
    customer.close()
    service.wait_ready()


@pytest.mark.slow
def test_from_a_file_to_an_answer_and_again_after_a_drain(service):
    job = train(service)
    assert job["state"] == "succeeded", job
    assert (job["result"]["version"], job["result"]["is_live"]) == (1, True)
    first = ask(service).json()["answers"][0]
    assert first["version"] == "desk@1"

    assert service.stop() == 0, service.tail()
    assert "Inlay answers at" in service.tail(10**6)
    assert not (service.home / "service" / "run" / "engine.sock").exists()
    service.start()
    service.wait_ready()
    assert ask(service).json()["answers"][0] == first


@pytest.mark.long
@pytest.mark.slow
def test_while_the_engine_begins_again_clients_are_asked_for_patience_or_kept_waiting(service):
    if ask(service).status_code == 404:
        train(service)
    first = ask(service).json()
    before = service.pid_of("web")
    service.kill("engine")
    statuses = set()

    def is_answered() -> bool:
        response = ask(service)
        statuses.add(response.status_code)
        if response.status_code == 503:
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["hint"]
        return response.status_code == 200 and response.json() == first

    wait_until(is_answered, "an answer")
    assert statuses <= {200, 503}
    assert service.pid_of("web") == before, "no other process was started again"


@pytest.mark.slow
def test_a_second_service_on_the_home_is_refused(service):
    second = RunningService(service.home, "minilm")
    second.log = service.home.with_name("second.log")
    second.start()
    assert second.process.wait(START_S) == 18
    assert "a service already runs on" in second.tail()
    assert f" at {service.url}, process " in second.tail()


@pytest.mark.slow
def test_logs_have_no_text_and_no_label(service):
    ask(service, "a word that is found nowhere: xylophone")
    log = Path(service.log).read_text()
    assert "POST /v1/predict" in log
    for secret in ("xylophone", "refund", "billing"):
        assert secret not in log


@pytest.mark.slow
def test_a_backbone_that_is_missing_ends_the_service_with_a_hint(tmp_path):
    alone = RunningService(tmp_path / "home", tmp_path / "no-such-folder")
    alone.start()
    assert alone.process.wait(START_S) == 9
    assert "hint:" in alone.tail()
    assert "no-such-folder" in alone.tail()
