"""
The gateway that integrates is killed, again and again, while it and others write.

The promise: the others refuse nothing; every append that returned is in the log once; another gateway takes
over, and an auditor finds the log valid.
"""

import random
import time

import pytest
from sqlalchemy import create_engine

from appliance.audit import verify
from appliance.audit.export import export_log
from appliance.audit.pending_rows import INTEGRATION
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.infra.schema import upgrade_database
from tests.audit_log import ORIGIN
from tests.postgres import private_postgres
from tests.writer_process import WriterProcess, assert_kept

KILLS = 5
ENTRIES = 40
"""Appends that each gateway must have seen return between two kills."""
DEAD_SECONDS = 8.0
"""The lease lasts for a quarter of it."""
PATIENCE_SECONDS = 60


@pytest.fixture(scope="module")
def server():
    with private_postgres() as server:
        yield server


def _integrator(connection, besides=None):
    """Wait for a gateway that holds the lease; returns its name."""
    query = f"SELECT holder FROM control_lease WHERE name = '{INTEGRATION}'"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        holder = connection.exec_driver_sql(query).scalar() or ""
        connection.commit()
        if holder and holder != besides:
            return holder
        assert time.monotonic() < deadline, "no gateway took the lease"
        time.sleep(0.01)


def test_acknowledged_entries_survive_a_killed_integrator(server, tmp_path):
    """Five kills at random moments, three gateways: those that are not killed refuse nothing."""
    url = server.new_database()
    upgrade_database(url)
    create_signing_key(tmp_path / "audit.key")

    def start(name, number):
        prefix = f"{name}-{number}"
        return WriterProcess(tmp_path, url, name, prefix, gateway_dead_seconds=DEAD_SECONDS)

    writers = {name: start(name, 0) for name in ("g0", "g1", "g2")}
    chance = random.Random(6962)
    promised = []
    killed = set()
    engine = create_engine(url)
    with engine.connect() as connection:
        holder = None
        for number in range(1, KILLS + 1):
            for writer in writers.values():
                writer.wait_for(len(writer.acknowledged) + ENTRIES)
            time.sleep(chance.uniform(0, 0.3))
            holder = _integrator(connection, holder)
            name = holder.partition("/")[0]
            dead = writers.pop(name)
            dead.kill()
            promised += dead.acknowledged
            killed.add(name)
            # While none integrates, and after another has taken over.
            for writer in writers.values():
                writer.wait_for(len(writer.acknowledged) + ENTRIES)
            _integrator(connection, holder)
            writers[name] = start(name, number)
        for writer in writers.values():
            writer.wait_for(ENTRIES)
    engine.dispose()
    assert [writer.refused for writer in writers.values()] == [0] * 3
    assert [writer.close() for writer in writers.values()] == [(0, "")] * 3
    promised += [entry for writer in writers.values() for entry in writer.acknowledged]

    store = SqlAuditStore(url)
    leaves = store.leaves(0, 1_000_000)
    assert [leaf.index for leaf in leaves] == list(range(len(leaves)))
    assert store.accepted_leaves() == store.open_intents() == []
    assert_kept(promised, leaves)
    signer = load_signing_key(tmp_path / "audit.key", ORIGIN)
    assert export_log(store, tmp_path / "export", vkey=signer.vkey) == len(leaves)
    store.close()
    report = verify.verify_export(tmp_path / "export", verify.parse_key(signer.vkey), None)
    assert (report.problems, report.exit_code) == ([], verify.ExitCode.VALID)
    assert len(killed) > 1
    assert report.sequences.keys() == {"g0", "g1", "g2"}
