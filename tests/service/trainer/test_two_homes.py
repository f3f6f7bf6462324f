"""Two machines' trainers over one Postgres and one bucket, in this process. `make postgres` runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_side_jobs import FakeEngine
from trainer_bench import Bench, make_rows, open_bench_at

sys.path += [str(Path(__file__).parents[1] / "state"), str(Path(__file__).parents[2] / "store")]
from bucket_server import BUCKET, KEYS, FaultyProxy, serve_bucket
from postgres_server import IS_POSTGRES, drop_database, make_database, url_of

from inlay.errors import BadConfig, StoreUnreachable
from inlay.service.state import Database, JobRequest, Tenants, erase_task
from inlay.service.trainer import cohort_work
from inlay.service.trainer.answering import Answerer
from inlay.serving import Request
from inlay.store import Store, object_storage

pytest.importorskip("obstore")
pytest.importorskip("moto.server")
pytestmark = pytest.mark.skipif(not IS_POSTGRES, reason="`make postgres` runs it")

EPOCHS = 4
Open = Callable[[str], Bench]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with serve_bucket() as address:
        yield address


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> FaultyProxy:
    proxy = FaultyProxy(s3)
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": proxy.address}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_storage, "_FIRST_PAUSE_S", 0.001)
    return proxy


@pytest.fixture
def machine(proxy: FaultyProxy, tmp_path: Path, backbone_of: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """A function that opens the service on a machine of its own: another disk, the same database and bucket."""
    name, opened = make_database(), []
    monkeypatch.setenv("INLAY_DATABASE", url_of(name))
    place = f"s3://{BUCKET}/{tmp_path.name}"

    def open_it(machine_name: str) -> Bench:
        monkeypatch.setenv("INLAY_LOCAL", str(tmp_path / machine_name))
        opened.append(open_bench_at(place, backbone_of("bert")))
        opened[-1].trainer.owner = machine_name
        return opened[-1]

    yield open_it
    for bench in opened:
        bench.db.close()
    drop_database(name)


def texts_under(folder: Path, text: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def keys_below(bench: Bench, prefix: str) -> list[str]:
    return [each.key for each in bench.store.storage.list(prefix)]


class MachineDied(BaseException):
    """Nothing of the machine works any more: no lease is given back, nothing is cleaned up."""


def die_at_state(bench: Bench, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until a resume state was kept so often, and die there."""
    save, calls = cohort_work.KeptAttempts.save, []

    def save_and_die(kept: Any, folder: Path) -> None:
        save(kept, folder)
        calls.append(folder)
        if len(calls) == number:
            raise MachineDied

    with monkeypatch.context() as patch:
        patch.setattr(cohort_work.KeptAttempts, "save", save_and_die)
        with pytest.raises(MachineDied):
            bench.train()


def test_what_one_machine_was_told_another_trains_and_both_answer(machine, tmp_path):
    first, second = machine("a"), machine("b")
    Tenants(first.db).add("acme")
    rows = make_rows(60)
    job = first.submit(rows)
    assert not texts_under(tmp_path / "a", rows[0]["text"]), "no text of a customer stays where it was uploaded"
    second.train()
    done = first.see(job)
    assert done.state == "succeeded", done.error
    answers = []
    for bench in (first, second):
        resolved = bench.workspace().resolve("mail")
        engine = FakeEngine(bench)._engine
        answers.append(engine.predict([Request(f"{resolved.store_name}@{resolved.number}", rows[0]["text"])])[0])
        assert bench.db.files.evaluations("acme", "mail").read("1.json")
    assert answers[0].outcome == answers[1].outcome
    assert not keys_below(first, "service/runs/")
    assert not texts_under(tmp_path / "b" / "remote", rows[0]["text"] + '", "label"')


