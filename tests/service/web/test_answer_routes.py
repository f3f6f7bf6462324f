"""Rows over HTTP: `/v1/predict`, `/classify` and `/hf/{task}`, against an engine that pretends."""

from __future__ import annotations

import pytest
from web_bench import measure, read_passage, tag

from inlay.service.engine import EngineRefused
from inlay.service.state import TenantLimits

HOT = {
    "/v1/predict": {"task": "mail", "rows": ["a prize"]},
    "/classify": {"model": "mail", "input": "a prize"},
    "/hf/mail": {"inputs": "a prize"},
}


def predict(client, **body):
    return client.post("/v1/predict", json=body)


def test_rows_are_answered_in_order_by_the_live_version(asker):
    answer = predict(asker, task="mail", rows=["a prize", {"text": "see you"}])
    assert answer.status_code == 200
    assert [(each["label"], each["version"]) for each in answer.json()["answers"]] == [
        ("spam", "mail@1"),
        ("ham", "mail@1"),
    ]
    assert answer.json()["usage"] == {"rows": 2, "tokens": 4}


def test_a_version_may_be_named(bench, acme):
    bench.store_task("acme", seed=1)
    rows = ["a prize", {"text": "a prize", "task": "mail@1"}]
    assert [each["version"] for each in predict(acme, task="mail", rows=rows).json()["answers"]] == ["mail@2", "mail@1"]


def test_tasks_give_each_row_a_list_in_their_order(bench, acme):
    bench.store_task("acme", "length")
    bench.engine.rules["acme.length"] = measure
    answers = predict(acme, tasks=["length", "mail"], rows=["a prize", "see you"]).json()["answers"]
    assert [[each["task"] for each in row] for row in answers] == [["length", "mail"]] * 2
    assert answers[0][0]["value"] == 7


def test_a_star_means_all_tasks_that_can_answer(bench, acme):
    bench.store_task("acme", "another")
    answers = predict(acme, tasks="*", rows=["a prize"]).json()["answers"]
    assert [each["task"] for each in answers[0]] == ["another", "mail"]


def test_a_star_without_tasks_says_what_to_do(bench):
    answer = predict(bench.add_tenant("empty"), tasks="*", rows=["a prize"])
    assert answer.status_code == 400
    assert "POST /v1/jobs" in answer.json()["hint"]


def test_a_bad_row_gets_its_problem_and_spoils_no_other(asker):
    rows = ["a prize", "", {"text": "x", "task": "nobody"}, {"text": "x", "task": "mail@9"}, "see you"]
    answers = predict(asker, task="mail", rows=rows).json()["answers"]
    assert [each.get("label") for each in answers] == ["spam", None, None, None, "ham"]
    assert [each["error"]["status"] for each in answers[1:4]] == [400, 404, 404]
    assert answers[2]["error"]["hint"] == "`GET /v1/tasks` lists your tasks"


def test_a_task_that_is_for_all_rows_and_unknown_is_a_404(asker):
    assert predict(asker, task="nobody", rows=["x"]).status_code == 404
    assert predict(asker, tasks=["mail", "nobody"], rows=["x"]).status_code == 404
    assert asker.post("/classify", json={"model": "nobody", "input": "x"}).status_code == 404
    assert asker.post("/hf/nobody", json={"inputs": "x"}).status_code == 404


def test_an_answer_of_another_version_is_never_shown(bench, acme):
    bench.engine.lies = True
    answer = predict(acme, task="mail", rows=["a prize"]).json()["answers"][0]
    assert answer["error"]["code"] == "wrong-version"
    assert "label" not in answer
    assert acme.post("/classify", json=HOT["/classify"]).status_code == 500
    assert "inlay_wrong_versions_total 2.0" in bench.client.get("/metrics").text


