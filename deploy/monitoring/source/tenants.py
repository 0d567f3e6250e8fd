"""
Tenants: who uses how much, who is at its limits, and what the tokens come to at a price.
"""

from deploy.monitoring.source.common import EVENTS, JOB, JOBS, MODELS, TENANT, TENANTS, until
from deploy.monitoring.source.panels import Dashboard, Panel, Query, Row

USE = Row(
    title="Use",
    panels=(
        Panel(
            title="Requests by tenant",
            text="The ten tenants with most requests. `(other)`: those that came once 3300 series named a "
            "tenant.",
            queries=(
                Query(
                    expr=f"topk(10, sum by (tenant) (rate(appliance_requests_total{{{TENANT}}}[$__rate_interval])))",
                    legend="{{tenant}}",
                ),
            ),
            unit="reqps", stacked=True,
        ),
        Panel(
            title="Tokens by tenant",
            text="Tokens of prompts and answers per second; the ten tenants with most.",
            queries=(
                Query(
                    expr=f"topk(10, sum by (tenant) (rate(appliance_tokens_total{{{TENANT}}}[$__rate_interval])))",
                    legend="{{tenant}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            title="Requests that did not end well",
            text="By tenant and how they ended; a single tenant with many is doing something unusual.",
            queries=(
                Query(
                    expr="topk(10, sum by (tenant, outcome) (rate(appliance_requests_total"
                    f'{{{TENANT},outcome!="completed"}}[$__rate_interval]))) or on() vector(0)',
                    legend="{{tenant}}: {{outcome}}",
                ),
            ),
            unit="reqps",
        ),
        Panel(
            title="Tokens in the time shown",
            text="What each tenant used in the time chosen at the top right.",
            queries=(
                Query(
                    expr=f"topk(20, sum by (tenant, kind) (increase(appliance_tokens_total{{{TENANT}}}[$__range])))",
                    legend="{{tenant}}: {{kind}}",
                ),
            ),
            kind="table", width=12,
        ),
        Panel(
            title="Cost in the time shown",
            text="Tokens of prompts and answers at the price of a million tokens that is typed in at the top, in "
            "its currency.",
            queries=(
                Query(
                    expr=f"topk(20, sum by (tenant) (increase(appliance_tokens_total{{{TENANT}}}[$__range]))) "
                    "* $price / 1000000",
                    legend="{{tenant}}",
                ),
            ),
            unit="none", kind="table", width=12,
        ),
    ),
)  # fmt: skip
ENGINES = Row(
    title="Engine time and energy",
    panels=(
        Panel(
            title="Engine time by tenant",
            text="Share of time that engines spent on each tenant's requests; the ten with most. 1 is one engine, busy "
            "all the time. What it costs: `appliance cost report`.",
            queries=(
                Query(
                    expr=f"topk(10, sum by (tenant) (rate(appliance_engine_seconds_total{{{TENANT}}}[$__rate_interval]))) "
                    "or on() vector(0)",
                    legend="{{tenant}}",
                ),
            ),
            unit="none", stacked=True, width=6,
        ),
        Panel(
            title="Power by tenant",
            text="Energy that went into each tenant's requests, per second: measured by GPUs, or made of the watts in "
            "the settings; 0 where neither is there.",
            queries=(
                Query(
                    expr=f"topk(10, sum by (tenant) (rate(appliance_energy_joules_total{{{TENANT}}}[$__rate_interval]))) "
                    "or on() vector(0)",
                    legend="{{tenant}}",
                ),
            ),
            unit="watt", stacked=True, width=6,
        ),
        Panel(
            title="Engines at work",
            text="Share of the time each engine worked. Low for weeks: fewer would do. Near 1 for hours: requests wait.",
            queries=(
                Query(
                    expr=f"max by (worker) (rate(appliance_worker_busy_seconds_total{{{JOB}}}[$__rate_interval])) "
                    "or on() vector(0)",
                    legend="{{worker}}",
                ),
            ),
            unit="percentunit", most=1, width=6,
        ),
        Panel(
            title="Engine time saved by drafting",
            text="Since the gateway started, by what the worker takes without drafts; below 0: lost.",
            queries=(
                Query(
                    expr=f"max by (worker) (appliance_speculation_saved_engine_seconds{{{JOB}}}) or on() vector(0)",
                    legend="{{worker}}",
                ),
            ),
            unit="s", width=6, least=None,
        ),
    ),
)  # fmt: skip
LIMITS = Row(
    title="Limits and keys",
    panels=(
        Panel(
            title="Limits in use",
            text="Share of each limit that is used or held; at 1 requests are refused. 0 without a name: no tenant "
            "has limits.",
            queries=(
                Query(
                    expr=f'max by (tenant, limit) (appliance_limit_used_ratio{{{JOB},tenant=~"$tenant"}}) '
                    "or on() vector(0)",
                    legend="{{tenant}}: {{limit}}",
                ),
            ),
            unit="percentunit", kind="bargauge", steps=((0.8, "orange"), (1, "red")),
        ),
        Panel(
            title="Refused for a limit",
            text="Requests answered 429 because of the tenant's own limit; other tenants do not notice.",
            queries=(
                Query(
                    expr="sum by (tenant, limit) (rate(appliance_limit_refusals_total"
                    f'{{{JOB},tenant=~"$tenant"}}[$__rate_interval])) or on() vector(0)',
                    legend="{{tenant}}: {{limit}}",
                ),
            ),
            unit="reqps",
        ),
        Panel(
            title="Callers turned away",
            text="Requests answered 401, by what was wrong with the key or token.",
            queries=(
                Query(
                    expr=f"sum by (reason) (rate(appliance_callers_refused_total{{{JOB}}}[$__rate_interval])) "
                    "or on() vector(0)",
                    legend="{{reason}}",
                ),
            ),
            unit="reqps",
        ),
        Panel(
            title="Next API key ends in",
            text="Of keys in force that have no successor; `appliance key list` says whose.",
            queries=(Query(expr=until("appliance_keys_next_end_timestamp_seconds")),),
            unit="s", kind="stat", width=6, height=4, words={"-1": ("none ends", "green")},
            base="red", steps=((7 * 86400, "green"),),
        ),
        Panel(
            title="Lines of batches",
            text="Requests of batches that were done in the time shown, by how they ended.",
            queries=(
                Query(
                    expr="sum by (result) (increase(appliance_batch_lines_total"
                    f'{{{JOB},tenant=~"$tenant"}}[$__range])) or on() vector(0)',
                    legend="{{result}}",
                ),
            ),
            kind="stat", width=6, height=4,
        ),
        Panel(
            title="Tenants and keys are from",
            text="How long ago the database last confirmed who may call. Growing: a key that was revoked may still "
            "open here.",
            queries=(Query(expr=f"max(appliance_tenants_age_seconds{{{JOB}}})"),),
            unit="s", kind="stat", width=6, height=4, steps=((5, "orange"), (60, "red")),
        ),
        Panel(
            title="All tenants shown by name",
            text="`no`: so many series name a tenant that further ones are counted as `(other)`.",
            queries=(Query(expr=f"max(appliance_tenant_series_full{{{JOB}}})"),),
            kind="stat", width=6, height=4, words={"0": ("yes", "green"), "1": ("no", "orange")},
        ),
    ),
)  # fmt: skip
DRAFTS = Row(
    title="Whose drafts are accepted",
    panels=(
        Panel(
            title="Acceptance length by tenant",
            text="The ten lowest over an hour. One tenant far below the others slows down whoever is decoded with "
            "it: it can opt out of speculation (docs/how-to/opt-out-of-speculation.md).",
            queries=(
                Query(
                    expr=f"bottomk(10, 1 + sum by (tenant) (increase(appliance_accepted_tokens_total{{{TENANT}}}[1h])) "
                    f"/ (sum by (tenant) (increase(appliance_drafts_total{{{TENANT}}}[1h])) > 0))",
                    legend="{{tenant}}",
                ),
            ),
            unit="none", width=12,
        ),
        Panel(
            title="Draft tokens thrown away",
            text="Drafted for a tenant's requests and not accepted, per second: computed for nothing.",
            queries=(
                Query(
                    expr="topk(10, sum by (tenant) ("
                    f"rate(appliance_draft_tokens_total{{{TENANT}}}[$__rate_interval]) "
                    f"- rate(appliance_accepted_tokens_total{{{TENANT}}}[$__rate_interval])))",
                    legend="{{tenant}}",
                ),
            ),
            width=12, stacked=True,
        ),
    ),
)  # fmt: skip

TENANTS_AND_COST = Dashboard(
    uid="appliance-tenants",
    title="Appliance: tenants and cost",
    text="Who uses how much, who is at its limits, and what the tokens come to at a price.",
    variables=(JOBS, MODELS, TENANTS),
    events=EVENTS[:1],
    rows=(USE, ENGINES, LIMITS, DRAFTS),
    price=True,
)
