"""
The console's templates: everything that is put into a page is escaped.
"""

from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined

DASH = "\N{EN DASH}"


def open_templates() -> Environment:
    """Read templates from this package; a name that a page lacks is an error, not a blank."""
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
    """Unix time as people read it, in UTC; a dash for never."""
    if not time:
        return DASH
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def show_figure(value: float | None, places: int = 2) -> str:
    """A number with a fixed count of decimals; a dash for none."""
    return DASH if value is None else f"{value:,.{places}f}"
