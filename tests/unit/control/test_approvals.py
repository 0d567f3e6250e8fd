"""Who may approve whose request, and what is left of a request that could not be carried out."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from appliance.audit.entry_types import EntryType
from appliance.audit.pending import NOT_PLACED, Receipt
from appliance.control import approvals
from appliance.control.approvals import (
    APPROVAL_SECONDS,
    Approval,
    Approvals,
    Operation,
    SqlApprovalStore,
    refusal,
)
from appliance.errors import AuditUnavailableError, ControlRefusedError
from appliance.tenancy import Tenant, TenantDirectory
from tests.fakes import audit_fields
from tests.migrated import migrated

NOW = 1_800_000_000
ADA, BEN, CARL, DORA = (letter * 8 for letter in "abcd")
TOKEN, OTHER_TOKEN = "jwt:0123456789abcdef", "jwt:fedcba9876543210"
MADE = [("cli:root", ADA), ("cli:root", BEN)]
"""Who made which keys before the request."""


def made(*steps: tuple[str, ...], start: int = 0) -> list[tuple[int, dict[str, Any]]]:
    """Entries of keys: actor, key, and the key it replaces."""
    return [
        (index, dict(zip(("actor", "key_id", "previous_key_id"), step, strict=False)))
        for index, step in enumerate(steps, start)
    ]


def requested_by(actor: str) -> Approval:
    return Approval(
        approval_id="x", index=100, operation=Operation.ERASE, actor=actor, fields={}, expires_at=NOW
    )


@pytest.mark.parametrize(
    ("requester", "approver", "steps"),
    [
        (ADA, BEN, []),
        (ADA, TOKEN, []),
        (TOKEN, ADA, []),
        (TOKEN, OTHER_TOKEN, []),
        # Keys that were rotated meanwhile.
        (ADA, CARL, [(BEN, CARL, BEN)]),
        (CARL, BEN, [("cli:root", CARL, ADA)]),
    ],
)
def test_another_administrator_approves(requester, approver, steps):
    assert refusal(requested_by(requester), approver, made(*MADE, *steps), {}) is None


@pytest.mark.parametrize(
    ("requester", "approver", "steps"),
    [
        (ADA, ADA, []),
        (TOKEN, TOKEN, []),
        (ADA, CARL, [(ADA, CARL, ADA)]),
        (ADA, CARL, [("cli:root", CARL, ADA)]),
        (CARL, ADA, [(ADA, CARL, ADA)]),
        (ADA, CARL, [(ADA, CARL)]),
        (CARL, ADA, [(ADA, CARL)]),
        (TOKEN, CARL, [(TOKEN, CARL)]),
        (ADA, DORA, [(ADA, CARL), (CARL, DORA)]),
        # An administrator who rotates another's key gets its successor.
        (ADA, CARL, [(ADA, CARL, BEN)]),
        (ADA, DORA, [(ADA, CARL, BEN), (CARL, DORA, CARL)]),
        # Two keys that one administrator made.
        (CARL, DORA, [(BEN, CARL), (BEN, DORA)]),
    ],
)
def test_one_administrator_is_not_two(requester, approver, steps):
    assert refusal(requested_by(requester), approver, made(*MADE, *steps), {}) is not None


def test_a_replaced_key_counts_even_if_the_log_does_not_name_its_predecessor():
    """Two keys that a file brought in together."""
    keys = made(("cli:root", ADA), ("cli:root", CARL))
    assert refusal(requested_by(ADA), CARL, keys, {}) is None
    assert refusal(requested_by(ADA), CARL, keys, {CARL: ADA}) is not None


@pytest.mark.parametrize("steps", [[], [("cli:root", BEN)]])
def test_a_key_that_is_newer_than_the_request_or_unknown_to_the_log_approves_nothing(steps):
    """Also if a key of the same id existed before."""
    keys = made(*MADE[:1], *steps) + made(*steps, start=101)
    assert "newer than the request" in refusal(requested_by(ADA), BEN, keys, {})


class Log:
    """Entries in memory; the next one can fail."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, dict[str, Any]]] = []
        self.fails = self.spools = False

    async def append(self, entry_type: EntryType, /, **fields: Any) -> Receipt:
        if self.fails:
            raise AuditUnavailableError("the disk is full")
        index = len(self.entries)
        given = audit_fields(entry_type, fields)
        self.entries.append((index, {"id": f"id{index}", "type": str(entry_type), **given}))
        return Receipt(index=NOT_PLACED if self.spools else index, entry_id=f"id{index}")

    def of(self, *types: EntryType) -> list[tuple[int, dict[str, Any]]]:
        return [(index, entry) for index, entry in self.entries if entry["type"] in types]


