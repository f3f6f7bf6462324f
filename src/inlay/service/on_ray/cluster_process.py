"""The process of a service that looks after its cluster: it sends the keeper heartbeats, and writes the roster.

If the cluster cannot be reached at the start, the service ends with an error. Later the process tries again and again.
Meanwhile web processes use the engines that are left, or ask clients to wait, and jobs wait in the database.
"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from typing import Any

from inlay.cluster import connect
from inlay.errors import InlayError, LostProcess, Missing
from inlay.service.child import Child
from inlay.service.engine import Roster, RosterFile
from inlay.service.home import write_fleet
from inlay.service.logs import log_event
from inlay.service.on_ray.fleet_keeper import FleetKeeper
from inlay.service.on_ray.fleet_member import keep_forgetting
from inlay.service.on_ray.fleet_messages import (
    KEEPER,
    Failure,
    FleetReport,
    ServiceHeartbeat,
    find_home_id,
    find_namespace,
    make_order,
)
from inlay.service.settings import ServeSettings
from inlay.service.state import Database, queued_seconds

START_S = 300.0
"""longest wait for the first engines and trainers"""
_HEARTBEAT_PATIENCE_S = 10.0
_LOST_S = 60.0
"""after this time without the keeper the process ends, and its successor connects anew"""
_PAUSES_S = (0.5, 1.0, 2.0, 5.0)
_WORK_EVERY_S = 2.0
_SHOWN = ("backbone", "device", "slots")


class FleetFailed(InlayError):
    """An error of a machine of the cluster before the service was first ready."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, failure.hint)
        self.code, self.exit_status = failure.code, failure.exit_status


def serve(child: Child) -> None:
    """Look after the cluster until the service stops; then tell the keeper."""
    settings = child.settings
    assert settings.cluster is not None
    child.progress("connecting to the Ray cluster")
    ray = connect(settings.cluster.address)
    child.hear_signals()  # Ray has replaced the handlers
    if settings.store is not None:
        keep_forgetting(settings.store)
    with closing(Database.open(settings.store_address)) as db:
        client = KeeperClient(ray, settings, db)
        try:
            client.run(child)
        finally:
            # After a later error the supervisor restarts this process, and the engines stay as they are.
            if child.stopping.is_set() or not child.is_ready:
                client.leave()
                with suppress(Exception):
                    ray.shutdown()


