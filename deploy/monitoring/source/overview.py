"""
The overview: the state of an installation, and where a problem is.
"""

from dataclasses import replace

from deploy.monitoring.source.common import (
    ACCEPTANCE_LENGTH,
    AUDIT_LOG,
    EGRESS,
    EVENTS,
    FIRING,
    INSTALLATION,
    JOB,
    KV_CACHE,
    MODEL,
    MODELS,
    NONE,
    SITE,
    TOKENS_GENERATED,
    WORKER,
    WORKERS,
    ZERO,
    ZERO_OF_RULES,
    preemptions,
    quantiles,
)
from deploy.monitoring.source.panels import TOKENS_PER_SECOND, Dashboard, Panel, Query, Row

AUDIT_DASHBOARD = ("Audit and sovereignty", "/d/appliance-audit")

NOW = Row(
    title="Now",
    panels=(
        FIRING,
        Panel(
            title="Workers up",
            text="Workers that can take requests. If there are fewer than expected, see the dashboard Worker.",
            queries=(Query(expr=f"count(max by (worker) (appliance_worker_up{{{WORKER}}}) == 1) or on() {ZERO}"),),
            kind="stat", width=3, height=4, base="red", thresholds=((1, "green"),),
            link=("Worker", "/d/appliance-worker"),
        ),
        Panel(
            title="Request rate",
            text="Finished requests per second, with any outcome.",
            queries=(Query(expr=f"sum(rate(appliance_requests_total{{{MODEL}}}[$__rate_interval]))"),),
            unit="reqps", kind="stat", width=3, height=4, link=("Tenants and cost", "/d/appliance-tenants"),
        ),
        Panel(
            title="Error ratio",
            text="Requests of the last hour that failed through a fault of the service, not of the client or a "
            "limit; the installation with the highest ratio. The objective is 0.5 % over a month.",
            queries=(Query(expr=f"max(appliance:errors:ratio_rate1h{{{JOB}}} >= 0) or on() {ZERO_OF_RULES}"),),
            unit="percentunit", kind="stat", width=3, height=4, thresholds=((0.005, "orange"), (0.03, "red")),
        ),
        Panel(
            title="Queued requests",
            text="Requests that wait in gateways for a worker with a free slot, without batches.",
            queries=(Query(expr=f'sum(appliance_queue_requests{{{JOB},priority!="batch"}})'),),
            kind="stat", width=3, height=4, thresholds=((10, "orange"), (100, "red")),
        ),
        replace(ACCEPTANCE_LENGTH, link=("Speculation", "/d/appliance-speculation")),
        replace(AUDIT_LOG, link=AUDIT_DASHBOARD),
        replace(EGRESS, link=AUDIT_DASHBOARD),
    ),
)  # fmt: skip


def _requests(counted: str) -> str:
    """Requests of 30 days, by installation, up to a factor: both rates are recorded at the same times."""
    return f"sum_over_time(appliance:{counted}:rate5m{{{JOB}}}[30d])"


