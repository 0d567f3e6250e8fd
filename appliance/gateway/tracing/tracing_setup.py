"""Opens tracing for the life of a gateway, if the settings enable it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from appliance.gateway.tracing.endpoint import public_address
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import TracingSettings, forget_variables

if TYPE_CHECKING:
    from appliance.gateway.tracing.tracer import Tracing

LIBRARY = "opentelemetry"
QUEUE_SPANS = 4096  # that wait for the collector; a request has three.  Further ones are dropped
VARIABLES = "OTEL_"


@asynccontextmanager
async def open_tracing(
    settings: TracingSettings,
    *,
    version: str,
    gateway: str,
    metrics: Metrics,
    logger: Logger,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> AsyncIterator["Tracing | None"]:
    """
    Trace requests until the block ends; None, and no library imported, if tracing is off.

    At the end the queued spans are sent, for at most the time of one batch.  `clock` is the gateway's
    monotonic one, `wall_clock` gives Unix time.
    """
    if not settings.enabled:
        yield None
        return
    # Only the settings count: this process may run in the worker's offline environment, which switches the
    # library off.
    forget_variables(VARIABLES)
    # Imported here, so that a gateway that does not trace loads none of it.
    from appliance.gateway.tracing.delivery import CountingExporter, Delivery, make_exporter  # noqa: PLC0415
    from appliance.gateway.tracing.tracer import Tracing, make_provider  # noqa: PLC0415

    # It logs every batch that fails, with the collector's address; `CountingExporter` logs only the first.
    logging.getLogger(LIBRARY).setLevel(logging.CRITICAL)  # noqa: TID251 - the logger is the library's
    exporter = CountingExporter(
        make_exporter(settings),
        public_address=partial(public_address, settings),
        metrics=metrics,
        logger=logger,
    )
    delivery = Delivery(
        exporter, queue_spans=QUEUE_SPANS, interval_seconds=settings.interval_seconds, metrics=metrics
    )
    provider = make_provider(settings, processor=delivery, version=version, gateway=gateway)
    try:
        yield Tracing(provider.get_tracer("appliance"), settings, clock=clock, wall_clock=wall_clock)
    finally:
        stopping = asyncio.ensure_future(asyncio.to_thread(provider.shutdown))
        # A thread cannot be stopped; the process waits for it no longer than for one batch.
        await asyncio.wait({stopping}, timeout=settings.timeout_seconds)
