"""The start and the end of the engine's process: backbone, threads, socket; SIGTERM drains.

On a machine of a cluster it listens at a port, for clients that know the cluster's token; else on a Unix socket.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inlay.service.child import Child
from inlay.service.logs import log_event

if TYPE_CHECKING:
    from inlay.serving import Engine

VARIABLE = "INLAY_ENGINE_PORT"
"""environment variable with a `ListenAddress` as JSON; without it the engine listens on the home's Unix socket"""


@dataclass(frozen=True)
class ListenAddress:
    """The address at which an engine listens for other machines, and the token that they must send."""

    host: str
    token: str


def serve(child: Child) -> None:
    """Answer until SIGTERM, then finish the requests that were accepted."""
    from inlay.model import load_backbone
    from inlay.serving import Engine
    from inlay.store import Store
    from inlay.threads import set_threads

    settings = child.settings
    child.progress(f"loading the backbone {settings.backbone}")
    device = None if settings.device == "auto" else settings.device
    store = Store(settings.store_address)
    backbone = load_backbone(settings.backbone, device=device)
    if backbone.device.type == "cpu":
        set_threads(settings.threads_of("engine"))
    engine = Engine(backbone, store, num_slots=settings.num_slots, precision=settings.precision)
    asyncio.run(_answer(child, engine))


async def _answer(child: Child, engine: Engine) -> None:
    from inlay.service.engine.engine_process import TARGET_BATCH_MS, EngineLimits, EngineProcess

    settings, device = child.settings, engine.backbone.device
    process = EngineProcess(engine, EngineLimits(settings.target_batch_ms or TARGET_BATCH_MS[device.type]))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:  # called in another thread
        with suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(stopping.set)

    child.on_stop(stop)
    facts: dict[str, Any] = {"backbone": engine.backbone.name, "device": str(device), "slots": engine.num_slots}
    text = os.environ.get(VARIABLE)
    if text is None:
        await process.listen(settings.engine_socket)
    else:
        address = ListenAddress(**json.loads(text))
        port = await process.listen_on_port(address.host, address.token)
        facts |= {"host": address.host, "port": port, "fingerprint": engine.backbone.fingerprint}
    child.ready(facts)
    await stopping.wait()
    log_event("draining")
    await process.drain()
    await process.close()
    if text is None:
        settings.engine_socket.unlink(missing_ok=True)
