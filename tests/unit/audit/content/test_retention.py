"""
Entry first, then gone; also after a crash.
"""

import asyncio
import random
import shutil
import signal
import sqlite3
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.audit import verify
from appliance.audit.content.keeper import Content, Keeper
from appliance.audit.content.payload_keys import PayloadKeys, Purpose, ulid_ms
from appliance.audit.content.payloads import Selection, SqlPayloadStore, first_id
from appliance.audit.content.retention import (
    NAMED_KEYS,
    NAMED_KEYS_WITH_REQUESTS,
    NAMED_PER_ENTRY,
    Erasure,
    Retention,
    destroy_retired,
    finish_erasures,
    parse_moment,
)
from appliance.audit.content.sealing import Part, unwrap
from appliance.audit.entry import Entry, encode, format_time, new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.pending import Receipt
from appliance.audit.store import Head, Leaf, SqlAuditStore
from appliance.errors import AuditUnavailableError, InvalidRequestError
from appliance.infra.settings import AuditSettings
from appliance.tenancy import ContentPolicy
from tests.fake_engine import FakeClock
from tests.unit.sovereignty.bundle.test_bundle_load import killed_at

RANDOM = random.Random(13)
SETTINGS = AuditSettings(origin="a.example/log")


class EntryLog:
    """A log in the database, one entry at a time; it can refuse them."""

    def __init__(self, url):
        self.url = url
        self.erasures = []
        self.refuses = False

    async def append(self, entry_type, /, request_id=None, **fields):
        if self.refuses:
            message = "the disk is full"
            raise AuditUnavailableError(message)
        given = {name: value for name, value in fields.items() if value is not None}
        if entry_type is EntryType.ERASURE:
            self.erasures.append(given)
        with closing(SqlAuditStore(self.url)) as store:
            index = store.head().size
            leaf = encode(
                Entry(
                    log="x/y",
                    id=new_entry_id(index, bytes(10)),
                    type=entry_type,
                    time=format_time(1),
                    fields=given if request_id is None else {**given, "request_id": request_id},
                )
            )
            tree = CompactRange(index, store.head().subtrees)
            tree.append(hash_leaf(leaf))
            entry = Leaf(
                index=index,
                leaf=leaf,
                leaf_hash=hash_leaf(leaf),
                type=str(entry_type),
                request_id=request_id,
            )
            store.append([entry], expected=store.head(), new=Head.of(tree))
        return Receipt(index=index, entry_id="x")


class Kept:
    """A keeper with its keys, its store and a log."""

    def __init__(self, keeper, log, clock):
        self.keeper, self.log, self.clock = keeper, log, clock
        self.store, self.keys = keeper.store, keeper.keys
        self.retention = Retention(log=log, keeper=keeper, clock=clock, signed_within_seconds=0)

    async def keep(self, tenant="acme", content=b"said", policy=ContentPolicy.ENCRYPTED):
        """Keep one body under a new request id."""
        self.clock.advance(0.01)
        request_id = new_entry_id(int(self.clock() * 1000), RANDOM.randbytes(10))
        said = await self.store_part(request_id, Part.REQUEST, tenant, content, policy)
        await self.record(request_id, tenant, policy, said)
        return request_id

    async def record(self, request_id, tenant="acme", policy=ContentPolicy.ENCRYPTED, said=None):
        """Write the intent, as the gateway does once the body is stored."""
        await self.log.append(
            EntryType.REQUEST_INTENT,
            request_id=request_id, tenant=tenant, key_id="k", route="/v1/completions", model="m",
            stream=False, client="loopback", body_bytes=1, content_mode=str(policy), **(said or {}),
        )  # fmt: skip

    async def store_part(
        self, request_id, part, tenant="acme", content=b"said", policy=ContentPolicy.ENCRYPTED
    ):
        return await self.keeper.keep(
            Content(
                tenant=tenant,
                policy=policy,
                request_id=request_id,
                part=part,
                pieces=[content],
                size=len(content),
            )
        )

    async def erase(self, *requests, tenant="acme", before_ms=None):
        wanted = Erasure(
            tenant=tenant, requests=tuple(sorted(requests)), before_ms=before_ms, basis="a request"
        )
        return await self.retention.erase(wanted, actor="admin")

    def opens(self, request_id):
        """Whether a key that is there unwraps the request's data key."""
        payload = self.store.get(request_id, Part.REQUEST)
        if payload is None:
            return False
        name = self.keys.find(payload.key_id, Purpose.WRAPPING)
        return name is not None and bool(unwrap(payload.sealed.wrapped_key, self.keys.read(name).key))


