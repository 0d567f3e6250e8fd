"""
Read and control a worker through the plugin inside it (`serving.vllm.plugin`): speculation, token counts.

Speculation is controlled at a port of its own (`serving.vllm.listener`).  A worker without the plugin, one
without that listener, or one that rejects our token, cannot be controlled; that is a reading, not a failure.
Only a worker that does not answer fails.
"""

import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from appliance.errors import WorkerFailedError
from appliance.serving.restart_request import is_digest
from appliance.serving.usage import Usage, count_of
from appliance.serving.worker import Worker
from appliance.serving.worker_protocol import SPECULATION_PATH, USAGE_PATH
from appliance.serving.worker_tls import WorkerTls
from appliance.speculation.values import (
    Capability,
    DraftTokenTable,
    Energy,
    EngineReading,
    Reason,
    SpecDecodeCounters,
    SpeculationMode,
    StepCounters,
    parse_expectation,
    parse_names,
)

OK, NOT_FOUND, UNAUTHORISED = 200, 404, 401
FURTHER = (Capability.DEFERRED_PREFILL, Capability.ATTRIBUTION)
"""Capabilities in addition to control."""
NO_LISTENER = "it runs without the plugin, or at another port (pool.control_port)"
USAGE_SECONDS = 10.0
"""Maximum time for the tokens of a request whose client left, with waiting for a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationCommand:
    table: DraftTokenTable
    mode: SpeculationMode
    reason: Reason
    probe: tuple[tuple[int, int], ...] = ()
    """(draft tokens, steps) of each part; the table is in force again after the last."""

    def body(self) -> dict[str, Any]:
        return {
            "table": [list(span) for span in self.table],
            "mode": str(self.mode),
            "reason": str(self.reason),
            "probe": [list(part) for part in self.probe],
        }


class SpeculationClient:
    """Client of the plugins of all workers, with one token."""

    def __init__(self, session: aiohttp.ClientSession, token: str, tls: WorkerTls) -> None:
        self._session = session
        self._tls = tls
        self._headers = {"Authorization": f"Bearer {token}"}

    @classmethod
    @asynccontextmanager
    async def open(
        cls, *, token: str, tls: WorkerTls, connections: int = 2
    ) -> AsyncIterator["SpeculationClient"]:
        """`connections` is the maximum at one worker."""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit_per_host=connections, keepalive_timeout=4.0),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            yield cls(session, token, tls)

    async def read(self, worker: Worker, timeout_seconds: float) -> EngineReading:
        return await self._control("GET", worker, None, timeout_seconds)

    async def apply(
        self, worker: Worker, command: SpeculationCommand, timeout_seconds: float
    ) -> EngineReading:
        """Apply a table, and start the probe if there is one; effective at the worker's next step."""
        reading = await self._control("PUT", worker, command.body(), timeout_seconds)
        if reading.controllable and reading.table != command.table:
            raise WorkerFailedError("The worker did not apply the draft-token table.")
        return reading

    async def usage(self, worker: Worker, request_id: str) -> Usage | None:
        """The tokens of a request whose connection was closed; None if the worker did not count them."""
        try:
            url = worker.url + USAGE_PATH + request_id
            status, text = await self._request("GET", worker, url, None, USAGE_SECONDS)
            content = json.loads(text) if status == OK else {}
            prompt, completion = count_of(content["prompt_tokens"]), count_of(content["completion_tokens"])
        except (WorkerFailedError, ValueError, KeyError, TypeError, RecursionError):
            return None
        if prompt is None or completion is None:
            return None
        return Usage(prompt_tokens=prompt, completion_tokens=completion)

    async def _control(
        self, method: str, worker: Worker, body: dict[str, Any] | None, timeout_seconds: float
    ) -> EngineReading:
        url = worker.control_url + SPECULATION_PATH
        try:
            return parse_reading(*await self._request(method, worker, url, body, timeout_seconds))
        except WorkerFailedError as error:
            if not isinstance(error.__cause__, ConnectionRefusedError):
                raise
            port = urlsplit(url).port
            return _without_plugin(f"nothing listens on the worker's control port {port}: {NO_LISTENER}")

    async def _request(
        self, method: str, worker: Worker, url: str, body: dict[str, Any] | None, timeout_seconds: float
    ) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        try:
            async with self._session.request(
                *(method, url),
                json=body,
                headers=self._headers,
                ssl=self._tls.context,
                server_hostname=worker.tls_name or None,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError) as error:
            message = f"The worker's plugin could not be reached: {type(error).__name__}."
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            raise WorkerFailedError(message) from cause


