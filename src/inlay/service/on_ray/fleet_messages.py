"""The messages over Ray: the order for a fleet, a service's heartbeat, and the reports that come back.

Errors are sent as data, since a machine with other versions could not unpickle them. The mark that a service leaves in
its folder or bucket shows a machine whether it sees the same one: another folder may have the same path, and a bucket
at another endpoint the same name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from inlay.cluster import own_versions
from inlay.errors import InlayError
from inlay.service.engine import Roster
from inlay.service.settings import ClusterSettings, ServeSettings
from inlay.store import Store, write_atomically

ENGINE, TRAINER = "engine", "trainer"
KEEPER = "keeper"
DATABASE_VARIABLE = "INLAY_DATABASE"
_HANDED_OVER = (DATABASE_VARIABLE, "INLAY_BACKBONES", "INLAY_STORE_CACHE")
"""environment variables that a machine of the cluster takes from the service unless it has its own"""
_OF_STORAGE = ("AWS_", "GOOGLE_", "AZURE_")
"""prefixes of the environment variables of object storage"""
_CREDENTIAL = re.compile("KEY|SECRET|TOKEN|CREDENTIAL|PROFILE|ROLE|ACCOUNT|CLIENT|TENANT")
"""in the names of variables with credentials. A machine with one of them takes none: two accounts do not mix"""
_MARK_NAME = "cluster-mark"
_HOME_ID_NAME = "visitor-id"
_MARK_KEY = f"service/{_MARK_NAME}"
_COMPARED = ("backbone", "device", "precision", "num_slots", "train", "target_batch_ms")


@dataclass(frozen=True)
class FleetOrder:
    """All that a machine needs to run an engine or a trainer of a service."""

    settings: str
    """the settings of the service as JSON"""
    environment: Mapping[str, str] = field(repr=False)
    """it may contain the password of the database"""
    token: str = field(repr=False)
    mark: str
    """what `leave_mark` wrote into the folder or bucket"""
    versions: tuple[str, ...]
    hostname: str

    @property
    def identity(self) -> str:
        """A hash: services with the same one may share engines and trainers."""
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
    """The report of an engine or trainer about itself."""

    name: str
    hostname: str
    node: str
    pid: int | None = None
    """the id of its process; None while it has none"""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """what the process reported when it was ready; empty before"""
    failure: Failure | None = None


@dataclass(frozen=True)
class ServiceHeartbeat:
    """A regular message of a service to the keeper: that it runs, and what it wants of its fleet."""

    service: str
    order: FleetOrder
    """for members placed from now on: credentials may be newer than those of the first order"""
    cluster: ClusterSettings
    known_revision: int = -1
    queued_s: float = 0.0
    """the time that one trainer would need for all queued jobs"""


@dataclass(frozen=True)
class FleetReport:
    """The state of the fleet as its keeper knows it."""

    state: str
    """"starting"; "ready" since all members were up once; "ending" """
    roster: Roster
    members: tuple[MemberReport, ...] = ()
    waiting: tuple[str, ...] = ()
    """names of members that have no machine yet, or are starting"""
    failure: Failure | None = None


def make_order(settings: ServeSettings) -> FleetOrder:
    """Return the order for a service's fleet, and leave the mark in its folder or bucket."""
    begins = _OF_STORAGE if settings.store is not None else ()
    environment = {name: text for name, text in os.environ.items() if name in _HANDED_OVER or name.startswith(begins)}
    versions, hostname, mark = own_versions(), socket.gethostname(), leave_mark(settings)
    return FleetOrder(settings.to_json(), environment, secrets.token_hex(32), mark, versions, hostname)


def take_environment(given: Mapping[str, str], own: MutableMapping[str, str] = os.environ) -> None:
    """Set the service's variables on a machine of the cluster, except those that the machine has itself."""
    known = {kind for name in own if (kind := _find_account(name))}
    for name, text in given.items():
        if _find_account(name) not in known:
            own.setdefault(name, text)


def _find_account(name: str) -> str:
    """Return the provider whose credentials a variable is part of, as a prefix such as "AWS_", or "" """
    kind = next((begin for begin in _OF_STORAGE if name.startswith(begin)), "")
    return kind if _CREDENTIAL.search(name.removeprefix(kind)) else ""


def find_namespace(settings: ServeSettings) -> str:
    """Return Ray's namespace for a service, which depends on its database, or else on its store."""
    shared = os.environ.get(DATABASE_VARIABLE) or settings.store_address
    return f"inlay-{hashlib.sha256(shared.encode()).hexdigest()[:12]}"


def describe_failure(error: InlayError) -> Failure:
    """Return an error as data."""
    return Failure(error.code, error.message, error.hint, error.exit_status)


def leave_mark(settings: ServeSettings) -> str:
    """Return the mark of a service's folder or bucket; the first service writes it."""
    mark = secrets.token_hex(16)
    storage = None if settings.store is None else Store(settings.store).storage
    if storage is not None:
        with suppress(FileExistsError):
            storage.put_new(_MARK_KEY, mark.encode())
        return storage.get(_MARK_KEY).decode()
    path = settings.run_folder / _MARK_NAME
    if path.exists():
        return path.read_text()
    write_atomically(path, mark.encode())
    return mark


def find_home_id(settings: ServeSettings) -> str:
    """Return a random name for a service's home, kept in it: host names of two machines can be equal."""
    path = settings.run_folder / _HOME_ID_NAME
    if not path.exists():
        write_atomically(path, secrets.token_hex(16).encode())
    return path.read_text()


def has_mark(settings: ServeSettings, mark: str) -> bool:
    """Return whether this machine sees the folder or bucket with this mark."""
    storage = None if settings.store is None else Store(settings.store).storage
    try:
        found = (settings.run_folder / _MARK_NAME).read_text() if storage is None else storage.get(_MARK_KEY).decode()
    except OSError:
        return False
    return found == mark
