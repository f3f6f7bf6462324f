"""Keys, limits, usage, the operator's view, health and metrics over HTTP."""

from __future__ import annotations

from inlay.service.engine import EngineRefused
from inlay.service.state import Keys, TenantLimits


def test_a_key_is_made_shown_once_and_works(bench, acme):
    made = acme.post("/v1/keys", json={"name": "shop", "scopes": ["predict"], "expires_at": "2100-01-01T00:00:00Z"})
    assert made.status_code == 201
    about = made.json()
    assert about["expires_at"] == "2100-01-01T00:00:00.000Z"
    client = bench.client_with(about["secret"])
    assert client.get("/v1/tasks").status_code == 200
    assert client.get("/v1/keys").status_code == 403
    listed = acme.get("/v1/keys").json()["items"]
    assert about["id"] in {key["id"] for key in listed}
    assert not [key for key in listed if "secret" in key]


def test_a_repeated_request_for_a_key_does_not_show_its_secret_again(acme):
    asked = {"json": {"name": "shop"}, "headers": {"idempotency-key": "k1"}}
    first, again = acme.post("/v1/keys", **asked), acme.post("/v1/keys", **asked)
    assert first.json()["id"] == again.json()["id"]
    assert first.json()["secret"]
    assert again.json()["secret"] is None
    assert again.headers["idempotent-replayed"] == "true"
    assert len([key for key in acme.get("/v1/keys").json()["items"] if key["name"] == "shop"]) == 1


def test_a_key_is_replaced(bench, acme):
    made = acme.post("/v1/keys", json={}).json()
    new = acme.post(f"/v1/keys/{made['id']}/rotate", json={}).json()
    assert bench.client_with(new["secret"]).get("/v1/tasks").status_code == 200
    assert bench.client_with(made["secret"]).get("/v1/tasks").status_code == 401


def test_wrong_fields_of_a_key_are_named(acme):
    fields = {
        "name": {"name": 3},
        "scopes[0]": {"scopes": ["operator"]},
        "scopes": {"scopes": []},
        "expires_at": {"expires_at": "tomorrow"},
        "colour": {"colour": "red"},
    }
    for field, body in fields.items():
        answer = acme.post("/v1/keys", json=body)
        assert answer.status_code == 422
        assert [fault["field"] for fault in answer.json()["errors"]] == [field]
    assert (
        acme.post("/v1/keys", json={"expires_at": "2001-01-01T00:00:00Z"}).json()["errors"][0]["field"] == "expires_at"
    )


def test_limits_say_what_is_allowed_and_used(bench):
    client = bench.add_tenant("small", TenantLimits(queued_jobs=3, stored_bytes=None))
    about = client.get("/v1/limits").json()
    assert (about["tenant"], about["limits"]["queued_jobs"], about["limits"]["stored_bytes"]) == ("small", 3, None)
    assert about["used"] == {"queued_jobs": 0, "stored_bytes": 0}


def test_the_operator_sees_all_tenants_and_the_engine(bench, acme):
    _, secret = Keys(bench.db).make("local", ["operator"])
    operator = bench.client_with(secret)
    about = operator.get("/v1/operator").json()
    assert [tenant["name"] for tenant in about["tenants"]] == ["acme", "local"]
    assert about["engine"]["num_slots"] == 64
    assert about["jobs"]["queued"] == 0
    bench.engine.refusal = EngineRefused("gone", code="engine-lost", status=503, retry_after_s=1)
    assert operator.get("/v1/operator").json()["engine"]["problem"]["code"] == "engine-lost"


def test_readiness_tells_what_is_wrong(bench, monkeypatch):
    assert bench.client.get("/readyz").json()["status"] == "ready"
    bench.engine.refusal = EngineRefused("the engine is not there", code="engine-lost", status=503, retry_after_s=1)
    bench.app.state.readiness.keep({})
    bench.app.state.readiness._at = -1e9
    answer = bench.client.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "not-ready")
    assert answer.json()["checks"]["engine"] == "the engine is not there"
    assert bench.client.get("/healthz").status_code == 200


def test_a_full_disk_or_a_draining_process_is_not_ready(bench, monkeypatch):
    monkeypatch.setattr(type(bench.db), "free_bytes", lambda self: 1 << 20)
    bench.app.state.is_draining = True
    checks = bench.client.get("/readyz").json()["checks"]
    assert checks["disk"] == "1 MB are left"
    assert checks["process"] == "it is ending"


def test_metrics_count_and_name_nobody(bench, acme):
    acme.post("/v1/predict", json={"task": "mail", "rows": ["a prize", ""]})
    text = bench.client.get("/metrics").text
    assert 'inlay_rows_total{band="interactive"} 2.0' in text
    assert 'inlay_row_errors_total{code="bad-data"} 1.0' in text
    assert 'inlay_requests_total{method="POST",route="/v1/predict",status="200"} 1.0' in text
    assert "inlay_engine_slots 64.0" in text
    assert "acme" not in text
    assert "mail" not in text


def test_metrics_answer_without_the_engine(bench):
    bench.engine.refusal = EngineRefused("gone", code="engine-lost", status=503, retry_after_s=1)
    assert "inlay_engine_up 0.0" in bench.client.get("/metrics").text
