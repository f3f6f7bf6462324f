"""`/healthz`, `/readyz` and `/metrics`: whether the process runs, whether the service can answer, and its counters.

They need no key, and name no tenants.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request, Response
from starlette.responses import JSONResponse

from inlay.errors import InlayError
from inlay.service.home import read_fleet, read_status
from inlay.service.state import JobQueue
from inlay.service.web.app_state import AppState
from inlay.service.web.counters import MEDIA_TYPE
from inlay.service.web.guard import OPEN, make_router, needs
from inlay.service.web.shapes import HealthShape, ReadinessShape

router = make_router("health")
LEAST_FREE_BYTES = 256 << 20
"""free space on the disk below which the service is not ready"""
_KEPT_S = 1.0
_STATS_PATIENCE_S = 2.0


@router.get("/healthz", response_model=HealthShape, openapi_extra=needs(OPEN))
async def get_health() -> Any:
    """Tell that this process answers. Whether the service can do its work says `/readyz`."""
    return {"status": "ok"}


@router.get(
    "/readyz",
    response_model=ReadinessShape,
    responses={503: {"model": ReadinessShape, "description": "It cannot answer now."}},
    openapi_extra=needs(OPEN),
)
async def get_readiness(request: Request) -> Any:
    """Tell whether the service can answer: a real row was answered, the database writes, the disk has room."""
    checks = await check_readiness(request.app.state.inlay)
    is_ready = all(words == "ok" for words in checks.values())
    about = {"status": "ready" if is_ready else "not-ready", "checks": checks}
    return JSONResponse(about, 200 if is_ready else 503, {} if is_ready else {"retry-after": "1"})


async def check_readiness(state: AppState) -> dict[str, str]:
    """Return what is wrong with each part, or `ok`. The parts are checked at most once a second."""
    async with state.readiness.lock:
        if state.readiness.is_fresh(_KEPT_S):
            return state.readiness.checks
        engine, database, disk = await asyncio.gather(
            _try_engine(state), asyncio.to_thread(_try_database, state), asyncio.to_thread(_try_disk, state)
        )
        checks = {"engine": engine, "database": database, "disk": disk}
        if state.is_draining:
            checks["process"] = "it is ending"
        state.readiness.keep(checks)
        return checks


async def _try_engine(state: AppState) -> str:
    try:
        await state.engine.probe()
    except InlayError as error:
        return error.message[:200]
    return "ok"


def _try_database(state: AppState) -> str:
    try:
        state.db.probe()
    except InlayError as error:
        return error.message[:200] if error.http_status != 500 else "it cannot be written"
    except Exception as error:
        return f"it cannot be written ({type(error).__name__})"
    return "ok"


def _try_disk(state: AppState) -> str:
    free = state.db.free_bytes()
    return "ok" if free >= LEAST_FREE_BYTES else f"{free >> 20} MB are left"


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    openapi_extra=needs(OPEN),
)
async def get_metrics(request: Request) -> Response:
    """Return counters for Prometheus. None names a tenant or a task."""
    state: AppState = request.app.state.inlay
    try:
        async with asyncio.timeout(_STATS_PATIENCE_S):
            stats = await state.engine.stats()
    except (InlayError, TimeoutError):
        stats = None
    facts = await asyncio.to_thread(_collect_facts, state)
    return Response(state.counters.show(stats, facts), media_type=MEDIA_TYPE)


def _collect_facts(state: AppState) -> dict[str, float]:
    queue = JobQueue(state.db).stats()
    facts = {
        "inlay_jobs_queued": float(queue.queued),
        "inlay_jobs_running": float(queue.running),
        "inlay_oldest_job_wait_seconds": queue.oldest_wait_s,
        "inlay_tenants_with_jobs": float(len(queue.by_tenant)),
        "inlay_disk_free_bytes": float(state.db.free_bytes()),
        "inlay_event_streams": float(sum(state.streams.values())),
        "inlay_web_start_time_seconds": state.started_at,
    }
    if state.settings.cluster is not None:
        up = [member["name"].partition("-")[0] for member in read_fleet(state.settings) if member["is_up"]]
        facts |= {
            "inlay_cluster_engines": float(up.count("engine")),
            "inlay_cluster_trainers": float(up.count("trainer")),
        }
    restarts = [
        process.get("restarts")
        for process in read_status(state.settings).get("processes", ())
        if isinstance(process, dict)
    ]
    facts["inlay_process_restarts"] = float(sum(number for number in restarts if isinstance(number, int)))
    return facts
