"""The audit: who did what, and when. And the check of short texts that people give things as names."""

from __future__ import annotations

from sqlalchemy import Connection, insert

from inlay.errors import BadConfig
from inlay.service.state import schema


def write_audit(connection: Connection, tenant: str, at: float, what: tuple[str, str, str]) -> None:
    """Note the actor, the action and its target. Never a text or a label of a customer's."""
    actor, action, target = what
    connection.execute(
        insert(schema.audit).values(tenant=tenant, at=at, actor=actor[:64], action=action[:64], target=target)
    )


def check_label(what: str, text: str, most: int) -> None:
    """Refuse a short text that is too long or cannot be stored: control characters, halves of characters."""
    if len(text) > most:
        raise BadConfig(f"the {what} has {len(text)} characters", f"{most} at most")
    check_storable(what, text)
    if any(ord(character) < 32 for character in text):
        raise BadConfig(f"the {what} has a control character", "leave it out")


def check_storable(what: str, text: str) -> None:
    """Refuse a text that no database takes: with NUL, or with halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadConfig(f"the {what} is no Unicode text: it has half a character", "send it as UTF-8") from None
    if "\0" in text:
        raise BadConfig(f"the {what} has a NUL character", "leave it out")
