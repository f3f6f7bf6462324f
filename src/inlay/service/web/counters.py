"""Counters for Prometheus. Their labels are routes, statuses and kinds, never names of tenants or tasks.

Several web processes write their counters to one folder (the supervisor sets `PROMETHEUS_MULTIPROC_DIR`), and any of
them shows the sums.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

if TYPE_CHECKING:
    from inlay.service.engine import EngineStats

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"}
_BANDS = ("interactive", "bulk")


class Counters:
    """The counters of one web process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._requests = Counter(
            "inlay_requests", "Requests, by route and status.", ("method", "route", "status"), registry=registry
        )
        self._seconds = Histogram(
            "inlay_request_seconds",
            "Seconds from a request to its answer.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._rows = Counter("inlay_rows", "Rows answered, by band.", ("band",), registry=registry)
        self._tokens = Counter("inlay_tokens", "Tokens answered, by band.", ("band",), registry=registry)
        self._faults = Counter(
            "inlay_row_errors", "Rows answered with an error, by its code.", ("code",), registry=registry
        )
        self._mismatches = Counter(
            "inlay_wrong_versions", "Answers refused since another version had given them.", registry=registry
        )
        for band in _BANDS:
            self._rows.labels(band)
            self._tokens.labels(band)
        self._known: dict[tuple[str, str, int], Counter] = {}
        self._clocks: dict[str, Histogram] = {}

    def add_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        key = (method if method in _METHODS else "other", route, status)
        counter = self._known.get(key)
        if counter is None:
            counter = self._known[key] = self._requests.labels(key[0], route, str(status))
        counter.inc()
        clock = self._clocks.get(route)
        if clock is None:
            clock = self._clocks[route] = self._seconds.labels(route)
        clock.observe(seconds)

    def add_rows(self, band: str, num_rows: int, num_tokens: int) -> None:
        """Count rows that were answered."""
        self._rows.labels(band).inc(num_rows)
        self._tokens.labels(band).inc(num_tokens)

    def add_fault(self, code: str) -> None:
        """Count a row that got an error."""
        self._faults.labels(code).inc()

    def add_mismatch(self) -> None:
        """Count an answer that was refused because another version gave it. This must never happen."""
        self._mismatches.inc()

    def show(self, stats: EngineStats | None, facts: dict[str, float]) -> bytes:
        """Return all counters as Prometheus reads them, with those of the engine and the given values."""
        registry = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        gauges = CollectorRegistry()
        gauges.register(_Gauges(_engine_facts(stats) | facts))
        return generate_latest(registry) + generate_latest(gauges)


def _engine_facts(stats: EngineStats | None) -> dict[str, float]:
    if stats is None:
        return {"inlay_engine_up": 0.0}
    return {
        "inlay_engine_up": 1.0,
        "inlay_engine_queue_rows": stats.queue_rows,
        "inlay_engine_queue_tokens": stats.queue_tokens,
        "inlay_engine_queue_seconds": stats.queue_s,
        "inlay_engine_resident_versions": len(stats.resident),
        "inlay_engine_slots": stats.num_slots,
        "inlay_engine_tokens_per_second": stats.tokens_per_s,
        "inlay_engine_batches": stats.num_batches,
        "inlay_engine_rows": stats.num_rows,
        "inlay_engine_tokens": stats.num_tokens,
        "inlay_engine_uptime_seconds": stats.uptime_s,
        "inlay_engine_memory_bytes": stats.memory_bytes,
        "inlay_engine_load_failures": stats.num_load_failures,
        "inlay_engine_active_tenants": sum(1 for load in stats.per_tenant.values() if load.queued_rows),
        "inlay_engine_refusals": sum(load.num_refused for load in stats.per_tenant.values()),
    }


class _Gauges:
    """Present values, which were asked for and are not counted here."""

    def __init__(self, facts: dict[str, float]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in self._facts.items():
            words = name.removeprefix("inlay_").replace("_", " ").capitalize()
            yield GaugeMetricFamily(name, f"{words}.", value=value)
