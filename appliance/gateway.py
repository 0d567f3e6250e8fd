"""
The data plane: one request from its audited intent, through a worker, to its audited outcome.

    admit ─► audit intent ─► wait for a worker with room ─► relay ─► audit outcome

Two promises bind the order of everything here.  No byte of an answer leaves before the intent is
durable, and the last frame does not leave before the outcome is.  The worker is asked at once,
while the intent is being committed, so the promise costs no time it need not.

It fails closed: if the audit log cannot take an entry, the client gets an error, not an answer.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from sys import getsizeof
from typing import Any, Protocol

from appliance.admission import AdmissionControl, Asked, Lane, Slot
from appliance.attribution import Attribution
from appliance.audit.pending import Kept
from appliance.audit.registry import EntryType
from appliance.audit.sink import AuditSink
from appliance.call import Call
from appliance.capture import Captures
from appliance.errors import (
    ApplianceError,
    AtCapacityError,
    AuditError,
    InvalidRequestError,
    LimitReachedError,
    ModelNotFoundError,
    NoWorkerAvailableError,
    WorkerFailedError,
    WorkerTimeoutError,
    WorkerUnreachableError,
)
from appliance.exchange import Exchange, Outcome
from appliance.limits.limiting import NO_LIMITS, Limiting
from appliance.limits.reservation import Reservation
from appliance.logs import Logger
from appliance.metrics import Metrics
from appliance.serving import sse
from appliance.serving.client import Answer, WorkerClient
from appliance.serving.dialects.errors import ErrorText
from appliance.serving.dialects.policy import may_call
from appliance.serving.patience import Patience
from appliance.serving.pool import WorkerPool
from appliance.serving.refusal import CLIENT_ERROR, SERVER_ERROR, worker_error
from appliance.serving.router import has_target_only
from appliance.serving.worker import WorkerId

EVENT_STREAM = "text/event-stream; charset=utf-8"
OK = 200
UNAVAILABLE = 503
TOO_MANY = 429
NOT_IMPLEMENTED = 501
PASSING = frozenset({408, 429})
"""Refusals of a worker that say nothing about the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What goes out before the first byte of the answer."""

    status: int
    content_type: str
    headers: dict[str, str]
    length: int | None = None
    """Bytes of the body, where they are known."""


class Reply(Protocol):
    """The client's end of the connection."""

    client_left: bool

    async def start(self, head: Head) -> None:
        """Send the head."""

    async def write(self, data: bytes) -> None:
        """Send part of the body."""

    async def end(self, data: bytes) -> None:
        """Send the last part of the body; whatever the gateway still does, the client need not wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPolicy:
    """Times the relay keeps, in seconds, and the name receipts are found under."""

    keep_alive_seconds: float
    silence_seconds: float
    origin: str


class Gateway:
    """Relays calls to workers under the audit log's promises."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        admission: AdmissionControl,
        client: WorkerClient,
        audit: AuditSink,
        attribution: Attribution,
        captures: Captures,
        metrics: Metrics,
        logger: Logger,
        clock: Callable[[], float],
        policy: GatewayPolicy,
        limits: Limiting = NO_LIMITS,
    ) -> None:
        self.pool = pool
        self.admission = admission
        self.limits = limits
        self._client = client
        self._audit = audit
        self._attribution = attribution
        self._captures = captures
        self._metrics = metrics
        self._logger = logger
        self._clock = clock
        self._policy = policy
        self._patience = Patience(
            keep_alive_seconds=policy.keep_alive_seconds, silence_seconds=policy.silence_seconds
        )

    def admit(self, call: Call) -> None:
        """
        Refuse what can be refused before anything is sent; a refusal is audited.

        Raises:
            ModelNotFoundError: no worker serves the model, or the key may not use it.
            NeedsTargetOnlyWorkerError: it must not be speculated, and every worker of the model speculates.
            NoWorkerAvailableError: no worker has come up yet, so no model is known.
            InvalidRequestError: it asks for what no worker is asked for.
            AtCapacityError: no worker has room for it, and neither has the queue.
        """
        models = self.pool.models()
        if not models:
            message = "No worker is ready yet. Try again in a moment."
            raise NoWorkerAvailableError(message)
        served = models.get(call.model)
        if served is None or not may_call(call.caller, served):
            self._deny(call, "model_not_found", status=404)
            message = f"The model `{call.model}` does not exist or you do not have access to it."
            raise ModelNotFoundError(message)
        try:
            call.check_policy()
        except InvalidRequestError as error:
            self._deny(call, error.code or "invalid_request", status=CLIENT_ERROR)
            raise
        forbidden_by = call.forbidden_by
        if forbidden_by and not has_target_only(call.model, self.pool.snapshots):
            self._deny(call, "needs_target_only_worker", status=400)
            raise call.refusal()
        try:
            lane = Lane(call.model, forbidden_by is None)
            self.admission.refuse_if_full(lane, call.caller.tenant.name, call.priority, getsizeof(call.text))
        except AtCapacityError:
            self._deny(call, "at_capacity", status=TOO_MANY)
            raise

    def _deny(self, call: Call, reason: str, *, status: int) -> None:
        self._queue(
            EntryType.REQUEST_DENIED,
            request_id=call.request_id,
            tenant=call.caller.tenant.name,
            key_id=call.caller.key.key_id,
            route=call.route,
            reason=reason,
            status=status,
        )

    async def relay(self, call: Call, reply: Reply) -> None:
        """
        Answer one call.

        Cancelling this means that the client left or the gateway stops: the worker's connection is
        closed, which makes it stop generating, and the log says which of the two it was.

        Raises:
            ApplianceError: nothing was sent yet and the client is owed this error.  Once the head is
                out, an error becomes the last frame instead.
        """
        started = self._clock()
        reservation = self.limits.take(call.caller.tenant, call.model, call.text, call.members)
        if reservation is None:
            reservation = await self._wait_for_limits(call)
        exchange: Exchange | None = None
        try:
            exchange = await self._begin(call, started)
            await self._see_through(call, exchange, reply)
        finally:
            # The only place that gives back what was reserved, whatever happened.
            reservation.settle(0 if exchange is None else exchange.used_tokens(call.text, call.members))

    async def _wait_for_limits(self, call: Call) -> Reservation:
        try:
            return await self.limits.wait(call.caller.tenant, call.model, call.text, call.members)
        except LimitReachedError as error:
            self._deny(call, error.code, status=TOO_MANY)
            raise

    async def _begin(self, call: Call, started: float) -> Exchange:
        """Have the intent on its way, and what it names durable before it."""
        capture = self._captures.begin(call.caller.tenant, call.request_id)
        content = await capture.keep_request(call.text) if capture.is_on else {}
        return Exchange(
            request_id=call.request_id,
            caller=call.caller,
            route=call.route,
            model=call.model,
            started=started,
            template=self._attribution.template_of(call.route, call.members),
            forbidden_by=call.forbidden_by,
            intent=self._audit.submit(EntryType.REQUEST_INTENT, **call.intent_fields(), **content),
            capture=capture,
            verdicts=call.verdicts,
        )

    async def _see_through(self, call: Call, exchange: Exchange, reply: Reply) -> None:
        """From the intent to the outcome."""
        in_flight = self._metrics.requests_in_flight.labels(call.model)
        in_flight.inc()
        try:
            await self._answer(call, exchange, reply)
        except asyncio.CancelledError:
            left = Outcome.CLIENT_GONE if reply.client_left else Outcome.GATEWAY_STOPPED
            exchange.ends(left)
            raise
        except WorkerTimeoutError:
            exchange.ends(Outcome.TIMED_OUT)
            raise
        except WorkerFailedError:
            exchange.ends(Outcome.WORKER_FAILED)
            raise
        except NoWorkerAvailableError:
            exchange.ends(Outcome.WORKER_FAILED, status=UNAVAILABLE)
            raise
        except AtCapacityError:
            exchange.ends(Outcome.NOT_ADMITTED)
            raise
        except AuditError:
            exchange.fails(status=UNAVAILABLE)
            raise
        finally:
            in_flight.dec()
            self._finish(exchange)

    async def _answer(self, call: Call, exchange: Exchange, reply: Reply) -> None:
        try:
            await self._attempt_workers(call, exchange, reply)
        except ApplianceError as error:
            if not exchange.head_sent:
                raise
            # The head is out: the status can no longer say it, so the last frame does.
            await self._end_with_error(call, exchange, reply, error)

    async def _wait(self, asked: Asked, call: Call, exchange: Exchange, reply: Reply) -> Slot:
        """
        Wait for a worker with room.

        A stream that waits for long gets its head, so that neither proxy nor client gives up; from then
        on only its frames can say what becomes of it.
        """
        began = self._clock()

        async def keep_alive() -> None:
            exchange.queued = self._clock() - began
            if call.is_stream:
                await self._start(call, exchange, reply, OK, EVENT_STREAM)
                exchange.capture.saw(sse.KEEP_ALIVE)
                await reply.write(sse.KEEP_ALIVE)

        try:
            return await self.admission.wait(asked, keep_alive, self._policy.keep_alive_seconds)
        finally:
            exchange.queued = self._clock() - began

    async def _attempt_workers(self, call: Call, exchange: Exchange, reply: Reply) -> None:
        """Before the first byte of an answer another worker may be tried; after it, never."""
        body = call.worker_body().encode()
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "X-Request-Id": call.request_id,
        }
        asked, tried = _asked(call, exchange), set[WorkerId]()
        slot = self.admission.enter(asked) or await self._wait(asked, call, exchange, reply)
        while True:
            worker, another = slot.snapshot.worker, None
            tried.add(worker.worker_id)
            exchange.worker, exchange.dispatched = slot.snapshot, self._clock()
            try:
                async with self._client.forward(
                    worker, call.endpoint.worker_path, body, headers, self._policy.silence_seconds
                ) as answer:
                    exchange.answered = self._clock()
                    if answer.status < SERVER_ERROR or answer.status == NOT_IMPLEMENTED:
                        slot.succeeded()
                    else:
                        slot.failed()
                        another = self._another(asked, exchange, tried)
                    if another is None:
                        await self._relay_answer(call, exchange, answer, reply)
                        return
            except TimeoutError as error:
                slot.failed()
                raise self._patience.lost() from error
            except WorkerTimeoutError:
                raise
            except WorkerFailedError as error:
                slot.failed()
                self.pool.report_unreachable(worker.worker_id)
                is_free = isinstance(error, WorkerUnreachableError)
                another = self._another(asked, exchange, tried, is_free=is_free)
                if another is None:
                    raise
            finally:
                slot.release()
            slot = another

    def _another(
        self, asked: Asked, exchange: Exchange, tried: set[WorkerId], *, is_free: bool = False
    ) -> Slot | None:
        """A slot with a worker that was not tried yet, as long as no answer is being passed on."""
        slot = None if exchange.is_relayed else self.admission.again(asked, tried, is_free=is_free)
        if slot is not None:
            exchange.retries += 1
            self._metrics.retries.labels(exchange.model).inc()
        return slot

    async def _relay_answer(self, call: Call, exchange: Exchange, answer: Answer, reply: Reply) -> None:
        if answer.content_type.startswith("text/event-stream"):
            if not call.endpoint.dialect.streams:
                raise WorkerFailedError("The worker streams where there is nothing to stream.")
            await self._start(call, exchange, reply, answer.status, EVENT_STREAM)
            exchange.is_relayed = True
            try:
                await self._relay_frames(call, exchange, answer, reply)
            except ApplianceError as error:
                # The head is out: the status can no longer say it, so the last frame does.
                await self._end_with_error(call, exchange, reply, error)
            return
        dialect = call.endpoint.dialect
        text = (await self._patience.read_all(answer)).decode("utf-8", "replace")
        exchange.answered = self._clock()
        if answer.status >= CLIENT_ERROR:
            refused = answer.status < SERVER_ERROR
            exchange.ends(Outcome.WORKER_REFUSED if refused else Outcome.WORKER_FAILED, status=answer.status)
            said = worker_error(text, answer.status)
            text = dialect.error_body(said)
            if exchange.head_sent:
                # A stream that waited has its head already, so its last frame says it.
                text = dialect.error_frame(said, after=b"").decode()
        elif exchange.head_sent:
            message = "The worker answered in one piece where a stream was asked for."
            raise WorkerFailedError(message)
        else:
            read = dialect.read_answer(text, wants_metrics=call.wants_metrics)
            text, exchange.usage, exchange.finish_reason = read.text, read.usage, read.finish_reason
            exchange.ends(Outcome.COMPLETED, status=answer.status)
        body = text.encode()
        exchange.capture.saw(body)
        await self._record(exchange)
        await self._start(call, exchange, reply, answer.status, "application/json", length=len(body))
        await reply.end(body)

    async def _relay_frames(self, call: Call, exchange: Exchange, answer: Answer, reply: Reply) -> None:
        """Pass whole frames on as they arrive; hold back the ones that end the stream."""
        buffer, final, done = sse.FrameBuffer(), b"", False
        saw, dialect = exchange.capture.saw, call.endpoint.dialect

        async def keep_alive() -> None:
            saw(sse.KEEP_ALIVE)
            await reply.write(sse.KEEP_ALIVE)

        while not done:
            read = await self._patience.read(answer, keep_alive)
            if not read:
                message = "The worker broke off before it had finished; what came so far is incomplete."
                raise WorkerFailedError(message)
            frames = buffer.feed(read)
            if dialect.needs_care(frames):
                found = dialect.sort(
                    sse.split_frames(frames), wants_usage=call.wants_usage, wants_metrics=call.wants_metrics
                )
                frames, final, done = found.passed, final + found.held, found.is_end
                exchange.usage = found.usage or exchange.usage
                exchange.finish_reason = found.finish_reason or exchange.finish_reason
                if found.has_failed:
                    exchange.ends(Outcome.WORKER_FAILED)
            if frames:
                saw(frames)
                await reply.write(frames)
                # Only now: what is read here is for the record, and the client need not wait for it.
                exchange.last_frames = frames
                if pieces := dialect.count_pieces(frames):
                    exchange.saw_frames(pieces, self._clock())
                exchange.finish_reason = dialect.finish_reason(frames) or exchange.finish_reason
        exchange.ends(Outcome.COMPLETED, status=answer.status)
        saw(final)
        await self._record(exchange)
        await reply.end(final)

    async def _end_with_error(
        self, call: Call, exchange: Exchange, reply: Reply, error: ApplianceError
    ) -> None:
        code = "audit_unavailable"
        if isinstance(error, WorkerTimeoutError):
            code = "worker_timeout"
            exchange.ends(Outcome.TIMED_OUT)
        elif isinstance(error, WorkerFailedError):
            code = "worker_failed"
            exchange.ends(Outcome.WORKER_FAILED)
            if exchange.worker is not None:
                self.pool.report_unreachable(exchange.worker.worker.worker_id)
        elif isinstance(error, AtCapacityError):
            code = "at_capacity"
            exchange.ends(Outcome.NOT_ADMITTED)
        elif isinstance(error, NoWorkerAvailableError):
            code = "no_worker_available"
            exchange.ends(Outcome.WORKER_FAILED, status=UNAVAILABLE)
        else:
            exchange.fails(status=UNAVAILABLE)
        if not exchange.recorded:
            exchange.capture.saw(_error_frame(call, exchange, str(error), code))
            try:
                await self._record(exchange)
            except ApplianceError:
                code = "audit_unavailable"
        self._metrics.errors.labels(code).inc()
        await reply.end(_error_frame(call, exchange, str(error), code))

    async def _start(
        self,
        call: Call,
        exchange: Exchange,
        reply: Reply,
        status: int,
        content_type: str,
        *,
        length: int | None = None,
    ) -> None:
        """Send the head, once the intent is durable and not before; nothing if it is out already."""
        if exchange.head_sent:
            return
        receipt = await self._audit.confirm(exchange.intent)
        overhead = exchange.overhead_seconds(self._clock())
        self._metrics.overhead_seconds.labels(call.route).observe(overhead)
        exchange.head_sent = True
        await reply.start(
            Head(
                status=status,
                content_type=content_type,
                length=length,
                headers={
                    "x-request-id": call.client_request_id or call.request_id,
                    # An entry that is not in the log has no index yet: say so, rather than guess one.
                    **(
                        {"x-appliance-audit": f"{self._policy.origin}/{receipt.index}"}
                        if receipt.kept is Kept.LOGGED
                        else {"x-appliance-audit-kept": str(receipt.kept)}
                    ),
                    "x-appliance-overhead-ms": f"{overhead * 1000:.1f}",
                    **({"x-should-retry": _should_retry(status)} if status >= CLIENT_ERROR else {}),
                },
            )
        )

    async def _record(self, exchange: Exchange) -> None:
        """Make the outcome durable; the final frame waits for this."""
        await self._audit.confirm(exchange.intent)
        if exchange.capture.is_on:
            exchange.content = await exchange.capture.keep_answer()
        entry = self._audit.submit(EntryType.REQUEST_OUTCOME, **exchange.fields(self._clock()))
        exchange.recorded = True
        await self._audit.confirm(entry)

    def _finish(self, exchange: Exchange) -> None:
        """Count and log the request, and queue its outcome if it did not end the planned way."""
        now = self._clock()
        exchange.ends(Outcome.GATEWAY_FAILED)
        if not exchange.recorded and exchange.capture.is_on:
            self._captures.later(self._end_with_content(exchange, now))
        elif not exchange.recorded:
            self._queue_end(exchange, now)
        exchange.count(self._metrics, now)
        exchange.attribute(self._attribution)
        self._logger.info("request_finished", **exchange.log_fields(now))

    async def _end_with_content(self, exchange: Exchange, now: float) -> None:
        try:
            exchange.content = await exchange.capture.keep_answer()
        except AuditError as error:
            # The client has what it has; the entry must not name what is not there.
            exchange.content = {"payload_lost": True}
            self._logger.warning("audit_content_lost", request_id=exchange.request_id, error=str(error))
        self._queue_end(exchange, now)

    def _queue_end(self, exchange: Exchange, now: float) -> None:
        # Queued without waiting: this also runs while the task is being cancelled, where an await
        # may never come back.  The log writes its queue out before it closes.
        if not exchange.intent_failed:
            entry_type, fields = exchange.end_entry(now)
            self._queue(entry_type, **fields)

    def _queue(self, entry_type: EntryType, **fields: Any) -> None:  # noqa: ANN401
        """Submit an entry nobody waits for: whoever it is about has gone or been refused already."""
        try:
            self._audit.submit(entry_type, **fields)
        except AuditError as error:
            # A request it leaves open is closed by the log's own recovery at the next start.
            self._logger.warning("audit_entry_refused", reason=str(entry_type), error=str(error))


def _asked(call: Call, exchange: Exchange) -> Asked:
    """What admission has to know of a call."""
    return Asked(
        lane=Lane(call.model, exchange.forbidden_by is None),
        tenant=call.caller.tenant.name,
        priority=call.priority,
        size_bytes=getsizeof(call.text),
        beginning=call.beginning,
    )


def _error_frame(call: Call, exchange: Exchange, message: str, code: str) -> bytes:
    error = ErrorText(status=exchange.status, kind="server_error", message=message, code=code)
    return call.endpoint.dialect.error_frame(error, after=exchange.last_frames)


def _should_retry(status: int) -> str:
    """Whether a worker may answer the same request another time."""
    return "true" if status in PASSING or (status >= SERVER_ERROR and status != NOT_IMPLEMENTED) else "false"
