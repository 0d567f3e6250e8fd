"""
What the console has beside the services: its sessions, its chart, its verification.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from jinja2 import Environment

from appliance.api.console.history import History
from appliance.api.console.logins import Logins
from appliance.api.console.sessions import Sessions
from appliance.api.console.templating import open_templates
from appliance.audit.verification import LogVerification
from appliance.audit.witness.witnessing import WitnessLevel
from appliance.infra.settings import ConsoleSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """The parts of one gateway's console."""

    settings: ConsoleSettings
    sessions: Sessions
    logins: Logins
    history: History
    verification: LogVerification
    witnesses: Callable[[], WitnessLevel]
    clock: Callable[[], float]
    """Steady seconds; the clock of sessions and of the chart."""
    templates: Environment = field(default_factory=open_templates)

    async def run(self) -> None:
        """Keep the chart until cancelled, and then give up a verification that runs."""
        try:
            await self.history.run()
        finally:
            await self.verification.stop()
