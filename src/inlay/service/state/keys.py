"""Keys: who may ask, and for what. `inl_<id>_<secret>`; of the secret only the sha256 is kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inlay.service.state.state_errors import Forbidden
from inlay.service.state.timestamps import to_iso

if TYPE_CHECKING:
    from inlay.service.state.database import Database

SCOPES = ("predict", "train", "admin", "operator")
"""predict: ask; train: datasets, jobs, aliases, feedback; admin: keys and erasure; operator: all tenants"""
USUAL_SCOPES = ("predict", "train", "admin")


@dataclass(frozen=True)
class Key:
    """A key, without its secret."""

    id: str
    tenant: str
    name: str
    scopes: frozenset[str]
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None
    """to the minute"""

    @property
    def actor(self) -> str:
        """Its name in audits and histories."""
        return f"key:{self.id}"

    def require(self, scope: str) -> None:
        """Refuse a key without a scope."""
        if scope not in self.scopes:
            raise Forbidden(scope)

    def to_json(self) -> dict[str, Any]:
        """Return the key as the API shows it."""
        return {
            "id": self.id,
            "name": self.name,
            "tenant": self.tenant,
            "scopes": [scope for scope in SCOPES if scope in self.scopes],
            "created_at": to_iso(self.created_at),
            "expires_at": to_iso(self.expires_at),
            "revoked_at": to_iso(self.revoked_at),
            "last_used_at": to_iso(self.last_used_at),
        }


class Keys:
    """All keys of a service. `check` is on the hot route: it asks the database only after something changed."""

    def __init__(self, db: Database, actor: str = "operator") -> None:
        self._db = db
        self._actor = actor

    def exist(self) -> bool:
        """Tell whether any key is there, revoked or not: then every request needs one. Cached."""
        raise NotImplementedError

    def make(
        self,
        tenant: str,
        scopes: Collection[str] = USUAL_SCOPES,
        name: str = "",
        expires_at: float | None = None,
    ) -> tuple[Key, str]:
        """Make a key; return it and its whole text, which is shown once and never kept."""
        raise NotImplementedError

    def check(self, text: str) -> Key:
        """Return the valid key that a text is; Unauthorized for any other. Takes microseconds when nothing changed."""
        raise NotImplementedError

    def list(self, tenant: str) -> list[Key]:
        """Return a tenant's keys, newest first, revoked ones too."""
        raise NotImplementedError

    def revoke(self, key_id: str, *, tenant: str | None = None) -> Key:
        """End a key at once. With `tenant`, a key of another tenant is as unknown as one that never was."""
        raise NotImplementedError

    def rotate(self, key_id: str, *, tenant: str | None = None, overlap_s: float = 0.0) -> tuple[Key, str]:
        """Make a key like another, which ends after `overlap_s` seconds."""
        raise NotImplementedError
