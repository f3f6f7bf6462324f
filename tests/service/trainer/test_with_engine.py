"""The trainer beside a real engine: hot before live, comparisons and batches behind everybody's requests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from trainer_bench import make_rows

from inlay.service.engine import SyncEngineClient
from inlay.service.state import JobRequest
from inlay.serving import Engine, Request

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from running_engine import run_engine  # the engine's own tests run it so

RECIPE = {"method": "head", "size": None, "epochs": None, "lr": None, "dev_share": 0.3}


@pytest.fixture
def served(bench, open_bench, tmp_path):
    """A bench whose trainer asks a real engine, and the engine."""
    with run_engine(Engine(bench.context.backbone, bench.store, num_slots=4), tmp_path / "s") as running:
        client = SyncEngineClient(running.path)
        yield open_bench(bench.home, client), client
        client.close()


def test_a_version_is_in_the_engine_when_it_goes_live(served):
    bench, client = served
    job = bench.submit(make_rows(80), settings=RECIPE)
    other = bench.submit(make_rows(80, seed=1), "mail", "other", settings=RECIPE)
    bench.train()
    assert bench.kinds(job)[-2:] == bench.kinds(other)[-2:] == ["proved", "live"]
    proved = next(event for event in bench.workspace().events(job.id) if event.kind == "proved")
    assert proved.data["num_probes"] == 8
    assert set(client.stats().resident) == {"acme.mail@1", "other.mail@1"}


def test_the_live_version_answers_the_new_dev_rows_through_the_engine(served):
    bench, client = served
    bench.submit(make_rows(200, seed=1), settings=RECIPE)
    bench.train()
    before = client.stats().num_rows
    job = bench.submit(make_rows(200, seed=2), settings=RECIPE, publish="if-better")
    bench.train()
    compare = bench.see(job).result["compare"]
    assert compare["num_rows"] == 60
    assert client.stats().num_rows >= before + 60
    rows = [row["text"] for row in make_rows(200, seed=2)]
    assert len(rows) == 200


def test_a_batch_through_the_engine_is_what_the_version_answers(served):
    bench, client = served
    bench.submit(make_rows(80), settings=RECIPE)
    bench.train()
    texts = [row["text"] for row in make_rows(300, seed=5)]
    dataset = bench.upload([{"text": text} for text in texts], name="batch.jsonl")
    job = bench.workspace().submit(JobRequest("batch", "mail", dataset, {}))
    assert bench.trainer.do_next()
    lines = [json.loads(line) for line in bench.db.paths.batch("acme", job.id).read_text().splitlines()]
    alone = Engine(bench.context.backbone, bench.store).predict([Request("acme.mail@1", text) for text in texts])
    assert [line["label"] for line in lines] == [answer.outcome.label for answer in alone]
    assert client.stats().per_tenant["acme"].num_rows >= 300
    assert all("acme." not in json.dumps(line) for line in lines)


def test_the_engine_forgets_an_erased_task(served):
    bench, client = served
    bench.submit(make_rows(80), settings=RECIPE)
    bench.train()
    assert client.stats().resident == ["acme.mail@1"]
    bench.workspace().erase_task("mail")
    assert bench.trainer.do_next()
    assert client.stats().resident == []
