"""The parts of the console, and its templates, which escape every value."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined

from appliance.api.console.history import History
from appliance.api.console.sessions import LoginAttempts, Sessions
from appliance.audit.timestamps.timestamping import TimestampLevel
from appliance.audit.verification import LogVerification
from appliance.audit.witness.witnessing import WitnessLevel
from appliance.infra.settings import ConsoleSettings

DASH = "\N{EN DASH}"


def open_templates() -> Environment:
    """The templates of this package; an undefined name is an error, not a blank."""
    environment = Environment(
        loader=PackageLoader("appliance.api.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["moment"] = show_moment
    environment.filters["figure"] = show_figure
    return environment


def show_moment(time: float) -> str:
    """Unix time in UTC; a dash for 0."""
    if not time:
        return DASH
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def show_figure(value: float | None, places: int = 2) -> str:
    """A number with fixed decimals; a dash for None."""
    return DASH if value is None else f"{value:,.{places}f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    settings: ConsoleSettings
    sessions: Sessions
    attempts: LoginAttempts
    history: History
    verification: LogVerification
    witnesses: Callable[[], WitnessLevel]
    timestamps: Callable[[], TimestampLevel]
    clock: Callable[[], float]
    """Monotonic seconds, for sessions and the chart."""
    templates: Environment = field(default_factory=open_templates)

    async def run(self) -> None:
        """Sample for the chart until cancelled; then stop a running verification."""
        try:
            await self.history.run()
        finally:
            await self.verification.stop()
