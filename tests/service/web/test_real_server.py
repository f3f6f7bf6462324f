"""The web behind a real uvicorn: Hugging Face's client, slow and gone clients, streams, draining."""

from __future__ import annotations

import json
import shutil
import threading
import time

import httpx
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from real_server import read_all, serving, wait_until
from web_bench import CSV, open_bench, read_passage, tag

from inlay.service.state import Database, JobNote, JobQueue, TenantLimits
from inlay.service.web import request_context
from inlay.service.web import server as web_server


@pytest.fixture(scope="module")
def served(migrated, tmp_path_factory):
    bench = open_bench(shutil.copytree(migrated, tmp_path_factory.mktemp("served") / "home"))
    bench.add_tenant("acme")
    for name, rule in {"mail": None, "names": tag, "reader": read_passage}.items():
        bench.store_task("acme", name)
        if rule is not None:
            bench.engine.rules[f"acme.{name}"] = rule
    with serving(bench) as found:
        yield found
    bench.db.close()


@pytest.fixture
def key(served):
    served.bench.engine.delay_s = 0.0
    return served.bench.secrets["acme"]


@pytest.fixture
def client(served, key):
    with httpx.Client(base_url=served.url, headers={"authorization": f"Bearer {key}"}) as found:
        yield found


def head(key, path, *more, method="POST"):
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {key}", *more, "", ""]
    return "\r\n".join(lines).encode()


@pytest.fixture
def online(monkeypatch):
    """Hugging Face's client refuses every address where its hub is switched off, as it is in all tests."""
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)


def test_hugging_faces_client_classifies_tags_and_reads(served, key, online):
    ask = InferenceClient(model=f"{served.url}/hf/mail", token=key)
    found = ask.text_classification("a prize")
    assert [(item.label, round(item.score, 3)) for item in found] == [("spam", 0.9), ("ham", 0.1)]
    assert [item.label for item in ask.text_classification("a prize", top_k=1)] == ["spam"]
    (entity,) = InferenceClient(model=f"{served.url}/hf/names", token=key).token_classification("see Anna")
    assert (entity.entity_group, entity.word, entity.start, entity.end) == ("NAME", "Anna", 4, 8)
    reader = InferenceClient(model=f"{served.url}/hf/reader", token=key)
    passage = reader.question_answering(question="who?", context="Anna came")
    assert (passage.answer, passage.start, passage.end, passage.score) == ("Anna", 0, 4, 0.7)


def test_hugging_faces_client_hears_what_is_wrong(served, key, online):
    with pytest.raises(HfHubHTTPError, match="404"):
        InferenceClient(model=f"{served.url}/hf/nobody", token=key).text_classification("x")
    with pytest.raises(HfHubHTTPError, match="401"):
        InferenceClient(model=f"{served.url}/hf/mail", token="inl_wrong").text_classification("x")


def test_many_requests_on_one_connection_are_answered_in_order(served, key):
    body = [json.dumps({"task": "mail", "rows": [f"row {number}"] * number}).encode() for number in range(1, 6)]
    more = ("content-type: application/json",)
    requests = [head(key, "/v1/predict", *more, f"content-length: {len(each)}") + each for each in body]
    requests[-1] = requests[-1].replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
    found = served.talk(b"".join(requests))
    assert [found.count(b'"mail@1"'), found.count(b"HTTP/1.1 200")] == [15, 5]


def test_a_head_that_does_not_come_is_not_waited_for(served, monkeypatch):
    monkeypatch.setattr(web_server, "HEAD_PATIENCE_S", 0.2)
    for pieces in ((b"",), (b"GET /healthz HTTP/1.1\r\nhost: local",)):
        answer = served.talk(*pieces)
        assert answer.startswith(b"HTTP/1.1 408"), answer
        assert b'"code":"too-slow"' in answer


def test_a_second_head_is_bounded_as_the_first(served, monkeypatch):
    monkeypatch.setattr(web_server, "HEAD_PATIENCE_S", 0.2)
    whole = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answer = served.talk(whole, b"GET /healthz HTTP/1.1\r\nhost: lo", pause_s=0.1)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in answer


def test_a_head_without_end_is_refused(served):
    answer = served.talk(
        b"GET /healthz HTTP/1.1\r\n", *[b"x-%d: " % number + b"y" * 8000 + b"\r\n" for number in range(20)]
    )
    assert b"HTTP/1.1 431" in answer or answer == b""


