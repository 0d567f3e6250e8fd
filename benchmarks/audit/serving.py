"""
What `strict` costs a request: a gateway with its audit log against one without, side by side.

Both gateways run for the whole time in front of one upstream that answers at once; segments to the
one and to the other alternate, and which comes first alternates too, so that whatever else the
machine does falls on both.  Ratios are made within a round, and their median is reported.
"""

import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.audit.figures import Times, markdown, times
from benchmarks.gateway.client import Target, drive
from benchmarks.gateway.contenders import UNAUDITED, appliance, free_port
from benchmarks.gateway.upstream import MODEL, upstream
from demo.process import ApplianceProcess

MOST_ADDED_MS = 0.7
LEAST_RATIO = 0.75
"""The goal: at most 0.7 ms more to the first token at p50, at most a quarter fewer requests."""
STRICT, NONE = "strict", "none"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 400}]}
CODE: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Write a Python function that adds two numbers."}],
    "max_tokens": 32,
    "temperature": 0,
    "ignore_eos": True,
}
"""Each answer is as long as every other, so that only the gateways differ."""
FAST, SLOW = (1, 16), (1, 4)
"""Requests at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One line of the table: one kind of request at one concurrency."""

    name: str
    stream: bool
    concurrency: int
    rounds: int
    none: Times
    """To the first byte of the answer's body, without audit log."""
    strict: Times
    none_per_second: float
    strict_per_second: float
    ratio: float
    """Requests per second with over without, median of the rounds."""

    @property
    def added_p50(self) -> float:
        """Milliseconds the log adds to the first token in the middle."""
        return self.strict.p50 - self.none.p50

    @property
    def added_p99(self) -> float:
        """Likewise at the tail."""
        return self.strict.p99 - self.none.p99

    @property
    def reaches_goal(self) -> bool:
        """Whether both limits are kept."""
        return self.added_p50 <= MOST_ADDED_MS and self.ratio >= LEAST_RATIO


@dataclass(slots=True, kw_only=True)
class Segments:
    """What was measured of one gateway in one case."""

    first_bytes: list[float]
    """Seconds, each request."""
    per_second: list[float]
    """Requests per second, each round."""


def measure(rounds: int, requests: int) -> list[Serving]:
    """Measure every case in front of a stand-in that answers at once."""
    with upstream(0.0) as worker:
        return _compare(worker, BODY, FAST, rounds, requests)


def measure_on_worker(rounds: int, requests: int) -> list[Serving]:
    """The same in front of a real worker with the demo pair, which the appliance starts as well."""
    port = free_port()
    environment = {
        "APPLIANCE_WORKER__PORT": str(port),
        "APPLIANCE_WORKER__SERVED_NAME": MODEL,
        "APPLIANCE_LOG__LEVEL": "warning",
    }
    worker = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch,
        ApplianceProcess("up", data=Path(scratch), environment=environment),
    ):
        return _compare(worker, CODE, SLOW, rounds, requests)


def _compare(
    worker: str, body: dict[str, Any], concurrencies: tuple[int, ...], rounds: int, requests: int
) -> list[Serving]:
    """Start both gateways, and compare them in every case."""
    with (
        appliance(worker, name=NONE, module=UNAUDITED) as none,
        appliance(worker, name=STRICT) as strict,
    ):
        targets = {target.name: target for target in (none, strict)}
        return uvloop.run(_measure(targets, body, concurrencies, rounds, requests))


async def _measure(
    targets: dict[str, Target],
    body: dict[str, Any],
    concurrencies: tuple[int, ...],
    rounds: int,
    requests: int,
) -> list[Serving]:
    cases = [(stream, concurrency) for stream in (False, True) for concurrency in concurrencies]
    return [
        await _case(targets, {**body, "stream": stream}, rounds, requests, concurrency)
        for stream, concurrency in cases
    ]


async def _case(
    targets: dict[str, Target],
    body: dict[str, Any],
    rounds: int,
    requests: int,
    concurrency: int,
) -> Serving:
    found = {name: Segments(first_bytes=[], per_second=[]) for name in targets}
    for target in targets.values():
        await drive(target, requests // 4 + 1, concurrency, **body)  # to warm up
    for number in range(rounds):
        for name in sorted(targets, reverse=number % 2 == 1):
            segment = await drive(targets[name], requests, concurrency, **body)
            found[name].first_bytes += segment.first_bytes
            found[name].per_second.append(len(segment.first_bytes) / segment.seconds)
    ratios = [
        strict / none for strict, none in zip(found[STRICT].per_second, found[NONE].per_second, strict=True)
    ]
    return Serving(
        name=f"{'stream' if body['stream'] else 'plain'}, {concurrency} at a time",
        stream=body["stream"],
        concurrency=concurrency,
        rounds=rounds,
        none=times(found[NONE].first_bytes),
        strict=times(found[STRICT].first_bytes),
        none_per_second=statistics.median(found[NONE].per_second),
        strict_per_second=statistics.median(found[STRICT].per_second),
        ratio=statistics.median(ratios),
    )


def table(lines: list[Serving]) -> str:
    """The table of a report, in Markdown."""
    columns = ["case", "first token without, p50 / p99 ms", "with `strict`", "added p50", "added p99"]
    return markdown(
        [*columns, "requests/s without", "with", "ratio", "goal"],
        [
            [
                line.name,
                f"{line.none.p50:.2f} / {line.none.p99:.2f}",
                f"{line.strict.p50:.2f} / {line.strict.p99:.2f}",
                f"{line.added_p50:+.2f}",
                f"{line.added_p99:+.2f}",
                f"{line.none_per_second:,.0f}",
                f"{line.strict_per_second:,.0f}",
                f"{line.ratio:.2f}",
                "reached" if line.reaches_goal else "missed",
            ]
            for line in lines
        ],
    )


def document(lines: list[Serving]) -> list[dict[str, Any]]:
    """The same for a program."""
    return [
        {
            **asdict(line),
            "added_p50_ms": line.added_p50,
            "added_p99_ms": line.added_p99,
            "reaches_goal": line.reaches_goal,
        }
        for line in lines
    ]
