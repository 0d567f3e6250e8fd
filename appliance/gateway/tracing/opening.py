"""
Tracing for as long as a gateway runs, if the settings ask for it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from appliance.gateway.tracing.endpoint import public_address
from appliance.gateway.tracing.trace import Tracing
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import TracingSettings, forget_variables

LIBRARY = "opentelemetry"
QUEUE_SPANS = 4096
"""Maximum spans that wait for the collector; further ones are dropped and counted.  A request has three."""
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
) -> AsyncIterator[Tracing | None]:
    """
    Trace requests for as long as the context lasts; None, and nothing imported, where tracing is off.

    What is still queued at the end is sent, for as long as one batch may take.

    Args:
        settings: the `tracing` section.
        version: of the appliance.
        gateway: this gateway's name.
        metrics: where spans are counted.
        logger: is told of a collector that does not take them.
        clock: the gateway's monotonic clock, in seconds.
        wall_clock: Unix time, in seconds.
    """
    if not settings.enabled:
        yield None
        return
    # The settings say all there is to say; the worker's offline environment, which switches the library
    # off, may also be this process's own.
    forget_variables(VARIABLES)
    # Imported here, so that a gateway that does not trace holds none of it.
    from appliance.gateway.tracing.delivery import Delivery, Outbox, make_exporter  # noqa: PLC0415
    from appliance.gateway.tracing.tracer import SpanTracing, make_provider  # noqa: PLC0415

    # It writes a line for every batch that fails, with the collector's address; `Outbox` writes one for all.
    logging.getLogger(LIBRARY).setLevel(logging.CRITICAL)  # noqa: TID251 - the logger is the library's
    outbox = Outbox(
        make_exporter(settings),
        outside=partial(public_address, settings),
        metrics=metrics,
        logger=logger,
    )
    delivery = Delivery(
        outbox,
        queue_spans=QUEUE_SPANS,
        interval_seconds=settings.interval_seconds,
        metrics=metrics,
    )
    provider = make_provider(settings, processor=delivery, version=version, gateway=gateway)
    try:
        yield SpanTracing(provider.get_tracer("appliance"), settings, clock=clock, wall_clock=wall_clock)
    finally:
        stopping = asyncio.ensure_future(asyncio.to_thread(provider.shutdown))
        # A thread cannot be ended; the process does not wait longer for it than for one batch.
        await asyncio.wait({stopping}, timeout=settings.timeout_seconds)