@asynccontextmanager
async def open_kept(directory: Path, clock: FakeClock, **settings):
    """Open everything on a directory, as a start does."""
    url = f"sqlite:///{directory / 'audit.db'}"
    SqlAuditStore(url).close()
    keys = PayloadKeys(
        directory / "keys", master_key=None, key_days=7, clock=clock, random_bytes=RANDOM.randbytes
    )
    with closing(SqlPayloadStore(url)) as store:
        async with Keeper(
            store=store,
            keys=keys,
            settings=SETTINGS.model_copy(update=settings),
            clock=clock,
            random_bytes=RANDOM.randbytes,
        ).running() as keeper:
            yield Kept(keeper, EntryLog(url), clock)


@pytest.fixture
def clock():
    clock = FakeClock()
    clock.now = 1_800_000_000.0
    return clock


@pytest.fixture
async def kept(tmp_path, clock):
    async with open_kept(tmp_path, clock) as kept:
        yield kept


async def test_nothing_is_erased_if_the_log_cannot_record_it(kept):
    """Content is never gone without an entry."""
    request = await kept.keep()
    kept.log.refuses = True
    with pytest.raises(AuditUnavailableError):
        await kept.erase(request)
    assert kept.opens(request)


async def test_a_named_request_is_gone_and_the_others_open_under_another_key(kept):
    """The key that wrapped it is destroyed; what else it wrapped is rewrapped."""
    requests = [await kept.keep() for _ in range(5)]
    (before,) = kept.keys.names()
    erased = await kept.erase(requests[2])
    assert (erased.payloads, erased.keys) == (1, (before.key_id,))
    assert [kept.opens(request) for request in requests] == [True, True, False, True, True]
    (after,) = kept.keys.names()
    assert after.key_id != before.key_id


async def test_another_tenants_request_cannot_be_named(kept):
    """The tenant is part of what is asked."""
    request = await kept.keep("other")
    erased = await kept.erase(request, tenant="acme")
    assert (erased.payloads, erased.entries) == (0, ())
    assert kept.opens(request)


async def test_an_erasure_reaches_no_further_than_now(kept):
    """The entry says so too: it must not explain what goes missing later."""
    await kept.keep()
    await kept.erase(before_ms=2**47)
    (fields,) = kept.log.erasures
    assert fields["before"] <= format_time(int(kept.clock() * 1000) + 1)
    assert kept.opens(await kept.keep())


async def test_everything_is_erased_whatever_the_clock_said(kept, clock, tmp_path):
    """Also what was kept while it was an hour ahead; no key that wrapped any of it is left."""
    behind = [await kept.keep(), await kept.keep()]
    clock.advance(3600)
    ahead = [await kept.keep(), await kept.keep()]
    clock.advance(-3600)
    with closing(sqlite3.connect(tmp_path / "audit.db")) as live:
        live.execute("VACUUM INTO ?", (str(tmp_path / "copy.db"),))
    erased = await kept.erase()
    assert erased.payloads == 4
    assert not any(kept.opens(request) for request in (*behind, *ahead))
    assert kept.keys.names("acme") == []
    assert list(kept.store.all()) == []
    with closing(SqlPayloadStore(f"sqlite:///{tmp_path / 'copy.db'}")) as copy:
        for request in (*behind, *ahead):
            assert kept.keys.find(copy.get(request, Part.REQUEST).key_id, Purpose.WRAPPING) is None
    (fields,) = kept.log.erasures
    assert (fields["everything"], fields["payloads"]) == (True, 4)


async def test_content_kept_after_an_erasure_stays_whatever_the_clock_says(tmp_path, clock):
    """A clock that goes back does not make new content old, not even for the next start."""
    async with open_kept(tmp_path, clock) as kept:
        old = await kept.keep()
        await kept.erase()
        clock.advance(-3600)
        new = await kept.keep()
    async with open_kept(tmp_path, clock) as kept:
        await kept.retention.resume()
        assert not kept.opens(old)
        assert kept.opens(new)


