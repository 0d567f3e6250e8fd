"""The MAC of all tenants and keys; null until a gateway or `appliance tenant seal` computes it."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("tenancy_generation", sa.Column("mac", sa.Text))
