"""
The forwarder on a real log, with a collector that keeps what it is sent, and what an auditor finds in that.
"""

import asyncio
import contextlib
import io
import json
import time
from contextlib import asynccontextmanager

import structlog
from prometheus_client import CollectorRegistry

from appliance.audit import verify
from appliance.audit.forward.cursor import ForwardStore
from appliance.audit.forward.events import render_json
from appliance.audit.forward.forwarder import Forwarder
from appliance.audit.forward.reader import LogReader
from appliance.errors import ForwardError
from appliance.infra.metrics import Metrics
from tests.sole_lease import SoleLease

DESTINATION = "siem.test:6514"


def split_frames(data: bytes) -> list[bytes]:
    """Messages of an octet-counted stream (RFC 5425)."""
    found = []
    while data:
        length, _, data = data.partition(b" ")
        found.append(data[: int(length)])
        assert len(found[-1]) == int(length), "a frame is cut off"
        data = data[int(length) :]
    return found


class Collected:
    """A collector in memory; after `dies_after` messages its connection ends, and they are lost beyond."""

    def __init__(self, dies_after: int | None = None) -> None:
        self.messages: list[bytes] = []
        self.dies_after = dies_after
        self.connections = 0

    @asynccontextmanager
    async def connect(self):
        self.connections += 1
        yield self

    async def send(self, data: bytes) -> None:
        for message in split_frames(data):
            if self.dies_after is not None and len(self.messages) >= self.dies_after:
                self.dies_after = None
                raise ForwardError("it closed the connection")
            self.messages.append(message)

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(0)

    @property
    def stream(self) -> bytes:
        """The file it stores, a message a line."""
        return b"".join(message + b"\n" for message in self.messages)


def make_forwarder(store, collector, *, render=render_json, metrics=None, lease=None, **changed) -> Forwarder:
    """A forwarder of the log in `store`, as a gateway makes it."""
    forward = ForwardStore(store.database)
    return Forwarder(
        destination=DESTINATION,
        connect=collector.connect,
        reader=LogReader(store=store, forward=forward, render=render, host="gateway-1"),
        forward=forward,
        lease=lease or SoleLease(),
        metrics=metrics or Metrics(CollectorRegistry()),
        logger=structlog.wrap_logger(
            structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(0)
        ),
        clock=time.time,  # noqa: TID251 - a root of its own
        monotonic=time.monotonic,
        **changed,
    )


def judge_stream(path, vkey, *options: str) -> tuple[int, dict]:
    """Exit code and report of `verify --stream`; the report is empty if nothing could be verified."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
        code = verify.main(["--stream", str(path), "--key", vkey, "--json", *options])
    return code, json.loads(said.getvalue() or "{}")


def indices(messages) -> list[int]:
    """Indices of the entries in these messages, in order."""
    found = [verify._PROOF.search(message) for message in messages]
    return [int(match[2]) for match in found if match and match[1] == b"leaf"]