class Room:
    """The rule over a real store, with the keys of two administrators."""

    def __init__(self, url: str) -> None:
        self.log, self.store, self.now = Log(), SqlApprovalStore(url), float(NOW)
        self.approvals = Approvals(
            store=self.store,
            log=self.log,
            entries=self.log.of,
            tenants=TenantDirectory((Tenant(name="operator"),)),
            retention_days=30,
            clock=lambda: self.now,
        )

    async def request(self, **fields: Any) -> str:
        return (await self.approvals.request(Operation.RELEASE, actor=ADA, **fields)).approval_id

    async def ids(self) -> list[str]:
        return [approval.approval_id for approval in await self.approvals.pending()]


@pytest.fixture
async def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(migrated(tmp_path / "audit.db"))
    with closing(room.store):
        for key in (ADA, BEN):
            await room.log.append(
                EntryType.KEY_CREATED, tenant="operator", key_id=key, admin=True, actor="cli:root"
            )
        yield room


async def test_what_is_carried_out_is_what_the_log_says_was_requested(room):
    approval_id = await room.request(tenant="acme", reason="case closed")
    async with room.approvals.approved(approval_id, by=BEN) as approval:
        assert await room.ids() == []
        assert room.log.entries[-1][1]["outcome"] == "approved"
        assert (approval.actor, approval.operation) == (ADA, "release")
        assert approval.fields == {"tenant": "acme", "reason": "case closed"}
    with pytest.raises(ControlRefusedError, match="waits for approval"):
        async with room.approvals.approved(approval_id, by=BEN):
            pytest.fail("it was carried out twice")
    assert [entry["type"] for _, entry in room.log.entries[2:]] == ["approval.requested", "approval.closed"]


async def test_what_could_not_be_carried_out_can_be_approved_again(room):
    approval_id = await room.request(tenant="acme", reason="case closed")
    with pytest.raises(AuditUnavailableError):
        async with room.approvals.approved(approval_id, by=BEN):
            raise AuditUnavailableError("the disk is full")
    assert await room.ids() == [approval_id]
    room.log.fails = True
    with pytest.raises(AuditUnavailableError):
        async with room.approvals.approved(approval_id, by=BEN):
            pytest.fail("it was carried out without an entry")
    room.log.fails = False
    async with room.approvals.approved(approval_id, by=BEN):
        pass
    assert await room.ids() == []


async def test_what_cannot_be_recorded_is_not_pending(room):
    for room.log.fails, room.log.spools in ((True, False), (False, True)):
        with pytest.raises(AuditUnavailableError):
            await room.request(tenant="acme", reason="case closed")
        assert await room.ids() == []


async def test_a_refused_approval_leaves_the_request_pending(room):
    approval_id = await room.request(tenant="acme", reason="case closed")
    with pytest.raises(ControlRefusedError, match="cannot approve it"):
        async with room.approvals.approved(approval_id, by=ADA):
            pytest.fail("it was carried out")
    assert await room.ids() == [approval_id]


async def test_a_withdrawn_request_cannot_be_approved(room):
    approval_id = await room.request(tenant="acme", reason="case closed")
    await room.approvals.withdraw(approval_id, by=ADA)
    closed = room.log.entries[-1][1]
    assert (closed["approval"], closed["outcome"], closed["actor"]) == (approval_id, "withdrawn", ADA)
    for attempt in (room.approvals.withdraw(approval_id, by=ADA), room.approvals.withdraw("other", by=ADA)):
        with pytest.raises(ControlRefusedError):
            await attempt


async def test_a_request_expires(room):
    approval_id = await room.request(tenant="acme", reason="case closed")
    room.now += APPROVAL_SECONDS
    assert await room.ids() == []
    with pytest.raises(ControlRefusedError, match="expired"):
        async with room.approvals.approved(approval_id, by=BEN):
            pytest.fail("it was carried out")


async def test_pending_requests_are_bounded(room, monkeypatch):
    monkeypatch.setattr(approvals, "MAX_PENDING", 2)
    for _ in range(2):
        await room.request(tenant="acme", reason="case closed")
    entries = len(room.log.entries)
    with pytest.raises(ControlRefusedError, match="withdraw some"):
        await room.request(tenant="acme", reason="case closed")
    assert len(room.log.entries) == entries


def test_pruning_needs_approval_before_its_time_only(room):
    """The settings' retention has decided about older content."""
    day_ms = 86400_000
    assert not room.approvals.needed_to_prune((NOW - 30 * 86400) * 1000)
    assert room.approvals.needed_to_prune((NOW - 30 * 86400) * 1000 + day_ms)
