"""
A worker's answer on its way to the client: whole, or frame by frame as it arrives.

No byte leaves before the intent is durable, and the last frame does not leave before the outcome is.  Once
the head is out, whatever goes wrong becomes the last frame.
"""

from collections.abc import Callable

from appliance.audit.pending import Kept
from appliance.errors import (
    ApplianceError,
    AtCapacityError,
    NoWorkerAvailableError,
    WorkerFailedError,
    WorkerTimeoutError,
)
from appliance.gateway.call import Call
from appliance.gateway.exchange import Exchange, Outcome
from appliance.gateway.recorder import Recorder
from appliance.gateway.reply import Head, Reply
from appliance.infra.metrics import Metrics
from appliance.serving import sse
from appliance.serving.client import Answer
from appliance.serving.error_text import ErrorText
from appliance.serving.patience import Patience
from appliance.serving.pool import WorkerPool
from appliance.serving.refusal import CLIENT_ERROR, SERVER_ERROR, worker_error

EVENT_STREAM = "text/event-stream; charset=utf-8"
OK = 200
UNAVAILABLE = 503
NOT_IMPLEMENTED = 501
PASSING = frozenset({408, 429})
"""Refusals of a worker that say nothing about the request."""


class Relay:
    """Passes answers on."""

    def __init__(
        self,
        *,
        recorder: Recorder,
        pool: WorkerPool,
        patience: Patience,
        metrics: Metrics,
        clock: Callable[[], float],
        origin: str,
    ) -> None:
        self._recorder = recorder
        self._pool = pool
        self._patience = patience
        self._metrics = metrics
        self._clock = clock
        self._origin = origin

    async def pass_on(self, call: Call, exchange: Exchange, answer: Answer, reply: Reply) -> None:
        """
        Relay an answer to its end.

        Raises:
            ApplianceError: it cannot be passed on, and nothing was sent yet.
        """
        if answer.content_type.startswith("text/event-stream"):
            if not call.endpoint.dialect.streams:
                raise WorkerFailedError("The worker streams where there is nothing to stream.")
            await self.start(call, exchange, reply, answer.status, EVENT_STREAM)
            exchange.is_relayed = True
            try:
                await self._relay_frames(call, exchange, answer, reply)
            except ApplianceError as error:
                # The head is out: the status can no longer say it, so the last frame does.
                await self.end_with_error(call, exchange, reply, error)
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
        await self._recorder.record(exchange)
        await self.start(call, exchange, reply, answer.status, "application/json", length=len(body))
        await reply.end(body)

    async def _relay_frames(self, call: Call, exchange: Exchange, answer: Answer, reply: Reply) -> None:
        """Pass whole frames on as they arrive; hold back the ones that end the stream."""
        buffer, final, done = sse.FrameBuffer(), b"", False
        saw, saw_pieces, dialect = exchange.capture.saw, exchange.gaps.saw, call.endpoint.dialect

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
                    saw_pieces(pieces, self._clock())
                exchange.finish_reason = dialect.finish_reason(frames) or exchange.finish_reason
        exchange.ends(Outcome.COMPLETED, status=answer.status)
        saw(final)
        await self._recorder.record(exchange)
        await reply.end(final)

    async def end_with_error(
        self, call: Call, exchange: Exchange, reply: Reply, error: ApplianceError
    ) -> None:
        """End a stream whose head is out with a frame that says what went wrong."""
        code = "audit_unavailable"
        if isinstance(error, WorkerTimeoutError):
            code = "worker_timeout"
            exchange.ends(Outcome.TIMED_OUT)
        elif isinstance(error, WorkerFailedError):
            code = "worker_failed"
            exchange.ends(Outcome.WORKER_FAILED)
            if exchange.worker is not None:
                self._pool.report_unreachable(exchange.worker.worker.worker_id)
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
                await self._recorder.record(exchange)
            except ApplianceError:
                code = "audit_unavailable"
        self._metrics.errors.labels(code).inc()
        await reply.end(_error_frame(call, exchange, str(error), code))

    async def start(
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
        receipt = await self._recorder.confirm_intent(exchange)
        overhead = exchange.overhead_seconds(self._clock())
        exemplar = None if exchange.trace is None else exchange.trace.exemplar
        self._metrics.overhead_seconds.labels(call.route).observe(overhead, exemplar)
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
                        {"x-appliance-audit": f"{self._origin}/{receipt.index}"}
                        if receipt.kept is Kept.LOGGED
                        else {"x-appliance-audit-kept": str(receipt.kept)}
                    ),
                    "x-appliance-overhead-ms": f"{overhead * 1000:.1f}",
                    **({"x-should-retry": _should_retry(status)} if status >= CLIENT_ERROR else {}),
                },
            )
        )


def _error_frame(call: Call, exchange: Exchange, message: str, code: str) -> bytes:
    error = ErrorText(status=exchange.status, kind="server_error", message=message, code=code)
    return call.endpoint.dialect.error_frame(error, after=exchange.last_frames)


def _should_retry(status: int) -> str:
    """Whether a worker may answer the same request another time."""
    return "true" if status in PASSING or (status >= SERVER_ERROR and status != NOT_IMPLEMENTED) else "false"
