"""
Overrides: an operator's mode for a worker's speculation, for a limited time, instead of the monitor's.

Kept in the audit log's database, because the gateway that takes the request may not hold the lease.
An override always ends, so that a forgotten one does not stay in force.  Reading fails with an error, and the
control loop then uses the overrides it read last; writing fails closed, and nothing is in force.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from sqlalchemy import Column, Double, Integer, MetaData, Table, Text, delete, insert, select

from appliance.errors import ControlUnavailableError, InvalidRequestError
from appliance.infra.database import SqlStore
from appliance.speculation.values import SpeculationMode

EVERY_WORKER = "*"
AUTO = "auto"
MODES = (SpeculationMode.SPECULATIVE, SpeculationMode.TARGET_ONLY)
MINIMUM_SECONDS, DEFAULT_SECONDS, MAXIMUM_SECONDS = 60, 3600, 7 * 86400
MAXIMUM_NOTE = 200

_overrides = Table(
    "speculation_override",
    MetaData(),
    Column("worker", Text, primary_key=True),
    Column("mode", Text, nullable=False),
    Column("draft_tokens", Integer),
    Column("actor", Text, nullable=False),
    Column("note", Text, nullable=False),
    Column("since", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """In force from `since` until just before `expires_at`, both Unix time."""

    worker: str  # its id, or `*` for all that have no override of their own
    mode: SpeculationMode  # `speculative` or `target_only`
    draft_tokens: int | None = None  # at every batch size; None for the worker's maximum
    actor: str
    note: str
    since: float
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideRequest:
    worker: str
    mode: SpeculationMode | None  # None removes the override
    draft_tokens: int | None = None
    seconds: int = DEFAULT_SECONDS
    note: str = ""

    def made_by(self, actor: str, now: float) -> Override | None:
        if self.mode is None:
            return None
        return Override(
            worker=self.worker,
            mode=self.mode,
            draft_tokens=self.draft_tokens,
            actor=actor,
            note=self.note,
            since=now,
            expires_at=now + self.seconds,
        )


def in_force(overrides: Iterable[Override], now: float) -> tuple[Override, ...]:
    return tuple(override for override in overrides if now < override.expires_at)


def override_for(overrides: Iterable[Override], worker: str, now: float) -> Override | None:
    """The worker's own takes precedence over the one for all."""
    found = {override.worker: override for override in in_force(overrides, now)}
    return found.get(worker) or found.get(EVERY_WORKER)


def parse_override(members: Mapping[str, Any]) -> OverrideRequest:
    """Does not check whether the worker exists; raises InvalidRequestError."""
    unknown = sorted(members.keys() - {"worker", "mode", "draft_tokens", "seconds", "note"})
    if unknown:
        message = f"`{unknown[0]}` is not known here; use worker, mode, draft_tokens, seconds and note."
        raise InvalidRequestError(message, param=unknown[0])
    worker, mode = members.get("worker"), members.get("mode")
    if not isinstance(worker, str) or not worker:
        message = "`worker` must be the id of a worker, or `*` for all."
        raise InvalidRequestError(message, param="worker")
    if mode not in (*MODES, AUTO):
        message = "`mode` must be `speculative`, `target_only` or `auto`."
        raise InvalidRequestError(message, param="mode")
    return OverrideRequest(
        worker=worker,
        mode=None if mode == AUTO else SpeculationMode(mode),
        draft_tokens=_parse_draft_tokens(members.get("draft_tokens"), mode),
        seconds=_parse_seconds(members.get("seconds", DEFAULT_SECONDS)),
        note=parse_note(members.get("note", "")),
    )


def parse_note(note: object) -> str:
    """One line of at most `MAXIMUM_NOTE` characters, or raises InvalidRequestError."""
    if not isinstance(note, str) or len(note) > MAXIMUM_NOTE or not note.isprintable():
        message = f"`note` must be one line of at most {MAXIMUM_NOTE} characters."
        raise InvalidRequestError(message, param="note")
    return note


def _parse_draft_tokens(draft_tokens: object, mode: object) -> int | None:
    if draft_tokens is None:
        return None
    if mode != SpeculationMode.SPECULATIVE:
        message = "`draft_tokens` goes with the mode `speculative` only."
        raise InvalidRequestError(message, param="draft_tokens")
    if type(draft_tokens) is not int or draft_tokens < 1:
        message = "`draft_tokens` must be a whole number from 1 on."
        raise InvalidRequestError(message, param="draft_tokens")
    return draft_tokens


def _parse_seconds(seconds: object) -> int:
    if type(seconds) is not int or not MINIMUM_SECONDS <= seconds <= MAXIMUM_SECONDS:
        message = f"`seconds` must be a whole number from {MINIMUM_SECONDS} to {MAXIMUM_SECONDS}."
        raise InvalidRequestError(message, param="seconds")
    return seconds


class OverrideStore(Protocol):
    """Every method may raise ControlUnavailableError."""

    async def put(self, override: Override) -> None:
        """Replaces one for the same worker; durable on return."""

    async def delete(self, worker: str) -> bool:
        """Of one worker, or of all (`*`); returns whether there was one.  Durable on return."""

    async def list(self) -> tuple[Override, ...]:
        """Ordered by worker; some may have expired."""


class SqlOverrideStore(SqlStore):
    """In tables that `infra.schema` has made; raises ConfigurationError if the URL cannot be used."""

    subject = "the speculation overrides"
    unavailable = ControlUnavailableError

    async def put(self, override: Override) -> None:
        await asyncio.to_thread(self._put, override)

    async def delete(self, worker: str) -> bool:
        return await asyncio.to_thread(self._delete, worker)

    async def list(self) -> tuple[Override, ...]:
        return await asyncio.to_thread(self._list)

    def _put(self, override: Override) -> None:
        replaced = (_overrides.c.worker == override.worker) | (_overrides.c.expires_at <= override.since)
        with self._writing() as connection:
            connection.execute(delete(_overrides).where(replaced))
            row = asdict(override) | {"mode": str(override.mode)}
            connection.execute(insert(_overrides).values(row))

    def _delete(self, worker: str) -> bool:
        with self._writing() as connection:
            ended = connection.execute(delete(_overrides).where(_overrides.c.worker == worker))
            return ended.rowcount > 0

    def _list(self) -> tuple[Override, ...]:
        with self._reading() as connection:
            rows = connection.execute(select(_overrides).order_by(_overrides.c.worker)).all()
        return tuple(Override(**row._asdict() | {"mode": SpeculationMode(row.mode)}) for row in rows)
