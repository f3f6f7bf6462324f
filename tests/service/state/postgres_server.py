"""Databases on the Postgres that `make postgres` starts, each made from one that was migrated before."""

from __future__ import annotations

import os
from itertools import count

IS_POSTGRES = "INLAY_TEST_POSTGRES" in os.environ
_NUMBERS = count()


def make_database(template: str = "template1") -> str:
    """Make a database as `template` is; return its name."""
    name = f"inlay_{os.getpid()}_{next(_NUMBERS)}"
    _run(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    return name


def drop_database(name: str) -> None:
    """Drop a database, whoever is connected."""
    _run(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


def end_connections(name: str) -> int:
    """End all connections of a database, as an administrator or a failover does; return how many there were."""
    return len(_run(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"))


def url_of(name: str) -> str:
    """Return the address of a database; the server is where libpq's variables say."""
    return f"postgresql:///{name}"


def _run(statement: str) -> list[tuple[object, ...]]:
    import psycopg

    with psycopg.connect(dbname="postgres", autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []
