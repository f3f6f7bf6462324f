"""An engine's process in this one: its loop in a thread, its socket in a temporary folder."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.model import SlotSpec
from inlay.model.heads.heads import HeadSpec
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
