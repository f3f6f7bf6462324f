"""Jobs and batches over HTTP: asked for once, followed as they go, cancelled."""

from __future__ import annotations

import json

import pytest
from web_bench import CSV

from inlay.service.state import SUCCEEDED, JobNote, JobQueue, TenantLimits
from inlay.service.trainer import TRAIN_SETTINGS
from inlay.service.web.bodies import TrainSettings


def upload(client, content=CSV):
    headers = {"content-type": "text/csv"}
    return client.post("/v1/datasets?name=rows.csv", content=content, headers=headers).json()["id"]


def claim(bench):
    cohort = JobQueue(bench.db).claim("tests", kinds=("train", "batch"), company_s=0.0, most=100)
    assert cohort is not None
    return JobQueue(bench.db), cohort


def read_stream(answer):
    """The events of a stream as (id, kind, data)."""
    found = []
    for block in answer.text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines.get("id"), lines["event"], json.loads(lines["data"])))
    return found


def test_a_job_is_queued_and_told_where(bench, acme):
    dataset = upload(acme)
    made = acme.post("/v1/jobs", json={"task": "new", "dataset": dataset, "settings": {"epochs": 2, "lr": 0.001}})
    assert made.status_code == 202
    about = made.json()
    assert made.headers["location"] == f"/v1/jobs/{about['id']}"
    assert (about["state"], about["place"], about["publish"]) == ("queued", 1, "if-better")
    assert about["settings"] == {"bad_rows": "skip", "epochs": 2, "lr": 0.001}
    assert acme.get(f"/v1/jobs/{about['id']}").json() == about
    assert [job["id"] for job in acme.get("/v1/jobs?state=queued&task=new").json()["items"]] == [about["id"]]
    assert acme.get("/v1/jobs?state=failed").json()["items"] == []


def test_a_job_that_is_asked_for_twice_is_one_job(acme):
    body = {"task": "new", "dataset": upload(acme)}
    first = acme.post("/v1/jobs", json=body, headers={"idempotency-key": "a"})
    again = acme.post("/v1/jobs", json=body, headers={"idempotency-key": "a"})
    assert first.json() == again.json()
    assert again.headers["location"] == first.headers["location"]
    assert len([job for job in acme.get("/v1/jobs").json()["items"] if job["task"] == "new"]) == 1
    other = acme.post("/v1/jobs", json={**body, "priority": 1}, headers={"idempotency-key": "a"})
    assert (other.status_code, other.json()["code"]) == (422, "idempotency-key-reused")
    odd = acme.post("/v1/jobs", json=body, headers={"idempotency-key": "two words"})
    assert odd.status_code == 400


def test_a_refused_job_may_be_sent_again_with_its_key(acme):
    body = {"task": "new", "dataset": "ds_nothing"}
    assert acme.post("/v1/jobs", json=body, headers={"idempotency-key": "b"}).status_code == 404
    assert acme.post("/v1/jobs", json=body, headers={"idempotency-key": "b"}).status_code == 404


def test_an_answer_that_was_lost_is_made_of_what_is_there(bench, acme):
    """The process died after making the job and before answering."""
    body = json.dumps({"task": "new", "dataset": upload(acme)}).encode()
    workspace = bench.workspace("acme")
    first = acme.post("/v1/jobs", content=body, headers={"idempotency-key": "c", "content-type": "application/json"})
    with bench.db.writing() as connection:
        from sqlalchemy import text

        connection.execute(text("UPDATE calls SET status = NULL, body = NULL, held_until = 0"))
    again = acme.post("/v1/jobs", content=body, headers={"idempotency-key": "c", "content-type": "application/json"})
    assert again.status_code == 202
    assert again.json()["id"] == first.json()["id"]
    assert len(workspace.jobs(task="new").items) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "task"),
        ({"task": "a.b", "dataset": "ds_x"}, "task"),
        ({"task": "a" * 65, "dataset": "ds_x"}, "task"),
        ({"task": 3, "dataset": "ds_x"}, "task"),
        ({"task": "a"}, "dataset"),
        ({"task": "a", "dataset": "../x"}, "dataset"),
        ({"task": "a", "dataset": "ds_x", "corrections": True}, "dataset"),
        ({"task": "a", "dataset": "ds_x", "priority": 10}, "priority"),
        ({"task": "a", "dataset": "ds_x", "priority": "1"}, "priority"),
        ({"task": "a", "dataset": "ds_x", "publish": "maybe"}, "publish"),
        ({"task": "a", "dataset": "ds_x", "settings": []}, "settings"),
        ({"task": "a", "dataset": "ds_x", "settings": {"epochs": 0}}, "settings.epochs"),
        ({"task": "a", "dataset": "ds_x", "settings": {"epochs": 2.5}}, "settings.epochs"),
        ({"task": "a", "dataset": "ds_x", "settings": {"epochs": True}}, "settings.epochs"),
        ({"task": "a", "dataset": "ds_x", "settings": {"lr": 7}}, "settings.lr"),
        ({"task": "a", "dataset": "ds_x", "settings": {"source": "/etc/passwd"}}, "settings.source"),
        ({"task": "a", "dataset": "ds_x", "settings": {"backbone": "other"}}, "settings.backbone"),
        ({"task": "a", "dataset": "ds_x", "settings": {"labels": ["one"]}}, "settings.labels"),
        ({"task": "a", "dataset": "ds_x", "colour": "red"}, "colour"),
    ],
)
def test_a_wrong_field_of_a_job_is_named(asker, body, field):
    answer = asker.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    assert [fault["field"] for fault in answer.json()["errors"]] == [field]


