"""What engine time, energy and tokens came to, by slot, worker, model and tenant."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "cost_periods",
        sa.Column("start", sa.Text, primary_key=True),
        sa.Column("gateway", sa.Text, nullable=False),
        sa.Column("began_at", sa.BigInteger, nullable=False),
        sa.Column("until", sa.BigInteger, nullable=False),
        sa.Column("flush_seconds", sa.BigInteger, nullable=False),
        sa.Column("closed", sa.Boolean, nullable=False),
    )
    op.create_table(
        "cost_shares",
        sa.Column("slot", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("start", sa.Text, primary_key=True),
        sa.Column("worker", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("engine_us", sa.BigInteger, nullable=False),
        sa.Column("millijoules", sa.BigInteger, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("delivered_tokens", sa.BigInteger, nullable=False),
        sa.Column("draft_tokens", sa.BigInteger, nullable=False),
        sa.Column("accepted_tokens", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "cost_workers",
        sa.Column("slot", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("start", sa.Text, primary_key=True),
        sa.Column("worker", sa.Text, primary_key=True),
        sa.Column("observed_us", sa.BigInteger, nullable=False),
        sa.Column("busy_us", sa.BigInteger, nullable=False),
        sa.Column("estimated_us", sa.BigInteger, nullable=False),
        sa.Column("gpu_us", sa.BigInteger, nullable=False),
        sa.Column("millijoules", sa.BigInteger, nullable=False),
        sa.Column("busy_millijoules", sa.BigInteger, nullable=False),
        sa.Column("metered_us", sa.BigInteger, nullable=False),
        sa.Column("unknown_power_us", sa.BigInteger, nullable=False),
        sa.Column("draft_us", sa.BigInteger, nullable=False),
        sa.Column("draft_tokens", sa.BigInteger, nullable=False),
        sa.Column("target_only_us", sa.BigInteger, nullable=False),
        sa.Column("target_only_low_us", sa.BigInteger, nullable=False),
        sa.Column("target_only_high_us", sa.BigInteger, nullable=False),
    )
