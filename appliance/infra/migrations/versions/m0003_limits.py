"""What gateways share about tenants' limits: one book for each tenant."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "limit_books",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("book", sa.Text, nullable=False),
    )
