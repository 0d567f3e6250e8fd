"""
The console's sessions and failed logins, in memory only.

A session ends after its idle time, at its maximum age, at logout, and with the process.  A crash loses all
sessions: operators log in again.
"""

import hmac
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MAX_FAILED_LOGINS = 10
"""From one address within `FAILED_LOGIN_SECONDS`; then the address has to wait."""
FAILED_LOGIN_SECONDS = 60.0
MAX_ADDRESSES = 4096
"""Addresses with failed logins; the oldest is dropped for another."""
MAX_SESSIONS = 1000
"""The least recently used one is dropped for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentForm:
    path: str
    """As decoded from the request."""
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What the next page of a session says, once: what was done, or why not."""

    text: str
    is_problem: bool = False
    key: str = field(default="", repr=False)
    """A new API key; shown nowhere else."""
    sent: SentForm | None = field(default=None, repr=False)
    """The form that was refused, to be corrected."""


@dataclass(slots=True, kw_only=True)
class ConsoleSession:
    credential: str = field(repr=False)
    """The admin key or token of the login; checked at each request, so a revoked one gives no access."""
    csrf: str = field(repr=False)
    """The token of this session's forms."""
    began: float
    used: float
    notice: Notice | None = None

    def take_notice(self) -> Notice | None:
        taken, self.notice = self.notice, None
        return taken

    def vouches_for(self, token: str) -> bool:
        """Whether a form came from a page of this session; compares in constant time."""
        return hmac.compare_digest(self.csrf.encode(), token.encode())


class Sessions:
    def __init__(
        self,
        *,
        idle_seconds: float,
        longest_seconds: float,
        clock: Callable[[], float],
        new_token: Callable[[], str] = lambda: secrets.token_urlsafe(32),
    ) -> None:
        self._idle_seconds, self._longest_seconds = idle_seconds, longest_seconds
        self._clock, self._new_token = clock, new_token
        self._sessions: dict[str, ConsoleSession] = {}
        """By random id, the most recently used last."""

    def begin(self, credential: str) -> str:
        """Start a session and return its id."""
        self._forget_ended()
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        session_id, now = self._new_token(), self._clock()
        self._sessions[session_id] = ConsoleSession(
            credential=credential, csrf=self._new_token(), began=now, used=now
        )
        return session_id

    def find(self, session_id: str, *, touches: bool = True) -> ConsoleSession | None:
        """The session of an id, if it has not ended; `touches` if this counts as use."""
        self._forget_ended()
        session = self._sessions.get(session_id)
        if session is not None and touches:
            session.used = self._clock()
            self._sessions[session_id] = self._sessions.pop(session_id)
        return session

    def end(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def _forget_ended(self) -> None:
        now = self._clock()
        ended = [
            session_id
            for session_id, session in self._sessions.items()
            if now - session.used >= self._idle_seconds or now - session.began >= self._longest_seconds
        ]
        for session_id in ended:
            del self._sessions[session_id]


class LoginAttempts:
    """
    Failed logins by address, within the last `seconds`.

    Keys are too long to be guessed; the limit keeps attempts from filling the log.  It refuses no valid key.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        attempts: int = MAX_FAILED_LOGINS,
        seconds: float = FAILED_LOGIN_SECONDS,
    ) -> None:
        self._attempts, self._seconds, self._clock = attempts, seconds, clock
        self._failed: dict[str, deque[float]] = {}

    def wait_seconds(self, address: str) -> float:
        """Time until this address may log in again; 0 if it may now."""
        failed = self._failed.get(address)
        if failed is None or len(failed) < self._attempts:
            return 0.0
        return max(0.0, failed[0] + self._seconds - self._clock())

    def failed(self, address: str) -> None:
        if address not in self._failed and len(self._failed) >= MAX_ADDRESSES:
            del self._failed[next(iter(self._failed))]
        self._failed.setdefault(address, deque(maxlen=self._attempts)).append(self._clock())

    def succeeded(self, address: str) -> None:
        self._failed.pop(address, None)
