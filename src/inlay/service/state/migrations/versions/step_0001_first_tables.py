"""Make the first tables, with the tenant `local`."""

from __future__ import annotations

from alembic import context, op
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    String,
    Text,
    UniqueConstraint,
)

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None
_NUMBER = BigInteger().with_variant(Integer(), "sqlite")


def upgrade() -> None:
    """Bring an empty database to this schema."""
    _make_tenants()
    _make_tasks()
    _make_jobs()
    for name in ("hot", "keys", "probe"):
        op.execute(f"INSERT INTO revisions (name, value) VALUES ('{name}', 0)")
    now = float(context.config.attributes["now"])
    op.execute(
        "INSERT INTO tenants (name, state, weight, queued_jobs, dataset_rows, dataset_bytes, labels, rows_per_request, "
        f"turn, created_at) VALUES ('local', 'active', 1.0, 1000, 1000000, 1073741824, 10000, 1024, 0.0, {now!r})"
    )


def _make_tenants() -> None:
    """Make the tables of who may ask, and of who asked."""
    op.create_table(
        "revisions",
        Column("name", String(32), nullable=False),
        Column("value", _NUMBER, nullable=False),
        PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "tenants",
        Column("name", String(31), nullable=False),
        Column("state", String(16), nullable=False),
        Column("weight", Float(), nullable=False),
        Column("tokens_per_minute", _NUMBER),
        Column("queued_jobs", _NUMBER),
        Column("dataset_rows", _NUMBER),
        Column("dataset_bytes", _NUMBER),
        Column("labels", _NUMBER),
        Column("stored_bytes", _NUMBER),
        Column("rows_per_request", _NUMBER),
        Column("turn", Float(), nullable=False),
        Column("created_at", Float(), nullable=False),
        PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "keys",
        Column("id", String(12), nullable=False),
        Column("tenant", String(31), nullable=False),
        Column("name", String(64), nullable=False),
        Column("digest", String(64), nullable=False),
        Column("scopes", String(64), nullable=False),
        Column("created_at", Float(), nullable=False),
        Column("expires_at", Float()),
        Column("revoked_at", Float()),
        Column("last_used_at", Float()),
        PrimaryKeyConstraint("id"),
    )
    op.create_index("keys_of_tenant", "keys", ["tenant"])
    op.create_table(
        "usage",
        Column("tenant", String(31), nullable=False),
        Column("day", String(10), nullable=False),
        Column("task", String(64), nullable=False),
        Column("rows", _NUMBER, nullable=False),
        Column("tokens", _NUMBER, nullable=False),
        Column("requests", _NUMBER, nullable=False),
        PrimaryKeyConstraint("tenant", "day", "task"),
    )
    op.create_table(
        "calls",
        Column("tenant", String(31), nullable=False),
        Column("key", String(255), nullable=False),
        Column("digest", String(64), nullable=False),
        Column("token", String(32), nullable=False),
        Column("held_until", Float(), nullable=False),
        Column("subject", String(80)),
        Column("status", Integer()),
        Column("headers", JSON()),
        Column("body", LargeBinary()),
        Column("created_at", Float(), nullable=False),
        PrimaryKeyConstraint("tenant", "key"),
    )
    op.create_index("calls_by_age", "calls", ["created_at"])
    op.create_table(
        "audit",
        Column("number", _NUMBER, autoincrement=True, nullable=False),
        Column("tenant", String(31), nullable=False),
        Column("at", Float(), nullable=False),
        Column("actor", String(64), nullable=False),
        Column("action", String(64), nullable=False),
        Column("target", Text(), nullable=False),
        PrimaryKeyConstraint("number"),
        sqlite_autoincrement=True,
    )
    op.create_index("audit_of_tenant", "audit", ["tenant"])


