"""How much of the log a SIEM has, by destination."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "audit_forwarding",
        sa.Column("destination", sa.Text, primary_key=True),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("frontier", sa.LargeBinary, nullable=False),
        sa.Column("sent", sa.BigInteger, nullable=False),
    )
