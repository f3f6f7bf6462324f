"""Batches are answered whole and once, erasure leaves nothing, and the least sure rows are suggested."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest
from trainer_bench import make_rows, open_bench_at

from inlay.data import InputRow
from inlay.errors import UnknownName
from inlay.service.engine import Caller, EngineRefused, Predicted, VersionLoaded, WireAnswer, WireError
from inlay.service.state import JobRequest
from inlay.service.trainer import side_jobs
from inlay.service.trainer.trainer import keep_sweeping
from inlay.service.views import choose_rows_to_label
from inlay.serving import Engine, Request, describe_answer

RECIPE = {"method": "head", "size": None, "epochs": None, "lr": None}


def ask(bench, rows, tenant="acme", task="mail", **settings):
    """Submit a batch of rows."""
    dataset = rows if isinstance(rows, str) else bench.upload(rows, tenant, name="batch.jsonl")
    return bench.workspace(tenant).submit(JobRequest("batch", task, dataset, settings))


def read_lines(bench, job):
    return [json.loads(line) for line in bench.db.paths.batch(job.tenant, job.id).read_text().splitlines()]


@pytest.fixture
def trained(bench):
    """A bench on which `mail` of acme is live."""
    bench.submit(make_rows(80), settings=RECIPE)
    bench.train()
    assert bench.workspace().live("mail") == 1
    return bench


class FakeEngine:
    """An engine's client that answers in this process; `refusals` are raised first."""

    def __init__(self, bench, refusals=()):
        self._engine = Engine(bench.context.backbone, bench.store, num_slots=4)
        self.refusals = list(refusals)
        self.callers: list[Caller] = []
        self.loaded, self.forgotten = [], []

    def predict(self, caller, rows, **more):
        self.callers.append(caller)
        if self.refusals:
            raise self.refusals.pop(0)
        found = []
        for row in rows:
            answer = self._engine.predict([Request(f"{row.store_name}@{row.number}", row.text, row.pair)])[0]
            if answer.error is not None:
                error = answer.error
                found.append(WireError(error.code, error.message, error.hint, error.http_status))
            else:
                found.append(WireAnswer(row.store_name, row.number, describe_answer(answer)))
        return Predicted(1, found, 3 * len(rows), 0.0, 0.0)

    def load(self, name, number):
        if self.refusals:
            raise self.refusals.pop(0)
        self.loaded.append((name, number))
        return VersionLoaded(1, 0.1, 8)

    def forget(self, name):
        self.forgotten.append(name)
        return 1


def refusal(status, retry_after_s=0.01):
    return EngineRefused("not now", "later", code="busy", status=status, retry_after_s=retry_after_s)


def test_every_row_of_a_batch_gets_a_line_in_order(trained, open_bench):
    rows = [{"text": row["text"]} for row in make_rows(600, seed=3)]
    rows[7]["text"] = "  "
    job = ask(trained, rows)
    assert trained.trainer.do_next()
    done = trained.see(job)
    assert done.state == "succeeded", done.error
    lines = read_lines(trained, job)
    assert [line["line"] for line in lines] == list(range(1, 601))
    assert (done.result["rows"], done.result["errors"], done.result["version"]) == (600, 1, 1)
    assert done.result["output"] == f"/v1/batches/{job.id}/output"
    assert lines[0]["task"] == "mail"
    assert lines[0]["version"] == "mail@1"
    assert "empty text" in lines[7]["error"]["message"]
    alone = Engine(trained.context.backbone, trained.store).predict([Request("acme.mail@1", rows[0]["text"])])[0]
    assert lines[0]["label"] == alone.outcome.label
    told = json.dumps(lines) + json.dumps(done.to_json())
    assert "acme." not in told
    assert str(trained.home) not in told
    assert [path.name for path in trained.db.paths.batch("acme", "x").parent.iterdir()] == [f"{job.id}.jsonl"]
    trained.db.close()  # which writes what is counted
    again = open_bench(trained.home)
    assert [(day.task, day.rows) for day in again.workspace().usage()] == [("mail", 600)]


