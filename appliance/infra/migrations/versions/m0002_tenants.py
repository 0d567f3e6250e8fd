"""Tenants and the digests of their API keys, and a number that grows with every change of either."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("models", sa.Text, nullable=False),
        sa.Column("speculation", sa.Text, nullable=False),
        sa.Column("content", sa.Text, nullable=False),
        sa.Column("priority", sa.Text, nullable=False),
        sa.Column("may", sa.Text, nullable=False),
        sa.Column("limits", sa.Text, nullable=False),
        sa.Column("disabled", sa.Boolean, nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("admin", sa.Boolean, nullable=False),
        sa.Column("models", sa.Text),
        sa.Column("replaces", sa.Text),
        sa.Column("created_at", sa.BigInteger),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("rotated_at", sa.BigInteger),
        sa.Column("revoked_at", sa.BigInteger),
    )
    generation = op.create_table(
        "tenancy_generation",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
    )
    op.execute(sa.insert(generation).values(id=1, generation=0))