@pytest.mark.parametrize("stored", ["before the plan", "before the entry", "after the entry"])
async def test_content_of_requests_in_flight_is_erased_and_named_or_gets_a_later_key(kept, clock, stored):
    """Another gateway stores content and writes its intent at any moment of an erasure of everything."""
    await kept.keep()
    request_id = new_entry_id(int(clock() * 1000), bytes(10))
    append, keys_before = kept.log.append, kept.keys.names()

    async def append_meanwhile(entry_type, /, **fields):
        if stored == "before the entry" and entry_type is EntryType.ERASURE:
            await kept.store_part(request_id, Part.REQUEST)
            await kept.record(request_id)
        receipt = await append(entry_type, **fields)
        if stored == "after the entry" and entry_type is EntryType.ERASURE:
            await kept.store_part(request_id, Part.REQUEST)
            kept.log.append = append
            await kept.record(request_id)
        return receipt

    if stored == "before the plan":
        await kept.store_part(request_id, Part.REQUEST)
    kept.log.append = append_meanwhile
    await kept.erase()
    kept.log.append = append
    if stored == "before the plan":
        await kept.record(request_id)
    assert kept.opens(request_id) is (stored == "after the entry")
    assert all(name not in kept.keys.names() for name in keys_before)
    named = [fields["requests"] for fields in kept.log.erasures if "requests" in fields]
    assert named == ([(request_id,)] if stored == "before the plan" else [])


async def test_an_answer_stored_after_an_erasure_of_everything_stays(kept):
    """Its request ran meanwhile: the body is gone, and the answer is content of after."""
    request_id = await kept.keep()
    await kept.erase()
    await kept.store_part(request_id, Part.RESPONSE)
    await kept.log.append(
        EntryType.REQUEST_OUTCOME,
        request_id=request_id, tenant="acme", key_id="k", route="r", model="m", outcome="completed",
        status=200, duration_ms=1,
    )  # fmt: skip
    await kept.retention.resume()
    assert kept.store.get(request_id, Part.REQUEST) is None
    assert kept.store.get(request_id, Part.RESPONSE) is not None


async def test_no_covered_row_ever_gets_another_key(kept, tmp_path, clock, monkeypatch):
    """Not even if another gateway erases, and destroys keys, at the same time."""
    requests = [await kept.keep() for _ in range(3)]
    rewrapped, delete = [], SqlPayloadStore.delete
    rewrap = SqlPayloadStore.rewrap
    keys = PayloadKeys(
        tmp_path / "keys", master_key=None, key_days=7, clock=clock, random_bytes=RANDOM.randbytes
    )

    def rewrap_seen(store, rows, key_id):
        rewrapped.extend(request for request, *_ in rows)
        rewrap(store, rows, key_id)

    def delete_meanwhile(store, selection):
        with monkeypatch.context() as patch:
            patch.setattr(SqlPayloadStore, "delete", delete)
            finish_erasures(store, keys, tenant="acme")
        return delete(store, selection)

    monkeypatch.setattr(SqlPayloadStore, "rewrap", rewrap_seen)
    monkeypatch.setattr(SqlPayloadStore, "delete", delete_meanwhile)
    assert (await kept.erase()).payloads == 3
    assert rewrapped == []
    assert not any(kept.opens(request) for request in requests)


async def test_an_erasure_that_leaves_a_row_fails(kept, monkeypatch):
    """It says so instead of reporting success; asking again completes it."""
    request = await kept.keep()
    with monkeypatch.context() as patch:
        patch.setattr(SqlPayloadStore, "delete", lambda _store, _selection: 0)
        with pytest.raises(AuditUnavailableError, match="1 payloads of acme are left"):
            await kept.erase()
    assert kept.store.get(request, Part.REQUEST) is not None
    await kept.erase()
    assert kept.store.get(request, Part.REQUEST) is None


async def test_pruning_goes_by_the_log_where_a_clock_was_behind(kept, clock):
    """Content dated too early stays, is reported, and goes when its time has come by the log's order."""
    old = await kept.keep()
    clock.advance(30 * 86400)
    await kept.keep("other")
    clock.advance(-300 * 86400)
    misdated = await kept.keep()
    clock.advance(300 * 86400)
    recent = await kept.keep()
    (pruned,) = await kept.retention.prune(int((clock() - 86400) * 1000), actor="admin")
    assert (pruned.tenant, pruned.payloads, pruned.misdated) == ("acme", 1, 1)
    assert [kept.opens(request) for request in (old, misdated, recent)] == [False, True, True]
    await kept.retention.resume()
    assert kept.opens(misdated)
    clock.advance(2 * 86400)
    await kept.keep("other")
    pruned = await kept.retention.prune(int((clock() - 86400) * 1000), actor="admin")
    assert [(each.tenant, each.payloads, each.misdated) for each in pruned] == [
        ("acme", 2, 0),
        ("other", 1, 0),
    ]
    assert not any(kept.opens(request) for request in (old, misdated, recent))


