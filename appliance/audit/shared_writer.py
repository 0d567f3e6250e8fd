"""
The writer of a log that several gateways share, on PostgreSQL.

Every gateway accepts its own entries: they are durable with its commit, in its own sequence, before they have
an index.  One gateway, by lease, integrates: it moves what all have accepted into the tree, signs, and ends
the requests of dead gateways.  Its own entries it puts into the tree directly, unless some that it accepted
earlier still wait.

A lost lease costs time, never entries: the head moves only for the holder of the lease, under the gateway's
own epoch (`Fence`); any other gateway accepts.  Every gateway reads the tree's hashes, compares them with the
head and with what was signed, and finds its own entries there in order.  If one disappeared or is not
integrated in time, the gateway stops.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from appliance.audit.entry_types import EntryType
from appliance.audit.integration import (
    AcceptedRow,
    FollowedLog,
    Plan,
    Position,
    WaitingEntry,
    accept_after,
    left_open,
    place_after,
    without_request,
)
from appliance.audit.known import KnownLog
from appliance.audit.pending import NOT_PLACED, Pending, retrieve
from appliance.audit.pending_rows import INTEGRATED_ROWS, Fence, Observed, Registered, replaced
from appliance.audit.store import Head, Leaf, OpenRequest, SqlAuditStore
from appliance.audit.writer import Writer
from appliance.errors import AuditEntryError, AuditError, AuditForkError, AuditUnavailableError
from appliance.infra.lease import SqlLease
from appliance.infra.settings import AuditSettings

LONGEST_LEASE_SECONDS = 8.0
INTEGRATE_SECONDS = 0.1
OBSERVE_SECONDS = 0.25
IDLE_SECONDS = 1.0
BUSY_FOR_SECONDS = 10.0
"""How long after an integrated entry more are expected."""
TAKEOVER_SECONDS = 15.0
"""Maximum time from a free lease to integrated entries: two statements that wait for as long as they may."""


def lease_seconds(settings: AuditSettings) -> float:
    """How long the right to integrate lasts without being renewed."""
    return min(settings.gateway_dead_seconds / 4, LONGEST_LEASE_SECONDS)


def integration_seconds(settings: AuditSettings) -> float:
    """After this time an accepted entry that is not in the tree stops its gateway."""
    return 2 * lease_seconds(settings) + TAKEOVER_SECONDS


class SharedWriter(Writer):
    def __init__(
        self,
        *,
        store: SqlAuditStore,
        settings: AuditSettings,
        known: KnownLog,
        registered: Registered,
        begun: Iterable[str],
        lease: SqlLease,
        on_break: Callable[[str, str], None],
        **rest: Any,  # noqa: ANN401 - as the base has them
    ) -> None:
        super().__init__(store=store, settings=settings, known=known, **rest)
        self._shared, self._lease, self._on_break = store, lease, on_break
        self._broken: Mapping[str, str] = {}
        self._followed = FollowedLog(known.tree)
        self._writing, self._end = registered.writing, registered.end
        # Requests of this gateway without a durable end.  No other ends them while this one may write.
        self._begun = set(begun)
        now = self._loop.time()
        self._followed.accepted(self._waiting(registered.pending, now))
        self._leads = False
        self._lease_seconds = lease_seconds(settings)
        self._patience = integration_seconds(settings)
        self._lease_at = self._observe_at = self._integrate_at = now
        self._busy_until = now + BUSY_FOR_SECONDS
        # When the database was last unreachable: the integrator could not reach it, either.
        self._reachable_since: float | None = now
        # Last heartbeat of gateways whose requests were ended; None until those without a name were.
        self._settled: dict[str, float] | None = None

    @property
    def size(self) -> int:
        return self._followed.tree.size

    @property
    def root(self) -> bytes:
        return self._followed.tree.root()

    def _due_at(self) -> float:
        if self._leads:
            return min(super()._due_at(), self._lease_at, self._integrate_at)
        return min(self._beat_at, self._lease_at, self._observe_at)

    async def _turn(self) -> None:
        if self._in_doubt and not await self._resynchronise():
            return
        if self._loop.time() >= self._lease_at:
            await self._hold_lease()
        # Entries that were accepted before others of this gateway come into the tree before them.
        if self._leads and (self._followed.waiting or self._loop.time() >= self._integrate_at):
            await self._integrate()
        self._take()
        if self._taken:
            await self._commit()
        if self._in_doubt:
            return
        if not self._leads and self._loop.time() >= self._observe_at:
            await self._try_observe()
        if self._loop.time() >= self._beat_at:
            await self._beat()
        if self._leads and self._publisher.is_due(self.size, self._loop.time()):
            await self._publish()

    async def _hold_lease(self) -> None:
        self._lease_at = self._loop.time() + self._lease_seconds / 4
        held = await self._lease.hold()
        if held and not self._leads:
            self._settled = None
            self._integrate_at = self._loop.time()
        self._leads = held

    @property
    def _fence(self) -> Fence:
        return Fence(writing=self._writing, lease_epoch=self._lease.epoch)

    async def _commit(self) -> None:
        started = perf_counter()
        lost = without_request(self._taken, self._begun)
        self._fail(lost, AuditEntryError("the request has no intent in the log, or has ended already"))
        self._taken = [pending for pending in self._taken if pending not in lost]
        taken = tuple(self._taken)
        if not taken:
            return
        try:
            settle = None
            if self._leads and not self._followed.waiting:
                settle = await self._append_directly(taken)
            if settle is None:
                settle = await self._accept(taken)
        except AuditEntryError as error:
            self._isolate(error)
            return
        except AuditUnavailableError as error:
            self._in_doubt = True
            self._refuse(error)
            return
        # A crash before this line: the entries are durable and not acknowledged.  That is allowed; the
        # reverse is not.
        self.failure, self._taken = None, []
        self.last_commit_seconds = perf_counter() - started
        settle()
        for pending in taken:
            if pending.type is EntryType.REQUEST_INTENT and pending.request_id is not None:
                self._begun.add(pending.request_id)
            elif pending.type.closes_request:
                self._begun.discard(pending.request_id or "")
        self._on_commit(len(taken), self.last_commit_seconds)

    async def _append_directly(self, taken: Sequence[Pending]) -> Callable[[], None] | None:
        """Put entries into the tree; returns what is left to do, or None if this gateway may not any more."""
        known, newer = self._followed.tree, ()
        leaves, tree = place_after(known, taken)
        append = partial(self._shared.append, leaves, expected=self._followed.head, new=Head.of(tree))
        try:
            try:
                await self._thread.run(partial(append, fence=self._fence))
            except AuditForkError:
                # A gateway of version 0.1.0, which needs no lease, has moved the head.
                newer, known, leaves, tree = await self._thread.run(partial(self._append_behind, taken))
        except AuditForkError:
            await self._lose_turn()
            return None

        def settle() -> None:
            self._followed.follow(newer, known)
            self._followed.own_appended(leaves, tree)
            for pending, leaf in zip(taken, leaves, strict=True):
                pending.succeed(leaf.index)
            self._publisher.committed(self._loop.time())

        return settle

    def _append_behind(self, taken: Sequence[Pending]) -> Any:  # noqa: ANN401
        """In the writer's thread: nothing that is read here changes while the loop waits for it."""
        made: list[Any] = []

        def make(head: Head, newer: Sequence[Leaf]) -> tuple[Sequence[Leaf], Head]:
            hashes = tuple(leaf.leaf_hash for leaf in newer)
            known = self._followed.extended(hashes, head)
            leaves, tree = place_after(known, taken)
            made[:] = [hashes, known, leaves, tree]
            return leaves, Head.of(tree)

        self._shared.append_behind(self.size, make, fence=self._fence)
        return made

    async def _accept(self, taken: Sequence[Pending]) -> Callable[[], None]:
        rows = await self._thread.run(partial(self._accept_now, taken))
        entries = self._waiting([row.leaf_hash for row in rows], self._loop.time())

        def settle() -> None:
            self._followed.accepted(entries)
            self._end = Position(seq=rows[-1].seq, leaf_hash=rows[-1].leaf_hash)
            for pending, entry in zip(taken, entries, strict=True):
                pending.succeed(NOT_PLACED, entry.placed)
            self._observe_at = min(self._observe_at, self._loop.time() + OBSERVE_SECONDS)

        return settle

    def _accept_now(self, taken: Sequence[Pending]) -> list[AcceptedRow]:
        rows = accept_after(self._end, taken, self._gateway, self._writing.epoch)
        self._shared.accept(self._writing, rows)
        return rows

    def _waiting(self, leaf_hashes: Sequence[bytes], now: float) -> list[WaitingEntry]:
        entries = [
            WaitingEntry(leaf_hash=leaf_hash, placed=self._loop.create_future(), since=now)
            for leaf_hash in leaf_hashes
        ]
        for entry in entries:
            entry.placed.add_done_callback(retrieve)
        return entries

    async def _lose_turn(self) -> None:
        """The head moved, or this gateway does not integrate any more: read which."""
        size, self._leads = self.size, False
        self._lease_at = self._loop.time()
        await self._try_observe()
        if self.size == size:
            # Not the head: the lease.
            await self._lease.release()
            self._lease_at += self._lease_seconds / 4

    async def _integrate(self, dead: Sequence[str] = (), silent_since: float = -math.inf) -> list[str]:
        """Move what was accepted into the tree; end the requests of `dead` gateways, and return those."""
        now = self._loop.time()
        self._integrate_at = now + (INTEGRATE_SECONDS if now < self._busy_until else IDLE_SECONDS)
        ends = bool(dead) or self._settled is None
        try:
            if not ends and not await self._thread.run(self._shared.is_waiting):
                return []
            newer, plan, aborted, tree, gone = await self._thread.run(
                partial(self._integrate_now, dead, silent_since, ends=ends)
            )
        except AuditForkError:
            await self._lose_turn()
            return []
        except AuditUnavailableError:
            # Whether it happened is read with the next hashes.  Perhaps another gateway can.
            self._leads = False
            await self._lease.release()
            return []
        moved = [row.leaf_hash for prefix in plan.prefixes for row in prefix.rows]
        self._followed.follow([*newer, *moved, *(leaf.leaf_hash for leaf in aborted)], tree)
        self._settled = self._settled or {}
        for gateway, why in plan.broken.items() - self._broken.items():
            self._on_break(gateway, why)
        self._broken = plan.broken
        if newer or moved or aborted:
            self._publisher.committed(now)
        if moved:
            self._busy_until = now + BUSY_FOR_SECONDS
        if any(len(prefix.rows) == INTEGRATED_ROWS for prefix in plan.prefixes):
            self._integrate_at = now
        return gone

    def _integrate_now(
        self, dead: Sequence[str], silent_since: float, *, ends: bool
    ) -> tuple[Sequence[bytes], Plan, Sequence[Leaf], Any, list[str]]:
        """In the writer's thread: nothing that is read here changes while the loop waits for it."""
        made: list[Any] = []

        def make(head: Head, newer: Sequence[bytes], plan: Plan) -> Head:
            tree = self._followed.extended(newer, head)
            plan.extend(tree)
            made[:] = [newer, plan, (), tree]
            return Head.of(tree)

        def end_requests(_head: Head, requests: Sequence[OpenRequest]) -> tuple[Sequence[Leaf], Head]:
            tree, leaves = made[3], []
            for request in requests:
                fields = {"request_id": request.request_id, "reason": "gateway_stopped"}
                content = self._maker.leaf(EntryType.REQUEST_ABORTED, fields)
                leaf = Leaf.of(tree.size, content, EntryType.REQUEST_ABORTED, request.request_id)
                tree.append(leaf.leaf_hash)
                leaves.append(leaf)
            made[2] = leaves
            return leaves, Head.of(tree)

        gone = self._shared.integrate(
            self.size,
            make,
            fence=self._fence,
            dead=dead,
            silent_since=silent_since,
            end_requests=end_requests if ends else None,
        )
        newer, plan, aborted, tree = made
        return newer, plan, aborted, tree, gone

    async def _try_observe(self) -> None:
        try:
            await self._observe()
        except AuditUnavailableError:
            self._reachable_since = None

    async def _observe(self) -> None:
        """Follow the tree, find own entries in it, and seal what another gateway signed."""
        now = self._loop.time()
        self._observe_at = now + (OBSERVE_SECONDS if self._followed.waiting else IDLE_SECONDS)
        observed = await self._thread.run(partial(self._shared.observe, self._gateway, self.size))
        await self._follow_observed(observed)
        if self._reachable_since is None:
            self._reachable_since = now
        self._followed.require_integrated(self._reachable_since, self._patience, now)

    async def _follow_observed(self, observed: Observed) -> None:
        if observed.writing != self._writing:
            raise replaced(self._gateway)
        tree = await self._thread.run(partial(self._followed.extended, observed.leaf_hashes, observed.head))
        self._followed.follow(observed.leaf_hashes, tree)
        if observed.leaf_hashes:
            self._publisher.committed(self._loop.time())
        self._followed.require_pending(observed.pending)
        stored = observed.checkpoint
        if stored is None or stored.size <= self._publisher.published.size:
            return
        signed = self._publisher.verified(stored)
        if self._followed.adopt(signed.size, signed.root):
            now = self._loop.time()
            try:
                published = await self._thread.run(partial(self._publisher.adopt, stored))
            except AuditUnavailableError as error:
                self._publisher.failed(str(error), now)
            else:
                self._publisher.succeeded(published, now)

    async def _publish(self) -> None:
        if not self._leads:
            return
        try:
            # Only what was read back from the store is signed.
            await self._observe()
            published = await self._thread.run(partial(self._publisher.publish, self._followed.head))
        except AuditUnavailableError as error:
            self._publisher.failed(str(error), self._loop.time())
        else:
            self._followed.signed_here()
            self._publisher.succeeded(published, self._loop.time())

    async def _resynchronise(self) -> bool:
        """Find out what of the commit in doubt happened; end the requests it left without an end."""
        try:
            # Under a new epoch: what is still on its way to the database cannot happen any more.
            again = partial(self._shared.register, self._writing, self._clock(), again=True)
            registered = await self._thread.run(again)
            self._writing, self._end = registered.writing, registered.end
            known = {entry.leaf_hash for entry in self._followed.waiting}
            doubtful = [one for one in registered.pending if one not in known]
            self._followed.accepted(self._waiting(doubtful, self._loop.time()))
            observed = await self._thread.run(partial(self._shared.observe, self._gateway, self.size))
            await self._follow_observed(observed)
            placed = await self._thread.run(self._shared.open_requests)
        except AuditUnavailableError as error:
            self._reachable_since = None
            self._refuse(error)
            return False
        self._in_doubt, self.failure = False, None
        mine = left_open(
            [one.request_id for one in placed if one.gateway == self._gateway], registered.entries
        )
        self._begun = set(mine)
        ending = [pending.request_id for pending in self._queue if pending.type.closes_request]
        self._abort(self._requests.abandoned(mine, ending), "entry_not_durable")
        return True

    async def _beat(self) -> None:
        """Write a heartbeat; whoever integrates ends the requests of dead gateways."""
        self._beat_at = self._loop.time() + self._beat_seconds
        now = self._clock()
        try:
            seen = await self._thread.run(partial(self._store.beat, self._gateway, now))
        except AuditUnavailableError:
            # Others may have been cut off as well: their silence means nothing until they had time.
            self._beating_since = None
            return
        if self._beating_since is None:
            self._beating_since = self._loop.time()
        patience = self._settings.gateway_dead_seconds
        if not self._leads or self._loop.time() - self._beating_since < patience:
            return
        settled = self._settled or {}
        dead = [
            gateway
            for gateway, at in seen.items()
            if gateway != self._gateway and now - at > patience and settled.get(gateway) != at
        ]
        if dead:
            gone = await self._integrate(dead, now - patience)
            settled = self._settled or {}
            self._settled = {**settled, **{gateway: seen[gateway] for gateway in gone}}

    async def _settle(self) -> None:
        """Leave nothing that is durable outside of the tree, as long as a gateway can integrate."""
        until = self._loop.time() + self._patience
        self._lease_at = self._loop.time()
        while not self._in_doubt and self._loop.time() < until:
            if self._loop.time() >= self._lease_at:
                await self._hold_lease()
            if self._leads:
                await self._integrate()
            else:
                await self._try_observe()
            if not self._followed.waiting or self._reachable_since is None:
                break
            await self._pause(INTEGRATE_SECONDS)
        if self._leads:
            if not self._in_doubt and self.size > self._publisher.published.size:
                await self._publish()
            await self._lease.release()

    def _stop(self, error: AuditError) -> None:
        super()._stop(error)
        for entry in self._followed.waiting:
            if not entry.placed.done():
                entry.placed.set_exception(
                    AuditUnavailableError(f"the entry is durable and has no index yet: {error}")
                )
