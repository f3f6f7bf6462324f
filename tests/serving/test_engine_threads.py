"""Threads that share an engine, or a backbone: each gets what it would get alone."""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import threading
import time
import timeit

import numpy as np
import pytest
import torch

from inlay.data.encode import Truncation, tokenize
from inlay.model import SlotSpec
from inlay.model.heads.heads import HeadSpec
from inlay.serving import Engine, Request, verify
from inlay.settings import FitSettings
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Probe, Store
from inlay.training import fit, make_run, publish
from inlay.training.events import StepTaken

SPECS = [
    SlotSpec.of(MethodConfig("houlsby", 8), HeadSpec("classify", 3, "mean")),
    SlotSpec.of(MethodConfig("pfeiffer", 16), HeadSpec("multilabel", 2, "cls")),
    SlotSpec.of(MethodConfig("lora", 4), HeadSpec("regress", 1, "mean")),
    SlotSpec.of(MethodConfig("bitfit"), HeadSpec("tag", 5, "tokens")),
]

NUM_REQUESTS = int(os.environ.get("INLAY_THREAD_REQUESTS", "300"))
"""requests of each of eight threads; `make threads` asks 1,000"""


@pytest.fixture(autouse=True)
def eager_switches():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def publish_many(store, backbone, publish_random, number):
    """So many tasks of several methods and kinds, which cut their texts at different lengths, each with a probe."""
    names = [f"task-{index}" for index in range(number)]
    kept = []
    for index in range(number):
        loaded = store.load(publish_random(store, f"whole-{index}", backbone, SPECS[index % len(SPECS)], index))
        kept.append((loaded.tensors, dataclasses.replace(loaded.manifest, max_length=4 + index % 13)))
        store.publish(f"cut-{index}", *kept[-1])
    text = "the movie was good and the plot was fine , the cat sat on the mat"
    answers = Engine(backbone, store, num_slots=8).predict([Request(f"cut-{index}", text) for index in range(number)])
    assert [answer.error for answer in answers if answer.error] == []
    for name, (tensors, manifest), answer in zip(names, kept, answers, strict=True):
        assert answer.error is None, answer.error
        probes = (Probe(text, None, tuple(answer.logits.tolist())),)
        store.publish(name, tensors, dataclasses.replace(manifest, probes=probes))
    return names


def ask(names, texts, number, seed):
    """Requests for random tasks, of a random number at a time."""
    chosen = random.Random(seed)
    requests = [Request(chosen.choice(names), chosen.choice(texts)) for _ in range(number)]
    calls = []
    while requests:
        size = chosen.choice([1, 1, 1, 2, 5])
        calls.append(requests[:size])
        del requests[:size]
    return calls


def run_all(works):
    """Run functions in threads that begin together; return what each returned, or raise what it raised."""
    barrier, found, raised = threading.Barrier(len(works)), [None] * len(works), []

    def run(place, work):
        try:
            barrier.wait()
            found[place] = work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return found


def assert_same(found, expected):
    assert len(found) == len(expected)
    for answer, known in zip(found, expected, strict=True):
        assert answer.version == known.version
        torch.testing.assert_close(answer.logits, known.logits, atol=1e-5, rtol=1e-5)


def assert_same_result(result, known):
    """To the last bit, in all but the time it took."""
    for line, expected in zip(result.history, known.history, strict=True):
        assert line | {"seconds": 0} == expected | {"seconds": 0}
    assert all(torch.equal(result.tensors[name], tensor) for name, tensor in known.tensors.items())


def answer_all(engine, calls):
    return [answer for requests in calls for answer in engine.predict(requests)]


