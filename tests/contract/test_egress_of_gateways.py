"""Gateways that share a log each try their own network, next to the database that they need anyway."""

import json

from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.infra.schema import upgrade_database
from tests.contract.test_gateways_on_postgresql import command, two_gateways
from tests.fakes import FakeWorker, until

NEXT_DOOR = {
    "APPLIANCE_EGRESS__MODE": "strict",
    "APPLIANCE_EGRESS__TCP_TARGETS": "[]",
    "APPLIANCE_EGRESS__UDP_TARGETS": "[]",
    "APPLIANCE_EGRESS__METADATA_TARGETS": json.dumps(["127.0.0.1:9"]),
    "APPLIANCE_EGRESS__CANARY_NAME": "null",
}
"""The tests try no address outside this machine, only one of its ports without a listener."""


async def test_two_gateways_on_one_log_attest_each_for_themselves(postgres, tmp_path):
    """Each under its own name, with the database as the control; the log verifies."""
    url = postgres.new_database()
    upgrade_database(url)
    async with (
        FakeWorker().serving() as worker,
        two_gateways(tmp_path, url, worker.url, **NEXT_DOOR) as (first, _),
    ):
        store = SqlAuditStore(url)

        def attested():
            entries = [decode(leaf.leaf) for leaf in store.leaves(0, 10_000)]
            return [entry.fields for entry in entries if entry.type == EntryType.EGRESS_ATTESTED]

        await until(lambda: len(attested()) >= 2)
    found = attested()
    store.close()
    names = [
        (tmp_path / name / "gateway.id").read_text(encoding="utf-8").strip() for name in ("first", "second")
    ]
    assert sorted({fields["gateway"] for fields in found}) == sorted(names)
    assert {fields["result"] for fields in found} == {"closed"}
    assert all(f":{postgres.port} connected" in fields["control"] for fields in found)
    await command(first, url, "audit", "verify")
