"""`inlay.Client` against the app: many tasks at once, and files that are answered in the background."""

from __future__ import annotations

import json
import threading
import time

import pytest
from web_bench import BASE, CSV, measure

import inlay
from inlay.client import remote
from inlay.service.state import FAILED, SUCCEEDED, JobQueue

pytestmark = pytest.mark.filterwarnings("ignore:You should not use the 'timeout' argument")  # the test client has none


@pytest.fixture
def client(bench, acme):
    """A client of `acme`, which has the tasks `mail` and `length`; its requests go to the app in this process."""
    bench.store_task("acme", "length")
    bench.engine.rules["acme.length"] = measure
    found = inlay.Client(BASE, bench.secrets["acme"])
    found.close()
    found._http._client = acme
    return found


def run_batch(bench, lines, error=None):
    """Do what a trainer does with the next batch, as soon as there is one; return the thread and the job's settings."""
    settings = {}

    def work():
        queue, until = JobQueue(bench.db), time.monotonic() + 30
        while (cohort := queue.claim("tests", kinds=("batch",), company_s=0.0, most=1)) is None:
            assert time.monotonic() < until, "no batch was queued"
            time.sleep(0.02)
        (job,) = cohort.jobs
        settings.update(task=job.task, **job.settings)
        path = bench.db.paths.batch("acme", job.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if error is None:
            queue.finish(cohort, job.id, SUCCEEDED, result={})
        else:
            queue.finish(cohort, job.id, FAILED, error=error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, settings


def test_several_tasks_answer_each_row_in_their_order(client):
    by_row = client.predict_tasks(["length", "mail"], ["a prize", {"text": "see you"}, "a prize now"])
    assert [[answer.version for answer in answers] for answers in by_row] == [["length@1", "mail@1"]] * 3
    assert [answers[0].value for answers in by_row] == [7.0, 7.0, 11.0]
    assert [answers[1].label for answers in by_row] == ["spam", "ham", "spam"]


def test_all_tasks_answer_one_text(client):
    (answers,) = client.predict_tasks("*", "a prize")
    assert {answer.task: answer.version for answer in answers} == {"mail": "mail@1", "length": "length@1"}


def test_rows_for_several_tasks_go_in_several_requests_and_come_back_in_order(client, bench, monkeypatch):
    monkeypatch.setattr(remote, "_ROWS_AT_ONCE", 2)
    rows = ["x" * number for number in (5, 1, 4, 2, 3)]
    by_row = client.predict_tasks(["length", "mail"], rows, min_confidence=0.5)
    assert [answers[0].value for answers in by_row] == [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [len(asked) for _, asked in bench.engine.asked] == [4, 4, 2]
    assert {row.min_confidence for _, asked in bench.engine.asked for row in asked} == {0.5}


def test_a_row_that_one_of_several_tasks_cannot_answer_has_errors_of_its_own(client):
    good, bad = client.predict_tasks(["length", "mail"], ["a prize", " "])
    assert [answer.error for answer in good] == [None, None]
    assert [answer.error.code for answer in bad] == ["bad-data", "bad-data"]


def test_a_file_is_answered_in_the_background_row_by_row(client, bench, tmp_path):
    (tmp_path / "new.csv").write_bytes(CSV)
    lines = [{"line": number, "label": "ham"} for number in range(2, 42)]
    thread, settings = run_batch(bench, lines)
    found = client.predict_file("mail", tmp_path / "new.csv", min_confidence=0.25)
    thread.join()
    assert list(found) == lines
    assert settings == {"task": "mail", "version": 1, "min_confidence": 0.25}
    assert [(dataset.name, dataset.num_rows) for dataset in client.datasets()] == [("new.csv", 40)]


def test_a_dataset_that_is_there_is_answered_without_another_upload(client, bench):
    dataset = client.upload(CSV, name="new.csv")
    thread, settings = run_batch(bench, [{"line": 2}])
    assert list(client.predict_file("mail@1", dataset)) == [{"line": 2}]
    thread.join()
    assert "min_confidence" not in settings
    assert len(client.datasets()) == 1


def test_a_file_that_cannot_be_answered_raises_the_error_of_its_job(client, bench):
    error = {"code": "bad-data", "message": "no column of texts", "hint": "name it"}
    dataset = client.upload(CSV, name="new.csv")
    thread, _ = run_batch(bench, [], error)
    with pytest.raises(inlay.InlayError, match="no column of texts") as caught:
        client.predict_file("mail", dataset)
    thread.join()
    assert (caught.value.code, caught.value.hint) == ("bad-data", "name it")


def test_bytes_without_a_name_are_csv(client, bench):
    thread, settings = run_batch(bench, [{"line": 2, "label": "ham"}])
    assert list(client.predict_file("mail", CSV)) == [{"line": 2, "label": "ham"}]
    thread.join()
    assert settings["task"] == "mail"
    assert [(dataset.name, dataset.format) for dataset in client.datasets()] == [("rows.csv", "csv")]
