"""What travels over Ray: the order for a fleet, a visit of a service to its keeper, and the reports that come back.

Errors travel as data: a machine with another version of something could not read them as objects.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from inlay.cluster import own_versions
from inlay.errors import InlayError
from inlay.service.engine import Roster
from inlay.service.on_ray.marks import leave_mark
from inlay.service.settings import ClusterSettings, ServeSettings

ENGINE, TRAINER = "engine", "trainer"
KEEPER = "keeper"
DATABASE_VARIABLE = "INLAY_DATABASE"
_HANDED_OVER = (DATABASE_VARIABLE, "INLAY_BACKBONES", "INLAY_STORE_CACHE")
"""variables that a machine of the cluster takes from the service where it has none of its own"""
_OF_STORAGE = ("AWS_", "GOOGLE_", "AZURE_")
"""how variables of object storage begin"""
_CREDENTIAL = re.compile("KEY|SECRET|TOKEN|CREDENTIAL|PROFILE|ROLE|ACCOUNT|CLIENT|TENANT")
"""in the name of such a variable if it says who asks: a machine with one takes none, as two would not fit together"""
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
    """what `leave_mark` left in the folder or bucket: a machine that reads it there sees the same one"""
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
    """Return the order for a service's fleet, and leave the mark in its folder or bucket."""
    begins = _OF_STORAGE if settings.store is not None else ()
    environment = {name: text for name, text in os.environ.items() if name in _HANDED_OVER or name.startswith(begins)}
    versions, hostname, mark = own_versions(), socket.gethostname(), leave_mark(settings)
    return FleetOrder(settings.to_json(), environment, secrets.token_hex(32), mark, versions, hostname)


def take_environment(given: Mapping[str, str], own: MutableMapping[str, str] = os.environ) -> None:
    """Take the service's variables on a machine of the cluster, but for those that the machine has itself."""
    known = {kind for name in own if (kind := _find_account(name))}
    for name, text in given.items():
        if _find_account(name) not in known:
            own.setdefault(name, text)


def _find_account(name: str) -> str:
    """Return whose credentials a variable has part of: "AWS_" and the like, or "" """
    kind = next((begin for begin in _OF_STORAGE if name.startswith(begin)), "")
    return kind if _CREDENTIAL.search(name.removeprefix(kind)) else ""


def find_namespace(settings: ServeSettings) -> str:
    """Return Ray's namespace for a service: that of its database, or of its store."""
    place = os.environ.get(DATABASE_VARIABLE) or settings.place
    return f"inlay-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


def describe_failure(error: InlayError) -> Failure:
    """Return an error as data."""
    return Failure(error.code, error.message, error.hint, error.exit_status)
