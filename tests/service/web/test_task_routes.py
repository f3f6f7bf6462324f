"""Tasks over HTTP: what is live and how it moves, policies, reports, comparisons, feedback and erasure."""

from __future__ import annotations

import dataclasses

import pytest
from web_bench import CSV

from inlay.reports import EvaluatedRow, Evaluation, digest_rows
from inlay.service.engine import EngineRefused
from inlay.service.state import JobRequest
from inlay.service.version_evaluations import write_evaluation


def evaluate(bench, number, answers, tenant="acme", task="mail", texts=None):
    """Keep an evaluation of a version, as the trainer would have."""
    targets = ["ham", "spam"] * (len(answers) // 2)
    texts = texts or [f"row {line}" for line in range(len(answers))]
    rows = tuple(
        EvaluatedRow(line + 2, text, None, target, given, 0.6 + line / 100, given == target)
        for line, (text, target, given) in enumerate(zip(texts, targets, answers, strict=True))
    )
    about = Evaluation(
        number, "classify", ("ham", "spam"), (), "accuracy", {"dev": {"accuracy": 0.5}}, "dev", len(rows), rows,
        digest_rows("classify", ["another row"], None),
    )  # fmt: skip
    write_evaluation(bench.db.files.evaluations(tenant, task), about)
    return about


def test_a_task_is_described_with_its_etag(acme):
    answer = acme.get("/v1/tasks/mail")
    about = answer.json()
    assert answer.headers["etag"] == about["etag"]
    assert (about["kind"], about["labels"], about["live"]["version"]) == ("classify", ["ham", "spam"], 1)
    assert [task["name"] for task in acme.get("/v1/tasks").json()["items"]] == ["mail"]


def test_tasks_are_listed_page_by_page(bench, acme):
    for name in ("a", "b"):
        bench.store_task("acme", name)
    page = acme.get("/v1/tasks?limit=2").json()
    rest = acme.get("/v1/tasks", params={"cursor": page["next_cursor"]}).json()
    assert [task["name"] for task in page["items"] + rest["items"]] == ["a", "b", "mail"]


def test_a_version_is_loaded_before_it_is_live(bench, acme):
    bench.store_task("acme", seed=1)
    before = acme.get("/v1/tasks/mail/aliases/live")
    assert before.json()["version"] == 2
    moved = acme.put(
        "/v1/tasks/mail/aliases/live",
        json={"version": 1, "reason": "2 is worse"},
        headers={"if-match": before.headers["etag"]},
    )
    assert moved.status_code == 200
    assert (moved.json()["version"], moved.json()["reason"]) == (1, "2 is worse")
    assert moved.headers["etag"] != before.headers["etag"]
    assert bench.engine.loaded == [("acme.mail", 1)]
    answers = acme.post("/v1/predict", json={"task": "mail", "rows": ["x"]}).json()["answers"]
    assert answers[0]["version"] == "mail@1"
    history = acme.get("/v1/tasks/mail/aliases/live/history").json()["items"]
    assert [(move["from"], move["to"]) for move in history] == [(2, 1), (1, 2), (None, 1)]
    assert history[0]["by"].startswith("key:")


def test_a_stale_etag_moves_nothing(bench, acme):
    bench.store_task("acme", seed=1)
    for etag in ('"999"', "nonsense", '"1"'):
        answer = acme.put("/v1/tasks/mail/aliases/live", json={"version": 1}, headers={"if-match": etag})
        assert (answer.status_code, answer.json()["code"]) == (412, "live-moved")
    assert bench.engine.loaded == []
    assert acme.get("/v1/tasks/mail").json()["live"]["version"] == 2


def test_a_version_that_cannot_be_loaded_does_not_go_live(bench, acme):
    bench.store_task("acme", seed=1)
    bench.engine.refusal = EngineRefused("gone", code="engine-lost", status=503, retry_after_s=1)
    assert acme.put("/v1/tasks/mail/aliases/live", json={"version": 1}).status_code == 503
    assert acme.get("/v1/tasks/mail").json()["live"]["version"] == 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "version"),
        ({"version": 0}, "version"),
        ({"version": "1"}, "version"),
        ({"version": 1, "reason": 2}, "reason"),
    ],
)
def test_a_wrong_field_of_an_alias_is_named(asker, body, field):
    answer = asker.put("/v1/tasks/mail/aliases/live", json=body)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


