"""
Erases kept content: on request, by age (pruning), and not under the legal holds that forbid both.

    hold? ─► `erasure` entry durable, signed ─► keys retired
          ─► rows deleted ─► the rest rewrapped ─► keys destroyed

The entry comes first: content must never be missing without an entry that explains it.  The erasure waits
some seconds for a checkpoint that covers the entry, so that an export never misses content it cannot
explain.  A crash after the entry leaves content that the log declares erased: every start reads the entries
and completes them, also if a key was restored from a backup.

Copies of the database still have the deleted rows, with their wrapped data keys.  So the tenant's keys that
wrapped them are destroyed, and what else they wrapped is rewrapped: no row of such a copy under those keys
can be decrypted.

Fails closed: if holds or the log cannot be read or written, nothing is erased.
"""

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from appliance.audit.content.keeper import Keeper
from appliance.audit.content.payload_keys import KeyName, PayloadKeys, Purpose
from appliance.audit.content.payloads import Found, Selection, SqlPayloadStore
from appliance.audit.content.sealing import rewrap
from appliance.audit.entry import JSON, format_time
from appliance.audit.entry_types import EntryType
from appliance.audit.pending import Receipt
from appliance.errors import AuditKeyError, AuditUnavailableError, ControlRefusedError, InvalidRequestError
from appliance.tenancy import NAME_FORMAT

LONGEST_REASON = 200
NAMED_PER_ENTRY = 60
"""Request ids in one entry: a leaf has 4096 bytes."""
NAMED_KEYS, NAMED_KEYS_WITH_REQUESTS = 20, 10
SIGNED_WITHIN_SECONDS = 5.0
CLOCK_TOLERANCE_MS = 300_000
"""Difference between clocks, or between a request's arrival and its entry, that is not reported."""
POLL_SECONDS = 0.1
NOTHING = Found(payloads=0, requests=(), key_ids=())
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
PRUNED = "its retention period has ended"
MISDATED = "a clock was wrong: the ids of kept requests contradict the log or lie in the future"
_REQUEST_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
T = TypeVar("T")


class ErasureLog(Protocol):
    async def append(self, entry_type: EntryType, /, **fields: JSON | None) -> Receipt:
        """Append one entry and return once it is durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    tenant: str
    requests: tuple[str, ...]
    before_ms: int | None
    """Milliseconds since the epoch; None without requests: everything until now, keys included."""
    basis: str
    approved_by: str | None = None
    """Second administrator, if one was needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    tenant: str
    payloads: int
    keys: tuple[str, ...]
    """Tenant's keys that were destroyed."""
    entries: tuple[int, ...]
    """Indexes of its `erasure` entries."""
    misdated: int = 0
    """Payloads that stay, because the times in their ids contradict the log or lie in the future."""


def parse_erasure(members: Mapping[str, Any]) -> Erasure:
    """Raises InvalidRequestError if a member is missing, unknown, or of the wrong form."""
    known = ("tenant", "requests", "before", "basis")
    unknown = sorted(members.keys() - set(known))
    if unknown:
        message = f"`{unknown[0]}` is not known here; use {', '.join(known)}."
        raise InvalidRequestError(message, param=unknown[0])
    requests = members.get("requests", [])
    if not isinstance(requests, list) or not all(
        isinstance(request, str) and _REQUEST_ID.fullmatch(request) for request in requests
    ):
        raise InvalidRequestError("`requests` must be a list of request ids.", param="requests")
    before = members.get("before")
    if before is not None and requests:
        raise InvalidRequestError("Name `requests` or a time `before`, not both.", param="before")
    return Erasure(
        tenant=parse_tenant(members),
        requests=tuple(sorted(set(requests))),
        before_ms=None if before is None else parse_moment(before, "before"),
        basis=parse_line(members, "basis"),
    )


