"""What every request goes through: ids, names of hosts, origins, headers, unforeseen errors, and the log."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest
from web_bench import open_bench, send_pieces

from inlay.errors import BadData, StoreDamaged
from inlay.service.engine import EngineRefused
from inlay.service.logs import JsonLines
from inlay.service.web.identity import make_host_check, strip_port
from inlay.service.web.problems import Secrets, describe_error, make_problem


def test_a_request_keeps_its_own_id_and_gets_one_otherwise(shared):
    assert shared.client.get("/healthz", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    odd = shared.client.get("/healthz", headers={"x-request-id": "two words"}).headers["x-request-id"]
    assert odd.startswith("req_")
    assert shared.client.get("/v1/tasks").json()["request_id"].startswith("req_")


def test_all_answers_have_the_security_headers(shared):
    for path in ("/healthz", "/nowhere", "/v1/tasks"):
        headers = shared.client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"


def test_a_route_that_is_not_there_is_a_problem(asker):
    found = asker.get("/v2/tasks")
    assert (found.status_code, found.json()["code"]) == (404, "no-route")
    assert found.headers["content-type"] == "application/problem+json"
    other = asker.delete("/v1/tasks")
    assert (other.status_code, other.headers["allow"]) == (405, "GET")


def test_other_names_of_this_machine_are_refused(shared):
    answer = shared.client.get("/healthz", headers={"host": "evil.example"})
    assert (answer.status_code, answer.json()["code"]) == (400, "wrong-host")
    for host in ("localhost:1", "127.0.0.1", "[::1]:8642"):
        assert shared.client.get("/healthz", headers={"host": host}).status_code == 200


def test_a_listed_name_is_taken_and_no_other(home):
    bench = open_bench(home, host="0.0.0.0", hosts=("inlay.example",))
    with bench.client:
        assert bench.client.get("/healthz", headers={"host": "inlay.example"}).status_code == 200
        assert bench.client.get("/healthz", headers={"host": "other.example"}).status_code == 400
    bench.db.close()


def test_a_service_for_others_without_a_list_takes_any_name(home):
    settings = open_bench(home, host="0.0.0.0").app.state.settings
    assert make_host_check(settings)("anything.example:80")
    assert strip_port("[::1]:80") == "::1"


def test_an_unforeseen_error_says_nothing_but_its_id(bench, acme, caplog):
    async def fail(*arguments, **options):
        raise RuntimeError("".join(("custo", "mer")))

    bench.engine.predict = fail
    with caplog.at_level(logging.INFO, "inlay.service"):
        answer = acme.post("/v1/predict", json={"task": "mail", "rows": ["x"]})
    assert (answer.status_code, answer.json()["code"]) == (500, "unforeseen")
    record = next(record for record in caplog.records if record.exc_info)
    assert record.fields["request"] == answer.json()["request_id"]
    assert "customer" not in answer.text
    assert "customer" not in JsonLines("web").format(record)


def test_an_unforeseen_error_of_a_control_route_is_a_problem_too(bench, acme, monkeypatch, caplog):
    monkeypatch.setattr(type(bench.db), "free_bytes", lambda self: 1 / 0)
    assert bench.client.get("/metrics").json()["code"] == "unforeseen"


def test_the_log_has_neither_texts_nor_labels_nor_keys(bench, acme, caplog):
    with caplog.at_level(logging.DEBUG):
        acme.post("/v1/predict", json={"task": "mail", "rows": ["very secret words"]})
        acme.post("/v1/predict", json={"task": "mail", "rows": [{"very secret words": 1}]})
        acme.get("/v1/tasks/very-secret-words?very=secret")
        acme.post("/v1/tasks/mail/feedback", json={"items": [{"text": "very secret words", "label": "very secret"}]})
        acme.post("/v1/keys", json={"name": "very secret"})
        bench.client.get("/v1/tasks", headers={"authorization": "Bearer very-secret-words"})
    lines = [JsonLines("web").format(record) for record in caplog.records if record.name == "inlay.service"]
    assert len(lines) >= 6
    assert not [line for line in lines if "secret" in line or bench.secrets["acme"] in line]
    assert json.loads(lines[0])["route"] == "POST /v1/predict"
    assert json.loads(lines[0])["tenant"] == "acme"


def test_probes_are_logged_only_if_they_fail(bench, caplog):
    with caplog.at_level(logging.INFO, "inlay.service"):
        bench.client.get("/healthz")
        assert not caplog.records
        bench.engine.refusal = EngineRefused("lost", code="engine-lost", status=503, retry_after_s=1)
        assert bench.client.get("/readyz").status_code == 503
    assert [record.fields["route"] for record in caplog.records] == ["GET /readyz"]


def test_a_client_that_goes_away_has_its_rows_dropped(bench, acme):
    """The engine is told, and the request is logged as one that nobody waited for."""
    bench.engine.delay_s = 30.0
    body = json.dumps({"task": "mail", "rows": ["x"]}).encode()
    answer = send_pieces(bench.app, "/v1/predict", [body, None], bench.secrets["acme"])
    assert bench.engine.num_cancelled == 1
    assert not answer.messages
    assert 'status="499"' in bench.client.get("/metrics").text


def test_websockets_are_closed(bench):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(bench.app({"type": "websocket", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_too_many_long_bodies_at_once_are_refused(bench, acme):
    bench.app._app._budget._most_bytes = 1000
    pieces = (b'{"task": "mail", "rows": ["x', b"x" * 2000, b'"]}')
    answer = send_pieces(bench.app, "/v1/predict", pieces, bench.secrets["acme"])
    assert (answer.status, json.loads(answer.body)["code"]) == (503, "busy")
    assert bench.app._app._budget.held_bytes == 0
    assert acme.post("/v1/predict", json={"task": "mail", "rows": ["x"]}).status_code == 200


# Problems


def test_a_problem_is_complete():
    problem = make_problem(BadData("bad rows", "mend them"), "req_1")
    assert problem.status == 400
    assert problem.body == {
        "type": "urn:inlay:problem:bad-data",
        "title": "Bad data",
        "status": 400,
        "detail": "bad rows",
        "hint": "mend them",
        "code": "bad-data",
        "request_id": "req_1",
    }


def test_a_problem_has_no_path_and_no_prefix(tmp_path):
    secrets = Secrets(tmp_path).of_tenant("acme")
    error = StoreDamaged(f"`{tmp_path}/objects/ab/cd.safetensors`: `acme.mail@3` is damaged ({tmp_path})")
    assert describe_error(error, secrets)["detail"] == "`cd.safetensors`: `mail@3` is damaged ()"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_pages_of_other_sites_cannot_use_the_open_service(home, method):
    """Without any key, a visitor's browser would do what another site's page asks."""
    bench = open_bench(home)
    with bench.client:
        answer = bench.client.request(method, "/v1/jobs", headers={"origin": "https://evil.example"}, json={})
        own = bench.client.request(method, "/v1/jobs", headers={"origin": "http://127.0.0.1:8642"}, json={})
    bench.db.close()
    assert answer.status_code == (200 if method == "GET" else 403)
    assert own.status_code == (200 if method == "GET" else 422)


def test_the_old_httpx_reads_the_app_too(bench, acme):
    """`inlay.Client` is built on it."""

    async def ask():
        transport = httpx.ASGITransport(bench.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get("/healthz")

    assert asyncio.run(ask()).json() == {"status": "ok"}
