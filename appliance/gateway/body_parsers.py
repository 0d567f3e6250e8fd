"""
Reads bodies without holding up the event loop, and each tenant's without holding up the others'.

A small body is read at once: it takes less than handing it over.  A large one goes to a process, because a
thread that reads JSON holds the interpreter's lock for the whole body.  A tenant uses one of the processes
at a time, and receives a few large bodies at a time; its further ones wait unread, which costs no memory.

A process that ends, killed for its memory perhaps, costs its one request a 429; the next starts another.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fcntl import F_SETPIPE_SZ, fcntl
from typing import Any

from appliance.errors import AtCapacityError, InvalidRequestError
from appliance.gateway.batch.lines import BatchLine, FoundRequest, parse_line
from appliance.gateway.body import Body, BodyTerms, ParsedBody, read_body

MODULE = "appliance.gateway.body_process"
SMALL_BYTES = 2**15
"""Up to here a body is read on the event loop: a millisecond or two at worst."""
PROCESSES = 2
"""Each of one tenant at a time, so that one tenant's bodies never occupy all."""
LARGE_BODIES = 8
"""Of one tenant that are received at once; while they are read, so many chunks are work of the event loop."""
WAIT_SECONDS = 60.0
PIPE_BYTES = 2**20


class TenantTurns:
    """Turns for work of tenants: at most `per_tenant` at once, `total` of all; round after round."""

    def __init__(self, *, per_tenant: int, total: float) -> None:
        self._per_tenant, self._free = per_tenant, total
        self._running: dict[str, int] = {}
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def begin(self, tenant: str) -> None:
        """The caller must call `end`; raises AtCapacityError after `WAIT_SECONDS`."""
        if tenant not in self._waiting and self._has_room(tenant):
            self._start(tenant)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled():
                self.end(tenant)  # its turn came in the same moment
            if isinstance(error, asyncio.CancelledError):
                raise
            message = "Other large requests of yours are being read. Try again in a moment."
            raise AtCapacityError(message) from error

    def end(self, tenant: str) -> None:
        self._free += 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._start_next()

    def _has_room(self, tenant: str) -> bool:
        return self._free > 0 and self._running.get(tenant, 0) < self._per_tenant

    def _start(self, tenant: str) -> None:
        self._free -= 1
        self._running[tenant] = self._running.get(tenant, 0) + 1

    def _start_next(self) -> None:
        for tenant, turns in tuple(self._waiting.items()):
            while turns and turns[0].done():
                turns.popleft()  # its client has left, or has waited for too long
            if turns and self._has_room(tenant):
                self._start(tenant)
                turns.popleft().set_result(None)
                self._waiting.move_to_end(tenant)
            if not turns:
                del self._waiting[tenant]


class Reading:
    """One body while it is received and parsed; a large one waits for its tenant's turn."""

    __slots__ = ("_has_turn", "_tenant", "_turns")

    def __init__(self, turns: TenantTurns, tenant: str) -> None:
        self._turns, self._tenant, self._has_turn = turns, tenant, False

    async def go_on(self, received_bytes: int) -> None:
        """Return when more may be received; raises as `TenantTurns.begin`."""
        if received_bytes > SMALL_BYTES and not self._has_turn:
            await self._turns.begin(self._tenant)
            self._has_turn = True

    def end(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._turns.end(self._tenant)


class BodyParsers:
    """Starts its processes when they are needed; the owner calls `close`."""

    def __init__(self) -> None:
        self._receiving = TenantTurns(per_tenant=LARGE_BODIES, total=float("inf"))
        self._turns = TenantTurns(per_tenant=1, total=PROCESSES)
        self._threads = ThreadPoolExecutor(PROCESSES, "body-parser")
        self._idle: list[_Process] = []
        self._is_closed = False

    def reading(self, tenant: str) -> Reading:
        return Reading(self._receiving, tenant)

    async def parse(self, body: Body, terms: BodyTerms) -> ParsedBody:
        """Raises InvalidRequestError as `read_body`, and AtCapacityError."""
        if len(body) <= SMALL_BYTES:
            return read_body(body, terms)
        return ParsedBody.from_json(await self._read(terms.tenant, {"terms": terms.to_json()}, body))

    async def parse_line(self, number: int, line: bytes, tenant: str, endpoint: str) -> BatchLine:
        """Raises InvalidRequestError as `lines.parse_line`, and AtCapacityError."""
        if len(line) <= SMALL_BYTES:
            return parse_line(number, line, endpoint)
        found = FoundRequest(**await self._read(tenant, {"endpoint": endpoint}, line))
        body = line[found.start : found.end]
        return BatchLine(number=number, custom_id=found.custom_id, model=found.model, body=body)

    async def _read(self, tenant: str, task: dict[str, Any], data: Body) -> dict[str, Any]:
        await self._turns.begin(tenant)
        working = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, task, data)

        # Also if the caller is cancelled meanwhile, the process is busy until it has answered.
        def answered(done: "asyncio.Future[Any]") -> None:
            self._turns.end(tenant)
            done.exception()  # seen, also if the caller has left

        working.add_done_callback(answered)
        answer = await asyncio.shield(working)
        if "crashed" in answer:
            raise RuntimeError(f"reading a body failed: {answer['crashed']}")
        if "refused" in answer:
            message, param, code = answer["refused"]
            raise InvalidRequestError(message, param=param, code=code)
        read: dict[str, Any] = answer["read"]
        return read

    def _ask(self, task: dict[str, Any], data: Body) -> Any:  # noqa: ANN401 - JSON of our own
        try:
            process = self._idle.pop() if self._idle else _Process()
        except OSError as error:
            raise AtCapacityError("Large requests cannot be read now. Try again in a moment.") from error
        try:
            answer = process.ask(task, data)
        except (OSError, ValueError) as error:
            process.close()
            raise AtCapacityError("The request could not be read. Try again, or send less.") from error
        if self._is_closed:
            process.close()
        else:
            self._idle.append(process)
        return answer

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False)
        while self._idle:
            self._idle.pop().close()


class _Process:
    """One process; raises OSError and ValueError if it ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What a parser says about a body is for nobody.
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        self._asked, self._answers = self._process.stdin, self._process.stdout
        with suppress(OSError):  # the system's limit may be smaller
            fcntl(self._asked, F_SETPIPE_SZ, PIPE_BYTES)

    def ask(self, task: dict[str, Any], data: Body) -> Any:  # noqa: ANN401 - JSON of our own
        header = json.dumps({**task, "length": len(data)}).encode() + b"\n"
        for each in (header, data):
            rest = memoryview(each)
            while rest:
                rest = rest[os.write(self._asked.fileno(), rest) :]
        return json.loads(self._read_line())

    def _read_line(self) -> bytes:
        read = bytearray()
        while not read.endswith(b"\n"):
            part = os.read(self._answers.fileno(), PIPE_BYTES)
            if not part:
                raise BrokenPipeError
            read += part
        return bytes(read)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._asked.close()
        self._answers.close()
