"""The client of Inlay's service, over HTTP and with the library's names. It imports no torch."""

from __future__ import annotations

from inlay.client.problems_read import ServiceProblem
from inlay.client.remote import DEFAULT_URL, KEY_VARIABLE, Client
from inlay.client.results import (
    RemoteAlias,
    RemoteAnswer,
    RemoteDataset,
    RemoteEvent,
    RemoteJob,
    RemoteTask,
    RemoteVersion,
)

__all__ = [
    "DEFAULT_URL",
    "KEY_VARIABLE",
    "Client",
    "RemoteAlias",
    "RemoteAnswer",
    "RemoteDataset",
    "RemoteEvent",
    "RemoteJob",
    "RemoteTask",
    "RemoteVersion",
    "ServiceProblem",
]
