"""
One worker in detail: what gateways see of it, and what vLLM says of itself.
"""

from deploy.monitoring.source.common import (
    EVENTS,
    JOBS,
    KV_CACHE,
    TOKENS_GENERATED,
    WORKER,
    WORKERS,
    quantiles,
)
from deploy.monitoring.source.panels import Dashboard, Panel, Query, Row, Variable

INSTANCES = Variable(
    name="instance", label="Worker as Prometheus names it", metric="vllm:num_requests_running"
)
VLLM = 'instance=~"$instance"'

SEEN = Row(
    title="As gateways see it",
    panels=(
        Panel(
            title="Up",
            text="Whether the worker can take requests.",
            queries=(Query(expr=f"max by (worker) (appliance_worker_up{{{WORKER}}})", legend="{{worker}}"),),
            kind="state-timeline", height=6, words={"0": ("down", "red"), "1": ("up", "green")},
        ),
        Panel(
            title="Left out or at rest",
            text="Not 0: it gets no requests, because it was recycled and did not come back sound (1), or because it "
            "failed several requests in a row (2).",
            queries=(
                Query(
                    expr=f"(max by (worker) (appliance_worker_left_out{{{WORKER}}}) or 0 * max by (worker) "
                    f"(appliance_worker_up{{{WORKER}}})) + 2 * (max by (worker) "
                    f"(appliance_worker_breaker_open{{{WORKER}}}) or 0 * max by (worker) "
                    f"(appliance_worker_up{{{WORKER}}}))",
                    legend="{{worker}}",
                ),
            ),
            kind="state-timeline", height=6,
            words={
                "0": ("no", "green"), "1": ("left out", "red"), "2": ("at rest", "orange"), "3": ("both", "red"),
            },
        ),
        Panel(
            title="Restarts and failed looks",
            text="Restarts by the supervisor, and looks at the worker that failed, in the time shown.",
            queries=(
                Query(
                    expr=f"sum(increase(appliance_worker_restarts_total{{{WORKER}}}[$__range])) or on() vector(0)",
                    legend="restarts",
                ),
                Query(
                    expr=f"sum(increase(appliance_scrape_failures_total{{{WORKER}}}[$__range])) or on() vector(0)",
                    legend="failed looks",
                ),
            ),
            kind="stat", height=6,
        ),
        Panel(
            title="Requests in the worker",
            text="`running` are decoded together, `waiting` wait inside the worker; `places` is the most that one "
            "gateway gives it, which falls when the worker has a queue.",
            queries=(
                Query(
                    expr=f"max by (worker) (appliance_worker_running_requests{{{WORKER}}})",
                    legend="{{worker}} running",
                ),
                Query(
                    expr=f"max by (worker) (appliance_worker_waiting_requests{{{WORKER}}})",
                    legend="{{worker}} waiting",
                ),
                Query(expr=f"max by (worker) (appliance_worker_places{{{WORKER}}})", legend="{{worker}} places"),
            ),
        ),
        TOKENS_GENERATED,
        KV_CACHE,
    ),
)  # fmt: skip
SPEED = Row(
    title="As vLLM sees itself: speed",
    panels=(
        Panel(
            title="Time to the first token",
            text="From the request's arrival in the worker to its first token.",
            queries=quantiles("vllm:time_to_first_token_seconds", VLLM, 0.5, 0.95),
            unit="s",
        ),
        Panel(
            title="Time per token",
            text="Of a request, averaged over its answer: what a reader feels. With speculation several tokens come "
            "at once, so the gap between two pieces says less.",
            queries=quantiles("vllm:request_time_per_output_token_seconds", VLLM, 0.5, 0.95),
            unit="s",
        ),
        Panel(
            title="Where a request's time goes",
            text="Mean seconds of a request: waiting in the worker, reading its prompt, writing its answer.",
            queries=tuple(
                Query(
                    expr=f"sum(rate(vllm:request_{part}_time_seconds_sum{{{VLLM}}}[$__rate_interval])) "
                    f"/ sum(rate(vllm:request_{part}_time_seconds_count{{{VLLM}}}[$__rate_interval]))",
                    legend=legend,
                )
                for part, legend in (("queue", "waiting"), ("prefill", "reading"), ("decode", "writing"))
            ),
            unit="s", stacked=True,
        ),
        Panel(
            title="Tokens read and written",
            text="Per second. Prompts found in the prefix cache count as read.",
            queries=(
                Query(expr=f"sum(rate(vllm:prompt_tokens_total{{{VLLM}}}[$__rate_interval]))", legend="read"),
                Query(expr=f"sum(rate(vllm:generation_tokens_total{{{VLLM}}}[$__rate_interval]))", legend="written"),
            ),
        ),
        Panel(
            title="Found in the prefix cache",
            text="Share of prompt tokens whose computation was kept from an earlier request.",
            queries=(
                Query(
                    expr=f"sum(rate(vllm:prefix_cache_hits_total{{{VLLM}}}[$__rate_interval])) "
                    f"/ sum(rate(vllm:prefix_cache_queries_total{{{VLLM}}}[$__rate_interval]))",
                    legend="found",
                ),
            ),
            unit="percentunit", most=1,
        ),
        Panel(
            title="Pushed back",
            text="Requests that lost their place because the KV cache was full, per second. Not 0 for long: shorter "
            "contexts, fewer requests at once, or more memory.",
            queries=(Query(expr=f"sum(rate(vllm:num_preemptions_total{{{VLLM}}}[$__rate_interval]))", legend="pushed"),),
        ),
    ),
)  # fmt: skip
INSIDE = Row(
    title="As vLLM sees itself: drafts and process",
    panels=(
        Panel(
            title="Acceptance length",
            text="Tokens a step with drafts gives: 1 and the accepted tokens per draft. A gap: nothing was drafted.",
            queries=(
                Query(
                    expr="1 + sum by (instance) (rate("
                    f"vllm:spec_decode_num_accepted_tokens_total{{{VLLM}}}[$__rate_interval])) / (sum by (instance) "
                    f"(rate(vllm:spec_decode_num_drafts_total{{{VLLM}}}[$__rate_interval])) > 0)",
                    legend="{{instance}}",
                ),
            ),
            unit="none",
        ),
        Panel(
            title="Requests finished",
            text="Per second, by why vLLM ended them: `stop` and `length` are usual, `abort` means the client left.",
            queries=(
                Query(
                    expr=f"sum by (finished_reason) (rate(vllm:request_success_total{{{VLLM}}}[$__rate_interval]))",
                    legend="{{finished_reason}}",
                ),
            ),
            unit="reqps", stacked=True,
        ),
        Panel(
            title="Memory of the server process",
            text="Resident memory of the process that answers; the engine's own comes on top.",
            queries=(
                Query(
                    expr="process_resident_memory_bytes and on (job, instance) "
                    f"vllm:num_requests_running{{{VLLM}}}",
                    legend="{{instance}}",
                ),
            ),
            unit="bytes",
        ),
    ),
)  # fmt: skip

WORKER_DETAIL = Dashboard(
    uid="appliance-worker",
    title="Appliance: worker",
    text="What gateways see of a worker, and what vLLM says of itself.",
    variables=(JOBS, WORKERS, INSTANCES),
    events=EVENTS,
    rows=(SEEN, SPEED, INSIDE),
)
