"""Datasets, corrections, usage, limits, idempotency keys and pages."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import select
from state_makers import DIGEST, START, make_dataset, store_version, train, train_and_store

from inlay.errors import BadConfig, UnknownName, Unsupported
from inlay.service.state import (
    LOCAL,
    Call,
    CallInFlight,
    Conflict,
    Correction,
    JobQueue,
    JobRequest,
    KeyReused,
    OverLimit,
    StoredAnswer,
    TenantLimits,
    Tenants,
    UploadContent,
    Workspace,
    schema,
    sweep_leftovers,
)


def files_of(workspace):
    return sorted(path.name for path in workspace.db.paths.datasets(workspace.name).iterdir())


def test_a_dataset_is_kept_as_it_came(workspace):
    dataset = make_dataset(workspace, "text,label\na,b\n")
    assert dataset.path.read_text() == "text,label\na,b\n"
    assert files_of(workspace) == [f"{dataset.id}.csv"]
    assert workspace.dataset(dataset.id) == dataset
    shown = dataset.to_json()
    assert "path" not in shown
    assert shown["created_at"] == "2027-01-15T08:00:00.000Z"
    assert shown["reading"]["kind"] == "classify"


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (TenantLimits(dataset_bytes=10), "dataset_bytes"),
        (TenantLimits(dataset_rows=1), "dataset_rows"),
        (TenantLimits(labels=0), "labels"),
        (TenantLimits(stored_bytes=10), "stored_bytes"),
    ],
)
def test_an_upload_above_a_limit_is_refused_and_deleted(workspace, limits, name):
    Tenants(workspace.db).set_limits("acme", limits)
    reading = {"text": "text", "label": "label", "labels": [{"label": "ham", "count": 1}]}
    with pytest.raises(OverLimit) as refused:
        make_dataset(workspace, found=UploadContent(reading=reading))
    assert refused.value.limit == name
    assert refused.value.http_status == 413
    assert files_of(workspace) == []
    assert workspace.datasets().items == ()


def test_stored_bytes_are_those_of_datasets_and_versions(workspace):
    make_dataset(workspace)
    train_and_store(workspace)
    assert workspace.stored_bytes() == 34 + 100
    assert workspace.limits().to_json()["used"] == {"queued_jobs": 0, "stored_bytes": 134}


def test_a_dataset_in_use_is_not_deleted(workspace):
    dataset = make_dataset(workspace)
    job = train(workspace, dataset=dataset.id)
    with pytest.raises(Conflict, match=job.id):
        workspace.delete_dataset(dataset.id)
    workspace.cancel(job.id)
    workspace.delete_dataset(dataset.id)
    assert files_of(workspace) == []
    with pytest.raises(UnknownName):
        workspace.dataset(dataset.id)
    with pytest.raises(UnknownName):
        workspace.delete_dataset(dataset.id)


def test_other_columns_can_be_chosen_later(workspace):
    dataset = make_dataset(workspace)
    changed = workspace.set_reading(dataset.id, {"reading": {"text": "label", "label": "text"}})
    assert changed.found.reading == {"text": "label", "label": "text"}
    assert changed.found.columns == dataset.found.columns
    with pytest.raises(BadConfig, match="colour"):
        workspace.set_reading(dataset.id, {"colour": "red"})


@pytest.mark.parametrize("name", ["a" * 256, "a\nb", "\ud800", "a\0"])
def test_a_datasets_name_is_a_short_line(workspace, name):
    with pytest.raises(BadConfig, match="name of a dataset"):
        make_dataset(workspace, name=name)
    assert files_of(workspace) == []


def test_long_lists_come_in_pages(workspace):
    ids = [make_dataset(workspace).id for _ in range(5)]
    seen, cursor = [], None
    while True:
        page = workspace.datasets(limit=2, cursor=cursor)
        seen += [dataset.id for dataset in page.items]
        cursor = page.next_cursor
        make_dataset(workspace)  # what comes later moves nothing
        if cursor is None:
            break
    assert seen == ids[::-1]


@pytest.mark.parametrize(
    "cursor", ["", "x", "!!", "e30", "WyJqb2JzIiwgMV0", "WyJkYXRhc2V0cyIsICJ4Il0", "Ä", "A" * 5000]
)
def test_a_cursor_that_is_none_of_the_list_is_refused(workspace, cursor):
    with pytest.raises(BadConfig, match="cursor"):
        workspace.datasets(cursor=cursor)


@pytest.mark.parametrize("limit", [0, -1, 201])
def test_a_page_has_a_sensible_size(workspace, limit):
    for call in (workspace.datasets, workspace.jobs, workspace.tasks):
        with pytest.raises(BadConfig, match="limit"):
            call(limit=limit)


def test_jobs_are_listed_by_task_and_state(workspace):
    mail, news = train(workspace, "mail"), train(workspace, "news")
    workspace.cancel(mail.id)
    assert [job.id for job in workspace.jobs(task="news").items] == [news.id]
    assert [job.id for job in workspace.jobs(state="cancelled").items] == [mail.id]
    assert [job.place for job in workspace.jobs().items] == [1, None]


def test_corrections_are_merged_with_the_rows_of_the_live_version(workspace):
    dataset = make_dataset(workspace, "text,label\nhello,ham\nwin now,ham\nbye,ham\n")
    train_and_store(workspace, dataset=dataset.id)
    corrections = [
        Correction("win now", "ham", answered="spam", version=1),
        Correction("win now ", "spam"),
        Correction("free prize", "spam"),
    ]
    kept = workspace.add_feedback("mail", corrections)
    assert [item.correction.label for item in workspace.feedback("mail").items] == ["spam", "spam", "ham"]
    assert kept[0].to_json()["answered"] == "spam"
    assert workspace.num_feedback("mail") == 3
    merged = workspace.feedback_dataset("mail")
    rows = [json.loads(line) for line in merged.path.read_text().splitlines()]
    assert rows == [
        {"text": "hello", "label": "ham"},
        {"text": "win now", "label": "spam"},
        {"text": "bye", "label": "ham"},
        {"text": "free prize", "label": "spam"},
    ]
    assert merged.num_rows == 4
    assert merged.task == "mail"
    assert merged.size_bytes == merged.path.stat().st_size
    assert merged.found.reading["labels"] == [{"label": "ham", "count": 2}, {"label": "spam", "count": 2}]
    train(workspace, dataset=merged.id)


def test_merged_rows_keep_pairs_types_and_other_columns(workspace):
    content = '{"a": "x", "b": "y", "score": 1.5, "id": 7, "split": "dev"}\n{"a": "x", "b": "z", "score": 2, "id": 8}\n'
    reading = {"text": "a", "pair": "b", "label": "score", "kind": "regress", "labels": []}
    dataset = make_dataset(workspace, content, format="jsonl", found=UploadContent(reading=reading))
    train_and_store(workspace, dataset=dataset.id)
    workspace.add_feedback("mail", [Correction("x", "3.5", "y"), Correction("new", "1", "pair")])
    rows = [json.loads(line) for line in workspace.feedback_dataset("mail").path.read_text().splitlines()]
    assert rows[0] == {"a": "x", "b": "y", "score": 3.5, "id": 7, "split": "dev"}
    assert rows[1]["score"] == 2
    assert rows[2] == {"a": "new", "b": "pair", "score": 1, "split": "train"}


def test_what_cannot_be_merged_is_said_so(workspace):
    tags = UploadContent(reading={"text": "tokens", "pair": None, "label": "tags", "kind": "tag", "labels": []})
    dataset = make_dataset(workspace, found=tags)
    train(workspace)
    with pytest.raises(Conflict, match="no dataset"):
        workspace.feedback_dataset("mail")
    workspace.cancel(workspace.jobs().items[0].id)
    train_and_store(workspace, dataset=dataset.id)
    with pytest.raises(Conflict, match="no corrections"):
        workspace.feedback_dataset("mail")
    workspace.add_feedback("mail", [Correction("a", "b")])
    with pytest.raises(Unsupported, match="tag"):
        workspace.feedback_dataset("mail")
    workspace.delete_dataset(dataset.id)
    with pytest.raises(Conflict, match="deleted"):
        workspace.feedback_dataset("mail")


def test_a_merge_that_fails_leaves_no_draft(workspace):
    dataset = make_dataset(workspace)
    train_and_store(workspace, dataset=dataset.id)
    workspace.add_feedback("mail", [Correction("a", "b")])
    dataset.path.write_bytes(b"text,label\n\xff\xfe\xff,x\n" * 3)
    Tenants(workspace.db).set_limits("acme", TenantLimits(stored_bytes=1))
    with pytest.raises(Exception, match=r"\w"):
        workspace.feedback_dataset("mail")
    assert files_of(workspace) == [f"{dataset.id}.csv"]


@pytest.mark.parametrize(
    "item",
    [
        Correction("", "a"),
        Correction("a", " "),
        Correction("\ud800", "a"),
        Correction("a\0", "b"),
        Correction("a", "b", "\0"),
    ],
)
def test_a_correction_has_a_text_and_a_label(workspace, item):
    train(workspace)
    with pytest.raises(BadConfig):
        workspace.add_feedback("mail", [item])
    with pytest.raises(BadConfig):
        workspace.add_feedback("mail", [])


def test_usage_is_counted_by_day_and_task(workspace, clock):
    for _ in range(3):
        workspace.add_usage("mail", rows=2, tokens=20)
    workspace.add_usage("news", rows=1, tokens=5, requests=0)
    clock.now += 86400
    workspace.add_usage("mail", rows=7, tokens=70)
    workspace.db.meter.flush()
    days = [(item.day, item.task, item.rows, item.tokens, item.requests) for item in workspace.usage()]
    assert days == [("2027-01-16", "mail", 7, 70, 1), ("2027-01-15", "mail", 6, 60, 3), ("2027-01-15", "news", 1, 5, 0)]
    assert len(workspace.usage(days=1)) == 1
    with pytest.raises(BadConfig):
        workspace.usage(days=0)


def test_usage_is_written_within_a_second_by_itself(workspace):
    import time

    workspace.add_usage("mail", rows=1, tokens=1)
    until = time.monotonic() + 10
    while not workspace.usage() and time.monotonic() < until:
        time.sleep(0.05)
    assert workspace.usage()[0].rows == 1


def test_usage_that_cannot_be_written_is_kept(workspace, monkeypatch):
    meter = workspace.db.meter
    monkeypatch.setattr(meter, "_start", lambda: None)
    workspace.add_usage("mail", rows=1, tokens=1)
    with monkeypatch.context() as patch:
        patch.setattr(workspace.db, "writing", lambda: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            meter.flush()
    workspace.add_usage("mail", rows=2, tokens=2)
    meter.flush()
    assert workspace.usage()[0].rows == 3


def test_a_request_sent_again_is_answered_as_the_first_was(workspace):
    call = workspace.begin_call("once", DIGEST)
    assert isinstance(call, Call)
    with pytest.raises(CallInFlight):
        workspace.begin_call("once", DIGEST)
    with pytest.raises(KeyReused):
        workspace.begin_call("once", "cd" * 32)
    job = workspace.submit(JobRequest("train", "mail"), call)
    workspace.finish_call(call, 202, {"location": f"/v1/jobs/{job.id}"}, b'{"id": 1}')
    again = workspace.begin_call("once", DIGEST)
    assert again == StoredAnswer(job.id, 202, {"location": f"/v1/jobs/{job.id}"}, b'{"id": 1}')
    with pytest.raises(KeyReused):
        workspace.begin_call("once", "cd" * 32)


def test_a_crash_between_making_and_answering_does_nothing_twice(workspace, clock):
    call = workspace.begin_call("once", DIGEST)
    job = workspace.submit(JobRequest("train", "mail"), call)
    with pytest.raises(CallInFlight):
        workspace.begin_call("once", DIGEST)
    clock.now += 61
    assert workspace.begin_call("once", DIGEST) == StoredAnswer(job.id)
    assert len(workspace.jobs().items) == 1


def test_a_crash_before_making_is_taken_over_and_the_first_then_makes_nothing(workspace, clock):
    first = workspace.begin_call("once", DIGEST)
    clock.now += 61
    second = workspace.begin_call("once", DIGEST)
    with pytest.raises(CallInFlight):
        workspace.submit(JobRequest("train", "mail"), first)
    assert workspace.jobs().items == ()
    workspace.submit(JobRequest("train", "mail"), second)
    workspace.finish_call(first, 500, {}, b"")
    workspace.finish_call(second, 202, {}, b"ok")
    assert workspace.begin_call("once", DIGEST).status == 202


def test_a_call_that_made_nothing_can_be_sent_again(workspace):
    call = workspace.begin_call("once", DIGEST)
    workspace.abandon_call(call)
    assert isinstance(workspace.begin_call("once", "cd" * 32), Call)


def test_an_upload_whose_call_was_taken_over_leaves_no_file(workspace, clock):
    first = workspace.begin_call("once", DIGEST)
    clock.now += 61
    workspace.begin_call("once", DIGEST)
    folder = workspace.db.paths.datasets("acme")
    folder.mkdir(parents=True)
    path = folder / ".draft-x.csv"
    path.write_text("text,label\n")
    from inlay.service.state import DatasetDraft

    with pytest.raises(CallInFlight):
        workspace.add_dataset(DatasetDraft(path, "x", "csv", 11, DIGEST, 0, UploadContent()), first)
    assert files_of(workspace) == []


def test_answers_are_kept_for_a_day(workspace, clock):
    call = workspace.begin_call("once", DIGEST)
    workspace.finish_call(call, 200, {}, b"")
    clock.now += 24 * 3600 + 1
    assert isinstance(workspace.begin_call("once", "cd" * 32), Call)


@pytest.mark.parametrize("key", ["", "a b", "ä", "a" * 256, "a\n"])
def test_an_idempotency_key_is_printable_ascii(workspace, key):
    with pytest.raises(BadConfig):
        workspace.begin_call(key, DIGEST)


def test_two_tenants_may_use_the_same_idempotency_key(db, workspace):
    Tenants(db).add("rival")
    workspace.begin_call("once", DIGEST)
    assert isinstance(Workspace(db, "rival").begin_call("once", "cd" * 32), Call)


def test_a_sweep_deletes_what_no_row_knows_and_nothing_else(db, workspace):
    dataset = make_dataset(workspace)
    version = train_and_store(workspace, dataset=dataset.id)
    folder = db.paths.datasets("acme")
    strays = [folder / ".draft-1.csv", folder / "ds_gone.csv", db.paths.batch("acme", "job_gone")]
    strays += [db.paths.evaluations("acme", "gone") / "1.json", db.paths.datasets("gone") / "x.csv"]
    strays += [db.paths.service / ".draft-backup-1" / "service.db"]
    kept = [
        dataset.path,
        db.paths.evaluations("acme", "mail") / "1.json",
        db.paths.evaluations(LOCAL, "old") / "1.json",
    ]
    for path in (*strays, *kept[1:]):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    zombie = store_version(workspace, "mail", seed=9)
    mine = store_version(Workspace(db, LOCAL), "by-hand", seed=3)
    assert sweep_leftovers(db) == 0  # all of it is fresh: it may be on its way
    assert sweep_leftovers(db, old_s=0) == len(strays) + 1
    assert [path for path in strays if path.exists()] == []
    assert all(path.exists() for path in kept)
    assert [info.version for info in db.store.versions("acme.mail")] == [version]
    assert db.store.resolve("by-hand") == mine
    with pytest.raises(UnknownName):
        db.store.resolve(zombie.reference)


def test_a_sweep_leaves_versions_of_open_jobs_alone(db, workspace):
    train(workspace)
    version = store_version(workspace)
    JobQueue(db).claim("trainer", company_s=0)
    sweep_leftovers(db, old_s=0)
    assert db.store.resolve("acme.mail") == version


def test_who_changes_what_is_noted_without_texts(workspace):
    train_and_store(workspace, dataset=make_dataset(workspace).id)
    workspace.add_feedback("mail", [Correction("a customer's secret", "spam")])
    workspace.move_alias("mail", 1)
    workspace.audit("key.make", "abc")
    row = schema.audit.c
    with workspace.db.reading() as connection:
        noted = connection.execute(select(schema.audit).where(row.tenant == "acme")).all()
    assert {item.action for item in noted} >= {"job.submit", "alias.move", "key.make"}
    assert "secret" not in str(noted)
    assert {item.at for item in noted} == {START}