def test_a_batch_goes_through_the_engine_behind_everybody(open_bench, trained):
    engine = FakeEngine(trained, [refusal(429), refusal(503)])
    busy = open_bench(trained.home, engine)
    job = ask(busy, [{"text": row["text"]} for row in make_rows(300, seed=3)])
    busy.trainer.do_next()
    assert busy.see(job).state == "succeeded"
    assert {caller.band for caller in engine.callers} == {"bulk"}
    assert {caller.tenant for caller in engine.callers} == {"acme"}
    assert engine.callers[0].tokens_per_minute == 600_000
    assert len(engine.callers) == 4
    assert len(read_lines(busy, job)) == 300


def test_without_an_engine_that_answers_rows_are_answered_here(open_bench, trained):
    engine = FakeEngine(trained, [refusal(503)] * 1000)
    lost = open_bench(trained.home, engine)
    job = ask(lost, [{"text": "the cat sat"}])
    lost.trainer.do_next()
    assert lost.see(job).state == "succeeded"
    assert len(read_lines(lost, job)) == 1


def test_an_engine_that_answers_by_another_version_is_not_believed(open_bench, trained):
    engine = FakeEngine(trained)
    predict = engine.predict

    def lie(caller, rows, **more):
        answered = predict(caller, rows)
        wrong = [WireAnswer("other.mail", 1, answer.answer) for answer in answered.answers]
        return Predicted(1, wrong, 1, 0.0, 0.0)

    engine.predict = lie
    bench = open_bench(trained.home, engine)
    job = ask(bench, [{"text": "the cat sat"}])
    bench.trainer.do_next()
    assert bench.see(job).state == "failed"
    assert not bench.db.paths.batch("acme", job.id).exists()


def test_a_version_is_hot_before_it_is_live(open_bench, bench):
    engine = FakeEngine(bench)
    proving = open_bench(bench.home, engine)
    job = proving.submit(make_rows(), settings=RECIPE)
    live_when_loaded = []
    load = engine.load
    engine.load = lambda *given: live_when_loaded.append(proving.workspace().live("mail")) or load(*given)
    proving.train()
    assert engine.loaded == [("acme.mail", 1)]
    assert live_when_loaded == [None]
    assert proving.kinds(job)[-2:] == ["proved", "live"]


def test_a_version_that_the_engine_refuses_does_not_go_live(open_bench, bench):
    engine = FakeEngine(bench, [refusal(500)])
    bench = open_bench(bench.home, engine)
    job = bench.submit(make_rows(), settings=RECIPE)
    bench.train()
    done = bench.see(job)
    assert (done.state, done.result["is_live"]) == ("succeeded", False)
    assert "the engine refuses it" in done.result["reason"]


def test_an_engine_that_comes_back_proves_the_version(open_bench, bench):
    engine = FakeEngine(bench, [refusal(503)] * 2)
    bench = open_bench(bench.home, engine)
    job = bench.submit(make_rows(), settings=RECIPE)
    bench.train()
    assert "proved" in bench.kinds(job)


def test_an_engine_that_stays_away_does_not_keep_a_version_from_going_live(open_bench, bench):
    bench = open_bench(bench.home, FakeEngine(bench, [refusal(503)] * 1000))
    job = bench.submit(make_rows(), settings=RECIPE)
    bench.train()
    assert bench.kinds(job)[-2:] == ["notice", "live"]


