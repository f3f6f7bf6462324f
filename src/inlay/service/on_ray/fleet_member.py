"""An engine or a trainer on a machine of the cluster: an actor that keeps one process of the service running.

The process and its supervisor are the same as in a service on one machine. The process ends whenever the actor ends;
Ray then restarts the actor, on this machine or another. What always holds: a machine with other versions, or one that
does not see the service's folder or bucket, runs nothing and reports why.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from inlay.cluster import own_versions
from inlay.errors import InlayError, Missing, StoreUnreachable, Unsupported
from inlay.service.engine import Roster, RosterFile
from inlay.service.engine.engine_start import VARIABLE as ENGINE_VARIABLE
from inlay.service.engine.engine_start import ListenAddress
from inlay.service.home import prepare_home
from inlay.service.logs import log_event, log_failure, set_up_logs
from inlay.service.on_ray.fleet_messages import (
    DATABASE_VARIABLE,
    ENGINE,
    Failure,
    FleetOrder,
    MemberReport,
    describe_failure,
    has_mark,
    take_environment,
)
from inlay.service.settings import ROSTER_VARIABLE, ServeSettings, read_settings
from inlay.service.settings import VARIABLE as SETTINGS_VARIABLE
from inlay.service.start_service import find_home, make_environment
from inlay.service.supervisor import Listeners, ServiceProgram, Supervisor
from inlay.store import Store

_GRACE_S = 5.0
SWEEP_S = 3600.0


class FleetMember:
    """Keeps one engine or trainer running. An actor whose methods run in several threads."""

    def __init__(self, order: FleetOrder, name: str, role: str) -> None:
        import ray

        self._name, self._order = name, order
        self._node = ray.get_runtime_context().get_node_id()
        self._host = ray.util.get_node_ip_address()
        self._facts: Mapping[str, Any] = {}
        self._failure: Failure | None = None
        self._supervisor: Supervisor | None = None
        self._thread: threading.Thread | None = None
        settings = read_settings({SETTINGS_VARIABLE: order.settings})
        set_up_logs(name, as_json=settings.log_json)
        self._folder = tempfile.TemporaryDirectory(prefix="inlay-member-")
        self._roster = RosterFile(Path(self._folder.name) / "roster.json")
        self._revision = -1
        try:
            take_environment(order.environment)
            check_machine(order, settings)
            self._begin(prepare_machine(settings), role)
        except InlayError as error:
            self._failure = describe_failure(error)

    def describe(self, roster: Roster | None) -> MemberReport:
        """Return the state of the process, and write the latest roster, if it is known, for a trainer."""
        if roster is not None and roster.revision != self._revision:
            self._roster.write(roster)
            self._revision = roster.revision
        found = self._supervisor.describe()[0] if self._supervisor is not None else {}
        facts = self._facts if found.get("state") == "ready" else {}
        return MemberReport(self._name, socket.gethostname(), self._node, found.get("pid"), facts, self._failure)

    def drain(self) -> None:
        """Let the process finish its work, and end it."""
        if self._supervisor is not None and self._thread is not None:
            self._supervisor.stop()
            self._thread.join(self._drain_s + _GRACE_S)

    def _begin(self, settings: ServeSettings, role: str) -> None:
        environment = make_environment(settings, role) | {ROSTER_VARIABLE: str(Path(self._folder.name) / "roster.json")}
        if role == ENGINE:
            environment[ENGINE_VARIABLE] = json.dumps(asdict(ListenAddress(self._host, self._order.token)))
        command = (sys.executable, "-P", "-m", f"inlay.service.{role}")
        # No low priority here, even for trainers: Ray gives each member its own share of a machine.
        program = ServiceProgram(self._name, command, environment)
        self._drain_s = settings.drain_s
        self._supervisor = Supervisor([program], Listeners(on_facts=self._take_facts), drain_s=settings.drain_s)
        # The kernel ends the process with the thread that started it, so the thread lives as long as the process.
        self._thread = threading.Thread(target=self._run, args=(self._supervisor,), name="supervisor", daemon=True)
        self._thread.start()
        if role == ENGINE and settings.store is not None:  # trainers do it themselves
            keep_forgetting(settings.store)

    def _take_facts(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts

    def _run(self, supervisor: Supervisor) -> None:
        try:
            supervisor.run()
        except InlayError as error:
            log_event("given up", {"code": error.code}, level=40)
            self._failure = describe_failure(error)
        except Exception:
            log_failure("given up")
            os._exit(1)  # Ray restarts the actor


def check_machine(order: FleetOrder, settings: ServeSettings) -> None:
    """Refuse a machine that cannot work for the service: other versions, another store, or no shared database."""
    here, own = socket.gethostname(), own_versions()
    if own != order.versions:
        found = f"machine `{here}` has {', '.join(own)}, and the service {', '.join(order.versions)}"
        raise Unsupported(found, "install the same versions on all machines of the cluster")
    try:
        sees_store = has_mark(settings, order.mark)
    except (Missing, StoreUnreachable) as error:
        raise type(error)(f"on machine `{here}`: {error.message}", error.hint) from None
    if not sees_store:
        if settings.store is None:
            hint = "mount one folder at the same path on all machines"
            raise Unsupported(f"machine `{here}` does not see the service's folder `{settings.home}`", hint)
        hint = "it asks another endpoint (such as AWS_ENDPOINT_URL) or account than the service: set the same ones"
        raise Unsupported(f"machine `{here}` has another bucket for `{settings.store}`", hint)
    if here != order.hostname and not os.environ.get(DATABASE_VARIABLE):
        hint = f"keep it in Postgres, and set ${DATABASE_VARIABLE} (docs/operating.md)"
        raise Unsupported(f"the service's state lies in SQLite, which machine `{here}` cannot share", hint)


def prepare_machine(settings: ServeSettings) -> ServeSettings:
    """Return the settings of this machine: if the store is object storage, with a home of its own, which is made."""
    if settings.store is None:
        return settings
    settings = replace(settings, home=find_home(settings.store))
    prepare_home(settings)
    return settings


def keep_forgetting(store_address: str) -> None:
    """Delete this machine's copies of versions that are no longer in the store, now and once an hour, in a thread."""
    threading.Thread(target=_forget_forever, args=(store_address,), name="copies", daemon=True).start()


def _forget_forever(store_address: str) -> None:
    while True:
        try:
            Store(store_address).forget_gone()
        except InlayError as error:  # the storage may be gone for a moment
            log_event("copies of erased versions stay for now", {"code": error.code}, level=30)
        except Exception:
            log_failure("copies of erased versions could not be looked for")
        time.sleep(SWEEP_S)
