"""What an admin key may do, and requests that a second administrator has to approve."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    # NULL is every scope: keys from before this keep what they could do.
    op.add_column("api_keys", sa.Column("scopes", sa.Text))
    op.create_table(
        "approvals",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
    )