def parse_tenant(members: Mapping[str, Any]) -> str:
    """Return the name of a tenant, which may be removed; raises InvalidRequestError."""
    value = members.get("tenant")
    if not isinstance(value, str) or not NAME_FORMAT.fullmatch(value):
        raise InvalidRequestError("`tenant` must be the name of a tenant.", param="tenant")
    return value


def parse_line(members: Mapping[str, Any], name: str) -> str:
    """Return a line of at most 200 characters; raises InvalidRequestError."""
    value = members.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_REASON or not value.isprintable():
        message = f"`{name}` must be one line of 1 to {LONGEST_REASON} characters."
        raise InvalidRequestError(message, param=name)
    return value


def parse_moment(value: object, name: str) -> int:
    """Return a time in RFC 3339, or a date in UTC, as milliseconds; raises InvalidRequestError."""
    try:
        moment = datetime.fromisoformat(value if isinstance(value, str) else "")
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        milliseconds = (moment - EPOCH) // timedelta(milliseconds=1)
    except (ValueError, OverflowError) as error:
        message = f"`{name}` must be a time such as 2026-11-20T23:59:59Z, or a date."
        raise InvalidRequestError(message, param=name) from error
    if not 0 <= milliseconds < 2**48:
        raise InvalidRequestError(f"`{name}` is too far away.", param=name)
    return milliseconds


