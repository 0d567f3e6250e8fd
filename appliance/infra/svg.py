"""
SVG elements for the HTML pages the product writes: every text and attribute is escaped.  Pure.

A page is a Jinja2 template with autoescape; a drawing is `Markup`, which the template inserts as it is.
"""

from markupsafe import Markup, escape


def element(name: str, *content: str, **attributes: object) -> Markup:
    """
    `class_` is the attribute `class`, `stroke_width` is `stroke-width`; an attribute of None is omitted.

    A plain string in `content` is text, a `Markup` is another element.
    """
    written = "".join(
        f' {key.removesuffix("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(escape(part) for part in content)
    return Markup(f"<{name}{written}>{inner}</{name}>" if inner else f"<{name}{written}/>")  # noqa: S704


def drawing(label: str, width: float, height: float, *content: Markup) -> Markup:
    """The `<svg>` element itself; `label` describes it to screen readers."""
    return element("svg", *content, role="img", aria_label=label, viewBox=f"0 0 {width:g} {height:g}")


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> Markup:
    ends = {"x1": f"{x1:.1f}", "x2": f"{x2:.1f}", "y1": f"{y1:.1f}", "y2": f"{y2:.1f}"}
    return element("line", **ends, **attributes)


def label(x: float, y: float, content: str, **attributes: object) -> Markup:
    """A `<text>` element whose baseline begins at (x, y)."""
    return element("text", content, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)


def points(places: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
