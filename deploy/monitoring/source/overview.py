"""
The page that is open all day: is everything well, and if not, where to look.
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
    quantiles,
)
from deploy.monitoring.source.panels import Dashboard, Panel, Query, Row

NOW = Row(
    title="Now",
    panels=(
        FIRING,
        Panel(
            title="Workers up",
            text="Workers that can take requests. Fewer than there should be: see the dashboard Worker.",
            queries=(Query(expr=f"count(max by (worker) (appliance_worker_up{{{WORKER}}}) == 1) or on() vector(0)"),),
            kind="stat", width=3, height=4, base="red", steps=((1, "green"),),
        ),
        Panel(
            title="Requests per second",
            text="Requests that ended, however they did.",
            queries=(Query(expr=f"sum(rate(appliance_requests_total{{{MODEL}}}[$__rate_interval]))"),),
            unit="reqps", kind="stat", width=3, height=4,
        ),
        Panel(
            title="Failed through our fault",
            text="Share of requests in the last hour that failed for a reason that is neither the client's nor a "
            "limit, where most of them did. 0.5 % over a month is what is aimed at.",
            queries=(Query(expr=f"max(appliance:errors:ratio_rate1h{{{JOB}}}) or on() vector(0)"),),
            unit="percentunit", kind="stat", width=3, height=4, steps=((0.005, "orange"), (0.03, "red")),
        ),
        Panel(
            title="Waiting",
            text="Requests that wait in gateways for a worker with room, batches left out.",
            queries=(Query(expr=f'sum(appliance_queue_requests{{{JOB},priority!="batch"}})'),),
            kind="stat", width=3, height=4, steps=((10, "orange"), (100, "red")),
        ),
        Panel(
            title="Tokens per draft",
            text="Acceptance length over all workers that draft: tokens a step gives on average. 1 means that no "
            "draft token is accepted. What is good depends on the load: see the dashboard Speculation.",
            queries=(Query(expr=f"avg(appliance_acceptance_length{{{WORKER}}}) or on() vector(1)"),),
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
            title="Requests by how they ended",
            text="`completed` is what should be there. `worker_refused`: the worker found a mistake in the "
            "request. `client_gone`: the client left. `not_admitted`: nobody had room in time. The others are "
            "failures of ours.",
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
            text="From a request to the first piece of a streamed answer, waiting and prompt included. Rising "
            "while requests wait: there are too few workers. Rising alone: prompts got longer.",
            queries=quantiles("appliance_time_to_first_byte_seconds", MODEL, 0.5, 0.95),
            unit="s",
        ),
        Panel(
            title="Between two pieces of an answer",
            text="From one piece of a streamed answer to the next, as sent; with drafts a piece has several tokens. It "
            "grows with the number of requests decoded together. Counted when a stream ends. Seconds: readers see the "
            "text stop.",
            queries=quantiles("appliance_inter_token_seconds", MODEL, 0.5, 0.99),
            unit="s",
        ),
        Panel(
            title="Time of whole answers",
            text="From a request to the last byte of its answer. Long answers take long: compare with itself.",
            queries=quantiles("appliance_request_seconds", MODEL, 0.5, 0.95),
            unit="s", width=6,
        ),
        Panel(
            title="Tokens delivered",
            text="Tokens of prompts that were read, and of answers that were sent, per second.",
            queries=(
                Query(
                    expr=f"sum by (kind) (rate(appliance_tokens_total{{{MODEL}}}[$__rate_interval]))",
                    legend="{{kind}}",
                ),
            ),
            stacked=True, width=6,
        ),
        Panel(
            title="Requests under way and waiting",
            text="Under way: accepted and not answered in full yet. Waiting: for a worker with room.",
            queries=(
                Query(expr=f"sum(appliance_requests_in_flight{{{MODEL}}})", legend="under way"),
                Query(expr=f"sum by (priority) (appliance_queue_requests{{{JOB}}})", legend="waiting: {{priority}}"),
            ),
            width=6,
        ),
        Panel(
            title="Errors sent to clients",
            text="The eight most frequent codes; docs/reference/errors.md says what each means.",
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
            title="Added by the gateway",
            text="What the gateway itself adds before the first byte, the wait for the audit log included. "
            "Growing: look at the disk of the log.",
            queries=quantiles("appliance_overhead_seconds", JOB, 0.5, 0.99),
            unit="s",
        ),
    ),
)  # fmt: skip

OVERVIEW = Dashboard(
    uid="appliance-overview",
    title="Appliance: overview",
    text="Is everything well, and if not, where to look.",
    variables=(JOBS, WORKERS, MODELS),
    events=EVENTS,
    rows=(NOW, TRAFFIC, CAPACITY),
)