@pytest.mark.parametrize("moment", ["first chunk", "second chunk", "renamed"])
def test_a_batch_that_was_killed_goes_on_with_the_same_version(moment, trained, backbone_of, monkeypatch):
    rows = [{"text": row["text"]} for row in make_rows(600, seed=3)]
    job = ask(trained, rows)
    home = trained.home
    trained.db.close()
    child = os.fork()
    if not child:
        try:
            bench = open_bench_at(home, backbone_of("bert"))
            if moment == "renamed":
                monkeypatch.setattr(side_jobs.BatchWork, "_succeed", lambda self: os.kill(os.getpid(), signal.SIGKILL))
            answer, calls = bench.context.answers.answer, []

            def die(*given):
                calls.append(1)
                if len(calls) == {"first chunk": 2, "second chunk": 3}.get(moment, 10**6):
                    part = next(bench.db.paths.batch("acme", "x").parent.glob("*.parts/*"))
                    with part.open("ab") as file:  # what a kill in the middle of a line leaves
                        file.write(b'{"line": 99')
                    os.kill(os.getpid(), signal.SIGKILL)
                return answer(*given)

            bench.context.answers.answer = die
            bench.trainer.do_next()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    bench = open_bench_at(home, backbone_of("bert"))
    bench.queue.reclaim_of("tester")
    bench.submit(make_rows(80, seed=9), settings=RECIPE, publish="always")
    bench.train()
    assert bench.workspace().live("mail") == 2
    asked = []
    answer = bench.context.answers.answer
    bench.context.answers.answer = lambda *given: asked.append(len(given[2])) or answer(*given)
    bench.trainer.do_next()
    done = bench.see(job)
    assert done.state == "succeeded", done.error
    lines = read_lines(bench, job)
    assert [line["line"] for line in lines] == list(range(1, 601))
    assert {line["version"] for line in lines} == {"mail@1"}
    assert sum(asked) == {"first chunk": 344, "second chunk": 88, "renamed": 0}[moment]
    assert not list(bench.db.paths.batch("acme", "x").parent.glob("*.parts"))
    bench.db.close()


def test_a_cancelled_batch_leaves_no_file(trained):
    job = ask(trained, [{"text": row["text"]} for row in make_rows(600, seed=3)])
    trained.trainer.heartbeat_s = 0.01
    answer = trained.context.answers.answer

    def cancel(*given):
        trained.workspace().cancel(job.id)
        __import__("time").sleep(0.2)
        return answer(*given)

    trained.context.answers.answer = cancel
    trained.trainer.do_next()
    assert trained.see(job).state == "cancelled"
    assert list(trained.db.paths.batch("acme", "x").parent.iterdir()) == []


def test_a_stop_gives_a_batch_back(trained):
    job = ask(trained, [{"text": row["text"]} for row in make_rows(600, seed=3)])
    answer = trained.context.answers.answer
    trained.context.answers.answer = lambda *given: trained.trainer.stopping.set() or answer(*given)
    trained.trainer.do_next()
    assert trained.see(job).state == "queued"
    trained.trainer.stopping.clear()
    trained.context.answers.answer = answer
    trained.trainer.do_next()
    assert trained.see(job).state == "succeeded"
    assert len(read_lines(trained, job)) == 600


@pytest.mark.parametrize(
    ("settings", "task", "words"),
    [
        ({"lr": 0.1}, "mail", "not a setting of such a job"),
        ({"version": 9}, "mail", "mail@9"),
        ({"text": "body"}, "mail", "no column named `body`"),
    ],
)
def test_a_batch_that_cannot_be_says_why(trained, settings, task, words):
    job = ask(trained, [{"text": "a b"}], task=task, **settings)
    trained.trainer.do_next()
    done = trained.see(job)
    assert done.state == "failed"
    assert words in done.error["message"]
    assert str(trained.home) not in json.dumps(done.error)


def test_another_tenants_task_answers_no_batch(trained):
    for task in ("mail", "acme.mail"):
        with pytest.raises(UnknownName):
            ask(trained, [{"text": "a b"}], "other", task)


def test_an_erased_task_leaves_nothing_and_the_engine_forgets_it(open_bench, bench):
    secret = "quokka"
    rows = [{"text": f"{secret} {row['text']}", "label": row["label"]} for row in make_rows(80)]
    engine = FakeEngine(bench)
    bench = open_bench(bench.home, engine)
    bench.submit(rows, settings=RECIPE)
    bench.submit(make_rows(80, seed=1), "mail", "other", settings=RECIPE)
    bench.train()
    batch = ask(bench, [{"text": row["text"]} for row in rows])
    bench.trainer.do_next()
    assert bench.see(batch).state == "succeeded"
    bench.workspace().erase_task("mail")
    while bench.trainer.do_next():
        pass
    assert engine.forgotten == ["acme.mail"]
    assert [task.name for task in bench.store.ledger()] == ["other.mail"]
    bench.db.checkpoint()
    for path in bench.home.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
    assert bench.workspace("other").live("mail") == 1


