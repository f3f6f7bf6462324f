"""The environment that alembic runs the migrations in: on the connection, and in the transaction, it is given."""

from __future__ import annotations

from alembic import context

from inlay.service.state.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=False)
context.run_migrations()
