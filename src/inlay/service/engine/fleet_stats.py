"""The counters of several engines as those of one: sums, and means of what is a time."""

from __future__ import annotations

from collections.abc import Sequence

from inlay.service.engine.protocol import EngineStats, TenantLoad


def add_stats(each: Sequence[EngineStats]) -> EngineStats:
    """Return the counters of engines together. `num_slots` is that of one engine, `queue_s` the mean."""
    tenants: dict[str, list[TenantLoad]] = {}
    for stats in each:
        for name, load in stats.per_tenant.items():
            tenants.setdefault(name, []).append(load)
    return EngineStats(
        0,
        queue_rows=sum(stats.queue_rows for stats in each),
        queue_tokens=sum(stats.queue_tokens for stats in each),
        queue_s=sum(stats.queue_s for stats in each) / len(each),
        resident=list(dict.fromkeys(name for stats in each for name in stats.resident)),
        num_slots=each[0].num_slots,
        tokens_per_s=sum(stats.tokens_per_s for stats in each),
        num_batches=sum(stats.num_batches for stats in each),
        num_rows=sum(stats.num_rows for stats in each),
        num_tokens=sum(stats.num_tokens for stats in each),
        per_tenant={name: _add_loads(loads) for name, loads in tenants.items()},
        backbone=each[0].backbone,
        uptime_s=max(stats.uptime_s for stats in each),
        memory_bytes=sum(stats.memory_bytes for stats in each),
        num_load_failures=sum(stats.num_load_failures for stats in each),
        is_draining=all(stats.is_draining for stats in each),
    )


def _add_loads(loads: Sequence[TenantLoad]) -> TenantLoad:
    return TenantLoad(
        num_rows=sum(load.num_rows for load in loads),
        num_tokens=sum(load.num_tokens for load in loads),
        num_refused=sum(load.num_refused for load in loads),
        queued_rows=sum(load.queued_rows for load in loads),
        queued_tokens=sum(load.queued_tokens for load in loads),
    )
