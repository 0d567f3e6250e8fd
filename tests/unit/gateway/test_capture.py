"""Bounded, in order, kept once, and nothing for who keeps nothing."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.audit.content.sealing import Part
from appliance.errors import AuditUnavailableError
from appliance.gateway.capture import NO_CAPTURE, ContentCapture, ContentCaptures
from appliance.tenancy import ContentPolicy, Tenant

TENANT = Tenant(name="acme", content=ContentPolicy.ENCRYPTED)


class SlowKeeper:
    """A keeper that waits until it may, and can fail."""

    def __init__(self, error=None):
        self.kept, self.error = [], error
        self.may = asyncio.Event()
        self.may.set()

    async def keep(self, content):
        await self.may.wait()
        self.kept.append(content)
        if self.error:
            raise self.error
        return {"payload_key": "k"}


def test_a_tenant_without_content_policy_shares_the_one_capture_that_does_nothing():
    """Not an object of its own, not a task, not a byte."""
    captures = ContentCaptures(SlowKeeper(), 1000)
    assert captures.begin(Tenant(name="a"), "r") is NO_CAPTURE
    assert not NO_CAPTURE.is_on
    assert captures.begin(TENANT, "r").is_on


@given(st.lists(st.binary(max_size=20), max_size=20), st.integers(1, 100))
def test_what_is_kept_is_the_beginning_of_what_was_seen(pieces: list[bytes], max_bytes: int):
    """In order, up to the bound, and it says when that was not all."""
    keeper = SlowKeeper()
    capture = ContentCapture(keeper, TENANT, "r", max_bytes)
    for piece in pieces:
        capture.saw(piece)
    said = asyncio.run(capture.keep_answer())
    whole = b"".join(pieces)
    kept = b"".join(keeper.kept[0].pieces) if keeper.kept else b""
    assert kept == whole[:max_bytes]
    assert said["payload_bytes"] == len(kept)
    assert said.get("payload_truncated", False) == (len(whole) > max_bytes)


def test_small_reads_are_kept_by_reference():
    """Nothing is copied while a stream runs."""
    capture = ContentCapture(SlowKeeper(), TENANT, "r", 1000)
    piece = b"a frame"
    capture.saw(piece)
    assert capture._pieces[0] is piece


async def test_who_is_cancelled_while_it_is_being_kept_can_ask_again():
    """It is kept once, and both get the same words."""
    keeper = SlowKeeper()
    keeper.may.clear()
    capture = ContentCapture(keeper, TENANT, "r", 1000)
    capture.saw(b"x")
    first = asyncio.ensure_future(capture.keep_answer())
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    keeper.may.set()
    assert (await capture.keep_answer())["payload_key"] == "k"
    assert len(keeper.kept) == 1


async def test_an_answer_of_which_nothing_was_sent_is_not_kept():
    """The outcome says zero bytes, and names nothing."""
    keeper = SlowKeeper()
    assert await ContentCapture(keeper, TENANT, "r", 1000).keep_answer() == {"payload_bytes": 0}
    assert keeper.kept == []


async def test_the_body_is_kept_as_it_came():
    """As the part `request` of its own request."""
    keeper = SlowKeeper()
    await ContentCapture(keeper, TENANT, "r", 3).keep_request("naïve 😀")
    (content,) = keeper.kept
    assert (content.part, content.request_id, content.tenant) == (Part.REQUEST, "r", "acme")
    assert b"".join(content.pieces) == "naïve 😀".encode()


async def test_a_failure_is_the_callers():
    """Whoever waits decides what it means for the request."""
    capture = ContentCapture(SlowKeeper(AuditUnavailableError("full")), TENANT, "r", 1000)
    capture.saw(b"x")
    for _ in range(2):
        with pytest.raises(AuditUnavailableError):
            await capture.keep_answer()


async def test_work_that_is_left_is_seen_through_before_the_block_ends():
    """The end of a request whose client has gone is still written."""
    done = []

    async def work():
        await asyncio.sleep(0.01)
        done.append(1)

    async with ContentCaptures.open(SlowKeeper(), max_bytes=1) as captures:
        captures.later(work())
    assert done == [1]
