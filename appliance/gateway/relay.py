"""
Relays a worker's answer to the client: whole, or frame by frame as it arrives.

No byte is sent before the intent is durable, and the last frame is not sent before the outcome is.  Once
the head is sent, an error becomes the last frame.
"""

from collections.abc import Callable
from http import HTTPStatus

from appliance.audit.pending import Kept
from appliance.errors import ApplianceError, Outcome, WorkerFailedError, WorkerTimeoutError, code_of
from appliance.gateway.exchange import Exchange
from appliance.gateway.intents import IntentRecorder
from appliance.gateway.outcomes import OutcomeRecorder
from appliance.gateway.reply import ReplyHead, ReplySink
from appliance.infra.metrics import Metrics
from appliance.serving import sse
from appliance.serving.client import ReadTimeouts
from appliance.serving.connection import WorkerConnection
from appliance.serving.error_text import CLIENT_ERROR, SERVER_ERROR, ErrorText, worker_error
from appliance.serving.pool import WorkerPool

EVENT_STREAM = "text/event-stream; charset=utf-8"
# Client errors of a worker that the same request need not meet again.
RETRYABLE = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})


class Relay:
    def __init__(
        self,
        *,
        intents: IntentRecorder,
        outcomes: OutcomeRecorder,
        pool: WorkerPool,
        timeouts: ReadTimeouts,
        metrics: Metrics,
        clock: Callable[[], float],
        origin: str,
    ) -> None:
        self._intents = intents
        self._outcomes = outcomes
        self._pool = pool
        self._timeouts = timeouts
        self._metrics = metrics
        self._clock = clock
        self._origin = origin

    async def relay_answer(self, exchange: Exchange, answer: WorkerConnection, reply: ReplySink) -> None:
        """Relay an answer to its end; raises ApplianceError if nothing was sent yet."""
        dialect = exchange.call.endpoint.dialect
        if not answer.content_type.startswith("text/event-stream"):
            await self._relay_whole(exchange, answer, reply)
            return
        if not dialect.streams:
            raise WorkerFailedError("The worker streams an answer on a route without streams.")
        await self.send_head(exchange, reply, answer.status, EVENT_STREAM)
        exchange.is_relayed = True
        try:
            await self._relay_frames(exchange, answer, reply)
        except ApplianceError as error:
            await self.end_with_error(exchange, reply, error)

    async def _relay_whole(self, exchange: Exchange, answer: WorkerConnection, reply: ReplySink) -> None:
        call, dialect = exchange.call, exchange.call.endpoint.dialect
        text = (await self._timeouts.read_all(answer)).decode("utf-8", "replace")
        exchange.answered = self._clock()
        if answer.status >= CLIENT_ERROR:
            refused = answer.status < SERVER_ERROR
            exchange.end(Outcome.WORKER_REFUSED if refused else Outcome.WORKER_FAILED, answer.status)
            error = worker_error(text, answer.status)
            # A stream that waited for a worker has its head already, so its last frame carries the error.
            text = (
                dialect.error_frame(error, after=b"").decode()
                if exchange.head_sent
                else dialect.error_body(error)
            )
        elif exchange.head_sent:
            raise WorkerFailedError("The worker answered in one piece, but the client requested a stream.")
        else:
            read = dialect.read_answer(text, wants_metrics=call.wants_metrics)
            text, exchange.usage, exchange.finish_reason = read.text, read.usage, read.finish_reason
            exchange.end(Outcome.COMPLETED, answer.status)
        body = text.encode()
        exchange.capture.observe(body)
        await self._outcomes.record(exchange)
        await self.send_head(exchange, reply, answer.status, "application/json", length=len(body))
        await reply.end(body)

    async def _relay_frames(self, exchange: Exchange, answer: WorkerConnection, reply: ReplySink) -> None:
        """
        Relay whole frames as they arrive; hold back those that end the stream.

        Most pass at once, and only what has to be parsed or waited for wakes this task.
        """
        passing, final, done = _Passing(exchange, reply, self._clock), b"", False
        call, dialect = exchange.call, exchange.call.endpoint.dialect

        async def keep_alive() -> None:
            exchange.capture.observe(sse.KEEP_ALIVE)
            await reply.write(sse.KEEP_ALIVE)

        while not done:
            read = await self._timeouts.read(answer, keep_alive, passing.take)
            if not read:
                message = "The worker broke off before it had finished; the answer so far is incomplete."
                raise WorkerFailedError(message)
            frames = passing.buffer.feed(read)
            if dialect.needs_care(frames):
                found = dialect.sort(
                    sse.split_frames(frames),
                    wants_usage=call.parsed.wants_usage,
                    wants_metrics=call.wants_metrics,
                )
                frames, final, done = found.passed, final + found.held, found.is_end
                exchange.usage = found.usage or exchange.usage
                exchange.finish_reason = found.finish_reason or exchange.finish_reason
                if found.has_failed:
                    exchange.end(Outcome.WORKER_FAILED, HTTPStatus.BAD_GATEWAY)
            if frames:
                await passing.send(frames)
        exchange.end(Outcome.COMPLETED, answer.status)
        exchange.capture.observe(final)
        await self._outcomes.record(exchange)
        await reply.end(final)

    async def end_with_error(self, exchange: Exchange, reply: ReplySink, error: ApplianceError) -> None:
        """The head is sent, so the status cannot carry the error."""
        exchange.fail(error)
        code = code_of(error)
        is_lost = isinstance(error, WorkerFailedError) and not isinstance(error, WorkerTimeoutError)
        if is_lost and exchange.worker is not None:
            self._pool.report_unreachable(exchange.worker.worker.worker_id)
        if not exchange.recorded:
            exchange.capture.observe(_error_frame(exchange, str(error), code))
            try:
                await self._outcomes.record(exchange)
            except ApplianceError as failure:
                code = code_of(failure)
        self._metrics.errors.labels(code).inc()
        await reply.end(_error_frame(exchange, str(error), code))

    async def send_head(
        self,
        exchange: Exchange,
        reply: ReplySink,
        status: int,
        content_type: str,
        *,
        length: int | None = None,
    ) -> None:
        """Wait for the intent to be durable; nothing if the head is sent already."""
        if exchange.head_sent:
            return
        call = exchange.call
        receipt = await self._intents.confirm(exchange)
        overhead = exchange.overhead_seconds(self._clock())
        exemplar = None if exchange.trace is None else exchange.trace.exemplar
        self._metrics.overhead_seconds.labels(call.route).observe(overhead, exemplar)
        exchange.head_sent = True
        headers = {"x-request-id": call.client_request_id or call.request_id}
        # An entry that no gateway has integrated yet is named by its request, which the log knows it by.
        if receipt.kept is Kept.LOGGED:
            index = receipt.known_index
            name = call.request_id if index is None else index
            headers["x-appliance-audit"] = f"{self._origin}/{name}"
        else:
            headers["x-appliance-audit-kept"] = str(receipt.kept)
        headers["x-appliance-overhead-ms"] = f"{overhead * 1000:.1f}"
        if status >= CLIENT_ERROR:
            headers["x-should-retry"] = _should_retry(status)
        await reply.start(ReplyHead(status=status, content_type=content_type, length=length, headers=headers))


