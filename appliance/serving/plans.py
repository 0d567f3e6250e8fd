"""
The plans by which a worker can be started, with its draft and without, and which one is in force.

A restart request comes from this process or, through a file, from the plugin in the worker.  A malformed
request is ignored: the worker's end then counts as a failure, which is answered with a start as well.

The draft is chosen before every start: the active draft may have changed meanwhile, and a draft under test
must not outlive its promotion.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from appliance.serving.launch import LaunchPlan
from appliance.serving.restart_request import WITH_DRAFT, RestartRequest, parse_restart_request


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    plan: LaunchPlan
    is_trial: bool = False
    """Whether its draft is under test: the worker may fall back from it, never to it."""


Choose = Callable[[RestartRequest], ChosenPlan]
"""Finds the draft for a start and plans it.  It may read whole drafts, so it is called in a thread; it never
fails, but falls back to the active draft, and from there to the one of the settings."""


class WorkerPlans:
    """One worker's plans; the first is in force until a restart is requested."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        target_only: LaunchPlan | None = None,
        restart_file: Path | None = None,
        choose: Choose | None = None,
    ) -> None:
        """
        Nothing is read or removed yet.

        Without `target_only` the worker cannot run without its draft; without `choose` there is only the
        draft of the settings.
        """
        self._plan = plan
        self._target_only = target_only
        self._restart_file = restart_file
        self._choose = choose
        self._current = plan
        self._sound: LaunchPlan | None = None
        self._request: RestartRequest | None = None
        self._granted = WITH_DRAFT
        self._is_trial = self._is_pinned = False

    @property
    def current(self) -> LaunchPlan:
        return self._current

    @property
    def is_hard_off(self) -> bool:
        """Whether the plan in force omits the draft that the settings name."""
        return self._current is self._target_only

    def request_restart(self, request: RestartRequest) -> None:
        """Takes effect once the worker has ended."""
        self._request = request

    @property
    def restart_requested(self) -> bool:
        return self._request is not None or (self._restart_file is not None and self._restart_file.exists())

    def discard_requests(self) -> None:
        """Drop the requests to a worker process that has ended."""
        self._request = None
        self._read_request()

    def accept_request(self) -> bool:
        """Apply the pending request; False if there is none.  Each request takes effect once."""
        found = self._read_request()
        request, self._request = found if self._request is None else self._request, None
        if request is None:
            return False
        self._granted = request
        self._current = self._plan if request.with_draft or self._target_only is None else self._target_only
        self._is_trial = self._is_pinned = False
        return True

    async def prepare(self) -> None:
        """Choose the draft for the next start, unless it starts without one or repeats a plan that worked."""
        granted = self._granted
        if self._choose is None or self._is_pinned or not granted.with_draft:
            return
        chosen = await asyncio.to_thread(self._choose, granted)
        if self._granted is granted:
            self._current, self._is_trial = chosen.plan, chosen.is_trial

    def record_health(self) -> None:
        """Remember that the plan in force works; one with a draft under test is never rolled back to."""
        if not self._is_trial:
            self._sound = self._current

    def roll_back(self) -> bool:
        """
        Replace the plan in force by one that is likelier to work; False if there is none.

        From a draft under test to the active one, and from there to the last plan that worked, which stays in
        force until a restart is requested.
        """
        if self._is_trial:
            self._granted, self._current, self._is_trial = WITH_DRAFT, self._plan, False
            return True
        if self._sound is None or self._sound == self._current:
            return False
        self._current, self._is_pinned = self._sound, True
        return True

    def _read_request(self) -> RestartRequest | None:
        """Read the file and remove it; ignored if it cannot be removed, or every end would look requested."""
        if self._restart_file is None:
            return None
        try:
            text = self._restart_file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            text = ""
        except OSError:
            return None
        try:
            self._restart_file.unlink()
            content = json.loads(text)
        except (OSError, ValueError, RecursionError):
            return None
        return parse_restart_request(content)
