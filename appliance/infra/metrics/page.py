"""
The page that Prometheus scrapes, written a few series at a time.

A site's 5,000 series take some 70 ms to write.  On the event loop, no stream would move for 70 ms; a thread
would compete with the loop for the interpreter every 5 ms, at each of its system calls.  So the page is
written on the loop, which runs other tasks after every few series.

No thread is involved, so state that is read at a scrape is read between two steps of its owner.  A histogram
is read at once; two metrics may be of different moments, as Prometheus expects of any page.
"""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics import MetricWrapperBase

SERIES_AT_A_TIME = 25
"""About half a millisecond of work."""
CREATED = "_created"
"""Ending of the time at which a series began; exporting it would double the series."""
HEADERS = (b"# HELP ", b"# TYPE ", b"# UNIT ")
END = b"# EOF\n"
"""Ends a page of OpenMetrics, and each part of one that its encoder writes."""


async def page(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the page and its content type; `accept`: the request's header, empty for Prometheus text."""
    encode, content_type = choose_encoder(accept)
    parts, ends, written = [], False, 0
    for piece in _pieces(registry):
        text = encode(piece)
        ends = ends or text.endswith(END)
        text = text.removesuffix(END)
        parts.append(text if piece.is_first else _without_headers(text))
        written += len(piece.metric.samples)
        if written >= SERIES_AT_A_TIME:
            written = 0
            await asyncio.sleep(0)
    return b"".join(parts) + (END if ends else b""), content_type


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    metric: Metric
    is_first: bool

    def collect(self) -> Iterable[Metric]:
        return (self.metric,)


def _pieces(registry: CollectorRegistry) -> Iterator[_Piece]:
    # The client library has no public way to read a registry, or a metric, in parts.
    with registry._lock:  # noqa: SLF001
        collectors = tuple(registry._collector_to_names)  # noqa: SLF001
    for collector in collectors:
        if isinstance(collector, MetricWrapperBase) and collector._labelnames:  # noqa: SLF001
            yield from _in_parts(collector)
        else:
            for metric in collector.collect():
                metric.samples = [each for each in metric.samples if not each.name.endswith(CREATED)]
                yield _Piece(metric=metric, is_first=True)


def _in_parts(family: MetricWrapperBase) -> Iterator[_Piece]:
    with family._lock:  # noqa: SLF001
        children = tuple(family._metrics.items())  # noqa: SLF001
    (metric,), is_first = family.describe(), True
    for values, child in children:
        labels = dict(zip(family._labelnames, values, strict=True))  # noqa: SLF001
        for sample in child._samples():  # noqa: SLF001
            if sample.name != CREATED:
                metric.add_sample(
                    metric.name + sample.name,
                    {**labels, **sample.labels},
                    sample.value,
                    sample.timestamp,
                    sample.exemplar,
                )
        if len(metric.samples) >= SERIES_AT_A_TIME:
            yield _Piece(metric=metric, is_first=is_first)
            (metric,), is_first = family.describe(), False
    if metric.samples or is_first:
        yield _Piece(metric=metric, is_first=is_first)


def _without_headers(text: bytes) -> bytes:
    while text.startswith(HEADERS):
        text = text[text.index(b"\n") + 1 :]
    return text