def test_the_engine_hears_who_asks_and_how(bench):
    client = bench.add_tenant("small", TenantLimits(tokens_per_minute=7))
    bench.store_task("small")
    predict(client, task="mail", rows=[{"text": "x", "pair": "y", "min_confidence": 0.25}], band="bulk")
    caller, rows = bench.engine.asked[-1]
    assert (caller.tenant, caller.tokens_per_minute, caller.band) == ("small", 7, "bulk")
    assert (rows[0].store_name, rows[0].pair, rows[0].min_confidence) == ("small.mail", "y", 0.25)


def test_usage_is_counted_by_task(bench, acme):
    bench.store_task("acme", "other")
    predict(acme, task="mail", rows=["one two", "three"])
    predict(acme, tasks=["mail", "other"], rows=["one"])
    bench.db.meter.flush()
    used = {item["task"]: (item["rows"], item["requests"]) for item in acme.get("/v1/usage").json()["items"]}
    assert used == {"mail": (3, 2), "other": (1, 1)}


def test_more_rows_than_allowed_are_refused(bench):
    client = bench.add_tenant("small", TenantLimits(rows_per_request=2))
    bench.store_task("small")
    answer = predict(client, task="mail", rows=["x"] * 3)
    assert (answer.status_code, answer.json()["code"]) == (413, "over-limit")
    assert predict(client, tasks=["mail"] * 17, rows=["x"] * 2).status_code == 413
    assert client.post("/classify", json={"model": "mail", "input": ["x"] * 3}).status_code == 413
    assert client.post("/hf/mail", json={"inputs": ["x"] * 3}).status_code == 413


@pytest.mark.parametrize("path", HOT)
@pytest.mark.parametrize(("status", "retry"), [(429, 12.4), (503, 1.0), (503, None)])
def test_a_refusal_of_the_engine_is_told_with_when_to_come_back(shared, asker, path, status, retry):
    shared.engine.refusal = EngineRefused("busy", "wait", code="queue-full", status=status, retry_after_s=retry)
    answer = asker.post(path, json=HOT[path])
    assert answer.status_code == status
    assert answer.headers["retry-after"] == ("12" if retry == 12.4 else "1")
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"rows": ["x"]}, "rows[0]"),
        ({"task": "mail"}, "rows"),
        ({"task": "mail", "rows": "x"}, "rows"),
        ({"task": "mail", "rows": ["x", 3]}, "rows[1]"),
        ({"task": "mail", "rows": [{"text": None}]}, "rows[0].text"),
        ({"task": "mail", "rows": [{"txt": "x"}]}, "rows[0]"),
        ({"task": "mail", "rows": ["x"], "min_confidence": 2}, "min_confidence"),
        ({"task": "mail", "rows": ["x"], "min_confidence": "0.5"}, "min_confidence"),
        ({"task": "mail", "rows": ["x"], "deadline_ms": 0}, "deadline_ms"),
        ({"task": "mail", "rows": ["x"], "band": "urgent"}, "band"),
        ({"task": "mail", "tasks": ["mail"], "rows": ["x"]}, "tasks"),
        ({"tasks": [], "rows": ["x"]}, "tasks"),
        ({"tasks": "all", "rows": ["x"]}, "tasks"),
        ({"tasks": ["mail"], "rows": [{"text": "x", "task": "mail"}]}, "rows[0].task"),
        ({"task": "mail", "rows": ["x"], "colour": "red"}, "body"),
        ({"task": "", "rows": ["x"]}, "task"),
        ([], "body"),
    ],
)
def test_a_wrong_field_is_named(asker, body, field):
    answer = asker.post("/v1/predict", json=body)
    assert answer.status_code == 422
    assert [fault["field"] for fault in answer.json()["errors"]] == [field]


@pytest.mark.parametrize("path", HOT)
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"{", "truncated"),
        (b'{"a": NaN}', "malformed"),
        (b"[" * 100_000, "deeply"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"task": "mail", "rows": ["\\ud800"]}', "surrogate"),
    ],
)
def test_a_body_that_is_no_json_is_refused_in_words(asker, path, content, reason):
    answer = asker.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)
    assert reason in answer.json()["detail"] or answer.status_code == 422