def test_all_faults_are_named_at_once(asker):
    answer = asker.post("/v1/jobs", json={"task": "a b", "settings": {"epochs": "2", "size": 0}, "colour": 1})
    fields = {fault["field"] for fault in answer.json()["errors"]}
    assert fields == {"task", "settings.epochs", "settings.size", "colour"}


def test_an_unknown_method_is_refused_with_those_there_are(asker):
    answer = asker.post("/v1/jobs", json={"task": "a", "dataset": "ds_x", "settings": {"method": "full"}})
    assert answer.status_code == 400
    assert "houlsby" in answer.json()["hint"]


def test_the_settings_that_http_takes_are_those_of_the_trainer():
    names = {field.alias or name for name, field in TrainSettings.model_fields.items()}
    assert names | {"corrections"} == set(TRAIN_SETTINGS)


def test_too_many_queued_jobs_are_a_429(bench):
    client = bench.add_tenant("small", TenantLimits(queued_jobs=1))
    dataset = upload(client)
    assert client.post("/v1/jobs", json={"task": "a", "dataset": dataset}).status_code == 202
    refused = client.post("/v1/jobs", json={"task": "b", "dataset": dataset})
    assert (refused.status_code, refused.json()["code"]) == (429, "over-limit")
    assert refused.headers["retry-after"] == "1"


def test_a_job_is_cancelled(acme):
    job = acme.post("/v1/jobs", json={"task": "a", "dataset": upload(acme)}).json()["id"]
    assert acme.post(f"/v1/jobs/{job}/cancel").json()["state"] == "cancelled"
    assert acme.post(f"/v1/jobs/{job}/cancel").status_code == 202


def test_events_come_as_json_page_by_page(bench, acme):
    job = acme.post("/v1/jobs", json={"task": "a", "dataset": upload(acme)}).json()["id"]
    queue, cohort = claim(bench)
    for epoch in range(4):
        queue.record(cohort, job, JobNote("epoch", f"epoch {epoch}", {"epoch": epoch}))
    page = acme.get(f"/v1/jobs/{job}/events?limit=3").json()
    rest = acme.get(f"/v1/jobs/{job}/events", params={"cursor": page["next_cursor"]}).json()
    kinds = [event["kind"] for event in page["items"] + rest["items"]]
    assert kinds == ["queued", "claimed", "epoch", "epoch", "epoch", "epoch"]
    assert rest["next_cursor"] is None
    after = acme.get(f"/v1/jobs/{job}/events?after={rest['items'][-2]['id']}").json()["items"]
    assert [event["data"] for event in after] == [{"epoch": 3}]


def test_a_stream_gives_all_events_and_ends_with_the_job(bench, acme):
    job = acme.post("/v1/jobs", json={"task": "a", "dataset": upload(acme)}).json()["id"]
    queue, cohort = claim(bench)
    queue.record(cohort, job, JobNote("epoch", "epoch 1", {"epoch": 1}))
    queue.finish(cohort, job, SUCCEEDED, result={})
    answer = acme.get(f"/v1/jobs/{job}/events", headers={"accept": "text/event-stream"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = read_stream(answer)
    assert [kind for _, kind, _ in events][:3] == ["queued", "claimed", "epoch"]
    assert events[-1][1:] == ("end", {"state": "succeeded"})
    where = {"accept": "text/event-stream", "last-event-id": events[1][0]}
    assert read_stream(acme.get(f"/v1/jobs/{job}/events", headers=where)) == events[2:]
    assert bench.app.state.streams == {}


def test_a_draining_process_ends_its_streams(bench, acme):
    job = acme.post("/v1/jobs", json={"task": "a", "dataset": upload(acme)}).json()["id"]
    bench.app.state.is_draining = True
    assert acme.get(f"/v1/jobs/{job}/events", headers={"accept": "text/event-stream"}).text == ""


def test_too_many_streams_are_refused(bench, acme):
    job = acme.post("/v1/jobs", json={"task": "a", "dataset": upload(acme)}).json()["id"]
    bench.app.state.streams["acme"] = 64
    assert acme.get(f"/v1/jobs/{job}/events", headers={"accept": "text/event-stream"}).status_code == 429


def test_a_batch_is_queued_and_its_output_read(bench, acme):
    dataset = upload(acme)
    made = acme.post("/v1/batches", json={"task": "mail", "dataset": dataset, "min_confidence": 0.5})
    assert made.status_code == 202
    job = made.json()
    assert (job["kind"], job["task"], job["settings"]) == ("batch", "mail", {"version": 1, "min_confidence": 0.5})
    early = acme.get(f"/v1/batches/{job['id']}/output")
    assert (early.status_code, early.json()["code"]) == (409, "conflict")
    queue, cohort = claim(bench)
    path = bench.db.paths.batch("acme", job["id"])
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"line": 2}\n')
    queue.finish(cohort, job["id"], SUCCEEDED, result={})
    output = acme.get(f"/v1/batches/{job['id']}/output")
    assert (output.content, output.headers["content-type"]) == (b'{"line": 2}\n', "application/jsonl")


def test_a_training_has_no_output(acme):
    job = acme.post("/v1/jobs", json={"task": "a", "dataset": upload(acme)}).json()["id"]
    assert acme.get(f"/v1/batches/{job}/output").status_code == 409


def test_a_batch_of_an_unknown_task_is_a_404(acme):
    assert acme.post("/v1/batches", json={"task": "nobody", "dataset": upload(acme)}).status_code == 404
    assert acme.post("/v1/batches", json={"task": "mail@9", "dataset": upload(acme)}).status_code == 404
