"""Make the table of browsers that signed in with a key."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Float, PrimaryKeyConstraint, String

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table to the schema before."""
    op.create_table(
        "sessions",
        Column("digest", String(64), nullable=False),
        Column("key", String(12), nullable=False),
        Column("created_at", Float(), nullable=False),
        Column("expires_at", Float(), nullable=False),
        PrimaryKeyConstraint("digest"),
    )
    op.create_index("sessions_of_key", "sessions", ["key"])
