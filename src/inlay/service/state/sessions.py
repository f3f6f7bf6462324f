"""Sessions of browsers: a random token stands for a key. Only the token's sha256 is kept."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from sqlalchemy import delete, insert, select

from inlay.errors import UnknownName
from inlay.service.state import schema
from inlay.service.state.keys import Key, Keys

if TYPE_CHECKING:
    from inlay.service.state.database import Database

_TOKEN_BYTES = 32


class Sessions:
    """All sessions of a service. A session ends with its key: when that is revoked, expires or is erased."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def begin(self, key: Key, seconds: float) -> str:
        """Begin a session of a key; return its token. Sessions that ended are cleared away."""
        token, now = secrets.token_urlsafe(_TOKEN_BYTES), self._db.now()
        row = schema.sessions.c
        with self._db.writing() as connection:
            connection.execute(delete(schema.sessions).where(row.expires_at <= now))
            connection.execute(
                insert(schema.sessions).values(
                    digest=_digest(token), key=key.id, created_at=now, expires_at=now + seconds
                )
            )
        return token

    def find(self, token: str) -> Key | None:
        """Return the key of a session that has not ended; None for any other."""
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
        is_valid = key.revoked_at is None and (key.expires_at is None or now < key.expires_at)
        return key if is_valid else None

    def end(self, token: str) -> None:
        """End a session; one that is none is left as it is."""
        with self._db.writing() as connection:
            connection.execute(delete(schema.sessions).where(schema.sessions.c.digest == _digest(token)))


def _digest(token: str) -> str:
    """Return what is kept of a token: nobody who reads the database can sign in by it."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()
