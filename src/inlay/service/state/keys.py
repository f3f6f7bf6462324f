"""Keys and browser sessions: who may use the service, and for what.

A key is `inl_<id>_<secret>`. A session is a random token in a browser's cookie that stands for a key. Of secrets and
tokens only the sha256 is kept, so nobody who reads the database can use them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from inlay.errors import BadConfig, UnknownName
from inlay.service.state import schema
from inlay.service.state.database import Database, count_change, write_audit
from inlay.service.state.state_errors import Conflict, Forbidden, Unauthorized
from inlay.service.state.tenants import active_tenant
from inlay.service.state.values import check_label, to_iso

SCOPES = ("predict", "train", "admin", "operator")
"""predict: ask; train: datasets, jobs, aliases, feedback; admin: keys and erasure; operator: all tenants"""
USUAL_SCOPES = ("predict", "train", "admin")
MOST_NAME = 64
_MARK = "inl"
_ID = re.compile(r"[a-z2-7]{12}")
_SECRET_BYTES = 32  # of a key's secret and of a session's token
_MOST_LIFE_S, _MOST_OVERLAP_S = 100 * 366 * 86400.0, 30 * 86400.0


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
        """The key's name in audits and histories."""
        return f"key:{self.id}"

    def require(self, scope: str) -> None:
        """Refuse a key without a scope."""
        if scope not in self.scopes:
            raise Forbidden(scope)

    def is_valid(self, now: float) -> bool:
        """Return whether the key is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

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
    """All keys of a service. `check` is on the hot route: it reads the database only after something changed."""

    def __init__(self, db: Database, actor: str = "operator") -> None:
        self._db = db
        self._actor = actor

    def exist(self) -> bool:
        """Tell whether a key was ever made: from then on every request needs one. Cached."""

        def read() -> bool:
            row = schema.revisions.c
            with self._db.reading() as connection:
                return bool(connection.execute(select(row.value).where(row.name == "keys")).scalar())

        return self._db.cached("keys-exist", read)

    def make(
        self,
        tenant: str,
        scopes: Collection[str] = USUAL_SCOPES,
        name: str = "",
        expires_at: float | None = None,
    ) -> tuple[Key, str]:
        """Make a key; return it and its whole text, which is shown once and never kept."""
        for scope in scopes:
            if scope not in SCOPES:
                raise UnknownName("scope", scope, SCOPES)
        if not scopes:
            raise BadConfig("a key needs a scope", f"one or more of: {', '.join(SCOPES)}")
        check_label("name of a key", name, MOST_NAME)
        now = self._db.now()
        if expires_at is not None and not now < expires_at < now + _MOST_LIFE_S:
            raise BadConfig("the key would end in the past, or in more than 100 years", "choose a time in the future")
        key = Key(_make_id(), tenant, name, frozenset(scopes), now, expires_at)
        with self._db.writing() as connection:
            active_tenant(connection, tenant)
            secret = self._insert(connection, key)
            write_audit(connection, tenant, now, (self._actor, "key.make", key.id))
        return key, f"{_MARK}_{key.id}_{secret}"

    def check(self, text: str) -> Key:
        """Return the valid key with this text, else raise Unauthorized. Takes microseconds when nothing changed."""
        _, _, rest = text.partition("_")
        key_id, _, secret = rest.partition("_")
        try:
            found = self._db.cached(("key", key_id), lambda: self._load(key_id)) if _ID.fullmatch(key_id) else _DUMMY
        except UnknownName:
            found = _DUMMY
        key, digest = found
        # The digest is compared even if there is no such key or it has ended: all refusals take the same time.
        is_right = hmac.compare_digest(_digest(secret), digest)
        is_valid = key.is_valid(self._db.now())
        if not (is_right and is_valid and text.startswith(f"{_MARK}_")) or found is _DUMMY:
            raise Unauthorized
        self._db.meter.note_use(key.id)
        return key

    def list(self, tenant: str) -> list[Key]:
        """Return a tenant's keys, newest first, including revoked ones."""
        row = schema.keys.c
        query = select(schema.keys).where(row.tenant == tenant).order_by(row.created_at.desc(), row.id)
        with self._db.reading() as connection:
            return [_key_of(found) for found in connection.execute(query)]

    def get(self, key_id: str, *, tenant: str | None = None) -> Key:
        """Return a key. With `tenant`, a key of another tenant is as unknown as one that never was."""
        with self._db.reading() as connection:
            return _find(connection, key_id, tenant)[0]

    def revoke(self, key_id: str, *, tenant: str | None = None) -> Key:
        """End a key at once. With `tenant`, a key of another tenant is as unknown as one that never was."""
        now = self._db.now()
        with self._db.writing() as connection:
            key, _ = _find(connection, key_id, tenant)
            if key.revoked_at is None:
                _end(connection, key_id, {"revoked_at": now})
                write_audit(connection, key.tenant, now, (self._actor, "key.revoke", key_id))
            return _find(connection, key_id, tenant)[0]

    def rotate(self, key_id: str, *, tenant: str | None = None, overlap_s: float = 0.0) -> tuple[Key, str]:
        """Replace a key by a new one with the same rights; the old one ends after `overlap_s` seconds."""
        now = self._db.now()
        if not 0 <= overlap_s <= _MOST_OVERLAP_S:
            raise BadConfig(f"the old key would stay for {overlap_s:g} seconds", "0 to 30 days")
        with self._db.writing() as connection:
            old, _ = _find(connection, key_id, tenant)
            if not old.is_valid(now):
                raise Conflict(f"the key `{key_id}` has ended", "make a new key")
            new = replace(old, id=_make_id(), created_at=now, last_used_at=None)
            secret = self._insert(connection, new)
            ends_at = now + overlap_s if old.expires_at is None else min(old.expires_at, now + overlap_s)
            _end(connection, key_id, {"expires_at": ends_at} if overlap_s else {"revoked_at": now})
            write_audit(connection, old.tenant, now, (self._actor, "key.rotate", f"{key_id} {new.id}"))
        return new, f"{_MARK}_{new.id}_{secret}"

    def _insert(self, connection: Connection, key: Key) -> str:
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        connection.execute(
            insert(schema.keys).values(
                id=key.id,
                tenant=key.tenant,
                name=key.name,
                digest=_digest(secret),
                scopes=" ".join(sorted(key.scopes)),
                created_at=key.created_at,
                expires_at=key.expires_at,
            )
        )
        count_change(connection, "keys")
        count_change(connection)
        return secret

    def _load(self, key_id: str) -> tuple[Key, str]:
        with self._db.reading() as connection:
            return _find(connection, key_id, None)


class Sessions:
    """All sessions of browsers. A session ends with its key: when that is revoked, expires or is erased."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def begin(self, key: Key, seconds: float) -> str:
        """Begin a session of a key; return its token. Sessions that ended are deleted."""
        token, now = secrets.token_urlsafe(_SECRET_BYTES), self._db.now()
        values = {"digest": _digest(token), "key": key.id, "created_at": now, "expires_at": now + seconds}
        with self._db.writing() as connection:
            connection.execute(delete(schema.sessions).where(schema.sessions.c.expires_at <= now))
            connection.execute(insert(schema.sessions).values(**values))
        return token

    def find(self, token: str) -> Key | None:
        """Return the key of a session that has not ended, else None."""
        row = schema.sessions.c
        with self._db.reading() as connection:
            found = connection.execute(select(schema.sessions).where(row.digest == _digest(token))).first()
        now = self._db.now()
        if found is None or found.expires_at <= now:
            return None
        try:
            key = Keys(self._db).get(found.key)
        except UnknownName:
            return None
        return key if key.is_valid(now) else None

    def end(self, token: str) -> None:
        """End a session, if there is one of this token."""
        with self._db.writing() as connection:
            connection.execute(delete(schema.sessions).where(schema.sessions.c.digest == _digest(token)))


def _find(connection: Connection, key_id: str, tenant: str | None) -> tuple[Key, str]:
    row = schema.keys.c
    query = select(schema.keys).where(row.id == key_id)
    found = connection.execute(query if tenant is None else query.where(row.tenant == tenant)).one_or_none()
    if found is None:
        raise UnknownName("key", key_id, (), hint="the part of a key between the two `_` is its id")
    return _key_of(found), found.digest


def _key_of(row: Any) -> Key:
    scopes = frozenset(row.scopes.split())
    return Key(row.id, row.tenant, row.name, scopes, row.created_at, row.expires_at, row.revoked_at, row.last_used_at)


def _end(connection: Connection, key_id: str, values: dict[str, float]) -> None:
    connection.execute(update(schema.keys).where(schema.keys.c.id == key_id).values(**values))
    count_change(connection)


def _make_id() -> str:
    return base64.b32encode(secrets.token_bytes(8)).decode().lower()[:12]


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


_DUMMY = (Key("", "", "", frozenset(), 0.0), _digest(""))
