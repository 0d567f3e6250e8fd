"""
docs/how-to/back-up-and-restore.md, run verbatim on PostgreSQL: dumped, dropped, restored, verified.
"""

import os
import subprocess
import sys
from contextlib import closing

from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.infra.schema import grants
from tests.audit_log import ORIGIN, intent, open_log, outcome, prepare, settings_for
from tests.how_to import run_block
from tests.postgres import find_binaries

PAGE = "back-up-and-restore.md"


def verify(data, environment):
    command = [sys.executable, "-m", "appliance", "audit", "verify", "--data", str(data)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


async def test_a_log_comes_back_whole(postgres, postgres_url, tmp_path, monkeypatch):
    """Also for a gateway's role, once the grants were given again."""
    monkeypatch.setenv("PATH", f"{find_binaries()}{os.pathsep}{os.environ['PATH']}")
    data, backup = tmp_path / "data", tmp_path / "backup"
    prepare(data)
    (data / "gateway.id").write_text("gateway")
    settings = settings_for(data, postgres_url)
    with closing(SqlAuditStore(postgres_url)) as store:
        async with open_log(settings, store) as guarded:
            for number in range(10):
                await guarded.log.append(EntryType.REQUEST_INTENT, **intent(f"r-{number}"))
                await guarded.log.append(EntryType.REQUEST_OUTCOME, **outcome(f"r-{number}"))
        size = store.head().size
    name = postgres_url.rpartition("/")[2]
    owner_url = postgres_url.replace("postgresql+pg8000", "postgresql")
    done = run_block(PAGE, "back up from PostgreSQL", DATA=data, BACKUP=backup, OWNER_URL=owner_url)
    assert done.returncode == 0, done.stderr
    postgres.execute(f"DROP DATABASE {name}")
    postgres.execute(f"CREATE DATABASE {name}")
    (data / "audit.head").unlink()
    done = run_block(PAGE, "restore to PostgreSQL", DATA=data, BACKUP=backup, OWNER_URL=owner_url)
    assert done.returncode == 0, done.stderr
    role = f"restored_{name}"
    postgres.execute(f"CREATE ROLE {role} LOGIN; {grants(role)}", database=name)
    with closing(SqlAuditStore(postgres.url_of(name, role))) as store:
        async with open_log(settings_for(data, postgres.url_of(name, role)), store):
            assert store.head().size >= size
    environment = {
        **os.environ,
        "APPLIANCE_AUDIT__DATABASE_URL": postgres.url_of(name, role),
        "APPLIANCE_AUDIT__ORIGIN": ORIGIN,
    }
    verified = verify(data, environment)
    assert verified.returncode == 0, verified.stdout + verified.stderr
