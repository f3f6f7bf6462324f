"""One database, one store: a machine that names another store than the others would miss their files.

The database keeps which store is its own. A store on object storage is known by its address, a folder by a random name
in a file of its own, since folders of two machines may have the same path.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from sqlalchemy import Connection, insert, select

from inlay.errors import BadConfig
from inlay.service.state import schema
from inlay.service.state.places import Places
from inlay.store import Store, write_once

_FACT = "store"
_FOLDER = "folder"


def has_store(connection: Connection, places: Places, store: Store) -> bool:
    """Tell whether this is the database's store; False if it has none yet. Refuse another one."""
    row, mine = schema.facts.c, _name_of(places, store)
    found = connection.execute(select(row.value).where(row.name == _FACT)).scalar()
    if found is None or found == mine:
        return found is not None
    theirs = "a folder, of this machine or of another one" if found.startswith(f"{_FOLDER} ") else f"`{found}`"
    raise BadConfig(
        f"the database belongs to the service on {theirs}, and this machine's store is `{store.place}`",
        "give every machine the same store on object storage (`--store s3://BUCKET/PREFIX`), or use another database",
    )


def set_store(connection: Connection, places: Places, store: Store) -> None:
    """Make this the database's store, unless it has one; refuse it then, if it is another."""
    if not has_store(connection, places, store):
        connection.execute(insert(schema.facts).values(name=_FACT, value=_name_of(places, store)))


def _name_of(places: Places, store: Store) -> str:
    if store.is_remote:
        return store.place
    path = places.service / "id"
    with suppress(FileExistsError):
        if not path.exists():
            write_once(path, f"{_FOLDER} {secrets.token_hex(16)}".encode())
    return path.read_text()
