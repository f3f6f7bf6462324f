"""Sessions of browsers: they stand for a key, and end with it."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from inlay.service.state import Database, Keys, Sessions, schema


@pytest.fixture
def clock():
    return [1_800_000_000.0]


@pytest.fixture
def db(tmp_path, clock):
    database = Database.open(tmp_path, clock=lambda: clock[0])
    yield database
    database.close()


def test_a_session_stands_for_its_key_until_it_ends(db, clock):
    key, _ = Keys(db).make("local", name="laptop")
    token = Sessions(db).begin(key, 60.0)
    assert Sessions(db).find(token) == key
    assert Sessions(db).find(token + "x") is None
    Sessions(db).end(token)
    assert Sessions(db).find(token) is None
    second = Sessions(db).begin(key, 60.0)
    clock[0] += 61
    assert Sessions(db).find(second) is None


def test_a_session_ends_with_its_key(db, clock):
    keys, sessions = Keys(db), Sessions(db)
    revoked, _ = keys.make("local")
    expired, _ = keys.make("local", expires_at=clock[0] + 10)
    tokens = [sessions.begin(key, 3600.0) for key in (revoked, expired)]
    keys.revoke(revoked.id)
    clock[0] += 11
    assert [sessions.find(token) for token in tokens] == [None, None]


def test_of_a_session_only_a_digest_is_kept_and_old_ones_are_cleared(db, clock):
    key, _ = Keys(db).make("local")
    tokens = [Sessions(db).begin(key, 60.0) for _ in range(3)]
    with db.reading() as connection:
        kept = str(connection.execute(select(schema.sessions)).all())
    assert all(token not in kept for token in tokens)
    clock[0] += 61
    Sessions(db).begin(key, 60.0)
    with db.reading() as connection:
        assert len(connection.execute(select(schema.sessions)).all()) == 1