@pytest.mark.parametrize(
    "nonsense", [b"nonsense\r\n\r\n", b"GET \xff HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n"]
)
def test_what_is_no_http_is_refused(served, nonsense):
    answer = served.talk(nonsense)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"application/problem+json" in answer


def test_a_body_that_trickles_is_refused(served, key, monkeypatch):
    monkeypatch.setattr(request_context, "JSON_PATIENCE_S", 0.2)
    monkeypatch.setattr(request_context, "CHUNK_PATIENCE_S", 0.2)
    for path, kind in (
        ("/v1/predict", "application/json"),
        ("/v1/jobs", "application/json"),
        ("/v1/datasets", "text/csv"),
    ):
        answer = served.talk(head(key, path, f"content-type: {kind}", "content-length: 1000") + b"{")
        assert answer.startswith(b"HTTP/1.1 408"), (path, answer)
    assert not list(served.bench.db.paths.datasets("acme").glob("*"))


def test_a_client_that_waits_for_leave_to_send_too_much_is_told_at_once(served, key):
    more = ("content-type: application/json", "content-length: 99999999", "expect: 100-continue")
    answer = served.talk(head(key, "/v1/predict", *more))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"100 Continue" not in answer


def test_half_an_upload_leaves_nothing(served, key):
    folder = served.bench.db.paths.datasets("acme")
    with served.connect() as connection:
        connection.sendall(head(key, "/v1/datasets?name=a.csv", "content-length: 5000") + b"text,label\n" * 20)
        wait_until(lambda: folder.is_dir() and list(folder.iterdir()))
    wait_until(lambda: not list(folder.iterdir()))


def test_a_client_that_goes_has_its_rows_dropped(served, key):
    served.bench.engine.delay_s = 30.0
    before = served.bench.engine.num_cancelled
    body = json.dumps({"task": "mail", "rows": ["x"]}).encode()
    with served.connect() as connection:
        more = ("content-type: application/json", f"content-length: {len(body)}")
        connection.sendall(head(key, "/v1/predict", *more) + body)
        time.sleep(0.2)
    wait_until(lambda: served.bench.engine.num_cancelled == before + 1)


def test_events_arrive_as_they_happen(served, client):
    dataset = client.post("/v1/datasets?name=a.csv", content=CSV).json()["id"]
    job = client.post("/v1/jobs", json={"task": "new", "dataset": dataset}).json()["id"]
    lines = []

    def listen():
        with client.stream(
            "GET", f"/v1/jobs/{job}/events", headers={"accept": "text/event-stream"}, timeout=20
        ) as answer:
            lines.extend(answer.iter_lines())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    db = Database.open(served.bench.db.paths.home)  # a trainer is another process
    wait_until(lambda: served.bench.app.state.streams["acme"] == 1)
    queue = JobQueue(db)
    cohort = queue.claim("tests", company_s=0.0)
    queue.record(cohort, job, JobNote("epoch", "epoch 1", {"epoch": 1}))
    queue.finish(cohort, job, "succeeded", result={})
    listener.join(10)
    assert [line for line in lines if line.startswith("event:")] == [
        *("event: queued", "event: claimed", "event: epoch", "event: end"),
    ]
    db.close()
    wait_until(lambda: not served.bench.app.state.streams)


def test_a_server_that_drains_finishes_what_is_under_way(home):
    bench = open_bench(home)
    client = bench.add_tenant("acme", TenantLimits())
    bench.store_task("acme")
    bench.engine.delay_s = 0.5
    del client
    answers = []
    with serving(bench) as server:
        headers = {"authorization": f"Bearer {bench.secrets['acme']}"}

        def ask():
            body = {"task": "mail", "rows": ["x"]}
            answers.append(httpx.post(f"{server.url}/v1/predict", json=body, headers=headers, timeout=10))

        asker = threading.Thread(target=ask)
        asker.start()
        wait_until(lambda: bench.engine.asked)
    asker.join(5)
    assert [answer.status_code for answer in answers] == [200]
    bench.db.close()


def test_connections_that_are_left_open_are_closed(served):
    with served.connect() as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert read_all(connection).endswith(b'{"status":"ok"}')
