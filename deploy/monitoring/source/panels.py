"""
Panels and dashboards as values, and the JSON that Grafana reads (schema 38, Grafana 10.1 and later).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLUMNS = 24
"""Grafana's grid; a row of panels fills it."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]
TOKENS_PER_SECOND, PER_SECOND = "suffix:tokens/s", "suffix:/s"
"""Units that Grafana has no name for."""
DRILLS = {"worker": "appliance-worker", "tenant": "appliance-tenants"}
"""By label: the dashboard about one of its values, which a click on a series opens."""
KEPT = "${cluster:queryparam}&${namespace:queryparam}&${job:queryparam}&${__url_time_range}"
"""What a link to another dashboard keeps: the installation and the time range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One expression; `legend` names its series by their labels."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel of any kind."""

    title: str
    text: str
    """Tooltip of its title: what it shows and what to do."""
    queries: tuple[Query, ...] = ()
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    thresholds: tuple[tuple[float, str], ...] = ()
    """Colour from each value upwards, ascending; `base` below the first."""
    base: str = "green"
    """Colour below the first step."""
    mappings: Mapping[str, tuple[str, str]] | None = None
    """Text and colour shown instead of a value."""
    stacked: bool = False
    maximum: float | None = None
    """Minimum upper end of the axis, such as 1 for ratios."""
    minimum: float | None = 0
    """Lower end of the axis; None if values can be below 0."""
    link: tuple[str, str] | None = None
    """Title and path, in Grafana, of the next page to open."""
    absent: str = ""
    """Text instead of `No data`, if the series are optional: what is missing."""
    columns: Mapping[str, str] | None = None
    """Columns of a table, in this order, with their headings; all others are hidden."""
    pivot: tuple[str, str] | None = None
    """Labels of the rows and of the columns of a table."""

    def json(self, number: int, x: int, y: int) -> Json:
        """The panel at a position of the grid."""
        made: Json = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "options": self._options(),
            "targets": [
                self._target(letter, query) for letter, query in zip("ABCDEF", self.queries, strict=False)
            ],
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
        }
        if self.link is not None:
            title, url = self.link
            kept = f"{url}?{KEPT}" if url.startswith("/d/") else url
            made["links"] = [{"title": title, "url": kept, "type": "link", "targetBlank": False}]
        if self.pivot is not None:
            row, column = self.pivot
            options = {"rowField": row, "columnField": column, "valueField": "Value", "emptyValue": "null"}
            made["transformations"] = [{"id": "groupingToMatrix", "options": options}]
            made["transformations"].append(
                {"id": "organize", "options": {"renameByName": {f"{row}\\{column}": row}}}
            )
        elif self.columns is not None:
            made["transformations"] = [
                {"id": "filterFieldsByName", "options": {"include": {"names": list(self.columns)}}},
                {
                    "id": "organize",
                    "options": {
                        "indexByName": {name: at for at, name in enumerate(self.columns)},
                        "renameByName": dict(self.columns),
                    },
                },
            ]
        return made

    def _target(self, letter: str, query: Query) -> Json:
        is_now = self.kind in {"stat", "table", "bargauge"}
        return {
            "refId": letter,
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "instant": is_now,
            "range": not is_now,
            "format": "table" if self.kind == "table" else "time_series",
        }

    def _defaults(self) -> Json:
        steps = [{"color": self.base, "value": None}]
        steps += [{"color": color, "value": value} for value, color in self.thresholds]
        made: Json = {"unit": self.unit, "thresholds": {"mode": "absolute", "steps": steps}}
        if self.absent:
            made["noValue"] = self.absent
        of = "__data.fields" if self.kind == "table" else "__field.labels"
        drills = [
            {
                "title": f"${{{of}.{label}}}",
                "url": f"/d/{uid}?var-{label}=${{{of}.{label}}}&{KEPT}",
            }
            for label, uid in DRILLS.items()
            if any(f"{{{{{label}}}}}" in query.legend for query in self.queries)
        ]
        if drills:
            made["links"] = drills
        if self.mappings is not None:
            options = {
                value: {"text": text, "color": color} for value, (text, color) in self.mappings.items()
            }
            made["mappings"] = [{"type": "value", "options": options}]
        if self.kind in {"stat", "table", "bargauge", "state-timeline"}:
            made["color"] = {"mode": "thresholds"}
        if self.kind == "bargauge":
            made |= {"min": 0, "max": self.maximum} if self.maximum is not None else {"min": 0}
        if self.kind == "timeseries":
            made |= {"color": {"mode": "palette-classic"}}
            if self.minimum is not None:
                made["min"] = self.minimum
            made["custom"] = {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 20 if self.stacked else 5,
                "showPoints": "never",
                "spanNulls": False,
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
                "thresholdsStyle": {"mode": "line" if self.thresholds else "off"},
            }
            if self.maximum is not None:
                made["custom"]["axisSoftMax"] = self.maximum
        return made

    def _options(self) -> Json:
        now = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        match self.kind:
            case "stat":
                return {
                    "reduceOptions": now,
                    "colorMode": "background" if self.thresholds or self.mappings else "value",
                    "graphMode": "none",
                    "justifyMode": "auto",
                    "orientation": "auto",
                    "textMode": "auto",
                }
            case "bargauge":
                return {"reduceOptions": now, "displayMode": "basic", "orientation": "horizontal"}
            case "state-timeline":
                return {
                    "mergeValues": True,
                    "showValue": "auto",
                    "legend": {"displayMode": "hidden", "placement": "bottom", "showLegend": False},
                    "tooltip": {"mode": "single", "sort": "none"},
                }
            case "table":
                return {"showHeader": True, "cellHeight": "sm"}
            case _:
                return {
                    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                    "tooltip": {"mode": "multi", "sort": "desc"},
                }


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A panel of text."""

    title: str
    markdown: str
    width: int = COLUMNS
    height: int = 8

    def json(self, number: int, x: int, y: int) -> Json:
        """The panel at a place of the grid."""
        return {
            "id": number,
            "type": "text",
            "title": self.title,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "options": {"mode": "markdown", "content": self.markdown},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A heading with its panels, from left to right and top to bottom."""

    title: str
    panels: tuple[Panel | Text, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A selection at the top of a dashboard: one or more values of a label, by default all."""

    name: str
    label: str
    metric: str
    """Metric that has the label; may use the variables before this one."""

    def json(self) -> Json:
        """The variable as Grafana reads it."""
        query = f"label_values({self.metric}, {self.name})"
        return {
            "name": self.name,
            "label": self.label,
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": "variable"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An annotation on all panels at the times of an event."""

    name: str
    expr: str
    """Above 0 for a minute after the event."""
    title: str
    text: str
    color: str

    def json(self) -> Json:
        """The annotation as Grafana reads it."""
        return {
            "name": self.name,
            "datasource": DATASOURCE,
            "enable": True,
            "hide": False,
            "iconColor": self.color,
            "expr": self.expr,
            "step": "15s",
            "titleFormat": self.title,
            "textFormat": self.text,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    text: str
    variables: tuple[Variable, ...]
    events: tuple[Event, ...]
    rows: tuple[Row, ...]
    price: bool = False
    """Whether there is a text box for a price per million tokens."""

    def json(self) -> Json:
        """The dashboard as Grafana reads it."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.text,
            "tags": ["appliance"],
            "timezone": "browser",
            "editable": False,
            "graphTooltip": 1,
            "refresh": "30s",
            "schemaVersion": 38,
            "version": 1,
            "time": {"from": "now-6h", "to": "now"},
            "links": [
                {
                    "title": "Appliance",
                    "type": "dashboards",
                    "icon": "dashboard",
                    "tooltip": "",
                    "tags": ["appliance"],
                    "asDropdown": False,
                    "targetBlank": False,
                    "includeVars": True,
                    "keepTime": True,
                }
            ],
            "templating": {
                "list": [_datasource(), *self._boxes(), *(each.json() for each in self.variables)]
            },
            "annotations": {"list": [event.json() for event in self.events]},
            "panels": list(_laid_out(self.rows)),
        }

    def _boxes(self) -> list[Json]:
        if not self.price:
            return []
        current = {"selected": True, "text": "1.00", "value": "1.00"}
        return [
            {
                "name": "price",
                "label": "Price of a million tokens",
                "type": "textbox",
                "query": "1.00",
                "current": current,
                "options": [current],
            }
        ]


def _datasource() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "multi": False,
        "includeAll": False,
        "current": {},
    }


def _laid_out(rows: Sequence[Row]) -> Sequence[Json]:
    """All panels with ids and positions: next to each other while they fit, then in a new line."""
    made: list[Json] = []
    y = 0
    for row in rows:
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        x, y, tallest = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            made.append(panel.json(len(made) + 1, x, y))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return made
