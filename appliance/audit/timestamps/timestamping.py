"""
Has the log time-stamped: asks the authority at intervals, and knows how far the log is timed.

Only the newest checkpoint is stamped, as it covers every entry before.  The task only reads the log, so a
slow, dead or hostile authority does not affect it.  Fails open: requests are served without time stamps; the
age of the newest is a metric with an alert.
"""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import aiohttp

from appliance.audit.checkpoint import parse_body, parse_note
from appliance.audit.store import SqlAuditStore
from appliance.audit.timestamps.authority import Authority, load_authority, make_query
from appliance.audit.timestamps.store import Timestamp, Timestamps
from appliance.audit.verify import MAX_TIMESTAMP_BYTES
from appliance.errors import (
    AuditError,
    AuditUnavailableError,
    AuditVerificationError,
    ConfigurationError,
    MalformedCheckpointError,
)
from appliance.infra.settings import AuditSettings

QUERY_TYPE, REPLY_TYPE = "application/timestamp-query", "application/timestamp-reply"
TIMEOUT_SECONDS = 20.0
"""Maximum time an authority may take to answer; the log does not wait for it."""
POLL_SECONDS = 60.0
"""Time between two looks at whether a time stamp is due, and before the first retry."""
CLOCK_DIFFERENCE_SECONDS = 60.0
"""Difference between our clock and the authority's above which operators are warned."""
NONCE_BYTES = 8

Report = Callable[[str, str | None], None]
"""Takes an event and what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimestampLevel:
    """How far the log is time-stamped."""

    seconds: float = 0.0
    """Time between two time stamps, by the settings; 0 without an authority."""
    size: int = 0
    """Entries the newest time stamp covers; 0 for none."""
    time: int = 0
    """When it was made, in seconds since the epoch by the authority's clock; 0 for never."""
    failures: int = 0
    """Requests that failed since the last one that succeeded."""
    clock_difference: float = 0.0
    """Seconds by which the authority's clock was ahead of ours at its last answer."""


class AuthorityClient:
    """HTTP to the authority of the settings; every file is read again for each request."""

    def __init__(self, settings: AuditSettings, url: str) -> None:
        """Raises ConfigurationError if a file cannot be used."""
        self._settings, self._url = settings, url
        self._context()

    async def ask(self, query: bytes) -> bytes:
        """Return the answer, unread; raises AuditUnavailableError, or ConfigurationError for a file."""
        context = await asyncio.to_thread(self._context)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        content = b""
        try:
            # No proxy from the environment and no redirect: only the address in the settings is reached.
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
                session.post(
                    self._url,
                    data=query,
                    headers={"Content-Type": QUERY_TYPE, "Accept-Encoding": "identity"},
                    allow_redirects=False,
                    ssl=context or True,
                ) as response,
            ):
                async for chunk in response.content.iter_any():
                    content += chunk
                    if len(content) > MAX_TIMESTAMP_BYTES:
                        break
                status, kind = response.status, response.content_type
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            message = f"the time-stamp authority at {self._url} cannot be reached: {reason}"
            raise AuditUnavailableError(message) from error
        if status != 200 or kind != REPLY_TYPE or len(content) > MAX_TIMESTAMP_BYTES:  # noqa: PLR2004 - HTTP
            what = f"status {status}, {kind}, {len(content)} bytes or more"
            raise AuditUnavailableError(f"the time-stamp authority at {self._url} sent no time stamp: {what}")
        return content

    def _context(self) -> ssl.SSLContext | None:
        settings = self._settings
        if not self._url.startswith("https://"):
            return None
        try:
            context = ssl.create_default_context(cafile=settings.timestamp_ca_file)
            if settings.timestamp_client_certificate_file is not None:
                # A password is always given, or OpenSSL would ask for it on the terminal.
                certificate, key = (
                    settings.timestamp_client_certificate_file,
                    settings.timestamp_client_key_file,
                )
                context.load_cert_chain(certificate, key, "")
        except (OSError, ValueError) as error:
            message = f"a file for TLS to audit.timestamp_url cannot be used: {error}"
            raise ConfigurationError(message) from error
        return context


