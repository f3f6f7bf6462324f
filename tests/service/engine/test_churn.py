"""Tasks that come, go and change slots while clients ask: every answer is the canonical one of the version it names.

INLAY_CHURN_S=600 INLAY_CHURN_TASKS=200 python -m pytest tests/service/engine/test_churn.py
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time

from running_engine import SPECS, caller_of, check_same, run_engine, wire

from inlay.data import Split, encode_split
from inlay.errors import InlayError
from inlay.model import collect_outputs, find_head, infer_canonically, make_rows
from inlay.service.engine import EngineClient, WireAnswer
from inlay.serving import Answer, Engine, describe_answer, find_reading, read_slot
from inlay.store import Store

SECONDS = float(os.environ.get("INLAY_CHURN_S", "5"))
NUM_TASKS = int(os.environ.get("INLAY_CHURN_TASKS", "40"))
NUM_SLOTS = 16 if NUM_TASKS >= 200 else 5
NUM_CLIENTS = 8


class Versions:
    """What was published, with the canonical answers to every text, and what is still there."""

    def __init__(self, store, backbone, publish_random, texts):
        self.store, self.backbone, self.publish_random, self.texts = store, backbone, publish_random, texts
        self.expected = {}
        self.alive = []
        self.removed = {}

    def publish(self, name, spec, seed):
        version = self.publish_random(self.store, name, self.backbone, spec, seed)
        loaded = self.store.load(version)
        slot = read_slot(loaded.manifest, self.backbone)
        encoded = encode_split(
            self.backbone.tokenizer, Split(self.texts, None, None, []), find_reading(loaded.manifest)
        )
        logits = infer_canonically(self.backbone, slot, loaded.tensors, make_rows(encoded))
        outputs = collect_outputs(encoded, logits, self.texts)
        head = find_head(slot.head.kind)
        self.expected[name, version.number] = {
            text: describe_answer(
                Answer(name, version.reference, head.answer(output, slot.head, loaded.manifest.labels), output.flat)
            )
            for text, output in zip(self.texts, outputs, strict=True)
        }
        self.alive.append((name, version.number))

    def remove(self, name, number):
        """Remove a version; from now on it may be unknown, and a second from now it must be."""
        self.alive.remove((name, number))
        self.removed[name, number] = time.monotonic()
        self.store.remove(f"{name}@{number}")


def change(versions, stop, seed):
    """Publish and remove versions until told to stop."""
    chosen, numbers = random.Random(seed), iter(range(10**6, 10**9))
    while not stop.is_set():
        if len(versions.alive) < 2 * NUM_TASKS or chosen.random() < 0.5:
            task = chosen.randrange(NUM_TASKS)
            versions.publish(f"{'abc'[task % 3]}.task-{task}", SPECS[task % len(SPECS)], next(numbers))
        else:
            versions.remove(*chosen.choice(versions.alive[:NUM_TASKS]))
        time.sleep(0.01)


async def ask(path, versions, seed, ends):
    """Ask random versions until the end; return how many answers were right, and how many versions were gone."""
    chosen, client = random.Random(seed), EngineClient(path)
    num_right = num_gone = 0
    while time.monotonic() < ends:
        asked = [chosen.choice(versions.alive[-3 * NUM_SLOTS :] if chosen.random() < 0.7 else versions.alive)]
        if chosen.random() < 0.2:  # one text for several of the tenant's tasks
            tenant = asked[0][0][0]
            asked += [each for each in chosen.sample(versions.alive, 12) if each[0][0] == tenant]
        text = chosen.choice(versions.texts)
        rows = [wire(name, text, number) for name, number in asked]
        answers = (await client.predict(caller_of(asked[0][0]), rows)).answers
        for (name, number), answer in zip(asked, answers, strict=True):
            if isinstance(answer, WireAnswer):
                assert (answer.store_name, answer.number) == (name, number)
                check_same(answer.answer, versions.expected[name, number][text])
                num_right += 1
            else:
                assert answer.code == "unknown-name", answer
                assert (name, number) in versions.removed
                num_gone += 1
    await client.close()
    return num_right, num_gone


def test_every_answer_is_the_canonical_one_of_the_version_it_names(tiny_bert, publish_random, texts, tmp_path):
    versions = Versions(Store(tmp_path / "store"), tiny_bert, publish_random, texts)
    for task in range(NUM_TASKS):
        versions.publish(f"{'abc'[task % 3]}.task-{task}", SPECS[task % len(SPECS)], task)
    stop, raised = threading.Event(), []

    def publish_and_remove():
        try:
            change(versions, stop, 0)
        except (InlayError, AssertionError, OSError) as error:
            raised.append(error)

    with run_engine(Engine(tiny_bert, versions.store, num_slots=NUM_SLOTS), tmp_path / "s") as running:
        thread = threading.Thread(target=publish_and_remove, daemon=True)
        thread.start()

        async def ask_all():
            ends = time.monotonic() + SECONDS
            return await asyncio.gather(*(ask(running.path, versions, seed, ends) for seed in range(NUM_CLIENTS)))

        counts = asyncio.run(ask_all())
        stop.set()
        thread.join(30)
    assert not raised, raised
    num_right, num_gone = (sum(count[index] for count in counts) for index in (0, 1))
    assert num_right > 20 * SECONDS
    assert len(versions.removed) > SECONDS
    print(f"{num_right} answers, {num_gone} of versions that had gone, {len(versions.expected)} versions")
