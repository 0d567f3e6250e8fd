"""
The plans a worker can be started by, with its draft and without, and which of them is in force.

A wish for a restart comes from this process or, by way of a file, from the plugin in the worker.
What cannot be read as a wish is none: the worker's end then counts as a failure, which is answered
with a start all the same.

Which draft a worker with a draft gets is asked anew before every start: what is in service may have
changed meanwhile, and a draft that was only being tried does not outlive its promotion.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from appliance.serving.launch import LaunchPlan
from appliance.serving.restart_request import WITH_DRAFT, Wish, parse_wish


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The plan for one start with a draft."""

    plan: LaunchPlan
    is_trial: bool = False
    """Whether its draft is only being tried: one to fall back from, and never to."""


Choose = Callable[[Wish], Chosen]
"""Finds the draft for a start and plans it.  It may read whole drafts, so it is called in a thread; it
never fails, but falls back to the draft in service, and from there to the one of the settings."""


class WorkerPlans:
    """One worker's plans; the first one is in force until somebody wishes for another."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        target_only: LaunchPlan | None = None,
        restart_file: Path | None = None,
        choose: Choose | None = None,
    ) -> None:
        """
        Prepare; nothing is read or removed yet.

        Args:
            plan: how the settings want the worker started.
            target_only: how to start it without its draft; None where `plan` has none, or there is
                no going without.
            restart_file: where the worker leaves the wish to be started anew.
            choose: finds the draft for a start; None where there is only that of the settings.
        """
        self._plan = plan
        self._target_only = target_only
        self._restart_file = restart_file
        self._choose = choose
        self._current = plan
        self._sound: LaunchPlan | None = None
        self._wish: Wish | None = None
        self._granted = WITH_DRAFT
        self._is_trial = self._is_pinned = False

    @property
    def current(self) -> LaunchPlan:
        """The plan in force."""
        return self._current

    @property
    def is_hard_off(self) -> bool:
        """Whether the plan in force leaves out the draft that the settings want."""
        return self._current is self._target_only

    def wish(self, wish: Wish) -> None:
        """Wish for a restart; it counts once the worker has ended."""
        self._wish = wish

    @property
    def is_wished(self) -> bool:
        """Whether somebody wishes the worker to end and to be started anew."""
        return self._wish is not None or (self._restart_file is not None and self._restart_file.exists())

    def forget_wishes(self) -> None:
        """Drop what was wished of a worker that is no more."""
        self._wish = None
        self._read_wish()

    def take_wish(self) -> bool:
        """Put the plan in force that was wished for, if one was; each wish counts once."""
        found = self._read_wish()
        wish, self._wish = found if self._wish is None else self._wish, None
        if wish is None:
            return False
        self._granted = wish
        self._current = self._plan if wish.with_draft or self._target_only is None else self._target_only
        self._is_trial = self._is_pinned = False
        return True

    async def prepare(self) -> None:
        """Choose the draft for the next start, unless it is one without, or what worked is to be repeated."""
        granted = self._granted
        if self._choose is None or self._is_pinned or not granted.with_draft:
            return
        chosen = await asyncio.to_thread(self._choose, granted)
        if self._granted is granted:
            self._current, self._is_trial = chosen.plan, chosen.is_trial

    def saw_health(self) -> None:
        """Remember that the plan in force works; one with a draft on trial is nothing to come back to."""
        if not self._is_trial:
            self._sound = self._current

    def go_back(self) -> bool:
        """
        Leave the plan in force for one that is likelier to work; False where there is none.

        From a draft on trial to the one in service, and from there to the plan that was the last to
        work, which then stays in force whatever is in service, until somebody wishes otherwise.
        """
        if self._is_trial:
            self._granted, self._current, self._is_trial = WITH_DRAFT, self._plan, False
            return True
        if self._sound is None or self._sound == self._current:
            return False
        self._current, self._is_pinned = self._sound, True
        return True

    def _read_wish(self) -> Wish | None:
        """Read the file and remove it; one that stays would make every end look wanted, so it is none."""
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
        return parse_wish(content)
