"""The tables of the service, for SQLAlchemy Core. They are changed by steps in `migrations/versions/`.

What always holds: every table of customers' data has a `tenant` column, and is read with it. Times are seconds since
1970. Only portable types are used, so SQLite and Postgres have the same tables.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

HEAD = "0003"
"""the newest migration: a database at this revision needs none"""
metadata = MetaData()
_Number = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows itself only in an INTEGER column

revisions = Table(
    "revisions",  # counters of changes: `hot` for keys, tenants, tasks and aliases
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", _Number, nullable=False),
)

facts = Table(
    "facts",  # what all machines of a service must agree on: `store`, the store that the files of the rows lie in
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", Text, nullable=False),
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", String(31), primary_key=True),
    Column("state", String(16), nullable=False),  # active | removing
    Column("weight", Float, nullable=False),
    Column("tokens_per_minute", _Number),
    Column("queued_jobs", _Number),
    Column("dataset_rows", _Number),
    Column("dataset_bytes", _Number),
    Column("labels", _Number),
    Column("stored_bytes", _Number),
    Column("rows_per_request", _Number),
    Column("turn", Float, nullable=False),  # jobs claimed, divided by the weight: the tenant with the least comes next
    Column("created_at", Float, nullable=False),
)

keys = Table(
    "keys",
    metadata,
    Column("id", String(12), primary_key=True),
    Column("tenant", String(31), nullable=False),
    Column("name", String(64), nullable=False),
    Column("digest", String(64), nullable=False),  # sha256 of the secret
    Column("scopes", String(64), nullable=False),  # words
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    Column("last_used_at", Float),
    Index("keys_of_tenant", "tenant"),
)

sessions = Table(
    "sessions",  # browsers that signed in with a key
    metadata,
    Column("digest", String(64), primary_key=True),  # sha256 of the cookie's token
    Column("key", String(12), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Index("sessions_of_key", "key"),
)

datasets = Table(
    "datasets",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),
    Column("tenant", String(31), nullable=False),
    Column("id", String(32), nullable=False),
    Column("name", Text, nullable=False),
    Column("format", String(16), nullable=False),
    Column("file", String(64), nullable=False),  # its name in the tenant's folder
    Column("size_bytes", _Number, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("num_rows", _Number, nullable=False),
    Column("found", JSON, nullable=False),  # columns, reading, problem, notes, first_rows
    Column("task", String(64)),  # the task whose corrections made it
    Column("created_at", Float, nullable=False),
    UniqueConstraint("tenant", "id"),
    sqlite_autoincrement=True,
)

tasks = Table(
    "tasks",
    metadata,
    Column("tenant", String(31), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("state", String(16), nullable=False),  # active | erasing
    Column("policy", String(16), nullable=False),  # always | if-better | never
    Column("counter", _Number, nullable=False),  # its ETag: grows with every change
    Column("created_at", Float, nullable=False),
)

versions = Table(
    "versions",
    metadata,
    Column("tenant", String(31), primary_key=True),
    Column("task", String(64), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("job", String(32)),
    Column("dataset", String(32)),
    Column("size_bytes", _Number, nullable=False),
    Column("reason", Text, nullable=False),  # why it went live, or why not
    Column("published_at", Float, nullable=False),
)

aliases = Table(
    "aliases",
    metadata,
    Column("tenant", String(31), primary_key=True),
    Column("task", String(64), primary_key=True),
    Column("name", String(16), primary_key=True),  # live
    Column("number", Integer, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("counter", _Number, nullable=False),
    Column("moved_at", Float, nullable=False),
    Column("moved_by", String(64), nullable=False),
    Column("reason", Text, nullable=False),
)

alias_moves = Table(
    "alias_moves",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),
    Column("tenant", String(31), nullable=False),
    Column("task", String(64), nullable=False),
    Column("name", String(16), nullable=False),
    Column("from_number", Integer),
    Column("to_number", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Column("by", String(64), nullable=False),
    Column("reason", Text, nullable=False),
    Index("alias_moves_of_task", "tenant", "task"),
    sqlite_autoincrement=True,
)

cohorts = Table(
    "cohorts",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("state", String(16), nullable=False),  # running | late | waiting | done
    Column("token", _Number, nullable=False),  # the attempt: a write with an older one is refused
    Column("owner", String(128), nullable=False),
    Column("structure", Text, nullable=False),
    Column("lease_until", Float, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("cohorts_by_state", "state"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),
    Column("tenant", String(31), nullable=False),
    Column("id", String(32), nullable=False),
    Column("kind", String(8), nullable=False),  # train | batch | erase
    Column("task", String(64), nullable=False),  # "" for the erasure of a tenant
    Column("dataset", String(32)),
    Column("state", String(16), nullable=False),  # queued | running | succeeded | failed | cancelled
    Column("priority", Integer, nullable=False),
    Column("publish", String(16), nullable=False),
    Column("settings", JSON, nullable=False),
    Column("structure", Text, nullable=False),  # jobs of one structure may train together
    Column("deaths", Integer, nullable=False),  # how many trainers died while they had it
    Column("cohort", String(32), ForeignKey("cohorts.id")),
    Column("cancel_requested", Boolean, nullable=False),
    Column("asked_by", String(64), nullable=False),
    Column("progress", JSON),
    Column("result", JSON),
    Column("error", JSON),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    UniqueConstraint("tenant", "id"),
    Index("jobs_by_state", "state", "structure"),
    Index("jobs_of_task", "tenant", "task"),
    Index("jobs_of_cohort", "cohort"),
    sqlite_autoincrement=True,
)

cohort_members = Table(
    "cohort_members",
    metadata,
    Column("cohort", String(32), ForeignKey("cohorts.id"), primary_key=True),
    Column("job", _Number, primary_key=True),  # its number; it may be gone
    Column("position", Integer, nullable=False),
    Index("members_by_job", "job"),
)

job_events = Table(
    "job_events",
    metadata,
    Column("id", _Number, primary_key=True, autoincrement=True),
    Column("job", _Number, ForeignKey("jobs.number"), nullable=False),
    Column("at", Float, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("message", Text, nullable=False),
    Column("data", JSON, nullable=False),
    Index("events_of_job", "job", "id"),
    sqlite_autoincrement=True,
)

job_files = Table(
    "job_files",  # files and folders a trainer made for a job, below the home: gone with the task
    metadata,
    Column("tenant", String(31), primary_key=True),
    Column("task", String(64), primary_key=True),
    Column("path", String(512), primary_key=True),
)

feedback = Table(
    "feedback",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),
    Column("tenant", String(31), nullable=False),
    Column("task", String(64), nullable=False),
    Column("id", String(32), nullable=False),
    Column("text", Text, nullable=False),
    Column("pair", Text),
    Column("label", Text, nullable=False),
    Column("answered", Text),  # the label that was answered, and by which version
    Column("version", Integer),
    Column("by", String(64), nullable=False),
    Column("at", Float, nullable=False),
    Index("feedback_of_task", "tenant", "task"),
    sqlite_autoincrement=True,
)

usage = Table(
    "usage",
    metadata,
    Column("tenant", String(31), primary_key=True),
    Column("day", String(10), primary_key=True),
    Column("task", String(64), primary_key=True),
    Column("rows", _Number, nullable=False),
    Column("tokens", _Number, nullable=False),
    Column("requests", _Number, nullable=False),
)

calls = Table(
    "calls",  # requests with an idempotency key, and their first answers
    metadata,
    Column("tenant", String(31), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("digest", String(64), nullable=False),  # of the route and the body
    Column("token", String(32), nullable=False),  # the process that is answering it
    Column("held_until", Float, nullable=False),
    Column("subject", String(80)),  # what it made: an id, or `task:NAME`
    Column("status", Integer),
    Column("headers", JSON),
    Column("body", LargeBinary),
    Column("created_at", Float, nullable=False),
    Index("calls_by_age", "created_at"),
)

audit = Table(
    "audit",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),
    Column("tenant", String(31), nullable=False),
    Column("at", Float, nullable=False),
    Column("actor", String(64), nullable=False),
    Column("action", String(64), nullable=False),
    Column("target", Text, nullable=False),
    Index("audit_of_tenant", "tenant"),
    sqlite_autoincrement=True,
)
