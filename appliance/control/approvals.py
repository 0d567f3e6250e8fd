"""
The two-person rule (`audit.two_person`): a second administrator approves what another has requested.

What was requested, and by whom, is read from the log; the database holds only what is pending, for all
gateways.  A request is taken out before it is carried out, so it is never carried out twice.  Fails closed:
without the log or the database nothing is approved.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from sqlalchemy import BigInteger, Column, MetaData, Table, Text, delete, insert, select

from appliance.audit.content.payload_keys import DAY_MS
from appliance.audit.content.retention import ErasureLog
from appliance.audit.entry import ACCEPTED, ENVELOPE
from appliance.audit.entry_types import EntryType
from appliance.audit.pending import NOT_PLACED
from appliance.errors import (
    ApplianceError,
    AuditUnavailableError,
    ControlRefusedError,
    ControlUnavailableError,
)
from appliance.infra.database import SqlStore
from appliance.tenancy import TenantDirectory
from appliance.tenancy.keys import KEY_ID_FORMAT

APPROVAL_SECONDS = 24 * 3600
MAX_PENDING = 100
CLOCKS_DIFFER_MS = 300_000
"""Maximum by which the clock of a command may be ahead of a gateway's."""
COMMAND = "cli:"
_ENVELOPE = frozenset({*ENVELOPE, *ACCEPTED, "operation", "actor"})

LogEntries = list[tuple[int, dict[str, Any]]]
"""Index and members, in the order of the log."""

_approvals = Table(
    "approvals",
    MetaData(),
    Column("id", Text, primary_key=True),
    Column("expires_at", BigInteger, nullable=False),
)


class Operation(StrEnum):
    ERASE = "erase"
    PRUNE = "prune"
    RELEASE = "release"


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """A pending request, as its `approval.requested` entry has it."""

    approval_id: str
    """Id of the entry."""
    index: int
    operation: Operation
    actor: str
    fields: Mapping[str, Any]
    expires_at: int
    """Unix time from which it can no longer be approved."""


def refusal(approval: Approval, approver: str, keys: LogEntries, replaced: Mapping[str, str]) -> str | None:
    """
    Why this administrator may not approve it; None if they may.

    `keys` are the `key.created` and `key.rotated` entries, `replaced` the predecessor of each key.  An
    administrator knows the keys that they made or rotated.  Two keys with a common maker, or one made by the
    other, therefore count as one administrator.  Commands make keys for anyone, so they are no maker here.
    """
    if approver == approval.actor:
        return "the administrator who requested it cannot approve it"
    common = _makers(approver, keys, replaced) & _makers(approval.actor, keys, replaced)
    if common:
        made_by = ", ".join(sorted(common))
        return (
            f"{approver} and {approval.actor}, which requested it, count as one administrator, because "
            f"{made_by} made or replaced both: use a key made by `appliance key create`, or a token"
        )
    if KEY_ID_FORMAT.fullmatch(approver):
        made_at = [index for index, entry in keys if entry["key_id"] == approver]
        if not made_at or max(made_at) > approval.index:
            return f"the key {approver} is newer than the request"
    return None


def _makers(key_id: str, keys: LogEntries, replaced: Mapping[str, str]) -> set[str]:
    """The key itself, the keys it replaced, who made these, and so on."""
    made_by: dict[str, set[str]] = {key: {predecessor} for key, predecessor in replaced.items()}
    for _, entry in keys:
        found = {entry["actor"], entry.get("previous_key_id", entry["actor"])}
        made_by.setdefault(entry["key_id"], set()).update(found)
    makers, new = set[str](), {key_id}
    while new:
        makers |= new
        new = {each for key in new for each in made_by.get(key, ()) if not each.startswith(COMMAND)} - makers
    return makers


class ApprovalStore(Protocol):
    """Ids of pending requests; every method may raise ControlUnavailableError.  Times are Unix time."""

    def pending(self, now: float) -> dict[str, int]:
        """Expiry by id, without expired ones."""

    def add(self, approval_id: str, expires_at: int, now: float) -> None:
        """Durable on return; also removes what has expired."""

    def take(self, approval_id: str, now: float) -> bool:
        """Remove one; of several calls only one returns True, and none after its expiry."""


class SqlApprovalStore(SqlStore):
    subject = "the pending approvals"
    unavailable = ControlUnavailableError

    def pending(self, now: float) -> dict[str, int]:
        query = select(_approvals).where(_approvals.c.expires_at > now)
        with self._reading() as connection:
            return {row.id: row.expires_at for row in connection.execute(query)}

    def add(self, approval_id: str, expires_at: int, now: float) -> None:
        with self._writing() as connection:
            connection.execute(delete(_approvals).where(_approvals.c.expires_at <= now))
            connection.execute(insert(_approvals).values(id=approval_id, expires_at=expires_at))

    def take(self, approval_id: str, now: float) -> bool:
        mine = (_approvals.c.id == approval_id) & (_approvals.c.expires_at > now)
        with self._writing() as connection:
            return connection.execute(delete(_approvals).where(mine)).rowcount == 1