async def test_pruning_reports_content_dated_in_the_future(kept, clock):
    """It would stay too long; an erasure by name or of everything takes it."""
    clock.advance(86400)
    ahead = await kept.keep()
    clock.advance(-86400)
    assert await kept.retention.misdated() == {"acme": 1}
    (pruned,) = await kept.retention.prune(int(clock() * 1000), actor="admin")
    assert (pruned.payloads, pruned.misdated) == (0, 1)
    assert kept.opens(ahead)


async def test_keys_of_which_nothing_is_erased_stay(kept, clock):
    """Only the versions that wrapped something erased are replaced."""
    old = await kept.keep()
    clock.advance(8 * 86400)
    new = await kept.keep()
    first, second = kept.keys.names()
    await kept.erase(new)
    assert first in kept.keys.names()
    assert second not in kept.keys.names()
    assert kept.opens(old)


async def test_many_named_requests_make_several_entries_whose_sum_is_right(kept):
    """A leaf has room for a limited number of names; every name is in one of the entries."""
    requests = [await kept.keep() for _ in range(NAMED_PER_ENTRY + 5)]
    erased = await kept.erase(*requests)
    assert erased.payloads == len(requests)
    assert len(erased.entries) == 2
    assert sum(fields["payloads"] for fields in kept.log.erasures) == len(requests)
    named = [name for fields in kept.log.erasures for name in fields["requests"]]
    assert sorted(named) == sorted(requests)


@pytest.mark.parametrize("step", ["retired", "deleted", "overwritten", "rewrapped"])
async def test_a_crash_in_the_middle_is_finished_by_the_next_start(tmp_path, clock, step, monkeypatch):
    """After the entry, wherever it stops: the erased stay shut, the others open, the key goes."""
    where: dict[str, tuple[type, str]] = {
        "retired": (SqlPayloadStore, "delete"),
        "deleted": (SqlPayloadStore, "wrapped_with"),
        "overwritten": (Path, "unlink"),
        "rewrapped": (SqlPayloadStore, "scrub"),
    }
    async with open_kept(tmp_path, clock) as kept:
        requests = [await kept.keep() for _ in range(3)]
        (key,) = kept.keys.names()

        def die(*_arguments, **_more):
            message = "killed"
            raise AuditUnavailableError(message)

        with monkeypatch.context() as patch:
            patch.setattr(*where[step], die)
            with pytest.raises(AuditUnavailableError):
                await kept.erase(requests[0])
    async with open_kept(tmp_path, clock) as kept:
        await kept.retention.resume()
        assert [kept.opens(request) for request in requests] == [False, True, True]
        assert key.key_id not in {name.key_id for name in kept.keys.names()}


def test_an_erasure_killed_at_any_point_is_finished_by_the_next_start(tmp_path, clock):
    """`kill -9` before every flush, rename and deletion in turn: erased if the log says so, or all there."""
    site, saved = tmp_path / "site", tmp_path / "saved"
    site.mkdir()

    async def keep() -> list[str]:
        async with open_kept(site, clock) as kept:
            return [await kept.keep() for _ in range(3)]

    async def erase() -> None:
        async with open_kept(site, clock) as kept:
            await kept.erase(requests[0])

    async def start() -> bool:
        clock.advance(1.0)
        async with open_kept(site, clock) as kept:
            await kept.retention.resume()
            is_erased = bool(kept.store.entries(EntryType.ERASURE))
            assert [kept.opens(request) for request in requests] == [not is_erased, True, True]
            assert not any(name.is_retired for name in kept.keys.names())
            assert is_erased == all(key not in file.read_bytes() for file in (site / "keys").iterdir())
            return is_erased

    requests = asyncio.run(keep())
    (file,) = (site / "keys").iterdir()
    key = file.read_bytes()
    site.rename(saved)
    erased: list[bool] = []
    while True:
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(saved, site)
        status = killed_at(len(erased), lambda: asyncio.run(erase()))
        erased.append(asyncio.run(start()))
        assert asyncio.run(start()) == erased[-1]
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert len(erased) > 6
    assert erased == sorted(erased)