def _make_tasks() -> None:
    """Make the tables of what tenants have."""
    op.create_table(
        "datasets",
        Column("number", _NUMBER, autoincrement=True, nullable=False),
        Column("tenant", String(31), nullable=False),
        Column("id", String(32), nullable=False),
        Column("name", Text(), nullable=False),
        Column("format", String(16), nullable=False),
        Column("file", String(64), nullable=False),
        Column("size_bytes", _NUMBER, nullable=False),
        Column("sha256", String(64), nullable=False),
        Column("num_rows", _NUMBER, nullable=False),
        Column("found", JSON(), nullable=False),
        Column("task", String(64)),
        Column("created_at", Float(), nullable=False),
        PrimaryKeyConstraint("number"),
        UniqueConstraint("tenant", "id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "tasks",
        Column("tenant", String(31), nullable=False),
        Column("name", String(64), nullable=False),
        Column("state", String(16), nullable=False),
        Column("policy", String(16), nullable=False),
        Column("counter", _NUMBER, nullable=False),
        Column("created_at", Float(), nullable=False),
        PrimaryKeyConstraint("tenant", "name"),
    )
    op.create_table(
        "versions",
        Column("tenant", String(31), nullable=False),
        Column("task", String(64), nullable=False),
        Column("number", Integer(), nullable=False),
        Column("digest", String(64), nullable=False),
        Column("job", String(32)),
        Column("dataset", String(32)),
        Column("size_bytes", _NUMBER, nullable=False),
        Column("reason", Text(), nullable=False),
        Column("published_at", Float(), nullable=False),
        PrimaryKeyConstraint("tenant", "task", "number"),
    )
    op.create_table(
        "aliases",
        Column("tenant", String(31), nullable=False),
        Column("task", String(64), nullable=False),
        Column("name", String(16), nullable=False),
        Column("number", Integer(), nullable=False),
        Column("digest", String(64), nullable=False),
        Column("counter", _NUMBER, nullable=False),
        Column("moved_at", Float(), nullable=False),
        Column("moved_by", String(64), nullable=False),
        Column("reason", Text(), nullable=False),
        PrimaryKeyConstraint("tenant", "task", "name"),
    )
    op.create_table(
        "alias_moves",
        Column("number", _NUMBER, autoincrement=True, nullable=False),
        Column("tenant", String(31), nullable=False),
        Column("task", String(64), nullable=False),
        Column("name", String(16), nullable=False),
        Column("from_number", Integer()),
        Column("to_number", Integer(), nullable=False),
        Column("at", Float(), nullable=False),
        Column("by", String(64), nullable=False),
        Column("reason", Text(), nullable=False),
        PrimaryKeyConstraint("number"),
        sqlite_autoincrement=True,
    )
    op.create_index("alias_moves_of_task", "alias_moves", ["tenant", "task"])
    op.create_table(
        "feedback",
        Column("number", _NUMBER, autoincrement=True, nullable=False),
        Column("tenant", String(31), nullable=False),
        Column("task", String(64), nullable=False),
        Column("id", String(32), nullable=False),
        Column("text", Text(), nullable=False),
        Column("pair", Text()),
        Column("label", Text(), nullable=False),
        Column("answered", Text()),
        Column("version", Integer()),
        Column("by", String(64), nullable=False),
        Column("at", Float(), nullable=False),
        PrimaryKeyConstraint("number"),
        sqlite_autoincrement=True,
    )
    op.create_index("feedback_of_task", "feedback", ["tenant", "task"])


def _make_jobs() -> None:
    """Make the tables of what is to be done."""
    op.create_table(
        "cohorts",
        Column("id", String(32), nullable=False),
        Column("state", String(16), nullable=False),
        Column("token", _NUMBER, nullable=False),
        Column("owner", String(128), nullable=False),
        Column("structure", Text(), nullable=False),
        Column("lease_until", Float(), nullable=False),
        Column("created_at", Float(), nullable=False),
        PrimaryKeyConstraint("id"),
    )
    op.create_index("cohorts_by_state", "cohorts", ["state"])
    op.create_table(
        "jobs",
        Column("number", _NUMBER, autoincrement=True, nullable=False),
        Column("tenant", String(31), nullable=False),
        Column("id", String(32), nullable=False),
        Column("kind", String(8), nullable=False),
        Column("task", String(64), nullable=False),
        Column("dataset", String(32)),
        Column("state", String(16), nullable=False),
        Column("priority", Integer(), nullable=False),
        Column("publish", String(16), nullable=False),
        Column("settings", JSON(), nullable=False),
        Column("structure", Text(), nullable=False),
        Column("deaths", Integer(), nullable=False),
        Column("cohort", String(32)),
        Column("cancel_requested", Boolean(), nullable=False),
        Column("asked_by", String(64), nullable=False),
        Column("progress", JSON()),
        Column("result", JSON()),
        Column("error", JSON()),
        Column("created_at", Float(), nullable=False),
        Column("started_at", Float()),
        Column("ended_at", Float()),
        ForeignKeyConstraint(["cohort"], ["cohorts.id"]),
        PrimaryKeyConstraint("number"),
        UniqueConstraint("tenant", "id"),
        sqlite_autoincrement=True,
    )
    op.create_index("jobs_by_state", "jobs", ["state", "structure"])
    op.create_index("jobs_of_cohort", "jobs", ["cohort"])
    op.create_index("jobs_of_task", "jobs", ["tenant", "task"])
    op.create_table(
        "cohort_members",
        Column("cohort", String(32), nullable=False),
        Column("job", _NUMBER, nullable=False),
        Column("position", Integer(), nullable=False),
        ForeignKeyConstraint(["cohort"], ["cohorts.id"]),
        PrimaryKeyConstraint("cohort", "job"),
    )
    op.create_index("members_by_job", "cohort_members", ["job"])
    op.create_table(
        "job_events",
        Column("id", _NUMBER, autoincrement=True, nullable=False),
        Column("job", _NUMBER, nullable=False),
        Column("at", Float(), nullable=False),
        Column("kind", String(16), nullable=False),
        Column("message", Text(), nullable=False),
        Column("data", JSON(), nullable=False),
        ForeignKeyConstraint(["job"], ["jobs.number"]),
        PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("events_of_job", "job_events", ["job", "id"])
    op.create_table(
        "job_files",
        Column("tenant", String(31), nullable=False),
        Column("task", String(64), nullable=False),
        Column("path", String(512), nullable=False),
        PrimaryKeyConstraint("tenant", "task", "path"),
    )
