"""
The one way to change tenants and keys: it is in the audit log first, then in the database.

Fails closed: what cannot be recorded is not done.  A crash in between leaves an entry for a change
that did not come about, never a change without an entry.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from appliance.control.tenants.changes import Change, changes_between
from appliance.errors import TenantConflictError
from appliance.tenancy.roster import Roster, in_order
from appliance.tenancy.store import TenantStore
from appliance.tenancy.tenant import Tenant

TRIES = 5
"""How often a change is made anew because somebody else made another."""

Edit = Callable[[tuple[Tenant, ...]], tuple[Tenant, ...]]
"""All tenants as they are to be, from all tenants as they are; see `appliance.tenancy.edits`."""


class Registrar:
    """Changes tenants and keys, one change at a time."""

    def __init__(
        self,
        *,
        store: TenantStore,
        record: Callable[..., Awaitable[Any]],
        adopt: Callable[[Roster], None] = lambda _roster: None,
    ) -> None:
        self._store = store
        self._record = record
        """Takes an entry's type and fields, and returns once it is durable."""
        self._adopt = adopt
        """Puts what was written in force in this process."""
        self._turn = asyncio.Lock()

    async def roster(self) -> Roster:
        """
        All tenants and keys, as the database has them.

        Raises:
            TenantsUnavailableError: it cannot be read.
        """
        return await asyncio.to_thread(self._store.read)

    async def apply(self, edit: Edit, *, actor: str, reason: str | None = None) -> Roster:
        """
        Make a change, and return what is in force then.

        Args:
            edit: the change; what it raises is passed on, and nothing happened.
            actor: who makes it, as the audit log names them.
            reason: why, if it revokes keys.

        Raises:
            AuditError: it cannot be recorded, and was not made.
            TenantConflictError: others made changes all the time.
            TenantsUnavailableError: the database cannot be read or written.
        """
        async with self._turn:
            recorded: list[Change] = []
            for _ in range(TRIES):
                before = await self.roster()
                after = in_order(edit(before.tenants))
                changes = changes_between(before.tenants, after, reason=reason)
                if not changes:
                    return before
                for change in changes:
                    if change not in recorded:
                        await self._record(change.type, **change.fields, actor=actor)
                        recorded.append(change)
                try:
                    written = await asyncio.to_thread(self._store.write, before, after)
                except TenantConflictError:
                    continue
                self._adopt(written)
                return written
        raise TenantConflictError("Others change the tenants all the time. Try again.")
