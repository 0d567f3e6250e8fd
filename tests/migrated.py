"""SQLite databases with all tables, copied from one that was migrated once."""

import tempfile
from functools import cache
from pathlib import Path

from appliance.infra.schema import upgrade_database


def migrated(path: Path) -> str:
    """Make a database with all tables; returns its URL."""
    path.write_bytes(_template())
    return f"sqlite:///{path}"


@cache
def _template() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "template.db"
        upgrade_database(f"sqlite:///{path}")
        return path.read_bytes()
