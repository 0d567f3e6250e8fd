"""
What the gateway adds to a request, with the audit log strict: `make bench`.

A small upstream that answers in vLLM's shapes runs in one process, the gateway with its real audit
log on SQLite in another, the client here.  Rounds to the upstream directly and through the gateway
alternate, so that whatever else the machine does falls on both; the medians over all rounds are
compared.  Nothing is asserted: figures depend on the machine and are printed with it.
"""

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

from demo.machine import cpu_name
from demo.process import ApplianceProcess

FRAMES = 64
METRICS = "".join(
    f'# TYPE vllm:{name} gauge\nvllm:{name}{{engine="0"}} 0\n'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
)
PLAIN = {"model": "bench", "messages": [{"role": "user", "content": "x" * 400}]}
STREAM = {**PLAIN, "stream": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=150, help="per round and path")
    parser.add_argument("--think-ms", type=float, default=5.0, help="how long the upstream takes")
    options = parser.parse_args()
    with upstream(options.think_ms) as worker, gateway(worker) as (url, key):
        uvloop.run(compare(worker, url, key, options.rounds, options.requests))


async def compare(worker: str, gateway_url: str, key: str, rounds: int, requests: int) -> None:
    print(f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{rounds} rounds of {requests} requests each way, interleaved; medians over all requests\n")
    print(f"{'case':<26}{'direct ms':>10}{'gateway ms':>12}{'added ms':>10}{'p99 added':>11}{'ratio':>8}")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for name, body, concurrency in (
            ("plain, 1 at a time", PLAIN, 1),
            ("plain, 16 at a time", PLAIN, 16),
            ("stream, 1 at a time", STREAM, 1),
            ("stream, 16 at a time", STREAM, 16),
        ):
            direct: list[float] = []
            through: list[float] = []
            for _ in range(rounds):
                direct += await drive(session, worker, "", body, requests, concurrency)
                through += await drive(session, gateway_url, key, body, requests, concurrency)
            p50, q50 = statistics.median(direct), statistics.median(through)
            p99, q99 = statistics.quantiles(direct, n=100)[98], statistics.quantiles(through, n=100)[98]
            print(f"{name:<26}{p50:>10.2f}{q50:>12.2f}{q50 - p50:>10.2f}{q99 - p99:>11.2f}{q50 / p50:>7.2f}x")


async def drive(
    session: aiohttp.ClientSession, url: str, key: str, body: dict, requests: int, concurrency: int
) -> list[float]:
    """Milliseconds of each request, from sending to the last byte."""
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    times: list[float] = []
    left = iter(range(requests))

    async def client() -> None:
        for _ in left:
            started = time.perf_counter()
            async with session.post(f"{url}/v1/chat/completions", data=data, headers=headers) as response:
                content = await response.read()
            if response.status != 200 or not content:
                raise SystemExit(f"{url} answered {response.status}: {content[:300]!r}")
            times.append((time.perf_counter() - started) * 1000)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return times


@contextmanager
def upstream(think_ms: float) -> Iterator[str]:
    """The stand-in for a worker, in its own process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=serve_upstream, args=(think_ms, sender), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{receiver.recv()}"
    finally:
        process.terminate()
        process.join()


def serve_upstream(think_ms: float, sender: multiprocessing.connection.Connection) -> None:
    async def chat(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        await asyncio.sleep(think_ms / 1000)
        usage = {"prompt_tokens": 100, "completion_tokens": FRAMES, "total_tokens": 100 + FRAMES}
        if not asked.get("stream"):
            message = {"role": "assistant", "content": "word " * FRAMES}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return web.json_response({"id": "c", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunk = {"id": "c", "choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]}
        frame = f"data: {json.dumps(chunk)}\n\n".encode()
        for _ in range(FRAMES):
            await response.write(frame)
            await asyncio.sleep(0)
        if (asked.get("stream_options") or {}).get("include_usage"):
            await response.write(
                f"data: {json.dumps({'id': 'c', 'choices': [], 'usage': usage})}\n\n".encode()
            )
        await response.write(b"data: [DONE]\n\n")
        return response

    def constant(content: dict | str):  # noqa: ANN202
        async def answer(_request: web.Request) -> web.Response:
            return web.Response(text=content) if isinstance(content, str) else web.json_response(content)

        return answer

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        app.router.add_get("/health", constant(""))
        app.router.add_get("/version", constant({"version": "0.32.0"}))
        app.router.add_get("/metrics", constant(METRICS))
        app.router.add_get("/v1/models", constant({"data": [{"id": "bench", "created": 1}]}))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        sender.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    uvloop.run(serve())


@contextmanager
def gateway(worker: str) -> Iterator[tuple[str, str]]:
    """`appliance gateway` in front of the upstream, with a fresh data directory."""
    environment = {"APPLIANCE_POOL__URLS": json.dumps([worker]), "APPLIANCE_LOG__LEVEL": "warning"}
    with (
        tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch,
        ApplianceProcess("gateway", data=Path(scratch), environment=environment) as appliance,
    ):
        yield appliance.url, appliance.key


if __name__ == "__main__":
    main()
