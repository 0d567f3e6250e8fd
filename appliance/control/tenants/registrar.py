"""
The only way to change tenants and keys: first in the audit log, then in the database.

Fails closed: a change that cannot be recorded is not made.  A crash in between leaves an entry for a change
that was not made, never a change without an entry.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from appliance.audit.entry_types import EntryType
from appliance.control.tenants.sealing import NOT_IN_LOG, SealingPlan
from appliance.control.tenants.tenant_changes import TenantChange, changes_between
from appliance.errors import TenantConflictError
from appliance.tenancy.roster import Roster, sorted_tenants
from appliance.tenancy.store import TenantStore, roster_digest
from appliance.tenancy.tenant import Tenant

TRIES = 5  # of a change that conflicts with others

Edit = Callable[[tuple[Tenant, ...]], tuple[Tenant, ...]]  # before and after; see `tenancy.edits`


class Registrar:
    """One change at a time."""

    def __init__(
        self,
        *,
        store: TenantStore,
        record: Callable[..., Awaitable[Any]],
        adopt: Callable[[Roster], None] = lambda _roster: None,
    ) -> None:
        self._store = store
        self._record = record  # takes an entry's type and fields, and returns once it is durable
        self._adopt = adopt  # puts the written roster in force in this process
        self._turn = asyncio.Lock()

    async def roster(self) -> Roster:
        """As the database has them; raises TenantsUnavailableError."""
        return await asyncio.to_thread(self._store.read)

    async def apply(self, edit: Edit, *, actor: str, reason: str | None = None) -> Roster:
        """
        Make a change, and return the roster in force; an error of `edit` leaves all unchanged.

        Raises AuditError if it was not recorded and not made, TenantConflictError if it conflicted with
        `TRIES` others, TenantsUnavailableError if the database cannot be used.
        """
        async with self._turn:
            recorded: list[TenantChange] = []
            for _ in range(TRIES):
                before = await self.roster()
                after = sorted_tenants(edit(before.tenants))
                changes = changes_between(before.tenants, after, reason=reason)
                if not changes:
                    return before
                for change in changes:
                    if change not in recorded:
                        await self._record(change.type, **change.fields, actor=actor)
                        recorded.append(change)
                await self._record_state(before.generation + 1, after, actor)
                try:
                    written = await asyncio.to_thread(self._store.write, before, after)
                except TenantConflictError:
                    continue
                self._adopt(written)
                return written
        raise TenantConflictError("Others change the tenants all the time. Try again.")

    async def seal(self, plan: SealingPlan, *, actor: str) -> Roster:
        """Give all rows a new MAC, corrected as the plan says; raises as `apply`, for the first conflict."""
        async with self._turn:
            for change in changes_between(plan.before.tenants, plan.after, reason=NOT_IN_LOG):
                await self._record(change.type, **change.fields, actor=actor)
            await self._record_state(plan.generation, plan.after, actor)
            written = await asyncio.to_thread(
                self._store.rewrite, plan.before.generation, plan.generation, plan.after
            )
            self._adopt(written)
            return written

    async def _record_state(self, generation: int, after: tuple[Tenant, ...], actor: str) -> None:
        digest = roster_digest(generation, after)
        await self._record(EntryType.TENANTS_SEALED, generation=generation, digest=digest, actor=actor)