async def test_a_key_that_was_restored_is_destroyed_again_at_the_next_start(kept, tmp_path):
    """A backup of the keys makes erased content readable until then at most."""
    request, other = await kept.keep(), await kept.keep()
    (file,) = (tmp_path / "keys").iterdir()
    copy = file.read_bytes()
    await kept.erase(request)
    file.write_bytes(copy)
    file.chmod(0o600)
    await kept.retention.resume()
    assert not file.exists()
    assert kept.opens(other)


async def test_a_hold_of_today_keeps_a_start_from_finishing_an_erasure(kept, monkeypatch):
    """Once it is released, the next start does."""
    request = await kept.keep()

    def die(*_arguments, **_more):
        message = "killed"
        raise AuditUnavailableError(message)

    with monkeypatch.context() as patch:
        patch.setattr(PayloadKeys, "retire", die)
        with pytest.raises(AuditUnavailableError):
            await kept.erase(request)
    await kept.retention.place_hold("acme", "case 7", actor="admin")
    await kept.retention.resume()
    assert kept.opens(request)
    await kept.retention.release_hold("acme", "closed", actor="admin")
    await kept.retention.resume()
    assert kept.store.get(request, Part.REQUEST) is None


@pytest.mark.parametrize("everything", [False, True])
async def test_the_largest_entry_about_an_erasure_fits_a_leaf(kept, clock, everything):
    """With the longest names, most requests, most keys and widest characters."""
    count = NAMED_KEYS if everything else NAMED_KEYS_WITH_REQUESTS
    tenant, requests = "t" * 63, []
    for number in range(NAMED_PER_ENTRY):
        if number < count:
            clock.advance(8 * 86400)
        requests.append(await kept.keep(tenant))
    named = () if everything else tuple(sorted(requests))
    wanted = Erasure(tenant=tenant, requests=named, before_ms=None, basis="\U0001f600" * 200)
    erased = await kept.retention.erase(wanted, actor="k" * 60)
    assert (erased.payloads, len(erased.keys), len(erased.entries)) == (NAMED_PER_ENTRY, count, 1)
    assert len(kept.log.erasures[0]["keys"]) == count


async def test_a_copy_of_the_database_opens_nothing_under_a_destroyed_key(tmp_path, kept):
    """Neither the erased content nor other content under the same key."""
    requests = [await kept.keep() for _ in range(2)]
    with closing(sqlite3.connect(tmp_path / "audit.db")) as live:
        live.execute("VACUUM INTO ?", (str(tmp_path / "copy.db"),))
    await kept.erase(requests[0])
    with closing(SqlPayloadStore(f"sqlite:///{tmp_path / 'copy.db'}")) as copy:
        for request in requests:
            payload = copy.get(request, Part.REQUEST)
            assert kept.keys.find(payload.key_id, Purpose.WRAPPING) is None
    assert kept.opens(requests[1])


async def test_pruning_destroys_commitment_keys_that_were_replaced_before(kept, clock):
    """So old digests cannot be guessed any more, and newer ones can still be shown."""
    await kept.keep(policy=ContentPolicy.DIGEST)
    clock.advance(8 * 86400)
    await kept.keep(policy=ContentPolicy.DIGEST)
    clock.advance(1)
    old, new = kept.keys.names()
    await kept.erase(before_ms=int(clock() * 1000))
    assert kept.keys.names() == [new]
    assert old != new


async def test_too_much_that_waits_is_refused_and_answers_never_are(tmp_path, clock):
    """The bound holds for new requests; accepted requests are completed."""
    async with open_kept(tmp_path, clock, payload_queue_bytes=1000) as kept:
        with pytest.raises(AuditUnavailableError, match="wait already"):
            await kept.keep(content=b"x" * 1001)
        big = Content(
            tenant="acme",
            policy=ContentPolicy.ENCRYPTED,
            request_id=first_id(1),
            part=Part.RESPONSE,
            pieces=[b"x" * 1001],
            size=1001,
        )
        assert (await kept.keeper.keep(big))["payload_digest"]
        assert kept.opens(await kept.keep(content=b"x" * 999))


