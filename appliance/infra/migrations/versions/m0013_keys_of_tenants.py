"""Limits of keys, and keys that tenants make."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    # NULL is none of them: rows from before this keep their MAC.
    op.add_column("api_keys", sa.Column("limits", sa.Text))
    op.add_column("api_keys", sa.Column("manage_keys", sa.Boolean))
    op.add_column("api_keys", sa.Column("made_by", sa.Text))
