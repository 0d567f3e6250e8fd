"""HTML reports on drafts: self-contained pages without script, font or external address."""

from jinja2 import Environment, PackageLoader, StrictUndefined


def render_template(name: str, **values: object) -> str:
    """Render a template of `appliance/drafts/templates`; a value the template lacks is an error."""
    environment = Environment(
        loader=PackageLoader("appliance.drafts"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(**values)
