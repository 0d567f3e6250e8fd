"""
Shared parts of the dashboards: variables, annotations, and panels that several of them show.
"""

from deploy.monitoring.source.panels import PER_SECOND, TOKENS_PER_SECOND, Event, Panel, Query, Variable

SITE = 'cluster=~"$cluster",namespace=~"$namespace"'
"""Also selects series without these labels, if `All` is chosen: `cluster` is an external label of Prometheus."""
JOB = f'{SITE},job=~"$job"'
"""Selects what gateways export."""
WORKER = f'{JOB},worker=~"$worker"'
MODEL = f'{JOB},model=~"$model"'
TENANT = f'{MODEL},tenant=~"$tenant"'

INSTALLATION = (
    Variable(name="cluster", label="Cluster", metric="appliance_build_info"),
    Variable(name="namespace", label="Namespace", metric='appliance_build_info{cluster=~"$cluster"}'),
    Variable(name="job", label="Gateways", metric=f"appliance_build_info{{{SITE}}}"),
)
WORKERS = Variable(name="worker", label="Worker", metric=f"appliance_worker_up{{{JOB}}}")
MODELS = Variable(name="model", label="Model", metric=f"appliance_requests_total{{{JOB}}}")
TENANTS = Variable(name="tenant", label="Tenant", metric=f"appliance_requests_total{{{JOB}}}")

YES_NO = {"0": ("ok", "green"), "1": ("failing", "red")}
DAY = 24 * 3600
ZERO = f"(0 * max(appliance_build_info{{{JOB}}}))"
"""0 while gateways are scraped: without them a panel has no data, and must not look as if all were well."""
NONE = "None, or no gateway is scraped"
"""Instead of `No data`, where series appear with the first event."""
ZERO_OF_RULES = f"(0 * max(appliance:workers:count{{{JOB}}}))"
"""0 while Prometheus also evaluates our rules."""


def since(metric: str) -> str:
    """Seconds since a time stamp; -1 if the time stamp is 0 (never)."""
    return f"max(time() - ({metric}{{{JOB}}} > 0)) or on() ({ZERO} - 1)"


def until(metric: str) -> str:
    """Seconds until a time stamp; -1 if the time stamp is 0 (none)."""
    return f"min(({metric}{{{JOB}}} > 0) - time()) or on() ({ZERO} - 1)"


def quantiles(metric: str, selector: str) -> tuple[Query, ...]:
    """p50, p95 and p99 of a histogram, over all its other labels."""
    rate = f"sum by (le) (rate({metric}_bucket{{{selector}}}[$__rate_interval]))"
    return tuple(
        Query(expr=f"histogram_quantile({share}, {rate})", legend=f"p{share * 100:.0f}")
        for share in (0.5, 0.95, 0.99)
    )


def _happened(counter: str, by: str) -> str:
    """Increase of a counter in the last minute, including its first appearance."""
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
        name="Draft promotions",
        expr=_happened("appliance_draft_promotion_steps_total", "stage"),
        title="draft: {{stage}}",
        text="details: `appliance draft status`",
        color="green",
    ),
    Event(
        name="Worker restarts",
        expr=_happened("appliance_worker_restarts_total", "worker"),
        title="{{worker}} restarted",
        text="by its supervisor, after it exited",
        color="red",
    ),
)

BY_INSTALLATION = "cluster, namespace, job"
"""Labels that identify an installation; each has prices of its own."""


def saved(bound: str | None) -> str:
    """Engine seconds that drafting saved; a gateway counts them while it holds the lease."""
    metric = "appliance_speculation_saved_engine_seconds"
    if bound is not None:
        metric = "appliance_speculation_saved_bound_engine_seconds"
    selector = JOB if bound is None else f'{JOB},bound="{bound}"'
    return f"sum by ({BY_INSTALLATION}) ({metric}{{{selector}}})"


BOUNDS = (("low", "at least"), (None, "measured"), ("high", "at most"))
"""95 % confidence, as if all measurements erred the same way."""


def preemptions(selector: str) -> Panel:
    """Preemptions by vLLM server."""
    return Panel(
        title="Preemptions",
        text="Requests that vLLM preempted because the KV cache was full, per second, by worker as Prometheus names it. If it "
        "stays above 0: shorter contexts, fewer concurrent requests, or more memory.",
        queries=(
            Query(
                expr=f"sum by (instance) (rate(vllm:num_preemptions_total{{{selector}}}[$__rate_interval]))",
                legend="{{instance}}",
            ),
        ),
        unit=PER_SECOND, maximum=1,
    )  # fmt: skip


