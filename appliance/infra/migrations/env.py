"""What Alembic runs: every step in the one transaction of the connection it is given."""

from alembic import context

from appliance.infra.schema import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    version_table=VERSION_TABLE,
    # SQLite can undo the making of tables as well, now that we begin transactions ourselves.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