async def test_one_tenants_broken_key_is_not_anothers_trouble(tmp_path, clock):
    """Not even in the same batch."""
    async with open_kept(tmp_path, clock) as kept:
        await kept.keep("broken")
    (path,) = (tmp_path / "keys").iterdir()
    path.write_text("nonsense")
    async with open_kept(tmp_path, clock) as kept:
        tenants = ("broken", "fine")
        results = await asyncio.gather(*(kept.keep(tenant) for tenant in tenants), return_exceptions=True)
        assert isinstance(results[0], AuditUnavailableError)
        assert kept.opens(results[1])


@pytest.mark.parametrize("when", ["before", "after"])
async def test_content_sealed_while_another_gateway_destroys_the_key_still_opens(
    tmp_path, clock, kept, when, monkeypatch
):
    """Whichever of the two is first at the database."""
    first = await kept.keep()
    add = SqlPayloadStore.add
    erased = []

    def interfere():
        keys = PayloadKeys(
            tmp_path / "keys", master_key=None, key_days=7, clock=clock, random_bytes=RANDOM.randbytes
        )
        for name in keys.names():
            keys.retire(name)
        kept.store.delete(Selection(tenant="acme", requests=(first,)))
        destroy_retired(kept.store, keys, keys.names())
        erased.append(first)

    def add_meanwhile(store, payloads):
        if when == "before":
            interfere()
        add(store, payloads)
        if when == "after":
            interfere()

    with monkeypatch.context() as patch:
        patch.setattr(SqlPayloadStore, "add", add_meanwhile)
        second = await kept.keep()
    assert erased == [first]
    assert kept.opens(second)
    assert not kept.opens(first)


async def test_everything_that_waits_is_kept_before_the_keeper_closes(tmp_path, clock):
    """Closing loses nothing that was handed over."""
    async with AsyncExitStack() as stack:
        kept = await stack.enter_async_context(open_kept(tmp_path, clock))
        waiting = [asyncio.ensure_future(kept.keep()) for _ in range(100)]
        await asyncio.sleep(0)
    requests = await asyncio.gather(*waiting)
    async with open_kept(tmp_path, clock) as kept:
        assert all(kept.opens(request) for request in requests)


@given(st.integers(0, 2**48 - 1))
def test_the_verifier_reads_a_time_as_the_store_does(time_ms):
    """One rule says which requests came before: in the database, and for the auditor."""
    assert ulid_ms(first_id(time_ms)) == time_ms
    if time_ms < 253_402_300_800_000:  # the year 10000
        assert first_id(time_ms).startswith(verify._first_id(format_time(time_ms)))


@given(st.integers(0, 253_402_300_799_999))
def test_times_are_read_as_they_are_written(time_ms):
    """`parse_moment` undoes `format_time`."""
    assert parse_moment(format_time(time_ms), "before") == time_ms


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01", 5, None, "2026-01-01T00:00:00+99:00"])
def test_malformed_times_are_refused(text):
    """With the member's name."""
    with pytest.raises(InvalidRequestError) as caught:
        parse_moment(text, "before")
    assert caught.value.param == "before"


def test_holds_are_read_from_the_log_in_its_order(tmp_path):
    """Placed and released any number of times; the last entry counts."""
    url = f"sqlite:///{tmp_path / 'audit.db'}"
    tree, leaves = CompactRange(), []
    for number, (kind, tenant) in enumerate(
        [("placed", "a"), ("placed", "b"), ("released", "a"), ("placed", "a"), ("released", "b")]
    ):
        entry_type = EntryType(f"hold.{kind}")
        leaf = encode(
            Entry(
                log="x/y",
                id=new_entry_id(number, bytes(10)),
                type=entry_type,
                time=format_time(number),
                fields={"tenant": tenant, "reason": f"case {number}", "actor": "admin"},
            )
        )
        leaves.append(
            Leaf(index=number, leaf=leaf, leaf_hash=hash_leaf(leaf), type=str(entry_type), request_id=None)
        )
        tree.append(hash_leaf(leaf))
    with closing(SqlAuditStore(url)) as audit, closing(SqlPayloadStore(url)) as store:
        audit.append(leaves, expected=audit.head(), new=Head.of(tree))
        assert store.holds() == {"a": "case 3"}
        assert store.find(Selection(tenant="a", before_ms=1)).payloads == 0
