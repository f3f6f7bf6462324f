"""`inlay key make|list|revoke|rotate`: the keys of a service and what they allow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli import screen
from inlay.cli.app import make_typer
from inlay.cli.flags import JsonOption, StoreOption
from inlay.cli.screen import Column
from inlay.cli.stream import parse_duration
from inlay.errors import BadConfig

if TYPE_CHECKING:
    from inlay.service import Database, Key

app = make_typer(no_args_is_help=True, help="Make, list and revoke the keys that requests need.")
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="id of the key: the part between its two `_`")]
_DAY_S = 86400.0


@contextmanager
def open_database(store: Path | None) -> Iterator[Database]:
    """Open the database of the service on a store, and make it if there is none. The service may be running."""
    from inlay.service import Database, check_extra, find_store_address

    check_extra()
    db = Database.open(find_store_address(store))
    try:
        yield db
    finally:
        db.close()


@app.command("make")
def make(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="tenant of the key: `local`, or one that was added")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope",
            metavar="A,B,…",
            help="what the key allows: predict, train, admin (keys and erasure), operator (all tenants)"
            "  [default: predict,train,admin]",
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="a note to recognise the key by")] = "",
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="TIME", help="how long the key is valid, such as 90d; default: for ever"),
    ] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Make a key and print it. It is shown only once, because only its hash is kept.

    Once there is a key, every request needs one.
    """
    from inlay.service import USUAL_SCOPES, Keys

    scopes = [word.strip() for part in scope or () for word in part.split(",")]
    with open_database(store) as db:
        ends_at = None if expires is None else db.now() + _parse_days(expires, "--expires")
        key, text = Keys(db).make(tenant, scopes or USUAL_SCOPES, name, ends_at)
    _show_new(key, text, as_json=json)


@app.command("list")
def list_(
    tenant: Annotated[
        str | None, typer.Argument(metavar="TENANT", help="only the keys of this tenant; default: of all tenants")
    ] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """List keys, newest first, also revoked and expired ones. Secrets are never shown."""
    from inlay.service import Keys, Tenants

    with open_database(store) as db:
        names = [each.name for each in Tenants(db).list()] if tenant is None else [Tenants(db).get(tenant).name]
        keys = [key for name in names for key in Keys(db).list(name)]
        now = db.now()
    if json:
        screen.emit_json({"keys": [key.to_json() for key in keys]})
        return
    if not keys:
        screen.log("no keys yet: the service answers only this machine")
        screen.log("make the first: inlay key make local", "dim")
        return
    columns = [*map(Column, ("id", "tenant", "name", "scopes", "state", "last used"))]
    screen.emit_table(columns, [_row(key, now) for key in keys])


@app.command("revoke")
def revoke(key_id: IdArgument, store: StoreOption = None, json: JsonOption = False) -> None:
    """Revoke a key, at once and for ever."""
    from inlay.service import Keys

    with open_database(store) as db:
        key = Keys(db).revoke(key_id)
    if json:
        screen.emit_json(key.to_json())
    else:
        screen.emit(f"revoked {key.id} of {key.tenant}")


@app.command("rotate")
def rotate(
    key_id: IdArgument,
    overlap: Annotated[
        str, typer.Option("--overlap", metavar="TIME", help="how long the old key still works, such as 1d")
    ] = "0s",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Replace a key by a new one like it, and print the new one. It is shown only once."""
    from inlay.service import Keys

    with open_database(store) as db:
        key, text = Keys(db).rotate(key_id, overlap_s=_parse_days(overlap, "--overlap"))
    _show_new(key, text, as_json=json)


def _parse_days(text: str, option: str) -> float:
    """Return the seconds of `90d`, or of any duration that `parse_duration` reads."""
    number = text.strip().removesuffix("d")
    if number == text.strip():
        return parse_duration(text, option)
    try:
        return float(number) * _DAY_S
    except ValueError:
        raise BadConfig(f"`{option} {text}` is not a time", f"write `{option} 90d`, `12h` or `30m`") from None


def _show_new(key: Key, text: str, *, as_json: bool) -> None:
    if as_json:
        screen.emit_json({**key.to_json(), "key": text})
        return
    screen.emit(text)
    screen.log("copy it now: it will not be shown again", "yellow")
    screen.log(f"revoke it with: inlay key revoke {key.id}", "dim")


def _row(key: Key, now: float) -> list[str]:
    shown = key.to_json()
    state = "revoked" if key.revoked_at is not None else "valid"
    if state == "valid" and key.expires_at is not None:
        state = f"ends {shown['expires_at'][:10]}" if now < key.expires_at else "expired"
    used = "never" if key.last_used_at is None else str(shown["last_used_at"])[:16].replace("T", " ")
    return [key.id, key.tenant, key.name, ",".join(shown["scopes"]), state, used]