@pytest.mark.parametrize(
    ("num_tasks", "num_slots", "num_requests"),
    [(12, 4, 40), pytest.param(500, 8, NUM_REQUESTS, marks=pytest.mark.slow)],
)
def test_threads_on_one_engine_get_the_answers_of_one_thread(
    num_tasks, num_slots, num_requests, tiny_bert, publish_random, texts, tmp_path
):
    store = Store(tmp_path)
    names = publish_many(store, tiny_bert, publish_random, num_tasks)
    calls = [ask(names, texts, num_requests, seed) for seed in range(8)]
    alone = Engine(tiny_bert, store, num_slots=num_slots)
    expected = [answer_all(alone, own) for own in calls]
    engine = Engine(tiny_bert, store, num_slots=num_slots)
    found = run_all([lambda own=own: answer_all(engine, own) for own in calls])
    for answers, known in zip(found, expected, strict=True):
        assert_same(answers, known)
    assert_same(answer_all(engine, calls[0]), expected[0])  # and nothing is wrong afterwards
    hot = engine.hot_versions.values()
    assert len({each.slot for each in hot}) == len(hot) <= num_slots
    assert engine.num_tokens == alone.num_tokens + sum(
        len(tiny_bert.tokenizer(request.text, truncation=True, max_length=length)["input_ids"])
        for request, length in [
            (request, 4 + int(request.task.split("-")[1]) % 13) for own in calls[0] for request in own
        ]
    )


def test_engines_on_one_backbone_answer_through_their_own_banks(tiny_bert, publish_random, texts, tmp_path):
    store = Store(tmp_path)
    names = publish_many(store, tiny_bert, publish_random, 6)
    calls = [ask(names, texts, 40, seed) for seed in range(4)]
    expected = [answer_all(Engine(tiny_bert, store), own) for own in calls]
    engines = [Engine(tiny_bert, store, num_slots=2 + place) for place in range(4)]
    works = [lambda engine=engine, own=own: answer_all(engine, own) for engine, own in zip(engines, calls, strict=True)]
    works.append(lambda: verify([store.resolve(name) for name in names], tiny_bert, store))
    *found, checks = run_all(works)
    for answers, known in zip(found, expected, strict=True):
        assert_same(answers, known)
    assert all(check.stands for check in checks)


@pytest.mark.parametrize("settings", [FitSettings(threads=1), FitSettings(threads=1, checkpointing=True)])
def test_training_and_answers_beside_each_other_are_as_alone(
    settings, tiny_bert, publish_random, toy_task, texts, tmp_path
):
    """Dropout is on in training alone, and answers draw none of its random numbers."""
    store = Store(tmp_path)
    names = publish_many(store, tiny_bert, publish_random, 6)
    calls = ask(names, texts, 40, 0)
    expected = answer_all(Engine(tiny_bert, store, num_slots=3), calls)
    train = TrainConfig(batch_size=8, max_length=32, epochs=3, lr=5e-3, dropout=0.3)
    run = make_run(toy_task("new"), RunConfig(method=MethodConfig("houlsby", 8), train=train), tiny_bert)
    (known,) = fit([run], tiny_bert, tmp_path / "alone", settings)
    engine, steps, between, ended = Engine(tiny_bert, store, num_slots=3), [], [], threading.Event()

    def answer():
        found = []
        while not (found and ended.is_set()):  # all through the training
            before = len(steps)
            found.append(answer_all(engine, calls))
            between.append(len(steps) - before)
        return found

    def train_beside():
        try:
            return fit([run], tiny_bert, tmp_path / "beside", settings, steps.append)
        finally:
            ended.set()

    works = [answer, train_beside]
    rounds, (result,) = run_all(works)
    for found in rounds:
        assert_same(found, expected)
    assert sum(isinstance(event, StepTaken) for event in steps) == 18
    assert_same_result(result, known)
    assert max(between) < 2 * len(calls) + 20  # neither waits until the other has finished
    assert not tiny_bert.model.training


def test_trainings_beside_each_other_draw_the_random_numbers_of_each_alone(tiny_bert, toy_task, tmp_path):
    train = TrainConfig(batch_size=8, max_length=32, epochs=2, lr=5e-3, dropout=0.3)
    config = RunConfig(method=MethodConfig("houlsby", 8), train=train)
    runs = [make_run(toy_task(f"task-{seed}", seed=seed), config, tiny_bert) for seed in range(3)]
    known = [fit([run], tiny_bert, tmp_path / "alone", FitSettings(threads=1))[0] for run in runs]
    works = [lambda run=run: fit([run], tiny_bert, tmp_path / "beside", FitSettings(threads=1))[0] for run in runs]
    for result, expected in zip(run_all(works), known, strict=True):
        assert_same_result(result, expected)