def test_a_machine_that_dies_leaves_its_place_to_another_which_comes_to_the_same_bits(machine, tmp_path, monkeypatch):
    first, second = machine("a"), machine("b")
    Tenants(first.db).add("acme")
    rows = make_rows(60)
    calm = first.submit(rows, "calm", settings={"epochs": EPOCHS})
    first.train()
    assert first.see(calm).state == "succeeded"
    hurt = first.submit(rows, "hurt", settings={"epochs": EPOCHS})
    die_at_state(first, 2, monkeypatch)
    assert keys_below(first, "service/runs/")
    assert second.queue.reclaim_of("a"), "as its lease runs out"
    second.train()
    done = second.see(hurt)
    assert done.state == "succeeded", done.error
    events = second.workspace().events(hurt.id)
    assert "training goes on where it was stopped" in [event.message for event in events]
    assert sorted(event.data["epoch"] for event in events if event.kind == "epoch") == [*range(1, EPOCHS + 1)]
    tensors = [
        bench.store.load(bench.store.resolve(f"acme.{task}")).tensors
        for bench, task in ((first, "calm"), (second, "hurt"))
    ]
    assert all((tensors[0][name] == tensors[1][name]).all() for name in tensors[0])
    assert not keys_below(first, "service/runs/")


def test_a_batch_goes_on_elsewhere_from_the_answers_that_were_kept(machine, tmp_path, monkeypatch):
    from inlay.service.trainer import side_jobs

    first, second = machine("a"), machine("b")
    Tenants(first.db).add("acme")
    first.submit(make_rows(60))
    first.train()
    rows = make_rows(50, seed=3)
    batch = first.workspace().submit(JobRequest("batch", "mail", first.upload(rows), {}))
    monkeypatch.setattr(side_jobs, "CHUNK_ROWS", 10)
    monkeypatch.setattr(side_jobs, "_SAVE_S", 0.0)
    monkeypatch.setattr(side_jobs, "_REST", 0.0)
    answered: dict[str, int] = {"a": 0, "b": 0}

    def count(bench: Bench, name: str, most: int | None) -> None:
        answer = Answerer.answer

        def counted(answers: Answerer, caller: Any, version: Any, given: Any, *more: Any) -> Any:
            if answered[name] == most:
                raise MachineDied
            answered[name] += len(given)
            return answer(answers, caller, version, given, *more)

        bench.context.answers.answer = counted.__get__(bench.context.answers)

    count(first, "a", 30)
    with pytest.raises(MachineDied):
        first.trainer.do_next()
    assert second.queue.reclaim_of("a")
    count(second, "b", None)
    assert second.trainer.do_next()
    done = second.see(batch)
    assert done.state == "succeeded", done.error
    assert answered == {"a": 30, "b": 20}
    path = first.db.paths.batch("acme", batch.id)
    assert first.db.files.read(path).count(b"\n") == done.result["rows"] == 50
    assert keys_below(first, "service/batches/") == [f"service/batches/acme/{batch.id}.jsonl"]