@pytest.mark.parametrize("path", HOT)
def test_other_content_and_other_methods_are_refused(asker, path):
    wrong = asker.post(path, content=b"{}", headers={"content-type": "text/plain"})
    assert (wrong.status_code, wrong.json()["code"]) == (415, "wrong-content-type")
    other = asker.put(path, json={})
    assert (other.status_code, other.headers["allow"]) == (405, "POST")


def test_a_body_above_the_limit_is_refused_before_it_is_read(asker):
    answer = asker.post("/v1/predict", json={"task": "mail", "rows": ["x" * (9 << 20)]})
    assert (answer.status_code, answer.json()["code"]) == (413, "too-large")
    assert answer.headers["connection"] == "close"


def test_classify_has_the_shape_of_vllm(asker):
    answer = asker.post("/classify", json={"model": "mail", "input": ["a prize", "see you"]}).json()
    assert answer["object"] == "list"
    assert answer["model"] == "mail"
    assert answer["data"] == [
        {"index": 0, "label": "spam", "probs": [pytest.approx(0.1), 0.9], "num_classes": 2},
        {"index": 1, "label": "ham", "probs": [0.8, 0.2], "num_classes": 2},
    ]
    assert answer["usage"]["prompt_tokens"] == 4


def test_classify_says_what_it_cannot_do(bench, acme):
    bench.store_task("acme", "names")
    bench.engine.rules["acme.names"] = tag
    assert acme.post("/classify", json={"model": "names", "input": "x"}).status_code == 422
    assert acme.post("/classify", json={"model": "mail", "input": "x", "activation": False}).status_code == 422
    refused = acme.post("/classify", json={"model": "mail", "input": ["x", ""]})
    assert refused.status_code == 400
    assert refused.json()["errors"] == [{"field": "input[1]", "detail": "the text is empty"}]


def test_hf_scores_entities_passages_and_numbers(bench, acme):
    for name, rule in {"names": tag, "reader": read_passage, "length": measure}.items():
        bench.store_task("acme", name)
        bench.engine.rules[f"acme.{name}"] = rule
    one = acme.post("/hf/mail", json={"inputs": "a prize", "parameters": {"top_k": 1}}).json()
    assert one == [[{"label": "spam", "score": 0.9}]]
    many = acme.post("/hf/mail", json={"inputs": ["a prize", "see you"]}).json()
    assert [row[0]["label"] for row in many] == ["spam", "ham"]
    found = acme.post("/hf/names", json={"inputs": "see Anna"}).json()
    assert found == [{"entity_group": "NAME", "score": 0.8, "word": "Anna", "start": 4, "end": 8}]
    words = acme.post("/hf/names", json={"inputs": "see Anna", "parameters": {"aggregation_strategy": "none"}}).json()
    assert words == [{"entity": "B-NAME", "score": 0.8, "word": "Anna", "start": 4, "end": 8}]
    question = {"question": "who?", "context": "Anna came"}
    assert acme.post("/hf/reader", json={"inputs": question}).json() == {
        "answer": "Anna",
        "score": 0.7,
        "start": 0,
        "end": 4,
    }
    two = acme.post("/hf/reader", json={"inputs": question, "parameters": {"top_k": 2}}).json()
    assert [each["answer"] for each in two] == ["Anna", ""]
    assert acme.post("/hf/length", json={"inputs": "abc"}).json() == [[{"label": "value", "score": 3.0}]]


def test_hf_refuses_what_it_would_have_to_ignore(asker):
    body = {"inputs": "x", "parameters": {"function_to_apply": "none"}}
    assert asker.post("/hf/mail", json=body).json()["errors"][0]["field"] == "parameters.function_to_apply"
    assert asker.post("/hf/mail", json={"inputs": {"question": "x", "text": "y"}}).status_code == 422
    assert asker.post("/hf/mail", json={"inputs": "x", "parameters": {"temperature": 1}}).status_code == 422