def test_what_a_machine_has_of_a_batch_that_another_ended_or_erased_is_deleted_soon(trained):
    done, waiting = (ask(trained, [{"text": "a b"}]) for _ in range(2))
    trained.trainer.do_next()
    gone, kept = ((trained.db.paths.batch_parts("acme", job)) for job in (done.id, waiting.id))
    erased = trained.db.paths.batch_parts("acme", "job_of_an_erased_task")
    for folder in (gone, kept, erased):
        folder.mkdir(parents=True)
        (folder / "1.1").write_text('{"line": 1}\n')
    stopping = threading.Event()
    sweeps = threading.Thread(target=keep_sweeping, args=(trained.context, stopping))
    sweeps.start()
    stopping.set()  # it sweeps once all the same
    sweeps.join()
    assert not gone.exists()
    assert not erased.exists()
    assert (kept / "1.1").exists(), "the batch is not answered yet"
    while trained.trainer.do_next():
        pass
    assert [trained.see(job).state for job in (done, waiting)] == ["succeeded"] * 2
    assert not list(kept.parent.glob("*.parts"))


def test_erasing_a_task_while_it_trains_ends_its_job_and_no_other(bench):
    jobs = [
        bench.submit(make_rows(seed=seed), "mail", tenant, settings={"epochs": 6})
        for seed, tenant in enumerate(("acme", "other"))
    ]
    bench.trainer.heartbeat_s = 0.01
    record, asked = bench.queue.record, []

    def erase(cohort, job_id, note):
        record(cohort, job_id, note)
        if job_id == jobs[0].id and note.kind == "epoch" and not asked:
            asked.append(bench.workspace().erase_task("mail"))
            __import__("time").sleep(0.2)

    bench.queue.record = erase
    bench.train()
    while bench.trainer.do_next():
        pass
    assert bench.see(jobs[1]).state == "succeeded"
    assert [task.name for task in bench.store.ledger()] == ["other.mail"]
    assert list((bench.db.paths.service / "runs").iterdir()) == []


def test_side_jobs_and_training_go_on_at_the_same_time(open_bench, trained):
    side = open_bench(trained.home)
    batch = ask(trained, [{"text": row["text"]} for row in make_rows(300, seed=3)])
    job = trained.submit(make_rows(80, seed=5), "second", settings={"epochs": 4})
    thread = threading.Thread(target=side.trainer.do_next)
    thread.start()
    trained.train()
    thread.join(60)
    assert trained.see(job).state == "succeeded"
    assert trained.see(batch).state == "succeeded"


# Suggestions


def say(label, probability):
    other = {"billing": "delivery", "delivery": "billing"}[label]
    return {"label": label, "probabilities": {label: probability, other: 1 - probability}}


def test_the_least_sure_rows_come_first_and_no_text_twice():
    rows = [InputRow(line, text) for line, text in enumerate(["a", "b", "B ", "c", "d"], 1)]
    answers = [say("billing", p) for p in (0.9, 0.6, 0.6, 0.55, 0.7)]
    found = choose_rows_to_label(rows, answers, limit=3)
    assert [(row.line, row.text) for row in found] == [(4, "c"), (2, "b"), (5, "d")]
    assert found[0].to_json() == {"line": 4, "text": "c", "pair": None, "answer": "billing", "confidence": 0.55}
    assert [row.text for row in choose_rows_to_label(rows, answers, limit=3, known=["C"])] == ["b", "d", "a"]


def test_every_answer_gets_its_share():
    rows = [InputRow(line, f"text {line}") for line in range(40)]
    answers = [say("billing", 0.5 + line / 1000) for line in range(30)] + [say("delivery", 0.9)] * 10
    found = choose_rows_to_label(rows, answers, limit=10)
    assert len(found) == 10
    half = choose_rows_to_label(rows, answers, limit=4)
    assert [row.answer for row in half] == ["billing"] * 4
    three = [*answers[:30], *[say("delivery", 0.9)] * 10]
    assert len({row.text for row in choose_rows_to_label(rows, three, limit=20)}) == 20


def test_numbers_are_spread_and_rows_without_an_answer_left_out():
    rows = [InputRow(line, f"text {line}") for line in range(10)]
    answers = [{"value": float(line)} for line in range(9)] + [{"error": {"code": "x"}}]
    assert [row.answer for row in choose_rows_to_label(rows, answers, limit=3)] == ["0", "4", "8"]
    assert len(choose_rows_to_label(rows, answers, limit=30)) == 9