def test_texts_of_an_erased_batch_are_gone_from_a_machine_that_had_begun_it(machine, tmp_path, monkeypatch):
    from inlay.service.trainer import side_jobs
    from inlay.service.trainer.trainer import sweep_lost

    first, second = machine("a"), machine("b")
    Tenants(first.db).add("acme")
    first.submit(make_rows(60))
    first.train()
    rows = [{"text": f"quokka {row['text']}"} for row in make_rows(50, seed=3)]
    batch = first.workspace().submit(JobRequest("batch", "mail", first.upload(rows), {}))
    monkeypatch.setattr(side_jobs, "CHUNK_ROWS", 10)
    answer, calls = first.context.answers.answer, []

    def answer_and_die(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise MachineDied
        return answer(*given)

    first.context.answers.answer = answer_and_die
    with pytest.raises(MachineDied):
        first.trainer.do_next()
    here = first.db.paths.batch_parts("acme", batch.id)
    assert list(here.iterdir()), "the machine died with answers on its disk"
    assert second.queue.reclaim_of("a")
    assert second.trainer.do_next()
    second.workspace().erase_task("mail")
    erase_task(second.db, "acme", "mail")
    sweep_lost(first.context)
    assert not here.exists()
    assert not texts_under(tmp_path / "a", "quokka")
    assert not texts_under(tmp_path / "b", "quokka")
    assert not keys_below(first, "service/")


def test_a_machine_that_is_stopped_leaves_its_answers_to_the_others_and_none_on_its_disk(
    machine, tmp_path, monkeypatch
):
    from inlay.service.trainer import side_jobs

    first, second = machine("a"), machine("b")
    Tenants(first.db).add("acme")
    first.submit(make_rows(60))
    first.train()
    batch = first.workspace().submit(JobRequest("batch", "mail", first.upload(make_rows(50, seed=3)), {}))
    monkeypatch.setattr(side_jobs, "CHUNK_ROWS", 10)
    answer, calls = first.context.answers.answer, []

    def answer_and_stop(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            first.trainer.stopping.set()
        return answer(*given)

    first.context.answers.answer = answer_and_stop
    first.trainer.do_next()
    assert first.see(batch).state == "queued"
    assert not first.db.paths.batch_parts("acme", batch.id).exists()
    answered, answer = [], second.context.answers.answer
    second.context.answers.answer = lambda *given: answered.append(len(given[2])) or answer(*given)
    assert second.trainer.do_next()
    assert second.see(batch).result["rows"] == 50
    assert sum(answered) == 40


def test_a_machine_that_is_stopped_while_storage_fails_keeps_the_only_copy_of_its_answers(machine, monkeypatch):
    from inlay.service.trainer import side_jobs

    bench = machine("a")
    Tenants(bench.db).add("acme")
    bench.submit(make_rows(60))
    bench.train()
    batch = bench.workspace().submit(JobRequest("batch", "mail", bench.upload(make_rows(50, seed=3)), {}))
    monkeypatch.setattr(side_jobs, "CHUNK_ROWS", 10)
    answer, calls = bench.context.answers.answer, []

    def answer_and_stop(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            bench.trainer.stopping.set()
        return answer(*given)

    def fail(*given: Any) -> Any:
        raise StoreUnreachable("no answer", "try later")

    bench.context.answers.answer = answer_and_stop
    here = bench.db.paths.batch_parts("acme", batch.id)
    with monkeypatch.context() as broken:
        broken.setattr(type(bench.db.files.snapshots(here)), "save", fail)
        bench.trainer.do_next()
    assert sum(path.read_bytes().count(b"\n") for path in here.iterdir()) == 10


def test_erased_by_one_machine_nothing_is_left_in_the_bucket(machine, tmp_path):
    first, second = machine("a"), machine("b")
    Tenants(first.db).add("acme")
    first.submit(make_rows(60))
    first.train()
    second.store.load(second.store.resolve("acme.mail"))
    first.workspace().erase_task("mail")
    erase_task(first.db, "acme", "mail")
    left = keys_below(first, "")
    assert not [key for key in left if key.startswith(("service/", "objects/", "sidecars/"))], left
    assert second.store.forget_gone()
    assert not list((tmp_path / "b").rglob("*.safetensors"))


def test_storage_that_is_gone_for_a_while_costs_no_job(machine, proxy):
    bench = machine("a")
    Tenants(bench.db).add("acme")
    job = bench.submit(make_rows(60))
    proxy.fault = lambda method, path: "503" if method == "GET" and "datasets" in path else None
    with pytest.raises(StoreUnreachable, match="no answer after 5 attempts"):
        bench.train()
    assert bench.see(job).state == "queued"
    proxy.fault = lambda method, path: None
    bench.train()
    done = bench.see(job)
    assert done.state == "succeeded", done.error


def test_a_machine_with_another_store_is_refused(machine, monkeypatch, tmp_path):
    machine("a")
    monkeypatch.setenv("INLAY_LOCAL", str(tmp_path / "b"))
    with pytest.raises(BadConfig, match="belongs to the service on `s3://"):
        Database.open(f"s3://{BUCKET}/other")
    with pytest.raises(BadConfig, match="belongs to the service on `s3://"):
        Database.open(tmp_path / "folder")


def test_a_bucket_without_conditional_writes_or_with_wrong_keys_is_refused_at_the_start(machine, proxy, monkeypatch):
    for fault, message in (("unconditional", "although it was asked"), ("403", "refuses")):
        proxy.fault = lambda method, path, fault=fault: fault
        with pytest.raises(StoreUnreachable, match=message) as refused:
            Database.open(f"s3://{BUCKET}/{fault}")
        assert refused.value.hint


def test_a_bucket_needs_a_database_for_all_machines(machine, monkeypatch):
    monkeypatch.delenv("INLAY_DATABASE")
    with pytest.raises(BadConfig, match="needs a database for all its machines"):
        Database.open(f"s3://{BUCKET}/x")
    assert Store(f"s3://{BUCKET}/x").names() == []