class KeeperClient:
    """Sends a service's heartbeats to the keeper of its fleet, and takes the reports that come back."""

    def __init__(self, ray: Any, settings: ServeSettings, db: Database, *, name: str = "") -> None:
        """`name` tells apart several clients of one home. A service that was killed and restarted keeps its name."""
        self._ray, self._settings, self._db = ray, settings, db
        self._order = make_order(settings)
        self._namespace = find_namespace(settings)
        self._service = f"{self._order.hostname}:{find_home_id(settings)}:{name}"
        self._file = RosterFile(settings.roster_file)
        self._known: Roster | None = None
        self._members: list[dict[str, Any]] = []
        self._keeper: Any = None
        self._work_at, self._queued_s = -_WORK_EVERY_S, 0.0

    def run(self, child: Child) -> None:
        """Send heartbeats until the service stops."""
        began = seen_at = time.monotonic()
        pauses, told = 0, ""
        while not child.stopping.is_set():
            try:
                report = self._heartbeat()
            except InlayError:
                raise
            except Exception as error:  # errors of Ray and of its connection
                self._keeper = None
                if time.monotonic() - seen_at > _LOST_S:
                    raise _lost(error) from None
                if not pauses:
                    log_event("the cluster does not answer", {"why": type(error).__name__}, level=30)
                child.stopping.wait(_PAUSES_S[min(pauses, len(_PAUSES_S) - 1)])
                pauses += 1
                continue
            seen_at, pauses = time.monotonic(), 0
            self._take(report)
            if report.state == "ready":
                if not child.is_ready:
                    child.ready(self._describe(report))
                continue
            if not child.is_ready:  # else the keeper was restarted, and is finding its members
                if report.failure is not None:
                    raise FleetFailed(report.failure)
                if time.monotonic() - began > START_S:
                    raise self._too_late(report)
                words = f"waiting for {', '.join(report.waiting)}" if report.waiting else "waiting for the cluster"
                if words != told:
                    child.progress(words)
                    told = words
            child.stopping.wait(_PAUSES_S[0])

    def leave(self) -> None:
        """Tell the keeper that this service ends. With the last service its engines and trainers end too.

        A keeper whose machine has just died is being restarted on another one: it is asked again and again. Otherwise
        its members would stay until it has had no heartbeat for a minute.
        """
        until = time.monotonic() + self._settings.drain_s + START_S / 10
        while (left := until - time.monotonic()) > 0:
            try:
                keeper = self._ray.get_actor(KEEPER, namespace=self._namespace)
            except Exception:  # it has ended, or there is no cluster any more
                return
            with suppress(Exception):
                self._ray.get(keeper.leave.remote(self._service), timeout=left)
                return
            time.sleep(_PAUSES_S[0])

    def _heartbeat(self) -> FleetReport:
        assert self._settings.cluster is not None
        if self._keeper is None:
            self._keeper = self._find_keeper()
        revision = -1 if self._known is None else self._known.revision
        heartbeat = ServiceHeartbeat(self._service, self._order, self._settings.cluster, revision, self._count_work())
        report: FleetReport = self._ray.get(self._keeper.heartbeat.remote(heartbeat), timeout=_HEARTBEAT_PATIENCE_S)
        if report.state == "ending":
            self._keeper = None
        return report

    def _find_keeper(self) -> Any:
        make = self._ray.remote(FleetKeeper).options(
            name=KEEPER,
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=1000,
            num_cpus=0,
        )
        return make.remote(self._order, self._namespace)

    def _take(self, report: FleetReport) -> None:
        """Write the roster and the list of members, if they have changed."""
        # A restarted keeper may not have found its engines yet, which go on answering.
        is_known = bool(report.roster.replicas) or report.state == "ready" or self._known is None
        if report.roster != self._known and is_known:
            self._file.write(report.roster)
            self._known = report.roster
        members: list[dict[str, Any]] = []
        for each in report.members:
            about = {"name": each.name, "machine": each.hostname, "node": each.node, "pid": each.pid}
            members.append(about | {"is_up": each.name not in report.waiting})
        known = {each.name for each in report.members}
        members += [{"name": name, "is_up": False} for name in report.waiting if name not in known]
        if members != self._members:
            write_fleet(self._settings, members)
            self._members = members

    def _count_work(self) -> float:
        """Return the seconds that one trainer would need for all queued jobs; they are counted every two seconds."""
        if time.monotonic() - self._work_at >= _WORK_EVERY_S:
            self._work_at = time.monotonic()
            with suppress(InlayError):  # the database may be gone for a moment
                self._queued_s = queued_seconds(self._db)
        return self._queued_s

    def _describe(self, report: FleetReport) -> dict[str, Any]:
        facts = next((dict(each.facts) for each in report.members if "port" in each.facts), {})
        machines = {each.hostname for each in report.members}
        kept: dict[str, Any] = {name: facts[name] for name in _SHOWN if name in facts}
        return kept | {"engines": len(report.roster.replicas), "machines": len(machines)}

    def _too_late(self, report: FleetReport) -> InlayError:
        cluster = self._settings.cluster
        assert cluster is not None
        resources = f"{cluster.num_cpus:g} processors and {cluster.num_gpus:g} GPUs"
        names = ", ".join(report.waiting)
        return Missing(
            f"no machine of the cluster had room for {names} within {START_S:g} s ({resources} each)",
            "add machines, or ask for less with `--engines`, `--trainers`, `--ray-cpus` and `--ray-gpus`",
        )


def _lost(error: Exception) -> LostProcess:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
    return LostProcess(
        f"the Ray cluster has not answered for {_LOST_S:g} s: {reason}", "start it again; the service connects to it"
    )
