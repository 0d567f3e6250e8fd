"""
HTTP to witnesses: one call, `add-checkpoint`.

Whatever goes wrong is `AuditUnavailableError`; what a witness answers is judged elsewhere.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self

import aiohttp

from appliance.audit.cosigned import CosignedCheckpoints
from appliance.audit.store import SqlAuditStore
from appliance.audit.witness.witness import TEXT_TYPE, Answer
from appliance.audit.witness.witnessing import Witnessing, load_witnesses
from appliance.errors import AuditUnavailableError
from appliance.infra.settings import AuditSettings

MAX_ANSWER_BYTES = 2**16
TIMEOUT_SECONDS = 10.0
"""Maximum time a witness may take to answer; the log does not wait for it."""


@asynccontextmanager
async def open_witnessing(
    *,
    store: SqlAuditStore,
    settings: AuditSettings,
    report: Callable[[str, str | None], None],
) -> AsyncIterator[Witnessing]:
    """The task that asks the witnesses; the caller starts its `run`.  Raises as `load_witnesses`."""
    async with WitnessClient.open(timeout_seconds=TIMEOUT_SECONDS) as client:
        yield Witnessing(
            store=store,
            kept=CosignedCheckpoints(store.database),
            witnesses=load_witnesses(settings),
            courier=client,
            seconds=settings.witness_seconds,
            report=report,
        )


class WitnessClient:
    """Connections to witnesses; made by `open`, used on one event loop."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @classmethod
    @asynccontextmanager
    async def open(cls, *, timeout_seconds: float) -> AsyncIterator[Self]:
        """Connections that give up on a witness after so long; closed on leaving."""
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        # No proxy from the environment and no redirect: only the address in the settings is reached.
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            yield cls(session)

    async def add_checkpoint(self, url: str, text: str) -> Answer:
        """Raises AuditUnavailableError if the witness cannot be reached, or answers too much."""
        try:
            async with self._session.post(
                f"{url.rstrip('/')}/add-checkpoint",
                data=text.encode(),
                headers={"Content-Type": TEXT_TYPE},
                allow_redirects=False,
            ) as response:
                content = await response.content.read(MAX_ANSWER_BYTES + 1)
                while len(content) <= MAX_ANSWER_BYTES and not response.content.at_eof():
                    content += await response.content.read(MAX_ANSWER_BYTES + 1)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise AuditUnavailableError(f"the witness at {url} cannot be reached: {reason}") from error
        if len(content) > MAX_ANSWER_BYTES:
            raise AuditUnavailableError(f"the witness at {url} answered more than any cosignature is long")
        return Answer(status=response.status, text=content.decode(errors="replace"))