def test_a_version_can_be_published_while_others_answer(tiny_bert, publish_random, toy_task, texts, tmp_path):
    store = Store(tmp_path)
    names = publish_many(store, tiny_bert, publish_random, 6)
    calls = ask(names, texts, 60, 0)
    expected = answer_all(Engine(tiny_bert, store, num_slots=3), calls)
    train = TrainConfig(batch_size=8, max_length=32, epochs=1, lr=5e-3)
    run = make_run(toy_task("new"), RunConfig(method=MethodConfig("houlsby", 8), train=train), tiny_bert)
    (result,) = fit([run], tiny_bert, store.root / "runs")
    engine = Engine(tiny_bert, store, num_slots=3)
    found, version = run_all([lambda: answer_all(engine, calls), lambda: publish(run, result, tiny_bert, store, "new")])
    assert_same(found, expected)
    (check,) = verify([version], tiny_bert, store)
    assert check.stands
    assert check.is_exact


def test_threads_that_cut_texts_at_different_lengths_share_a_tokenizer(tiny_bert, texts):
    def read(max_length):
        cut = None if max_length is None else Truncation(max_length)
        return [[row.ids for row in tokenize(tiny_bert.tokenizer, texts, None, cut)] for _ in range(100)]

    lengths = [None, 3, 4, 5, 8, 12]
    expected = [read(length)[0] for length in lengths]
    whole = [tiny_bert.tokenizer(text)["input_ids"] for text in texts]
    for found, known in zip(run_all([lambda n=n: read(n) for n in lengths]), expected, strict=True):
        assert all(ids == known for ids in found)
    assert tiny_bert.tokenizer.backend_tokenizer.truncation is None
    assert [tiny_bert.tokenizer(text)["input_ids"] for text in texts] == whole


def test_a_thread_finds_the_backbone_at_rest_while_another_trains(tiny_bert):
    before = [rate for *_, rate in dropout_rates_of(tiny_bert)]
    at_rest, entered, left = threading.Event(), threading.Event(), threading.Event()

    def train():
        with tiny_bert.training(0.7), tiny_bert.checkpointed():
            with tiny_bert.turn():
                assert tiny_bert.model.training
            entered.set()
            at_rest.wait()
            with tiny_bert.turn():
                assert tiny_bert.model.training
                assert 0.7 in [rate for *_, rate in dropout_rates_of(tiny_bert)]
                assert all("forward" in vars(block) for block in tiny_bert._blocks)
            with tiny_bert.answering(), tiny_bert.turn():
                assert not tiny_bert.model.training
            with tiny_bert.turn():
                assert tiny_bert.model.training
        left.set()

    def look():
        entered.wait()
        with tiny_bert.turn():
            assert not tiny_bert.model.training
            assert [rate for *_, rate in dropout_rates_of(tiny_bert)] == before
            assert not any("forward" in vars(block) for block in tiny_bert._blocks)
        at_rest.set()
        left.wait()
        assert not tiny_bert.model.training
        assert [rate for *_, rate in dropout_rates_of(tiny_bert)] == before

    run_all([train, look])


def dropout_rates_of(backbone):
    from inlay.model.backbone.model_lock import dropout_rates

    return list(dropout_rates(backbone.model))


def test_a_thread_that_asks_again_and_again_keeps_no_other_waiting(tiny_bert):
    """A training gives way to a request after its pass, not after hundreds."""
    stop, waits = threading.Event(), []

    def train():
        while not stop.is_set():
            with tiny_bert.turn():
                time.sleep(0.002)

    def request():
        for _ in range(20):
            began = time.perf_counter()
            with tiny_bert.turn():
                waits.append(time.perf_counter() - began)
        stop.set()

    run_all([train, request])
    assert np.median(waits) < 0.05


def test_a_turn_costs_one_thread_next_to_nothing(tiny_bert, publish_random, tmp_path):
    """Beside the smallest request there is, to the smallest backbone: the lock of a pass is not measurable in it."""
    store = Store(tmp_path)
    (name,) = publish_many(store, tiny_bert, publish_random, 1)
    engine = Engine(tiny_bert, store, num_slots=2)

    def take_turn():
        with tiny_bert.turn():
            pass

    turn_s, request_s = (
        min(timeit.repeat(work, number=number, repeat=7)) / number
        for work, number in ((take_turn, 500), (lambda: engine.predict([Request(name, "good")]), 3))
    )
    assert turn_s < 0.01 * request_s