OBJECTIVE = Row(
    title="Service level objective and alerts",
    panels=(
        Panel(
            title="Error budget left",
            text="Of the last 30 days, or as long as Prometheus has data: 1 minus the error ratio divided by the 0.5 % "
            "that the objective allows; the installation with least. Below 0 the objective is missed: no risky "
            "change until it recovers.",
            queries=(
                Query(
                    expr=f"min(1 - {_requests('errors')} / ({_requests('errors')} + {_requests('completed')} > 0) "
                    "/ 0.005)"
                ),
            ),
            unit="percentunit", kind="stat", width=4, base="red", thresholds=((0, "orange"), (0.25, "green")),
        ),
        Panel(
            title="Error budget burn rate",
            text="How fast the error budget is used: at 1 it is used up in 30 days, at 14.4 in two days. Both alerts, "
            "ApplianceErrorBudgetBurnsFast and ApplianceErrorBudgetBurnsSlowly, compare a long window with a short one.",
            queries=tuple(
                Query(expr=f"max(appliance:errors:ratio_rate{window}{{{JOB}}}) / 0.005", legend=f"over {window}")
                for window in ("1h", "6h", "3d")
            ),
            unit="suffix:x", maximum=15, thresholds=((1, "orange"), (14.4, "red")),
        ),
        Panel(
            title="Firing alerts",
            text="Each alert that fires now, in the selected clusters and namespaces. The link opens Grafana's list of "
            "alerts; there `runbook_url` says what to do, and `dashboard_url` where to look.",
            queries=(Query(expr=f'ALERTS{{{SITE},alertname=~"Appliance.+",alertstate="firing"}}'),),
            kind="table", width=12, link=("Alerts", "/alerting/list?search=Appliance"),
            absent="None, if Alerts firing is 0",
            columns={
                "alertname": "Alert", "severity": "Severity", "namespace": "Namespace", "job": "Job",
                "instance": "Instance", "worker": "Worker",
            },
        ),
    ),
)  # fmt: skip
TRAFFIC = Row(
    title="Traffic",
    panels=(
        Panel(
            title="Requests by outcome",
            text="`completed` is the normal outcome. `worker_refused`: the worker found an error in the request. "
            "`client_gone`: the client left. `not_admitted`: no worker had a free slot in time. The others are "
            "failures of the service.",
            queries=(
                Query(
                    expr=f"sum by (outcome) (rate(appliance_requests_total{{{MODEL}}}[$__rate_interval]))",
                    legend="{{outcome}}",
                ),
            ),
            unit="reqps", stacked=True,
        ),
        Panel(
            title="Time to first token (TTFT)",
            text="From a request to the first frame of a streamed answer, including queueing and prompt processing. If "
            "it rises while requests are queued, there are too few workers. If it rises alone, prompts got longer.",
            queries=quantiles("appliance_time_to_first_byte_seconds", MODEL),
            unit="s",
        ),
        Panel(
            title="Inter-token latency (ITL)",
            text="From one frame of a streamed answer to the next, as sent; with drafts a frame has several tokens. It "
            "grows with the batch size. Counted when a stream ends. At seconds, readers see the text stop.",
            queries=quantiles("appliance_inter_token_seconds", MODEL),
            unit="s",
        ),
        Panel(
            title="End-to-end latency",
            text="From a request to the last byte of its answer. Long answers take long: compare with earlier values.",
            queries=quantiles("appliance_request_seconds", MODEL),
            unit="s", width=6,
        ),
        Panel(
            title="Tokens delivered",
            text="Tokens of processed prompts, and of answers that were sent, per second.",
            queries=(
                Query(
                    expr=f"sum by (kind) (rate(appliance_tokens_total{{{MODEL}}}[$__rate_interval]))",
                    legend="{{kind}}",
                ),
            ),
            unit=TOKENS_PER_SECOND, stacked=True, width=6,
        ),
        Panel(
            title="Requests in flight and queued",
            text="In flight: accepted and not completely answered yet. Queued: waiting for a worker with a free slot.",
            queries=(
                Query(expr=f"sum(appliance_requests_in_flight{{{MODEL}}})", legend="in flight"),
                Query(expr=f"sum by (priority) (appliance_queue_requests{{{JOB}}})", legend="queued: {{priority}}"),
            ),
            width=6,
        ),
        Panel(
            title="Errors sent to clients",
            text="The eight most frequent codes; docs/reference/errors.md explains each.",
            queries=(
                Query(
                    expr=f"topk(8, sum by (code) (rate(appliance_errors_total{{{JOB}}}[$__rate_interval])) > 0)",
                    legend="{{code}}",
                ),
            ),
            unit="reqps", stacked=True, width=6, absent=NONE,
        ),
    ),
)  # fmt: skip
CAPACITY = Row(
    title="Capacity",
    panels=(
        replace(TOKENS_GENERATED, width=6),
        replace(KV_CACHE, width=6),
        replace(preemptions(SITE), width=6),
        Panel(
            title="Gateway overhead",
            text="Time that the gateway itself adds before the first byte, including the wait for the audit log. "
            "If it grows, check the disk of the log.",
            queries=quantiles("appliance_overhead_seconds", JOB),
            unit="s", width=6,
        ),
    ),
)  # fmt: skip

OVERVIEW = Dashboard(
    uid="appliance-overview",
    title="Appliance: overview",
    text="The state of an installation, and where a problem is.",
    variables=(*INSTALLATION, WORKERS, MODELS),
    events=EVENTS,
    rows=(NOW, OBJECTIVE, TRAFFIC, CAPACITY),
)
