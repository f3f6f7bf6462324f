"""Make the table of what all machines of a service must agree on."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, PrimaryKeyConstraint, String, Text

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table to the schema before."""
    op.create_table(
        "facts",
        Column("name", String(32), nullable=False),
        Column("value", Text(), nullable=False),
        PrimaryKeyConstraint("name"),
    )
