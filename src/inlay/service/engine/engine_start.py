"""The start and the end of the engine's process: backbone, threads, socket; SIGTERM drains."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from inlay.service.child import Child
from inlay.service.logs import log_event

if TYPE_CHECKING:
    from inlay.serving import Engine


def serve(child: Child) -> None:
    """Answer until SIGTERM, and then all that was taken."""
    settings = child.settings
    child.progress(f"loading the backbone {settings.backbone}")
    engine = _load_engine(child)
    asyncio.run(_answer(child, engine))


def _load_engine(child: Child) -> Engine:
    from inlay.model import load_backbone
    from inlay.serving import Engine
    from inlay.store import Store
    from inlay.threads import set_threads

    settings = child.settings
    device = None if settings.device == "auto" else settings.device
    store = Store(settings.home)
    backbone = load_backbone(settings.backbone, device=device)
    if backbone.device.type == "cpu":
        set_threads(settings.threads_of("engine"))
    return Engine(backbone, store, num_slots=settings.num_slots, precision=settings.precision)


async def _answer(child: Child, engine: Engine) -> None:
    from inlay.service.engine.engine_process import TARGET_BATCH_MS, EngineLimits, EngineProcess

    settings, device = child.settings, engine.backbone.device
    process = EngineProcess(engine, EngineLimits(settings.target_batch_ms or TARGET_BATCH_MS[device.type]))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    child.on_stop(lambda: _wake(loop, stopping))
    await process.listen(settings.engine_socket)
    child.ready({"backbone": engine.backbone.name, "device": str(device), "slots": engine.num_slots})
    await stopping.wait()
    log_event("draining")
    await process.drain()
    await process.close()
    settings.engine_socket.unlink(missing_ok=True)


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event of a loop from a signal's handler."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