class Approvals:
    def __init__(
        self,
        *,
        store: ApprovalStore,
        log: ErasureLog,
        entries: Callable[..., LogEntries],
        tenants: TenantDirectory,
        retention_days: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._log, self._tenants, self._clock = store, log, tenants, clock
        self._entries = entries  # of some types, from the database
        self._retention_days = retention_days

    def needed_to_prune(self, before_ms: int) -> bool:
        """Whether content from before this time may be younger than the settings' retention."""
        if self._retention_days is None:
            return True
        return before_ms > self._clock() * 1000 - self._retention_days * DAY_MS + CLOCKS_DIFFER_MS

    async def request(self, operation: Operation, *, actor: str, **fields: Any) -> Approval:  # noqa: ANN401 - as the registry has them
        """Record a request and make it pending; raises ControlRefusedError if too many are."""
        now = self._clock()
        if len(await asyncio.to_thread(self._store.pending, now)) >= MAX_PENDING:
            raise ControlRefusedError(f"{MAX_PENDING} requests wait for approval: withdraw some")
        receipt = await self._log.append(
            EntryType.APPROVAL_REQUESTED, operation=str(operation), actor=actor, **fields
        )
        if receipt.index == NOT_PLACED:
            # A newer key could get a place in the log before it.
            raise AuditUnavailableError("the database does not take the request: request it again later")
        expires_at = int(now) + APPROVAL_SECONDS
        # A crash before this line: the entry exists and nothing is pending; it has to be requested again.
        await asyncio.to_thread(self._store.add, receipt.entry_id, expires_at, now)
        return Approval(
            approval_id=receipt.entry_id,
            index=receipt.index,
            operation=operation,
            actor=actor,
            fields={name: value for name, value in fields.items() if value is not None},
            expires_at=expires_at,
        )

    async def pending(self) -> list[Approval]:
        """Oldest first."""
        expiries = await asyncio.to_thread(self._store.pending, self._clock())
        found = await asyncio.to_thread(self._entries, EntryType.APPROVAL_REQUESTED) if expiries else []
        return [
            _decode(index, entry, expiries[entry["id"]]) for index, entry in found if entry["id"] in expiries
        ]

    async def withdraw(self, approval_id: str, *, by: str) -> None:
        """Raises ControlRefusedError if it is not pending."""
        async with self._closing(await self._find(approval_id), "withdrawn", by):
            pass

    @asynccontextmanager
    async def approved(self, approval_id: str, *, by: str) -> AsyncIterator[Approval]:
        """
        Approve a request; the block carries it out, and after an ApplianceError it is pending again.

        Raises ControlRefusedError if it is not pending, or this administrator may not approve it.
        """
        approval = await self._find(approval_id)
        keys = await asyncio.to_thread(self._entries, EntryType.KEY_CREATED, EntryType.KEY_ROTATED)
        why = refusal(approval, by, keys, _replaced(self._tenants))
        if why is not None:
            raise ControlRefusedError(f"{approval_id} is not approved: {why}")
        async with self._closing(approval, "approved", by):
            yield approval

    @asynccontextmanager
    async def _closing(self, approval: Approval, outcome: str, actor: str) -> AsyncIterator[None]:
        if not await asyncio.to_thread(self._store.take, approval.approval_id, self._clock()):
            raise _not_pending(approval.approval_id)
        # A crash from here on: it is no longer pending.  An erasure whose entry exists is completed at the
        # next start; otherwise nothing was done, and has to be requested again.
        try:
            await self._log.append(
                EntryType.APPROVAL_CLOSED, approval=approval.approval_id, outcome=outcome, actor=actor
            )
            yield
        except ApplianceError:
            args = approval.approval_id, approval.expires_at, self._clock()
            await asyncio.to_thread(self._store.add, *args)
            raise

    async def _find(self, approval_id: str) -> Approval:
        for approval in await self.pending():
            if approval.approval_id == approval_id:
                return approval
        raise _not_pending(approval_id)


def _decode(index: int, entry: dict[str, Any], expires_at: int) -> Approval:
    return Approval(
        approval_id=entry["id"],
        index=index,
        operation=Operation(entry["operation"]),
        actor=entry["actor"],
        fields={name: value for name, value in entry.items() if name not in _ENVELOPE},
        expires_at=expires_at,
    )


def _replaced(tenants: TenantDirectory) -> dict[str, str]:
    keys = (key for tenant in tenants.tenants for key in tenant.keys)
    return {key.key_id: key.replaces for key in keys if key.replaces is not None}


def _not_pending(approval_id: str) -> ControlRefusedError:
    return ControlRefusedError(
        f"no request {approval_id} waits for approval: it was approved or withdrawn, or has expired"
    )
