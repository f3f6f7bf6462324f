"""What travels over Ray: the order for a fleet, a visit of a service to its keeper, and the reports that come back.

Errors travel as data: a machine with another version of something could not read them as objects.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inlay.cluster import own_versions
from inlay.errors import InlayError
from inlay.service.engine import Roster
from inlay.service.settings import ClusterSettings, ServeSettings
from inlay.store import write_atomically

ENGINE, TRAINER = "engine", "trainer"
KEEPER = "keeper"
DATABASE_VARIABLE = "INLAY_DATABASE"
_HANDED_OVER = (DATABASE_VARIABLE, "INLAY_BACKBONES", "INLAY_STORE_CACHE")
"""variables that a machine of the cluster takes from the service where it has none of its own"""
_COMPARED = ("backbone", "device", "precision", "num_slots", "train", "target_batch_ms")


@dataclass(frozen=True)
class FleetOrder:
    """All that a machine needs to run an engine or a trainer of a service."""

    settings: str
    """the settings of the service as JSON"""
    environment: Mapping[str, str] = field(repr=False)
    """it may have the password of the database"""
    token: str = field(repr=False)
    mark: str
    """the content of a file in the home: a machine that reads it sees the same folder, if the store is one"""
    versions: tuple[str, ...]
    hostname: str

    @property
    def identity(self) -> str:
        """Two services of one identity may share engines and trainers."""
        tree = json.loads(self.settings)
        known = [self.versions, tree["store"] or tree["home"], *(tree[name] for name in _COMPARED)]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()


@dataclass(frozen=True)
class Failure:
    """An error as data."""

    code: str
    message: str
    hint: str | None
    exit_status: int


@dataclass(frozen=True)
class MemberReport:
    """An engine or trainer as it says it is."""

    name: str
    hostname: str
    node: str
    pid: int | None = None
    """its process; None while there is none"""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """what the process said when it was ready; empty before"""
    failure: Failure | None = None


@dataclass(frozen=True)
class FleetVisit:
    """A service that shows it is there, and what it wants of its fleet."""

    service: str
    identity: str
    cluster: ClusterSettings
    known_revision: int = -1
    queued_s: float = 0.0
    """the time that one trainer would need for all that is queued"""


@dataclass(frozen=True)
class FleetReport:
    """The fleet as its keeper knows it."""

    state: str
    """"starting", "ready" once all were there, "ending" """
    roster: Roster
    members: tuple[MemberReport, ...] = ()
    waiting: tuple[str, ...] = ()
    """names of those for which no machine has room yet, or which are still beginning"""
    failure: Failure | None = None


def make_order(settings: ServeSettings) -> FleetOrder:
    """Return the order for a service's fleet, and leave the mark in its home."""
    mark = secrets.token_hex(16)
    path = settings.run_folder / "cluster-mark"
    if path.exists():
        mark = path.read_text()
    else:
        write_atomically(path, mark.encode())
    environment = {name: os.environ[name] for name in _HANDED_OVER if name in os.environ}
    versions, hostname = own_versions(), socket.gethostname()
    return FleetOrder(settings.to_json(), environment, secrets.token_hex(32), mark, versions, hostname)


def find_namespace(settings: ServeSettings) -> str:
    """Return Ray's namespace for a service: that of its database, or of its store."""
    place = os.environ.get(DATABASE_VARIABLE) or settings.place
    return f"inlay-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


def describe_failure(error: InlayError) -> Failure:
    """Return an error as data."""
    return Failure(error.code, error.message, error.hint, error.exit_status)
