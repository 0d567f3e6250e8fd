"""
The data plane: serves one request from its audited intent, through a worker, to its audited outcome.

    admit ─► audit intent ─► wait for a worker with room ─► relay ─► audit outcome

Two invariants fix the order: no byte of an answer is sent before the intent is durable, and the last frame
is not sent before the outcome is.  The gateway forwards the request while the intent is being committed, so
durability costs as little time as possible.

It fails closed: if the audit log cannot take an entry, the client gets an error, not an answer.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from appliance.errors import (
    ApplianceError,
    LimitReachedError,
    ModelNotFoundError,
    NoWorkerAvailableError,
    Outcome,
    WorkerFailedError,
    WorkerLeavingError,
    WorkerTimeoutError,
    WorkerUnreachableError,
)
from appliance.gateway.admission import AdmissionControl, AdmissionRequest, Lane, Slot
from appliance.gateway.body import BodyTerms
from appliance.gateway.body_parsers import BodyParsers
from appliance.gateway.call import Call
from appliance.gateway.cost.metering import NO_METERING, Metering
from appliance.gateway.exchange import Exchange
from appliance.gateway.intents import IntentRecorder
from appliance.gateway.outcomes import OutcomeRecorder
from appliance.gateway.relay import EVENT_STREAM, Relay
from appliance.gateway.reply import ReplySink
from appliance.infra.metrics import Metrics
from appliance.serving import sse
from appliance.serving.client import ReadTimeouts, WorkerClient
from appliance.serving.dialects.policy import may_call
from appliance.serving.error_text import SERVER_ERROR
from appliance.serving.pool import WorkerPool
from appliance.serving.router import has_target_only
from appliance.serving.worker import ServedModel, WorkerId
from appliance.tenancy import Caller
from appliance.tenancy.limits.limiting import NO_LIMITS, Limiting, Reservation

if TYPE_CHECKING:  # loaded only if tracing is on
    from appliance.gateway.tracing.tracer import Tracing

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that left; no client receives it


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPolicy:
    """Silence that the gateway tolerates, in seconds, and the log's origin, which receipts name."""

    keep_alive_seconds: float
    silence_seconds: float
    origin: str


