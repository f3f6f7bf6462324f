"""Identifiers: opaque, random, never used again."""

from __future__ import annotations

import base64
import secrets


def make_id(kind: str) -> str:
    """Return a new id, such as `job_…`: 100 random bits."""
    return f"{kind}_{base64.b32encode(secrets.token_bytes(13)).decode().lower()[:20]}"