def parse_reading(status: int, text: str) -> EngineReading:
    if status == NOT_FOUND:
        return _without_plugin("the worker runs without the plugin, or was given no control token")
    if status == UNAUTHORISED:
        return _without_plugin("the worker does not accept this control token")
    try:
        content = json.loads(text)
        if content.get("leaving") is True:
            return EngineReading(
                controllable=False, problems=(str(content["error"]),), epoch="", is_leaving=True
            )
        if status != OK:
            raise WorkerFailedError(f"The worker's plugin answered {status}: {content['error']}.")
        return _checked(_parse(content))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise WorkerFailedError(f"The answer of the worker's plugin ({status}) is malformed.") from error


def _parse(content: dict[str, Any]) -> EngineReading:
    if not content["controllable"] and not content["epoch"]:
        return EngineReading(
            controllable=False,
            problems=tuple(str(problem) for problem in content["problems"]),
            epoch="",
            missing_capabilities=_parse_missing(content),
            energy=_parse_energy(content),
            target=_parse_digest(content, "target"),
            draft=_parse_digest(content, "draft"),
        )
    drafting = content["drafting"]
    choices = tuple(int(choice) for choice in content["choices"])
    # Absent in a worker of an earlier version; a malformed record promises nothing.
    expected = parse_expectation(content.get("expected"))
    mode, reason = parse_names(content["mode"], content["reason"])
    return EngineReading(
        controllable=bool(content["controllable"]),
        problems=tuple(str(problem) for problem in content["problems"]),
        missing_capabilities=_parse_missing(content),
        epoch=str(content["epoch"]),
        largest_batch=int(content["largest_batch"]),
        choices=choices,
        table=tuple((int(first), int(last), int(k)) for first, last, k in content["table"]),
        mode=mode,
        reason=reason,
        is_probing=bool(content["is_probing"]),
        batch=int(content["batch"]),
        step_count=int(content["step_count"]),
        steps=MappingProxyType(
            {
                (int(cell["batch"]), int(cell["draft_tokens"])): StepCounters(
                    steps=int(cell["steps"]),
                    seconds=float(cell["seconds"]),
                    seconds_squared=float(cell["seconds_squared"]),
                    requests=int(cell["requests"]),
                    tokens=int(cell["tokens"]),
                )
                for cell in content["steps"]
            }
        ),
        drafting=SpecDecodeCounters(
            drafts=int(drafting["drafts"]),
            draft_tokens=int(drafting["draft_tokens"]),
            accepted_tokens=int(drafting["accepted_tokens"]),
            accepted_per_position=tuple(int(count) for count in drafting["accepted_per_position"]),
            drafted_per_position=tuple(int(count) for count in drafting["drafted_per_position"]),
        ),
        # Absent in a worker of an earlier version.
        busy_seconds=float(content["busy_seconds"]) if "busy_seconds" in content else None,
        catch_up_seconds=float(content.get("catch_up_seconds", 0.0)),
        energy=_parse_energy(content),
        expected_length=expected.at(max(choices)) if expected is not None and max(choices) > 0 else None,
        target=_parse_digest(content, "target"),
        draft=_parse_digest(content, "draft"),
    )


def _parse_missing(content: dict[str, Any]) -> Mapping[Capability, str]:
    """Without the plugin's report, in a worker of an earlier version, no further capability is assumed."""
    reported = content.get("missing_capabilities")
    if not isinstance(reported, dict):
        reported = dict.fromkeys(FURTHER, "the worker's plugin does not report it")
    return MappingProxyType({name: str(reported[name]) for name in FURTHER if name in reported})


def _parse_digest(content: dict[str, Any], name: str) -> str:
    """A digest; empty if the worker is of an earlier version, or not started by us."""
    digest = content.get(name)
    return str(digest) if is_digest(digest) else ""


def _parse_energy(content: dict[str, Any]) -> Energy | None:
    energy = content.get("energy")
    if energy is None:
        return None
    return Energy(gpus=int(energy["gpus"]), millijoules=int(energy["millijoules"]))


def _checked(reading: EngineReading) -> EngineReading:
    """Reject figures that no engine can have counted: the decisions rely on these invariants."""
    drafting = reading.drafting
    seconds = [value for cell in reading.steps.values() for value in (cell.seconds, cell.seconds_squared)]
    seconds += [reading.busy_seconds or 0.0, reading.catch_up_seconds]
    if (
        min(reading.choices) != 0
        or reading.largest_batch < 1
        or len(drafting.drafted_per_position) != len(drafting.accepted_per_position)
        or not all(map(math.isfinite, seconds))
    ):
        raise ValueError("the plugin's figures are impossible")
    return reading


def _without_plugin(problem: str) -> EngineReading:
    missing = MappingProxyType(dict.fromkeys(FURTHER, problem))
    return EngineReading(controllable=False, problems=(problem,), epoch="", missing_capabilities=missing)
