"""
PostgreSQL is killed in the middle of commits, again and again, while real gateways write.

The promise: every append that returned is in the log, at the place it was told; no index is missing
or used twice; an auditor finds the log valid.
"""

import random
import time

import pytest

from appliance.audit import verify
from appliance.audit.export import export_log
from appliance.audit.merkle import TILE_WIDTH
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.infra.schema import upgrade_database
from tests.audit_log import ORIGIN
from tests.consistency import AsLeft, assert_consistent
from tests.postgres import private_postgres
from tests.writer_process import WriterProcess, assert_kept

KILLS = 4
ENTRIES = 60
"""Appends that each gateway must have seen return between two kills."""
# Each commit waits this long between its last write and its flush: that is where most kills then hit.
COMMIT_DELAY_MICROSECONDS = 10_000


@pytest.fixture(scope="module")
def server():
    with private_postgres() as server:
        server.execute(
            f"ALTER SYSTEM SET commit_delay = {COMMIT_DELAY_MICROSECONDS};"
            "ALTER SYSTEM SET commit_siblings = 0;"
            "SELECT pg_reload_conf();"
        )
        yield server


def _wait_for_more(writers, refused):
    deadline = time.monotonic() + 60
    while (now := sum(writer.refused for writer in writers)) == refused:
        assert time.monotonic() < deadline, "nothing was refused while the database was gone"
        time.sleep(0.01)
    return now


@pytest.mark.parametrize("gateways", [1, 2])
def test_acknowledged_entries_survive_a_killed_database(server, tmp_path, gateways):
    """Four kills at random moments, one gateway or two: nothing promised is lost, and the log is whole."""
    url = server.new_database()
    upgrade_database(url)
    create_signing_key(tmp_path / "audit.key")
    writers = [WriterProcess(tmp_path, url, f"g{number}", f"g{number}") for number in range(gateways)]
    chance = random.Random(6962)
    refused = 0
    for _ in range(KILLS):
        for writer in writers:
            writer.wait_for(len(writer.acknowledged) + ENTRIES)
        time.sleep(chance.uniform(0, 0.1))
        server.kill()
        # Each kill hits appends in flight, which are refused, not left waiting.
        refused = _wait_for_more(writers, refused)
        server.start()
    for writer in writers:
        writer.wait_for(len(writer.acknowledged) + ENTRIES)
    # After the last kill everything works again, and closing ends open requests.
    assert [writer.close() for writer in writers] == [(0, "")] * gateways

    store = AsLeft(url)
    assert_consistent(store)
    leaves = store.leaves(0, 1_000_000)
    assert len(leaves) > TILE_WIDTH
    assert [leaf.index for leaf in leaves] == list(range(len(leaves)))
    assert_kept([entry for writer in writers for entry in writer.acknowledged], leaves)

    signer = load_signing_key(tmp_path / "audit.key", ORIGIN)
    assert export_log(store, tmp_path / "export", vkey=signer.vkey) == len(leaves)
    store.close()
    report = verify.verify_export(tmp_path / "export", verify.parse_key(signer.vkey), None)
    assert (report.problems, report.exit_code) == ([], verify.ExitCode.VALID)
