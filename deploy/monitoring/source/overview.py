"""
The overview: the state of an installation, and where a problem is.
"""

from deploy.monitoring.source.common import (
    AUDIT_LOG,
    EGRESS,
    EVENTS,
    FIRING,
    JOB,
    JOBS,
    KV_CACHE,
    MODEL,
    MODELS,
    TOKENS_GENERATED,
    WORKER,
    WORKERS,
    ZERO,
    ZERO_OF_RULES,
    quantiles,
)
from deploy.monitoring.source.panels import TOKENS_PER_SECOND, Dashboard, Panel, Query, Row

NOW = Row(
    title="Now",
    panels=(
        FIRING,
        Panel(
            title="Workers up",
            text="Workers that can take requests. If there are fewer than expected, see the dashboard Worker.",
            queries=(Query(expr=f"count(max by (worker) (appliance_worker_up{{{WORKER}}}) == 1) or on() {ZERO}"),),
            kind="stat", width=3, height=4, base="red", thresholds=((1, "green"),),
        ),
        Panel(
            title="Requests per second",
            text="Finished requests, with any outcome.",
            queries=(Query(expr=f"sum(rate(appliance_requests_total{{{MODEL}}}[$__rate_interval]))"),),
            unit="reqps", kind="stat", width=3, height=4,
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
        Panel(
            title="Acceptance length",
            text="Mean tokens per step, over all workers that draft. 1 means that no draft token is accepted. Which "
            "value is good depends on the load: see the dashboard Speculation.",
            queries=(Query(expr=f"avg(appliance_acceptance_length{{{WORKER}}})"),),
            unit="none", kind="stat", width=3, height=4,
        ),
        AUDIT_LOG,
        EGRESS,
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
            title="Time to the first byte",
            text="From a request to the first frame of a streamed answer, including queueing and prompt processing. If "
            "it rises while requests are queued, there are too few workers. If it rises alone, prompts got longer.",
            queries=quantiles("appliance_time_to_first_byte_seconds", MODEL, 0.5, 0.95),
            unit="s",
        ),
        Panel(
            title="Time between frames",
            text="From one frame of a streamed answer to the next, as sent; with drafts a frame has several tokens. It "
            "grows with the batch size. Counted when a stream ends. At seconds, readers see the text stop.",
            queries=quantiles("appliance_inter_token_seconds", MODEL, 0.5, 0.99),
            unit="s",
        ),
        Panel(
            title="Request duration",
            text="From a request to the last byte of its answer. Long answers take long: compare with earlier values.",
            queries=quantiles("appliance_request_seconds", MODEL, 0.5, 0.95),
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
                    expr=f"topk(8, sum by (code) (rate(appliance_errors_total{{{JOB}}}[$__rate_interval])))",
                    legend="{{code}}",
                ),
            ),
            unit="reqps", stacked=True, width=6,
        ),
    ),
)  # fmt: skip
CAPACITY = Row(
    title="Capacity",
    panels=(
        TOKENS_GENERATED,
        KV_CACHE,
        Panel(
            title="Gateway overhead",
            text="Time that the gateway itself adds before the first byte, including the wait for the audit log. "
            "If it grows, check the disk of the log.",
            queries=quantiles("appliance_overhead_seconds", JOB, 0.5, 0.99),
            unit="s",
        ),
    ),
)  # fmt: skip

OVERVIEW = Dashboard(
    uid="appliance-overview",
    title="Appliance: overview",
    text="The state of an installation, and where a problem is.",
    variables=(JOBS, WORKERS, MODELS),
    events=EVENTS,
    rows=(NOW, TRAFFIC, CAPACITY),
)
