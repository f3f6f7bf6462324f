"""An engine's process in this one: its loop in a thread, its socket in a temporary folder."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inlay.model import SlotSpec
from inlay.model.heads.heads import HeadSpec
from inlay.service.engine import Caller, WireRow
from inlay.serving import Engine
from inlay.settings.run_config import MethodConfig

SPECS = [
    SlotSpec.of(MethodConfig("pfeiffer", 8, layers="2:"), HeadSpec("classify", 3, "mean")),
    SlotSpec.of(MethodConfig("houlsby", 8), HeadSpec("multilabel", 2, "cls")),
    SlotSpec.of(MethodConfig("head"), HeadSpec("regress", 1, "mean")),
    SlotSpec.of(MethodConfig("lora", 4), HeadSpec("tag", 5, "tokens")),
]


@dataclass
class Running:
    """A running engine: where it listens, and its insides."""

    path: Path
    process: Any
    loop: asyncio.AbstractEventLoop

    def call(self, work):
        """Run a coroutine in the engine's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)


@contextmanager
def run_engine(engine, path, **limits):
    """Run an engine's process until the block ends."""
    from inlay.service.engine.engine_process import EngineLimits, EngineProcess

    ready, stop = threading.Event(), threading.Event()
    found = []

    async def work():
        process = EngineProcess(engine, EngineLimits(**{"target_batch_ms": 20.0, **limits}))
        await process.listen(path)
        ended = asyncio.Event()
        found.append(Running(path, process, asyncio.get_running_loop()))
        found.append(ended)
        ready.set()
        await ended.wait()
        await process.close()

    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    thread.start()
    assert ready.wait(30)
    running, ended = found
    try:
        yield running
    finally:
        stop.set()
        running.loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        assert not thread.is_alive()


class GatedEngine(Engine):
    """An engine that computes when it is let, and remembers the texts of each batch."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.gate = threading.Event()
        self.gate.set()
        self.has_arrived = threading.Event()
        """set when a batch has come to the gate"""
        self.computed: list[list[str]] = []

    def answer(self, batch, states):
        self.has_arrived.set()
        assert self.gate.wait(30)
        self.computed.append([item.checked.request.text for item in batch])
        return super().answer(batch, states)


def wait_until(claim, seconds=20.0):
    """Wait until something is so."""
    ends = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < ends, "it never was"
        time.sleep(0.002)


def wire(name, text, number=1, **more):
    """A row for a task of the store, which its tenant knows without the prefix."""
    return WireRow(name.partition(".")[2], name, number, text, **more)


def caller_of(name, **more):
    """The tenant of a task."""
    return Caller(name.partition(".")[0], **more)


def numbers_of(about):
    """All numbers of a described answer, in order."""
    if isinstance(about, dict):
        return [number for key in sorted(about) for number in numbers_of(about[key])]
    if isinstance(about, list | tuple):
        return [number for item in about for number in numbers_of(item)]
    return [about] if isinstance(about, float) else []


def check_same(answer, expected):
    """The same answer, its numbers to 1e-5."""
    assert numbers_of(answer) == pytest.approx(numbers_of(expected), abs=1e-5, rel=1e-5)
    hidden = ("task", "version")
    plain = [{k: v for k, v in each.items() if k not in hidden and not numbers_of(v)} for each in (answer, expected)]
    assert json.loads(json.dumps(plain[0])) == json.loads(json.dumps(plain[1]))
