"""
Who is logged in to the console: random ids for browsers, kept in memory and nowhere else.

A session ends when it was not used for a while, when it is old, when its owner leaves, and with the
process.  A crash loses them all: operators log in again.
"""

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

MOST_SESSIONS = 1000
"""The one unused for longest makes room for one more."""


@dataclass(slots=True, kw_only=True)
class Session:
    """One browser that logged in."""

    credential: str = field(repr=False)
    """The admin key or token it came with: judged anew at each request, so a revoked one opens nothing."""
    csrf: str = field(repr=False)
    """What each form of this session carries."""
    began: float
    """Clock reading of the login."""
    used: float
    """Clock reading of the last request."""

    def vouches_for(self, token: str) -> bool:
        """Whether a form came from a page of this session; takes the same time for every wrong token."""
        return hmac.compare_digest(self.csrf.encode(), token.encode())


class Sessions:
    """The sessions of one gateway."""

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
        self._sessions: dict[str, Session] = {}
        """By id, the one used last at the end."""

    def begin(self, credential: str) -> str:
        """Log somebody in and return the id of the session."""
        self._forget_ended()
        while len(self._sessions) >= MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        session_id, now = self._new_token(), self._clock()
        self._sessions[session_id] = Session(
            credential=credential, csrf=self._new_token(), began=now, used=now
        )
        return session_id

    def find(self, session_id: str, *, touches: bool = True) -> Session | None:
        """
        The session of this id, if it has not ended.

        Args:
            session_id: as a browser sent it.
            touches: whether this counts as use; what a page asks for by itself does not.
        """
        self._forget_ended()
        session = self._sessions.get(session_id)
        if session is not None and touches:
            session.used = self._clock()
            self._sessions[session_id] = self._sessions.pop(session_id)
        return session

    def end(self, session_id: str) -> None:
        """Log somebody out."""
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
