"""Who may ask: keys, scopes, sessions, and the person at this machine."""

from __future__ import annotations

import pytest
from web_bench import open_bench

from inlay.service.state import Keys, Sessions
from inlay.service.web.identity import COOKIE

SCOPED = [
    ("predict", "POST", "/v1/predict"),
    ("predict", "POST", "/classify"),
    ("predict", "POST", "/hf/mail"),
    ("predict", "POST", "/v1/batches"),
    ("train", "POST", "/v1/datasets"),
    ("train", "GET", "/v1/datasets"),
    ("train", "POST", "/v1/jobs"),
    ("train", "PUT", "/v1/tasks/mail/aliases/live"),
    ("train", "PATCH", "/v1/tasks/mail"),
    ("train", "POST", "/v1/tasks/mail/feedback"),
    ("train", "GET", "/v1/tasks/mail/versions/1/errors"),
    ("admin", "DELETE", "/v1/tasks/mail"),
    ("admin", "GET", "/v1/keys"),
    ("admin", "POST", "/v1/keys"),
    ("operator", "GET", "/v1/operator"),
]


def test_without_any_key_the_person_at_this_machine_needs_none(bench):
    assert bench.client.get("/v1/limits").json()["tenant"] == "local"
    assert bench.client.get("/v1/operator").status_code == 200


def test_as_soon_as_there_is_a_key_everybody_needs_one(bench):
    assert bench.client.get("/v1/tasks").status_code == 200
    Keys(bench.db).make("local")
    refused = bench.client.get("/v1/tasks")
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert "Authorization: Bearer" in refused.json()["hint"]


def test_a_service_that_others_reach_needs_keys_from_the_start(home):
    bench = open_bench(home, host="0.0.0.0")
    with bench.client:
        assert bench.client.get("/v1/tasks").status_code == 401
        assert bench.client.get("/healthz").status_code == 200
    bench.db.close()


@pytest.mark.parametrize(
    "header",
    [
        *(
            "Bearer",
            "Bearer ",
            "Bearer inl_aaaaaaaaaaaa_" + "x" * 43,
            "Basic aW5sOng=",
            "inl_x",
            "Bearer " + "x" * 5000,
        ),
        *("bearer \xff", ""),
    ],
)
def test_what_is_no_valid_key_is_refused_alike(shared, header):
    answer = shared.client.get("/v1/tasks", headers={"authorization": header.encode("latin-1")})
    assert answer.status_code == 401
    assert answer.json()["detail"] == "the key is not valid"


def test_a_revoked_key_ends_at_once(bench, acme):
    key = acme.get("/v1/keys").json()["items"][0]
    assert acme.delete(f"/v1/keys/{key['id']}").json()["revoked_at"]
    assert acme.get("/v1/tasks").status_code == 401
    assert acme.post("/v1/predict", json={"task": "mail", "rows": ["x"]}).status_code == 401


@pytest.mark.parametrize(("scope", "method", "path"), SCOPED)
def test_a_key_without_the_scope_is_refused_before_anything_is_read(shared, scope, method, path):
    others = [name for name in ("predict", "train", "admin", "operator") if name != scope]
    _, secret = Keys(shared.db).make("acme", others)
    answer = shared.client_with(secret).request(method, path, content=b"no json")
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert scope in answer.json()["detail"]


def test_every_route_needs_a_key_but_those_of_health(shared):
    document = shared.client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            place = path.replace("{version}", "1").replace("{task}", "mail")
            answer = shared.client.request(method.upper(), place.replace("{", "").replace("}", ""))
            assert (answer.status_code == 401) == bool(operation.get("security")), (method, path)


def test_a_session_of_a_browser_stands_for_its_key(bench):
    key, _ = Keys(bench.db).make("local")
    cookie = {"cookie": f"{COOKIE}={Sessions(bench.db).begin(key, 3600)}"}
    assert bench.client.get("/v1/limits", headers=cookie).json()["tenant"] == "local"
    assert bench.client.get("/v1/limits", headers={"cookie": f"{COOKIE}=nonsense"}).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://127.0.0.1:8642"}, 422),
        ({"sec-fetch-site": "same-origin"}, 422),
        ({"origin": "https://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": "null"}, 403),
        ({}, 403),
    ],
)
def test_a_session_changes_things_only_from_the_services_own_pages(bench, headers, status):
    key, _ = Keys(bench.db).make("local")
    cookie = {"cookie": f"{COOKIE}={Sessions(bench.db).begin(key, 3600)}"}
    assert bench.client.post("/v1/jobs", json={}, headers=cookie | headers).status_code == status


def test_a_key_needs_no_origin(bench, acme):
    assert acme.post("/v1/jobs", json={}, headers={"origin": "https://shop.example"}).status_code == 422
