"""
The plans a worker can be started by, with its draft and without, and which of them is in force.

A wish for a restart comes from this process or, by way of a file, from the plugin in the worker.
What cannot be read as a wish is none: the worker's end then counts as a failure, which is answered
with a start all the same.
"""

import json
from pathlib import Path

from appliance.serving.launch import LaunchPlan


class WorkerPlans:
    """One worker's plans; the first one is in force until somebody wishes for the other."""

    def __init__(
        self, plan: LaunchPlan, *, target_only: LaunchPlan | None = None, restart_file: Path | None = None
    ) -> None:
        """
        Prepare; nothing is read or removed yet.

        Args:
            plan: how the settings want the worker started.
            target_only: how to start it without its draft; None where `plan` has none, or there is
                no going without.
            restart_file: where the worker leaves the wish to be started anew.
        """
        self._plan = plan
        self._target_only = target_only
        self._restart_file = restart_file
        self._current = plan
        self._sound: LaunchPlan | None = None
        self._wish: bool | None = None

    @property
    def current(self) -> LaunchPlan:
        """The plan in force."""
        return self._current

    @property
    def is_hard_off(self) -> bool:
        """Whether the plan in force leaves out the draft that the settings want."""
        return self._current is self._target_only

    def wish(self, *, with_draft: bool) -> None:
        """Wish for a restart; it counts once the worker has ended."""
        self._wish = with_draft

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
        self._current = self._plan if wish or self._target_only is None else self._target_only
        return True

    def saw_health(self) -> None:
        """Remember that the plan in force works."""
        self._sound = self._current

    def go_back(self) -> bool:
        """Put the plan in force that was the last to work; False if that is it already, or none was."""
        if self._sound is None or self._sound is self._current:
            return False
        self._current = self._sound
        return True

    def _read_wish(self) -> bool | None:
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
        wish = content.get("with_draft") if isinstance(content, dict) else None
        return wish if isinstance(wish, bool) else None
