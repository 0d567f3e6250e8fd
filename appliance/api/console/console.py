"""The parts of the console, and its templates, which escape every value."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from appliance.api.console.history import History
from appliance.api.console.sessions import LoginAttempts, Sessions
from appliance.audit.store import SqlAuditStore
from appliance.audit.timestamps.timestamping import TimestampLevel
from appliance.audit.verification import LogVerification
from appliance.audit.witness.witnessing import WitnessLevel
from appliance.gateway.cost.reader import UsageReader
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
    environment.filters["code"] = show_code
    return environment


def show_moment(time: float) -> str:
    """Unix time in UTC; a dash for 0."""
    if not time:
        return DASH
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def show_figure(value: float | None, places: int = 2) -> str:
    """A number with fixed decimals; a dash for None."""
    return DASH if value is None else f"{value:,.{places}f}"


def show_code(text: str) -> Markup:
    """Escaped, with what stands in backticks as code."""
    parts = escape(text).split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else part for number, part in enumerate(parts)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    settings: ConsoleSettings
    sessions: Sessions
    attempts: LoginAttempts
    history: History
    verification: LogVerification
    usage: UsageReader
    witnesses: Callable[[], WitnessLevel]
    timestamps: Callable[[], TimestampLevel]
    open_log: Callable[[], SqlAuditStore]
    """The log's database; whoever opens it closes it."""
    vkey: Callable[[], str]
    """The current verifier keys, one per line."""
    clock: Callable[[], float]
    """Monotonic seconds, for sessions and the chart."""
    templates: Environment = field(default_factory=open_templates)

    async def run(self) -> None:
        """Sample for the chart until cancelled; then stop a running verification."""
        try:
            await self.history.run()
        finally:
            await self.verification.stop()