def acceptance_by_tenant(selector: str) -> Panel:
    """Where drafts are accepted, for whom."""
    return Panel(
        title="Acceptance length by tenant",
        text="The ten lowest over an hour. A tenant far below the others slows down requests in the same batch: it can "
        "opt out of speculation (docs/how-to/opt-out-of-speculation.md).",
        queries=(
            Query(
                expr=f"bottomk(10, 1 + sum by (tenant) (increase(appliance_accepted_tokens_total{{{selector}}}[1h])) "
                f"/ (sum by (tenant) (increase(appliance_drafts_total{{{selector}}}[1h])) > 0))",
                legend="{{tenant}}",
            ),
        ),
        unit="none", width=12,
    )  # fmt: skip


def rejected_by_tenant(selector: str) -> Panel:
    """Whose drafts are wasted work."""
    return Panel(
        title="Rejected draft tokens by tenant",
        text="Draft tokens of a tenant's requests that were not accepted, per second.",
        queries=(
            Query(
                expr="topk(10, sum by (tenant) ("
                f"rate(appliance_draft_tokens_total{{{selector}}}[$__rate_interval]) "
                f"- rate(appliance_accepted_tokens_total{{{selector}}}[$__rate_interval])))",
                legend="{{tenant}}",
            ),
        ),
        width=12, unit=TOKENS_PER_SECOND, stacked=True,
    )  # fmt: skip


FIRING = Panel(
    title="Alerts firing",
    text="Alerts of the appliance that fire now. The `runbook_url` of each opens the page that says what to do.",
    queries=(Query(expr=f'count(ALERTS{{{SITE},alertname=~"Appliance.+",alertstate="firing"}}) or on() {ZERO_OF_RULES}'),),
    kind="stat", width=3, height=4, thresholds=((1, "red"),),
    link=("Alerts", "/alerting/list?search=Appliance"),
)  # fmt: skip
EGRESS = Panel(
    title="Egress",
    text="Verdict of the last egress check. `open`: something outside was reached, an incident. `not proven`: "
    "the check was inconclusive, or there was none.",
    queries=(
        Query(
            expr=f'2 * max(appliance_egress_verdict{{{JOB},verdict="open"}}) '
            f'+ max(appliance_egress_verdict{{{JOB},verdict="closed"}}) or on() {ZERO}'
        ),
    ),
    kind="stat", width=3, height=4,
    mappings={"0": ("not proven", "orange"), "1": ("closed", "green"), "2": ("OPEN", "red"), "3": ("OPEN", "red")},
)  # fmt: skip
AUDIT_LOG = Panel(
    title="Audit log",
    text="Whether entries can be written. If failing in the mode `strict`, requests are refused.",
    queries=(Query(expr=f"max(appliance_audit_failing{{{JOB}}})"),),
    kind="stat", width=3, height=4, mappings=YES_NO,
)  # fmt: skip
TOKENS_GENERATED = Panel(
    title="Tokens generated by worker",
    text="Per second, from each worker's counters. If a worker is far below the others, check its mode and its "
    "requests.",
    queries=(
        Query(
            expr=f"max by (worker) (appliance_worker_generation_tokens_per_second{{{WORKER}}})",
            legend="{{worker}}",
        ),
    ),
    unit=TOKENS_PER_SECOND,
)  # fmt: skip
KV_CACHE = Panel(
    title="KV cache in use",
    text="Fraction of the KV cache in use. Near 1, vLLM preempts requests and computes them again.",
    queries=(
        Query(expr=f"max by (worker) (appliance_worker_kv_cache_usage_ratio{{{WORKER}}})", legend="{{worker}}"),
    ),
    unit="percentunit", maximum=1, thresholds=((0.95, "red"),),
)  # fmt: skip
ACCEPTANCE_LENGTH = Panel(
    title="Acceptance length",
    text="Mean tokens per step, over all workers that draft. 1 means that no draft token is accepted. Which "
    "value is good depends on the load: see the dashboard Speculation.",
    queries=(Query(expr=f"avg(appliance_acceptance_length{{{WORKER}}})"),),
    unit="none", kind="stat", width=3, height=4,
)  # fmt: skip
SAVED = Panel(
    title="Engine time saved by drafting",
    text="Since the gateways started, compared with the time without drafts; below 0: lost. The outer lines are "
    "95 % bounds. If 0 is between them, it is not known whether drafting saves.",
    queries=tuple(
        Query(expr=f"sum({saved(bound)}) or on() {ZERO}", legend=legend) for bound, legend in BOUNDS
    ),
    unit="s", minimum=None,
)  # fmt: skip