class _Passing:
    """Passes the frames of one stream to its client, and notes about them what the record needs."""

    def __init__(self, exchange: Exchange, reply: ReplySink, clock: Callable[[], float]) -> None:
        self.buffer = sse.FrameBuffer()
        self._exchange, self._reply, self._clock = exchange, reply, clock
        self._dialect = exchange.call.endpoint.dialect

    def take(self, read: bytes) -> bool:
        """Pass what need not be parsed, if the client takes it at once; else leave all as it was."""
        rest = self.buffer.rest
        frames = self.buffer.feed(read)
        if not frames:
            return True
        if self._dialect.needs_care(frames) or not self._reply.write_now(frames):
            self.buffer.rest = rest
            return False
        self._exchange.capture.observe(frames)
        self._note(frames)
        return True

    async def send(self, frames: bytes) -> None:
        self._exchange.capture.observe(frames)
        await self._reply.write(frames)
        self._note(frames)

    def _note(self, frames: bytes) -> None:
        # After the write: the client need not wait for it.
        exchange = self._exchange
        exchange.last_frames = frames
        if pieces := self._dialect.count_pieces(frames):
            exchange.gaps.observe(pieces, self._clock())
        exchange.finish_reason = self._dialect.finish_reason(frames) or exchange.finish_reason


def _error_frame(exchange: Exchange, message: str, code: str) -> bytes:
    error = ErrorText(status=exchange.status, kind="server_error", message=message, code=code)
    return exchange.call.endpoint.dialect.error_frame(error, after=exchange.last_frames)


def _should_retry(status: int) -> str:
    may_pass = status >= SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED
    return "true" if may_pass or status in RETRYABLE else "false"
