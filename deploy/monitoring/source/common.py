"""
What the dashboards share: the variables, the events, and the words for states.
"""

from deploy.monitoring.source.panels import Event, Panel, Query, Variable

JOB = 'job=~"$job"'
"""Selects what gateways export."""
WORKER = f'{JOB},worker=~"$worker"'
MODEL = f'{JOB},model=~"$model"'
TENANT = f'{MODEL},tenant=~"$tenant"'

JOBS = Variable(name="job", label="Gateways", metric="appliance_build_info")
WORKERS = Variable(name="worker", label="Worker", metric=f"appliance_worker_up{{{JOB}}}")
MODELS = Variable(name="model", label="Model", metric=f"appliance_requests_total{{{JOB}}}")
TENANTS = Variable(name="tenant", label="Tenant", metric=f"appliance_requests_total{{{JOB}}}")

YES_NO = {"0": ("ok", "green"), "1": ("failing", "red")}
DAY = 24 * 3600


def since(metric: str) -> str:
    """Seconds since a moment that is 0 for never; then -1."""
    return f"max(time() - ({metric}{{{JOB}}} > 0)) or on() vector(-1)"


def until(metric: str) -> str:
    """Seconds until a moment that is 0 for none; then -1."""
    return f"min(({metric}{{{JOB}}} > 0) - time()) or on() vector(-1)"


def quantiles(metric: str, selector: str, *shares: float) -> tuple[Query, ...]:
    """Quantiles of a histogram, over all its other labels."""
    rate = f"sum by (le) (rate({metric}_bucket{{{selector}}}[$__rate_interval]))"
    return tuple(
        Query(expr=f"histogram_quantile({share}, {rate})", legend=f"{share:.0%} are faster")
        for share in shares
    )


def _happened(counter: str, by: str) -> str:
    """What a counter rose by in the last minute, its first appearance included."""
    now = f"sum by ({by}) ({counter}{{{JOB}}})"
    then = f"sum by ({by}) ({counter}{{{JOB}}} offset 1m)"
    return f"({now} - {then} or {now}) > 0"


EVENTS = (
    Event(
        name="Speculation changes",
        expr=_happened("appliance_speculation_changes_total", "worker, mode, reason"),
        title="{{worker}}: {{mode}}",
        text="{{reason}}",
        color="purple",
    ),
    Event(
        name="Worker recycles",
        expr=_happened("appliance_worker_recycles_total", "worker, reason, result"),
        title="{{worker}} recycled: {{result}}",
        text="{{reason}}",
        color="orange",
    ),
    Event(
        name="Worker restarts",
        expr=_happened("appliance_worker_restarts_total", "worker"),
        title="{{worker}} started again",
        text="by its supervisor, because it ended",
        color="red",
    ),
)

FIRING = Panel(
    title="Alerts firing",
    text="Alerts of the appliance that fire now. Each has a page under docs/runbooks/alerts.",
    queries=(Query(expr='count(ALERTS{alertname=~"Appliance.+",alertstate="firing"}) or on() vector(0)'),),
    kind="stat", width=3, height=4, steps=((1, "red"),),
)  # fmt: skip
EGRESS = Panel(
    title="Way out",
    text="What the last egress check showed. `open`: something outside was reached, an incident. `not proven`: "
    "the check could not tell, or there was none.",
    queries=(
        Query(
            expr=f'2 * max(appliance_egress_verdict{{{JOB},verdict="open"}}) '
            f'+ max(appliance_egress_verdict{{{JOB},verdict="closed"}}) or on() vector(0)'
        ),
    ),
    kind="stat", width=3, height=4,
    words={"0": ("not proven", "orange"), "1": ("closed", "green"), "2": ("OPEN", "red"), "3": ("OPEN", "red")},
)  # fmt: skip