def test_an_unknown_version_is_a_404(asker):
    assert asker.put("/v1/tasks/mail/aliases/live", json={"version": 9}).status_code == 404
    assert asker.get("/v1/tasks/mail/versions/9").status_code == 404
    assert asker.get("/v1/tasks/mail/versions/9/report").status_code == 404
    assert asker.get("/v1/tasks/mail/compare?a=1&b=9").status_code == 404
    assert asker.get("/v1/tasks/mail/versions/zero").status_code == 422


def test_a_policy_is_set(acme):
    before = acme.get("/v1/tasks/mail").json()["etag"]
    changed = acme.patch("/v1/tasks/mail", json={"policy": "never"}, headers={"if-match": before})
    assert changed.json()["policy"] == "never"
    stale = acme.patch("/v1/tasks/mail", json={"policy": "always"}, headers={"if-match": before})
    assert stale.status_code == 412
    assert acme.patch("/v1/tasks/mail", json={"policy": "sometimes"}).json()["errors"][0]["field"] == "policy"


def test_a_report_has_intervals_labels_confusion_and_errors(bench, acme):
    evaluate(bench, 1, ["ham", "spam"] * 8 + ["spam", "spam", "ham", "ham"])
    report = acme.get("/v1/tasks/mail/versions/1/report").json()
    assert report["num_rows"] == 20
    assert report["confusion"]["counts"] == [[9, 1], [1, 9]]
    low, high = report["interval"]
    assert low < 0.9 < high
    assert report["rows"] == "/v1/tasks/mail/versions/1/errors"
    wrong = acme.get(report["rows"]).json()["items"]
    assert [(row["line"], row["expected"], row["answer"]) for row in wrong] == [
        (21, "spam", "ham"),
        (18, "ham", "spam"),
    ]
    only = acme.get(f"{report['rows']}?expected=ham&answer=spam").json()["items"]
    assert [row["line"] for row in only] == [18]
    page = acme.get(f"{report['rows']}?limit=1").json()
    rest = acme.get(report["rows"], params={"limit": 1, "cursor": page["next_cursor"]}).json()
    assert [row["line"] for row in page["items"] + rest["items"]] == [21, 18]
    assert acme.get("/v1/tasks/mail").json()["live"]["interval"] == report["interval"]


def test_a_version_without_an_evaluation_says_so(asker):
    answer = asker.get("/v1/tasks/mail/versions/1/report")
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")


def test_versions_are_compared_on_the_same_rows(bench, acme):
    bench.store_task("acme", seed=1)
    evaluate(bench, 1, ["ham", "ham"] * 30)
    evaluate(bench, 2, ["ham", "spam"] * 30)
    found = acme.get("/v1/tasks/mail/compare?a=1&b=2").json()
    assert (found["a"], found["b"], found["num_rows"], found["verdict"]) == (1, 2, 60, "better")
    assert found["p_value"] < 0.001
    assert len(found["changed"]) == 30
    assert bench.engine.asked == []


def test_a_version_answers_the_other_ones_rows_first(bench, acme):
    """Versions trained on other files have other dev rows: the older one answers the newer one's, once."""
    bench.store_task("acme", seed=1)
    evaluate(bench, 1, ["ham", "spam"] * 10)
    texts = [f"a {'prize' if line % 2 else 'visit'} {line}" for line in range(20)]
    evaluate(bench, 2, ["ham", "ham"] * 10, texts=texts)
    found = acme.get("/v1/tasks/mail/compare?a=2&b=1").json()
    assert (found["score_a"], found["score_b"]) == (0.5, 1.0)
    caller, rows = bench.engine.asked[0]
    assert caller.band == "bulk"
    assert {(row.store_name, row.number) for row in rows} == {("acme.mail", 1)}
    assert acme.get("/v1/tasks/mail/compare?a=2&b=1").json() == found
    assert len(bench.engine.asked) == 1


