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
from appliance.gateway.admission import AdmissionControl, Asked, Lane, Slot
from appliance.gateway.call import Call
from appliance.gateway.cost.metering import NO_METERING, Metering
from appliance.gateway.exchange import Exchange, Outcome
from appliance.gateway.recorder import Recorder
from appliance.gateway.relay import EVENT_STREAM, NOT_IMPLEMENTED, OK, UNAVAILABLE, Relay
from appliance.gateway.reply import Reply
from appliance.gateway.tracing.trace import Tracing
from appliance.infra.metrics import Metrics
from appliance.serving import sse
from appliance.serving.client import WorkerClient
from appliance.serving.dialects.policy import may_call
from appliance.serving.patience import Patience
from appliance.serving.pool import WorkerPool
from appliance.serving.refusal import CLIENT_ERROR, SERVER_ERROR
from appliance.serving.router import has_target_only
from appliance.serving.worker import WorkerId
from appliance.tenancy.limits.limiting import NO_LIMITS, Limiting
from appliance.tenancy.limits.reservation import Reservation

TOO_MANY = 429


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
        recorder: Recorder,
        metrics: Metrics,
        clock: Callable[[], float],
        policy: GatewayPolicy,
        limits: Limiting = NO_LIMITS,
        costs: Metering = NO_METERING,
        tracing: Tracing | None = None,
    ) -> None:
        self.pool = pool
        self.admission = admission
        self.limits = limits
        self._costs = costs
        self._tracing = tracing
        self._client = client
        self._recorder = recorder
        self._metrics = metrics
        self._clock = clock
        self._policy = policy
        self._patience = Patience(
            keep_alive_seconds=policy.keep_alive_seconds, silence_seconds=policy.silence_seconds
        )
        self._relay = Relay(
            recorder=recorder,
            pool=pool,
            patience=self._patience,
            metrics=metrics,
            clock=clock,
            origin=policy.origin,
        )

    @property
    def traces(self) -> bool:
        """Whether requests are traced, so that what clients say of their own traces matters."""
        return self._tracing is not None

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
            self._recorder.deny(call, "model_not_found", status=404)
            message = f"The model `{call.model}` does not exist or you do not have access to it."
            raise ModelNotFoundError(message)
        try:
            call.check_policy()
        except InvalidRequestError as error:
            self._recorder.deny(call, error.code or "invalid_request", status=CLIENT_ERROR)
            raise
        forbidden_by = call.forbidden_by
        if forbidden_by and not has_target_only(call.model, self.pool.snapshots):
            self._recorder.deny(call, "needs_target_only_worker", status=400)
            raise call.refusal()
        try:
            lane = Lane(call.model, forbidden_by is None)
            self.admission.refuse_if_full(lane, call.caller.tenant.name, call.priority, getsizeof(call.text))
        except AtCapacityError:
            self._recorder.deny(call, "at_capacity", status=TOO_MANY)
            raise

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
            exchange = await self._recorder.begin(call, started)
            if self._tracing is not None:
                exchange.trace = self._tracing.begin(
                    request_id=call.request_id,
                    tenant=call.caller.tenant.name,
                    route=call.route,
                    model=call.model,
                    traceparent=call.traceparent,
                    started=started,
                )
            await self._see_through(call, exchange, reply)
        finally:
            # The only place that gives back what was reserved, whatever happened.
            reservation.settle(0 if exchange is None else exchange.used_tokens(call.text, call.members))

    async def _wait_for_limits(self, call: Call) -> Reservation:
        try:
            return await self.limits.wait(call.caller.tenant, call.model, call.text, call.members)
        except LimitReachedError as error:
            self._recorder.deny(call, error.code, status=TOO_MANY)
            raise

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
            self._recorder.finish(exchange)

    async def _answer(self, call: Call, exchange: Exchange, reply: Reply) -> None:
        try:
            await self._attempt_workers(call, exchange, reply)
        except ApplianceError as error:
            if not exchange.head_sent:
                raise
            # The head is out: the status can no longer say it, so the last frame does.
            await self._relay.end_with_error(call, exchange, reply, error)

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
                await self._relay.start(call, exchange, reply, OK, EVENT_STREAM)
                exchange.capture.saw(sse.KEEP_ALIVE)
                await reply.write(sse.KEEP_ALIVE)

        try:
            return await self.admission.wait(asked, keep_alive, self._policy.keep_alive_seconds)
        finally:
            exchange.queued = self._clock() - began
            if exchange.trace is not None:
                exchange.trace.waited(began, began + exchange.queued)

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
            if exchange.trace is not None:
                headers |= exchange.trace.ask(worker.url, exchange.dispatched)
            stay = self._costs.begin(worker.worker_id, asked.tenant, call.model)
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
                        await self._relay.pass_on(call, exchange, answer, reply)
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
                self._costs.end(stay)
                slot.release()
                if exchange.trace is not None:
                    exchange.trace.leave(self._clock(), goes_on=another is not None)
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


def _asked(call: Call, exchange: Exchange) -> Asked:
    """What admission has to know of a call."""
    return Asked(
        lane=Lane(call.model, exchange.forbidden_by is None),
        tenant=call.caller.tenant.name,
        priority=call.priority,
        size_bytes=getsizeof(call.text),
        beginning=call.beginning,
    )