class Retention:
    """Erases, prunes and holds, one at a time."""

    def __init__(
        self,
        *,
        log: ErasureLog,
        keeper: Keeper,
        clock: Callable[[], float],
        signed_within_seconds: float = SIGNED_WITHIN_SECONDS,
    ) -> None:
        self._log, self._keeper, self._clock = log, keeper, clock
        self._signed_within_seconds = signed_within_seconds
        # Within one gateway; a hold that another places at the same moment may come too late.
        self._turn = asyncio.Lock()

    async def resume(self) -> None:
        """
        Complete erasures that a crash interrupted, and destroy keys that a backup restored.

        After AuditUnavailableError not all of it was done: erased content may still open.
        """
        async with self._turn:
            await self._in_turn(lambda: finish_erasures(self._keeper.store, self._keeper.keys))

    async def erase(self, wanted: Erasure, *, actor: str) -> Erased:
        """
        Erase permanently, after recording it in the log.

        Raises ControlRefusedError if the tenant is under a legal hold, and AuditUnavailableError if nothing
        was erased, or not all: ask again.
        """
        async with self._turn:
            return await self._erase(wanted, actor)

    async def prune(self, before_ms: int, *, actor: str, approved_by: str | None = None) -> list[Erased]:
        """Erase everything from before a time, except for tenants under a hold."""
        async with self._turn:
            held = await self._in_turn(self._keeper.store.holds)
            tenants = await self._in_turn(lambda: self._keeper.store.tenants_before(before_ms))
            erased = []
            for tenant in sorted({*tenants, *await self.misdated()}):
                if tenant not in held:
                    wanted = Erasure(
                        tenant=tenant,
                        requests=(),
                        before_ms=before_ms,
                        basis=PRUNED,
                        approved_by=approved_by,
                    )
                    erased.append(await self._erase(wanted, actor))
            return erased

    async def misdated(self) -> dict[str, int]:
        """Return by tenant the number of payloads with ids in the future: a gateway's clock was ahead."""
        since_ms = int(self._clock() * 1000) + CLOCK_TOLERANCE_MS
        return await self._in_turn(lambda: self._keeper.store.misdated(since_ms))

    async def holds(self) -> dict[str, str]:
        return await self._in_turn(self._keeper.store.holds)

    async def place_hold(self, tenant: str, reason: str, *, actor: str) -> int:
        """Forbid erasing a tenant's content; returns the index of the entry."""
        async with self._turn:
            entry = await self._log.append(EntryType.HOLD_PLACED, tenant=tenant, reason=reason, actor=actor)
            return entry.index

    async def release_hold(
        self, tenant: str, reason: str, *, actor: str, approved_by: str | None = None
    ) -> int:
        """End a hold; returns the index of the entry.  Raises ControlRefusedError if there is none."""
        async with self._turn:
            if tenant not in await self._in_turn(self._keeper.store.holds):
                raise ControlRefusedError(f"there is no legal hold on {tenant}")
            entry = await self._log.append(
                EntryType.HOLD_RELEASED, tenant=tenant, reason=reason, actor=actor, approved_by=approved_by
            )
            return entry.index

    async def _in_turn(self, call: Callable[[], T]) -> T:
        try:
            return await self._keeper.in_turn(call)
        except AuditKeyError as error:
            raise AuditUnavailableError(str(error)) from error

    async def _erase(self, wanted: Erasure, actor: str) -> Erased:
        store, keys = self._keeper.store, self._keeper.keys
        held = await self._in_turn(store.holds)
        if wanted.tenant in held:
            raise ControlRefusedError(
                f"{wanted.tenant} is under a legal hold ({held[wanted.tenant]}): release it first"
            )
        # Never later than now: the entry must not explain content that is lost after it.
        now_ms = int(self._clock() * 1000) + 1
        plan = await self._in_turn(lambda: make_plan(store, keys, wanted, now_ms))
        entries = [
            (await self._log.append(EntryType.ERASURE, **fields)).index
            for fields in _entries(wanted, plan, actor)
        ]
        if entries:
            await self._wait_until_signed(entries[-1])

        def finish() -> None:
            # After a crash, an entry of before may exist without its work.
            finish_erasures(store, keys, tenant=wanted.tenant, doomed=plan.doomed)
            left = sum(store.find(selection).payloads for selection in plan.selections)
            if left:
                message = f"{left} payloads of {wanted.tenant} are left that should be erased: ask again"
                raise AuditUnavailableError(message)

        await self._in_turn(finish)
        return Erased(
            tenant=wanted.tenant,
            payloads=plan.payloads,
            keys=tuple(name.key_id for name in plan.doomed),
            entries=tuple(entries),
            misdated=plan.misdated,
        )

    async def _wait_until_signed(self, index: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._signed_within_seconds):
                while await self._in_turn(self._keeper.store.signed_size) <= index:  # noqa: ASYNC110 - in the database
                    await asyncio.sleep(POLL_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an erasure covers, decided before its entries are written."""

    named: Found
    """Named requests; of an erasure by time or of everything, those that no entry names yet."""
    covered: Found
    """Payloads within the bounds."""
    selections: tuple[Selection, ...]
    """All of it."""
    bounds: Mapping[str, JSON | None]
    """Fields of the entry; empty if only requests are named."""
    doomed: tuple[KeyName, ...]
    misdated: int

    @property
    def payloads(self) -> int:
        return self.named.payloads + self.covered.payloads


def make_plan(store: SqlPayloadStore, keys: PayloadKeys, wanted: Erasure, now_ms: int) -> Plan:
    """
    Decide what an erasure covers.

    Everything is everything that the log names before the entry, whatever the clocks said.  By time, content
    is covered that is old by its id and was recorded before the log had reached that time: a clock that was
    behind makes no new content old.  Payloads that no entry names yet are named in the entry: nothing of
    them stays, and if their request is recorded later, its missing content is explained.
    """
    mine = keys.names(wanted.tenant)
    by_name = Selection(tenant=wanted.tenant, requests=wanted.requests)
    if wanted.requests:
        named = store.find(by_name)
        return Plan(
            named=named,
            covered=NOTHING,
            selections=(by_name,),
            bounds={},
            doomed=doomed_keys(mine, before_ms=0, key_ids=named.key_ids),
            misdated=0,
        )
    # The size first: what is recorded after it was in flight when the erasure began.
    size, before_ms, before_index, misdated = store.size(), wanted.before_ms, None, 0
    fields: dict[str, JSON | None] = {"before": format_time(now_ms), "everything": True}
    if before_ms is not None:
        before_ms = min(now_ms, before_ms)
        reached = store.reached(before_ms + CLOCK_TOLERANCE_MS, now_ms + CLOCK_TOLERANCE_MS)
        before_index = size if reached is None else min(size, reached)
        fields = {"before": format_time(before_ms), "before_index": before_index}
    bounds = Selection(tenant=wanted.tenant, before_ms=before_ms, before_index=before_index, entry_index=size)
    covered = store.find(bounds)
    unlogged = store.unlogged(wanted.tenant, before_ms)
    by_name = Selection(tenant=wanted.tenant, requests=unlogged)
    named = store.find(by_name) if unlogged else NOTHING
    doomed = tuple(mine)
    if before_ms is not None and before_index is not None:
        early = store.find(Selection(tenant=wanted.tenant, before_ms=before_ms)).payloads
        ahead = store.misdated(now_ms + CLOCK_TOLERANCE_MS).get(wanted.tenant, 0)
        misdated = max(0, early - covered.payloads - named.payloads) + ahead
        doomed = doomed_keys(
            mine,
            before_ms=before_ms,
            key_ids={*covered.key_ids, *named.key_ids},
            created_since=partial(store.created_since, before_index),
        )
    return Plan(
        named=named,
        covered=covered,
        selections=(bounds, by_name) if unlogged else (bounds,),
        bounds=fields if covered.payloads or unlogged or doomed else {},
        doomed=doomed,
        misdated=misdated,
    )


def doomed_keys(
    names: Sequence[KeyName],
    *,
    before_ms: int,
    key_ids: Collection[str],
    created_since: Callable[[], Collection[str]] = frozenset,
) -> tuple[KeyName, ...]:
    """
    Return the keys of a tenant that an erasure by name or by time has to destroy.

    These are the keys that wrap erased content (`key_ids`) and all keys created before a time, including
    those of files, except of those that the log recorded too late (`created_since`); keys of commitments
    only if they were replaced before it.
    """
    commitments = [name for name in names if name.purpose is Purpose.COMMITMENT]
    files = [name for name in names if name.purpose is Purpose.FILE and name.made_ms < before_ms]
    young = created_since() if files else ()
    return (
        *(
            name
            for name in names
            if name.purpose is Purpose.WRAPPING and (name.key_id in key_ids or name.made_ms < before_ms)
        ),
        *(name for name in files if name.key_id.rpartition(".")[2] not in young),
        *(name for name, successor in pairwise(commitments) if successor.made_ms <= before_ms),
    )


def finish_erasures(
    store: SqlPayloadStore,
    keys: PayloadKeys,
    *,
    tenant: str | None = None,
    doomed: Collection[KeyName] = (),
) -> None:
    """
    Carry out every erasure in the log, of one tenant or of all, except for tenants under a hold now.

    A key is retired only after the entry of its erasure, and what entries cover is deleted before a retired
    key's other rows are rewrapped, by every gateway: so nothing that was erased gets a new key.
    """
    # Before the entries are read: another gateway may retire further keys meanwhile.
    retired = {name for name in keys.names(tenant) if name.is_retired}
    held, changed = store.holds(), len(retired)
    erasures: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for index, entry in store.entries(EntryType.ERASURE):
        if entry["tenant"] not in held and tenant in {None, entry["tenant"]}:
            erasures.setdefault(entry["tenant"], []).append((index, entry))
    for name, entries in erasures.items():
        mine = keys.names(name)
        listed = {key_id for _, entry in entries for key_id in entry.get("keys", ())}
        wanted = {key for key in mine if key.key_id in listed or key in doomed}
        selections = list(_selections(name, entries))
        for selection, before_ms, index in selections:
            wanted |= set(
                doomed_keys(
                    mine,
                    before_ms=before_ms,
                    key_ids=store.find(selection).key_ids,
                    created_since=partial(store.created_since, index),
                )
            )
        retired |= {keys.retire(key) for key in wanted}
        # A crash before this line, or any below: the next start completes it.
        changed += len(wanted) + sum(store.delete(selection) for selection, *_ in selections)
    destroy_retired(store, keys, retired)
    if changed:
        store.scrub()


def _selections(
    tenant: str, entries: Sequence[tuple[int, Mapping[str, Any]]]
) -> Iterator[tuple[Selection, int, int]]:
    """Yield what a tenant's `erasure` entries cover, with the time and the index that its keys are before."""
    named = {request for _, entry in entries for request in entry.get("requests", ())}
    if named:
        yield Selection(tenant=tenant, requests=tuple(sorted(named))), 0, 0
    bounds: list[tuple[Selection, int, int]] = []
    for index, entry in entries:
        if "requests" in entry or "before" not in entry:
            continue
        before_ms = parse_moment(entry["before"], "before")
        selection = Selection(
            tenant=tenant,
            before_ms=None if entry.get("everything") else before_ms,
            before_index=entry.get("before_index"),
            # Entries of 0.1.0 name no request that no entry named yet: these go by their ids' time alone.
            entry_index=index if {"everything", "before_index"} & entry.keys() else None,
        )
        # Usually the newest covers all that older ones cover.
        bounds = [old for old in bounds if not _covers(selection, old[0])]
        bounds.append((selection, before_ms, entry.get("before_index", index)))
    yield from bounds


def _covers(new: Selection, old: Selection) -> bool:
    """Whether a later erasure covers all that an earlier one covers."""
    return all(
        ours is None or (theirs is not None and theirs <= ours)
        for ours, theirs in (
            (new.before_ms, old.before_ms),
            (new.before_index, old.before_index),
            (new.entry_index, old.entry_index),
        )
    )


def destroy_retired(store: SqlPayloadStore, keys: PayloadKeys, retired: Iterable[KeyName]) -> None:
    """Rewrap what retired keys still wrap, then destroy them; after an AuditError a retry is safe."""
    for name in sorted(retired, key=lambda name: name.file):
        _rewrap_all(store, keys, name)
        keys.destroy(name)


def _rewrap_all(store: SqlPayloadStore, keys: PayloadKeys, name: KeyName) -> None:
    # Overwritten: a crash interrupted its destruction, which began when it wrapped nothing.
    if name.purpose is not Purpose.WRAPPING or keys.is_overwritten(name):
        return
    old = keys.read(name)
    while rows := store.wrapped_with(name.key_id):
        new = keys.current(name.tenant, Purpose.WRAPPING)
        store.rewrap(
            [(request, part, rewrap(wrapped, old.key, new.key)) for request, part, wrapped in rows],
            new.key_id,
        )


def _entries(wanted: Erasure, plan: Plan, actor: str) -> list[dict[str, JSON | None]]:
    """Fields of the `erasure` entries: several if many requests are named."""
    about: dict[str, JSON | None] = {
        "tenant": wanted.tenant,
        "legal_basis": wanted.basis,
        "actor": actor,
        "approved_by": wanted.approved_by,
    }
    most = NAMED_KEYS if plan.bounds else NAMED_KEYS_WITH_REQUESTS
    key_ids = tuple(name.key_id for name in plan.doomed)
    keys = {"keys": key_ids if 0 < len(key_ids) <= most else None}
    entries: list[dict[str, JSON | None]] = []
    left, names = plan.named.payloads, plan.named.requests
    for start in range(0, len(names), NAMED_PER_ENTRY):
        named = names[start : start + NAMED_PER_ENTRY]
        # The last of several entries has the rest of the count, so that the sum is right.
        last = start + NAMED_PER_ENTRY >= len(names)
        count = left if last else min(left, len(named))
        left -= count
        entries.append({**about, "payloads": count, "requests": named, **({} if plan.bounds else keys)})
    # After the names: an entry of all that is covered must not be there without them.
    if plan.bounds:
        entries.append({**about, "payloads": plan.covered.payloads, **plan.bounds, **keys})
    return entries
