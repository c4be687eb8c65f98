"""What Alembic runs: the server hands its own connection in, no ini file is read."""

from alembic import context

from rankscope_server.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
