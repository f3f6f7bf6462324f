"""Nothing of a tenant's shows to another: in answers, errors, lists, cursors and idempotency keys."""

from __future__ import annotations

import re
import time
from statistics import median

import pytest
from two_tenants import MARK, TwoTenants, make_two_tenants
from web_bench import CSV

BODIES = {
    "predict": {"task": "{task}", "rows": ["x"]},
    "answer_vllm": {"model": "{task}", "input": "x"},
    "answer_hf": {"inputs": "x"},
    "submit_job": {"task": "new", "dataset": "{dataset}"},
    "submit_batch_job": {"task": "{task}", "dataset": "{dataset}"},
    "read_dataset_again": {"text": "text"},
    "set_policy": {"policy": "never"},
    "put_live": {"version": 1},
    "add_feedback": {"items": [{"text": "x", "label": "y"}]},
    "make_key": {},
    "rotate_key": {},
}
QUERIES = {"compare_versions": "?a=1&b=1"}
# Operations that end what they are about come last.
LAST = ("cancel_job", "rotate_key", "revoke_key", "delete_dataset", "erase_task")


@pytest.fixture
def two(bench) -> TwoTenants:
    return make_two_tenants(bench)


def fill_in(value, ids):
    """A body or path with the ids that its braces stand for."""
    if isinstance(value, dict):
        return {name: fill_in(item, ids) for name, item in value.items()}
    if isinstance(value, str):
        return re.sub(r"\{(\w+)\}", lambda found: ids[found[1]], value)
    return value


def list_requests(document):
    """Every operation as (operation id, method, path, body), those that destroy last."""
    found = [
        (operation["operationId"], method.upper(), path + QUERIES.get(operation["operationId"], ""))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if operation.get("security")
    ]
    found.sort(key=lambda item: LAST.index(item[0]) if item[0] in LAST else -1)
    return found


def send(client, name, method, path, ids):
    options = {"content": CSV, "headers": {"content-type": "text/csv"}} if name == "upload_dataset" else {}
    if name in BODIES:
        options = {"json": fill_in(BODIES[name], ids)}
    return client.request(method, fill_in(path, ids), **options)


def plain(answer, ids):
    """An answer without what differs in any case: its request's id and the name that was asked for."""
    text = re.sub(r"req_[0-9a-f]+", "", answer.text)
    for value in ids.values():
        text = text.replace(value, "…")
    return answer.status_code, text


def test_every_request_of_one_tenant_with_the_others_key_finds_nothing(two):
    """What is another's is refused word for word as what never was."""
    never = {"task": "never-was", "dataset": "ds_neverwas", "job": "job_neverwas", "version": "1", "key": "neverwas"}
    tried = set()
    for name, method, path in list_requests(two.owner.get("/openapi.json").json()):
        about_ids = re.search(r"\{\w+\}", f"{path} {BODIES.get(name)}")
        foreign = send(two.other, name, method, path, two.ids)
        if about_ids:
            assert plain(foreign, two.ids) == plain(send(two.other, name, method, path, never), never), name
            assert foreign.status_code == 404, (name, foreign.text)
        assert MARK not in foreign.text.replace(two.ids["task"], ""), name
        own = send(two.owner, name, method, path, two.ids)
        allowed = {409} if name in ("get_output", "delete_dataset") else {403} if name == "get_operator" else set()
        assert own.status_code < 300 or own.status_code in allowed, (name, own.status_code, own.text)
        tried.add(name)
    assert len(tried) > 35


def test_lists_show_only_ones_own(two):
    for path in ("/v1/tasks", "/v1/datasets", "/v1/jobs", "/v1/keys", "/v1/usage", "/v1/limits"):
        two.check_hidden(two.other.get(path))
    two.check_hidden(two.other.get("/v1/jobs", params={"task": two.ids["task"]}))
    two.check_hidden(two.other.get("/metrics"))


def test_a_cursor_of_another_tenant_leads_to_ones_own(two):
    for _ in range(3):
        two.owner.post("/v1/datasets?name=a.csv", content=CSV, headers={"content-type": "text/csv"})
    cursor = two.owner.get("/v1/datasets?limit=1").json()["next_cursor"]
    two.check_hidden(two.other.get("/v1/datasets", params={"cursor": cursor}))


def test_idempotency_keys_are_each_tenants_own(two):
    asked = {"json": {"name": "same"}, "headers": {"idempotency-key": "same"}}
    first, second = two.owner.post("/v1/keys", **asked), two.other.post("/v1/keys", **asked)
    assert first.json()["id"] != second.json()["id"]
    assert second.json()["tenant"] == "globex"


def test_a_name_with_another_tenants_prefix_is_unknown(two):
    for name in ("acme.mail", "acme.mail@1", "globex.mail", "../acme/mail", "acme"):
        answer = two.other.post("/v1/predict", json={"task": name, "rows": ["x"]})
        assert answer.status_code == 404, name
    assert two.bench.engine.asked == []


def test_tasks_of_one_name_are_answered_by_each_tenants_own(two):
    for client, store_name in ((two.owner, "acme.mail"), (two.other, "globex.mail")):
        client.post("/v1/predict", json={"task": "mail", "rows": ["x"]})
        assert two.bench.engine.asked[-1][1][0].store_name == store_name


def test_an_error_of_the_engine_shows_no_name_of_the_store(two):
    from inlay.service.engine import WireError

    two.bench.engine._answer = lambda row: WireError(
        "unknown-name", "no task named `globex.mail`", "did you mean `acme.mail-zanzibar`?", 404
    )
    answer = two.other.post("/v1/predict", json={"task": "mail", "rows": ["x"]}).json()["answers"][0]
    assert answer["error"]["detail"] == "no task named `mail`"
    assert answer["error"]["hint"] == "`GET /v1/tasks` lists your tasks"


def test_what_is_anothers_takes_as_long_to_refuse_as_what_never_was(two):
    def measure(job):
        times = []
        for _ in range(40):
            began = time.perf_counter()
            two.other.get(f"/v1/jobs/{job}")
            times.append(time.perf_counter() - began)
        return median(times)

    ratios = sorted(measure(two.ids["job"]) / measure("job_" + "a" * 20) for _ in range(3))
    assert 0.5 < ratios[1] < 2