def test_feedback_is_kept_listed_and_trained_with(bench, acme):
    headers = {"content-type": "text/csv"}
    dataset = acme.post("/v1/datasets?name=rows.csv", content=CSV, headers=headers).json()["id"]
    bench.workspace("acme").submit(JobRequest("train", "mail", dataset, {"method": "houlsby", "epochs": 3}))
    from state_makers import publication, store_version

    from inlay.service.state import JobQueue

    cohort = JobQueue(bench.db).claim("tests", company_s=0.0)
    version = store_version(bench.workspace("acme"), "mail", 5)
    made = dataclasses.replace(publication(version.number), digest=version.digest)
    JobQueue(bench.db).publish_live(cohort, cohort.jobs[0].id, made)

    items = [
        {"text": "win a prize now 0", "label": "ham", "answered": "spam", "version": 2},
        {"text": "new", "label": "spam"},
    ]
    kept = acme.post("/v1/tasks/mail/feedback", json={"items": items}, headers={"idempotency-key": "f"})
    assert kept.status_code == 201
    assert [item["label"] for item in kept.json()["items"]] == ["ham", "spam"]
    again = acme.post("/v1/tasks/mail/feedback", json={"items": items}, headers={"idempotency-key": "f"})
    assert again.json() == kept.json()
    assert [item["text"] for item in acme.get("/v1/tasks/mail/feedback").json()["items"]] == [
        "new",
        "win a prize now 0",
    ]

    job = acme.post("/v1/jobs", json={"task": "mail", "corrections": True, "settings": {"epochs": 4}}).json()
    assert job["settings"] == {"bad_rows": "skip", "method": "houlsby", "epochs": 4, "corrections": True}
    merged = acme.get(f"/v1/datasets/{job['dataset']}").json()
    assert merged["num_rows"] == 41
    assert {item["label"]: item["count"] for item in merged["reading"]["labels"]} == {"spam": 20, "ham": 21}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "items"),
        ({"items": []}, "items"),
        ({"items": [{"text": "x"}]}, "items[0].label"),
        ({"items": [{"text": "", "label": "y"}]}, "items[0].text"),
        ({"items": [{"text": "x\x00", "label": "y"}]}, "items[0].text"),
        ({"items": [{"text": "x", "label": "y", "version": 0}]}, "items[0].version"),
        ({"items": [{"text": "x", "label": "y", "who": "me"}]}, "items[0].who"),
    ],
)
def test_a_wrong_field_of_feedback_is_named(asker, body, field):
    answer = asker.post("/v1/tasks/mail/feedback", json=body)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


def test_suggestions_are_the_rows_it_is_least_sure_of(bench, acme):
    evaluate(bench, 1, ["ham", "spam"] * 10)
    found = acme.get("/v1/tasks/mail/suggestions?limit=3").json()["items"]
    assert [row["line"] for row in found][:2] == [2, 3]
    assert {row["source"] for row in found} == {"dev"}
    headers = {"content-type": "text/csv"}
    dataset = acme.post("/v1/datasets?name=rows.csv", content=b"text\nsee you\na prize\n", headers=headers).json()["id"]
    found = acme.get(f"/v1/tasks/mail/suggestions?dataset={dataset}").json()["items"]
    assert [(row["text"], row["answer"], row["confidence"], row["source"]) for row in found] == [
        ("see you", "ham", 0.8, "unlabelled"),
        ("a prize", "spam", 0.9, "unlabelled"),
    ]


def test_an_erased_task_is_gone_at_once(acme):
    job = acme.delete("/v1/tasks/mail")
    assert (job.status_code, job.json()["kind"]) == (202, "erase")
    assert job.headers["location"] == f"/v1/jobs/{job.json()['id']}"
    for path in ("/v1/tasks/mail", "/v1/tasks/mail/versions", "/v1/tasks/mail/aliases/live"):
        assert acme.get(path).status_code == 404
    assert acme.post("/v1/predict", json={"task": "mail", "rows": ["x"]}).status_code == 404