class Timestamping:
    def __init__(
        self,
        *,
        store: SqlAuditStore,
        settings: AuditSettings,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
        report: Report,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Prepare; the caller starts `run`.  `clock` is Unix time.

        Raises ConfigurationError if a file of the settings cannot be used.
        """
        self._store, self._kept = store, Timestamps(store.database)
        self._authority = load_authority(settings)
        url = settings.timestamp_url
        self._client = AuthorityClient(settings, url) if url and self._authority else None
        self._clock, self._monotonic, self._random_bytes = clock, monotonic, random_bytes
        self._report = report
        self._seconds = settings.timestamp_seconds
        self._due_at: float | None = None
        self._problem: str | None = None
        self.level = TimestampLevel(seconds=self._seconds if self._authority else 0.0)
        """How far the log is timed, as of the last round."""

    async def run(self, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Ask for a time stamp whenever one is due, until cancelled."""
        while True:
            await self.round()
            await pause(POLL_SECONDS)

    async def round(self) -> None:
        """Read how far the log is timed, and ask for a time stamp if one is due."""
        try:
            self._observe(await asyncio.to_thread(self._kept.newest))
            if self._client is None or self._authority is None or self._monotonic() < (self._due_at or 0.0):
                return
            text, size = await asyncio.to_thread(latest_text, self._store)
            if size <= self.level.size:
                return
        except AuditError:
            return  # the log itself reports the same failure, or nothing was signed yet
        try:
            stamp = await self._ask(self._client, self._authority, text, size)
            problem = None
        except (AuditError, ConfigurationError) as error:
            problem = str(error)
            failures = self.level.failures + 1
            self.level = replace(self.level, failures=failures)
            # The more often it failed in a row, the rarer, but never rarer than time stamps are.
            wait = min(POLL_SECONDS * 2 ** min(failures - 1, 10), self._seconds)
            self._due_at = self._monotonic() + wait
        else:
            self._observe(stamp)
            self.level = replace(self.level, failures=0)
        if problem != self._problem:
            self._report("timestamp_failed" if problem else "timestamp_made", problem)
        self._problem = problem

    def _observe(self, newest: Timestamp | None) -> None:
        """Take over the newest time stamp, which another gateway may have asked for."""
        if newest is None or (newest.size, newest.time) == (self.level.size, self.level.time):
            return
        # After a start, the wait begins when the time stamp was made; later, when it was observed.
        age = self._clock() - newest.time if self._due_at is None else 0.0
        left = self._seconds - age if 0.0 <= age < self._seconds else 0.0
        self._due_at = self._monotonic() + left
        self.level = replace(self.level, size=newest.size, time=newest.time)

    async def _ask(self, client: AuthorityClient, authority: Authority, text: str, size: int) -> Timestamp:
        nonce = int.from_bytes(self._random_bytes(NONCE_BYTES)) >> 1
        response = await client.ask(make_query(text, policy=authority.policy, nonce=nonce))
        stamp = await asyncio.to_thread(authority.judge, response, text, nonce=nonce)
        difference = stamp.time - self._clock()
        self.level = replace(self.level, clock_difference=difference)
        if abs(difference) > CLOCK_DIFFERENCE_SECONDS:
            direction = "behind" if difference > 0 else "ahead of"
            self._report(
                "timestamp_clock_differs",
                f"our clock is {abs(difference):.0f} s {direction} the time-stamp authority's: check both",
            )
        timestamp = Timestamp(size=size, token=response, time=stamp.time)
        await asyncio.to_thread(self._kept.save, timestamp)
        return timestamp


def latest_text(store: SqlAuditStore) -> tuple[str, int]:
    """
    Return the text of the latest checkpoint, and its size; blocks.

    Raises AuditVerificationError if nothing was signed yet, MalformedCheckpointError, or
    AuditUnavailableError.
    """
    latest = store.latest_checkpoint()
    if latest is None:
        raise AuditVerificationError("nothing was signed yet; wait for the first checkpoint")
    text = parse_note(latest.note).text
    if parse_body(text).size != latest.size:
        raise MalformedCheckpointError(f"a checkpoint is kept as that of {latest.size} entries, and is not")
    return text, latest.size


def import_response(store: SqlAuditStore, authority: Authority, response: bytes) -> Timestamp:
    """
    Keep a time stamp that was carried here; blocks.

    Raises AuditVerificationError if it is not the authority's over a checkpoint of this log, and
    AuditUnavailableError.
    """
    kept = Timestamps(store.database)
    text = kept.checkpoint_of(authority.judge(response).imprint)
    stamp = authority.judge(response, text)
    timestamp = Timestamp(size=parse_body(text).size, token=response, time=stamp.time)
    kept.save(timestamp)
    return timestamp