class Gateway:
    def __init__(
        self,
        *,
        pool: WorkerPool,
        admission: AdmissionControl,
        client: WorkerClient,
        intents: IntentRecorder,
        outcomes: OutcomeRecorder,
        metrics: Metrics,
        clock: Callable[[], float],
        policy: GatewayPolicy,
        limits: Limiting = NO_LIMITS,
        costs: Metering = NO_METERING,
        tracing: "Tracing | None" = None,
        bodies: BodyParsers | None = None,
    ) -> None:
        self.bodies = bodies or BodyParsers()
        self.pool = pool
        self.admission = admission
        self.limits = limits
        self._costs = costs
        self._tracing = tracing
        self._client = client
        self._intents = intents
        self._outcomes = outcomes
        self._metrics = metrics
        self._clock = clock
        self._policy = policy
        self._timeouts = ReadTimeouts(
            keep_alive_seconds=policy.keep_alive_seconds, silence_seconds=policy.silence_seconds
        )
        self._relay = Relay(
            intents=intents,
            outcomes=outcomes,
            pool=pool,
            timeouts=self._timeouts,
            metrics=metrics,
            clock=clock,
            origin=policy.origin,
        )

    @property
    def traces(self) -> bool:
        """If so, the clients' own trace context is read."""
        return self._tracing is not None

    async def enter(self, request_id: str, caller: Caller, route: str) -> Reservation:
        """
        Check the tenant's limits of requests before its body is read; a refusal is audited.

        The caller releases what this returns; `relay` does so when it reserves the whole need, so that a
        request is never counted twice.  Raises LimitReachedError and LimitsUnavailableError.
        """
        try:
            return await self.limits.enter(caller.tenant, caller.key_limits)
        except LimitReachedError as error:
            self._intents.deny(request_id, caller, route, error)
            raise

    def terms(self, caller: Caller, route: str, *, salted: bool) -> BodyTerms:
        """`salted`: workers separate the prefix cache by tenant."""
        return BodyTerms(
            route=route,
            tenant=caller.tenant.name,
            may=caller.tenant.may,
            salted=salted,
            label_key=self._intents.label_key,
        )

    def admit(self, call: Call) -> None:
        """
        Refuse a call before anything is sent for it; a refusal is audited.

        Raises ModelNotFoundError (also if the key may not use it), NeedsTargetOnlyWorkerError,
        NoWorkerAvailableError (none has come up yet), InvalidRequestError (by policy) or AtCapacityError.
        """
        models = self.pool.models()
        if not models:
            raise NoWorkerAvailableError("No worker is ready yet. Try again in a moment.")
        try:
            self._check(call, models.get(call.model))
        except ApplianceError as error:
            self._intents.deny(call.request_id, call.caller, call.route, error)
            raise

    def _check(self, call: Call, served: ServedModel | None) -> None:
        if served is None or not may_call(call.caller, served):
            message = f"The model `{call.model}` does not exist or you do not have access to it."
            raise ModelNotFoundError(message)
        call.check_policy()
        may_speculate = call.forbidden_by is None
        if not may_speculate and not has_target_only(call.model, self.pool.snapshots):
            raise call.refusal()
        lane = Lane(call.model, may_speculate)
        self.admission.check_capacity(lane, call.caller.tenant.name, call.priority, len(call.body))

    async def relay(self, call: Call, reply: ReplySink) -> None:
        """
        Answer one call; raises ApplianceError if nothing was sent yet, else an error becomes the last frame.

        Cancelling this means that the client left or the gateway stops: the worker's connection is closed,
        which makes it stop generating, and the log records which of the two it was.
        """
        started = self._clock()
        call.entry.release()
        caller = call.caller
        reservation = self.limits.take(caller.tenant, call.model, call.parsed.size, caller.key_limits)
        if reservation is None:
            reservation = await self._wait_for_limits(call)
        exchange: Exchange | None = None
        try:
            exchange = await self._intents.begin(call, started)
            if self._tracing is not None:
                exchange.trace = self._tracing.begin(
                    request_id=call.request_id,
                    tenant=call.caller.tenant.name,
                    route=call.route,
                    model=call.model,
                    traceparent=call.traceparent,
                    started=started,
                )
            await self._answer(exchange, reply)
        finally:
            # The only places that release the reservation, whatever happened.
            if exchange is None:
                reservation.settle(0)
            else:
                self._outcomes.finish(exchange, reservation)

    async def _wait_for_limits(self, call: Call) -> Reservation:
        try:
            caller = call.caller
            return await self.limits.wait(caller.tenant, call.model, call.parsed.size, caller.key_limits)
        except LimitReachedError as error:
            self._intents.deny(call.request_id, call.caller, call.route, error)
            raise

    async def _answer(self, exchange: Exchange, reply: ReplySink) -> None:
        in_flight = self._metrics.requests_in_flight.labels(exchange.call.model)
        in_flight.inc()
        try:
            await self._attempt_workers(exchange, reply)
        except asyncio.CancelledError:
            left = Outcome.CLIENT_GONE if reply.client_left else Outcome.GATEWAY_STOPPED
            exchange.end(left, CLIENT_CLOSED_REQUEST)
            raise
        except ApplianceError as error:
            if not exchange.head_sent:
                exchange.fail(error)
                raise
            await self._relay.end_with_error(exchange, reply, error)
        finally:
            in_flight.dec()

    async def _attempt_workers(self, exchange: Exchange, reply: ReplySink) -> None:
        """
        Before the first byte of an answer the request may be retried on another worker.

        If there is none, it waits for one that is on its way, as if it had just come.
        """
        call = exchange.call
        body = call.parsed.edit(call.body)
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "X-Request-Id": call.request_id,
        }
        request, tried = _admission_request(call), set[WorkerId]()
        slot = self.admission.enter(request) or await self._wait(request, exchange, reply)
        while True:
            worker, another, waits = slot.snapshot.worker, None, False
            tried.add(worker.worker_id)
            exchange.worker, exchange.dispatched = slot.snapshot, self._clock()
            if exchange.trace is not None:
                headers |= exchange.trace.forward(worker.url, exchange.dispatched)
            stay = self._costs.begin(worker.worker_id, request.tenant, call.model)
            try:
                async with self._client.forward(
                    worker, call.endpoint.worker_path, body, headers, self._policy.silence_seconds
                ) as answer:
                    exchange.answered = self._clock()
                    if answer.status < SERVER_ERROR or answer.status == HTTPStatus.NOT_IMPLEMENTED:
                        slot.succeeded()
                    else:
                        slot.failed()
                        another = self._another(request, exchange, tried)
                    if another is None:
                        await self._relay.relay_answer(exchange, answer, reply)
                        return
            except TimeoutError as error:
                slot.failed()
                raise self._timeouts.lost() from error
            except WorkerFailedError as error:
                another = self._recover(error, slot, request, exchange, tried)
                waits = another is None
            finally:
                self._costs.end(stay)
                slot.release()
                if exchange.trace is not None:
                    exchange.trace.leave(self._clock(), is_retried=waits or another is not None)
            if another is None:
                another = await self._wait(request, exchange, reply)
                tried.clear()
                self._count_retry(exchange)
            slot = another

    def _recover(
        self,
        error: WorkerFailedError,
        slot: Slot,
        request: AdmissionRequest,
        exchange: Exchange,
        tried: set[WorkerId],
    ) -> Slot | None:
        """A slot of another worker, or None if the request may wait for one; else raises the error."""
        if isinstance(error, WorkerTimeoutError):
            raise error
        if not isinstance(error, WorkerLeavingError):
            slot.failed()
        self.pool.report_unreachable(slot.snapshot.worker.worker_id)
        is_free = isinstance(error, WorkerUnreachableError)
        another = self._another(request, exchange, tried, is_free=is_free)
        if another is None and (exchange.is_relayed or not self.admission.may_wait(request, is_free=is_free)):
            raise error
        return another

    async def _wait(self, request: AdmissionRequest, exchange: Exchange, reply: ReplySink) -> Slot:
        """
        Wait for a worker with room.

        A stream that waits for long gets its head, so that neither proxy nor client times out; from then on
        only its frames can carry an error.
        """
        began, before = self._clock(), exchange.queued

        async def keep_alive() -> None:
            exchange.queued = before + self._clock() - began
            if exchange.call.parsed.is_stream:
                await self._relay.send_head(exchange, reply, HTTPStatus.OK, EVENT_STREAM)
                exchange.capture.observe(sse.KEEP_ALIVE)
                await reply.write(sse.KEEP_ALIVE)

        try:
            return await self.admission.wait(request, keep_alive, self._policy.keep_alive_seconds)
        finally:
            ended = self._clock()
            exchange.queued = before + ended - began
            if exchange.trace is not None:
                exchange.trace.waited(began, ended)

    def _another(
        self, request: AdmissionRequest, exchange: Exchange, tried: set[WorkerId], *, is_free: bool = False
    ) -> Slot | None:
        """None once an answer is being relayed, or if every worker was tried."""
        slot = None if exchange.is_relayed else self.admission.retry(request, tried, is_free=is_free)
        if slot is not None:
            self._count_retry(exchange)
        return slot

    def _count_retry(self, exchange: Exchange) -> None:
        exchange.retries += 1
        self._metrics.retries.labels(exchange.call.model).inc()


def _admission_request(call: Call) -> AdmissionRequest:
    return AdmissionRequest(
        lane=Lane(call.model, call.forbidden_by is None),
        tenant=call.caller.tenant.name,
        priority=call.priority,
        size_bytes=len(call.body),
        sequences=call.parsed.sequences,
        prefix_text=call.prefix_text,
    )
