"""Tags and answers served: in mixed batches as alone, from all windows, cut from the text, proved like any version."""

from __future__ import annotations

import pytest
import torch

from inlay.errors import BadConfig, Unsupported
from inlay.serving import Engine, Request
from inlay.serving.verification import verify
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import fit, make_run, publish
from predicted import predict_split

LONG = "the cat " * 60


@pytest.fixture(scope="module")
def kept(tiny_bert, toy_task, toy_tags, toy_answers, tmp_path_factory):
    """A store with a classifier, a number, a tagger and question answering of both versions."""
    store = Store(tmp_path_factory.mktemp("store"))
    tasks = [
        toy_task("classes", num_labels=3),
        toy_task("number", kind="regress", seed=3),
        toy_tags("tags", num_rows=80),
        toy_answers("answers", num_rows=60),
        toy_answers("answers2", num_rows=60, with_none=True, seed=5),
    ]
    train = TrainConfig(batch_size=8, max_length=40, stride=6, epochs=4, lr=1e-2)
    runs = [make_run(task, RunConfig(method=MethodConfig(size=8), train=train), tiny_bert) for task in tasks]
    results = fit(runs, tiny_bert, store.root / "runs")
    versions = [publish(run, result, tiny_bert, store) for run, result in zip(runs, results, strict=True)]
    return store, {run.task.name: (run, result) for run, result in zip(runs, results, strict=True)}, versions


REQUESTS = [
    Request("tags", "the oslo is good , home"),
    Request("answers", "what prize ?", f"it was prize seven . {LONG}"),
    Request("classes", "the movie was good"),
    Request("answers2", "what prize ?", f"{LONG} prize two . {LONG}"),
    Request("number", "free prize call now"),
    Request("tags", LONG),
    Request("answers2", "what ?", "cat"),
]


def test_tags_and_answers_in_a_mixed_batch_equal_those_alone(tiny_bert, kept):
    store, _, _ = kept
    together = Engine(tiny_bert, store).predict(REQUESTS)
    for request, answer in zip(REQUESTS, together, strict=True):
        assert answer.error is None
        (alone,) = Engine(tiny_bert, store, num_slots=1).predict([request])
        torch.testing.assert_close(answer.logits, alone.logits, atol=1e-5, rtol=1e-5)
        for said, single in zip(answer.to_json().items(), alone.to_json().items(), strict=True):
            assert said[0] == single[0]
    fields = {request.task: set(answer.to_json()) for request, answer in zip(REQUESTS, together, strict=True)}
    assert {"entities", "words"} <= fields["tags"]
    assert {"answer", "start", "end", "probability", "nbest"} <= fields["answers"]


def test_served_outputs_are_the_trained_ones(tiny_bert, kept):
    store, trained, _ = kept
    engine = Engine(tiny_bert, store)
    for name in ("tags", "answers", "answers2"):
        run, result = trained[name]
        dev = run.task.dev
        train = run.config.train
        expected = predict_split(run.spec, result.tensors, tiny_bert, dev, train.max_length, train.stride)
        pairs = dev.pairs or [None] * len(dev)
        answers = engine.predict([Request(name, text, pair) for text, pair in zip(dev.texts, pairs, strict=True)])
        for answer, logits in zip(answers, expected, strict=True):
            torch.testing.assert_close(answer.logits, logits, atol=1e-5, rtol=1e-5)


def test_entities_and_answers_are_parts_of_what_was_read(tiny_bert, kept):
    store, trained, _ = kept
    engine = Engine(tiny_bert, store)
    dev = trained["tags"][0].task.dev
    found = 0
    for text, answer in zip(dev.texts, engine.predict([Request("tags", text) for text in dev.texts]), strict=True):
        for entity in answer.outcome.entities:
            found += 1
            assert text[entity.start : entity.end] == entity.text
            assert 0 < entity.probability <= 1
        assert "".join(word.text for word in answer.outcome.words) == text.replace(" ", "")
    assert found > 5
    dev = trained["answers"][0].task.dev
    requests = [Request("answers", text, pair) for text, pair in zip(dev.texts, dev.pairs, strict=True)]
    for request, answer in zip(requests, engine.predict(requests), strict=True):
        outcome = answer.outcome
        assert outcome.answer == request.pair[outcome.start : outcome.end] != ""
        assert outcome.nbest[0].text == outcome.answer
        assert [passage.score for passage in outcome.nbest] == sorted((p.score for p in outcome.nbest), reverse=True)


def test_versions_of_token_heads_are_proved_bit_for_bit_and_in_mixed_batches(tiny_bert, kept):
    store, _, versions = kept
    checks = verify(versions, tiny_bert, store)
    assert all(check.stands and check.is_exact for check in checks), checks
    probes = store.manifest(versions[2]).probes
    run = kept[1]["tags"][0]
    assert len(probes[0].logits) == run.spec.head.num_outputs * len(tiny_bert.tokenizer(probes[0].text)["input_ids"])


def test_an_unsure_answer_is_withheld_by_request_and_spoils_no_other(tiny_bert, kept):
    store, _, _ = kept
    sure, unsure, number, wrong, plain = Engine(tiny_bert, store).predict(
        [
            Request("classes", "the movie was good", min_confidence=0.0),
            Request("classes", "the movie was good", min_confidence=1.0),
            Request("number", "free prize", min_confidence=0.5),
            Request("classes", "the movie was good", min_confidence=7.0),
            Request("classes", "the movie was good"),
        ]
    )
    assert sure.outcome.label == plain.outcome.label
    assert unsure.to_json()["label"] is None
    assert unsure.to_json()["abstained"] is True
    assert unsure.outcome.probabilities == pytest.approx(plain.outcome.probabilities, abs=1e-5)
    assert isinstance(number.error, Unsupported)
    assert "`regress`" in number.error.message
    assert isinstance(wrong.error, BadConfig)


def test_versions_of_every_kind_are_built_and_proved_when_another_store_imports_them(tiny_bert, kept, tmp_path):
    from inlay.exchange import import_file

    store, _, versions = kept
    for version in versions:
        path = store.export(version.reference, tmp_path)
        assert import_file(path, None, Store(tmp_path / "other"), lambda name: tiny_bert).digest == version.digest
