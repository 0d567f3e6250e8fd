"""Captured content is bounded, in order and kept once."""

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
    """A keeper that waits for an event, and can fail."""

    def __init__(self, error=None):
        self.kept, self.error = [], error
        self.allowed = asyncio.Event()
        self.allowed.set()

    async def keep(self, content):
        await self.allowed.wait()
        self.kept.append(content)
        if self.error:
            raise self.error
        return {"payload_key": "k"}


def test_tenants_without_a_content_policy_share_no_capture():
    captures = ContentCaptures(SlowKeeper(), 1000)
    assert captures.begin(Tenant(name="a"), "r") is NO_CAPTURE
    assert not NO_CAPTURE.is_on
    assert captures.begin(TENANT, "r").is_on


@given(st.lists(st.binary(max_size=20), max_size=20), st.integers(1, 100))
def test_the_answer_is_kept_up_to_the_maximum_size(pieces: list[bytes], max_bytes: int):
    """In order; the fields say whether it was truncated."""
    keeper = SlowKeeper()
    capture = ContentCapture(keeper, TENANT, "r", max_bytes)
    for piece in pieces:
        capture.observe(piece)
    about = asyncio.run(capture.keep_answer())
    whole = b"".join(pieces)
    kept = b"".join(keeper.kept[0].pieces) if keeper.kept else b""
    assert kept == whole[:max_bytes]
    assert about["payload_bytes"] == len(kept)
    assert about.get("payload_truncated", False) == (len(whole) > max_bytes)


def test_reads_are_kept_by_reference():
    """Nothing is copied while an answer streams."""
    capture = ContentCapture(SlowKeeper(), TENANT, "r", 1000)
    piece = b"a frame"
    capture.observe(piece)
    assert capture._pieces[0] is piece


async def test_a_cancelled_call_can_be_repeated_while_content_is_being_kept():
    """The content is kept once, and both calls return the same fields."""
    keeper = SlowKeeper()
    keeper.allowed.clear()
    capture = ContentCapture(keeper, TENANT, "r", 1000)
    capture.observe(b"x")
    first = asyncio.ensure_future(capture.keep_answer())
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    keeper.allowed.set()
    assert (await capture.keep_answer())["payload_key"] == "k"
    assert len(keeper.kept) == 1


async def test_an_empty_answer_is_not_kept():
    """The outcome says zero bytes, and names no content."""
    keeper = SlowKeeper()
    assert await ContentCapture(keeper, TENANT, "r", 1000).keep_answer() == {"payload_bytes": 0}
    assert keeper.kept == []


async def test_the_body_is_kept_byte_for_byte():
    """As the part `request`."""
    keeper = SlowKeeper()
    await ContentCapture(keeper, TENANT, "r", 3).keep_request("naïve 😀".encode())
    (content,) = keeper.kept
    assert (content.part, content.request_id, content.tenant) == (Part.REQUEST, "r", "acme")
    assert b"".join(content.pieces) == "naïve 😀".encode()


async def test_every_caller_receives_the_failure():
    """The caller decides what it means for the request."""
    capture = ContentCapture(SlowKeeper(AuditUnavailableError("full")), TENANT, "r", 1000)
    capture.observe(b"x")
    for _ in range(2):
        with pytest.raises(AuditUnavailableError):
            await capture.keep_answer()


async def test_background_work_finishes_before_the_block_ends():
    """The last entry of a request whose client left is still written."""
    done = []

    async def work():
        await asyncio.sleep(0.01)
        done.append(1)

    async with ContentCaptures.open(SlowKeeper(), max_bytes=1) as captures:
        captures.run_later(work())
    assert done == [1]
