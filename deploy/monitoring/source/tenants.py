"""
Tenants: usage, limits, costs, and tokens at a price.
"""

from dataclasses import replace

from deploy.monitoring.source.common import (
    BOUNDS,
    BY_INSTALLATION,
    EVENTS,
    INSTALLATION,
    JOB,
    MODELS,
    NONE,
    SAVED,
    TENANT,
    TENANTS,
    ZERO,
    acceptance_by_tenant,
    rejected_by_tenant,
    saved,
    until,
)
from deploy.monitoring.source.panels import TOKENS_PER_SECOND, Dashboard, Panel, Query, Row

USE = Row(
    title="Usage",
    panels=(
        Panel(
            title="Requests by tenant",
            text="The ten tenants with most requests. `(other)`: tenants that were first seen after 3100 series named a "
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
            unit=TOKENS_PER_SECOND, stacked=True,
        ),
        Panel(
            title="Requests not completed",
            text="By tenant and outcome. If one tenant has many, its traffic is unusual.",
            queries=(
                Query(
                    expr="topk(10, sum by (tenant, outcome) (rate(appliance_requests_total"
                    f'{{{TENANT},outcome!="completed"}}[$__rate_interval])))',
                    legend="{{tenant}}: {{outcome}}",
                ),
            ),
            unit="reqps",
            absent=NONE,
        ),
        Panel(
            title="Tokens in the time range",
            text="Usage of each tenant in the time range at the top right.",
            queries=(
                Query(
                    expr=f"topk(20, sum by (tenant, kind) (increase(appliance_tokens_total{{{TENANT}}}[$__range])))",
                    legend="{{tenant}}: {{kind}}",
                ),
            ),
            kind="table", width=12, pivot=("tenant", "kind"),
        ),
        Panel(
            title="Price in the time range",
            text="What you charge: tokens of prompts and answers at the price of a million tokens that you enter at "
            "the top, in its currency. Your own costs are below.",
            queries=(
                Query(
                    expr=f"topk(20, sum by (tenant) (increase(appliance_tokens_total{{{TENANT}}}[$__range]))) "
                    "* $price / 1000000",
                    legend="{{tenant}}",
                ),
            ),
            unit="none", kind="table", width=12, columns={"tenant": "tenant", "Value": "price"},
        ),
    ),
)  # fmt: skip
ENGINES = Row(
    title="Engine time and energy",
    panels=(
        Panel(
            title="Engine time by tenant",
            text="Fraction of time that engines spent on each tenant's requests; the ten with most. 1 is one engine that "
            "is busy all the time. Costs: `appliance cost report`.",
            queries=(
                Query(
                    expr=f"topk(10, sum by (tenant) (rate(appliance_engine_seconds_total{{{TENANT}}}[$__rate_interval]))) ",
                    legend="{{tenant}}",
                ),
            ),
            unit="none", stacked=True,
            absent=NONE,
        ),
        Panel(
            title="Power by tenant",
            text="Energy for each tenant's requests, per second: measured by GPUs, or computed from the watts in the "
            "settings; 0 without either.",
            queries=(
                Query(
                    expr=f"topk(10, sum by (tenant) (rate(appliance_energy_joules_total{{{TENANT}}}[$__rate_interval]))) ",
                    legend="{{tenant}}",
                ),
            ),
            unit="watt", stacked=True,
            absent=NONE,
        ),
        Panel(
            title="Engine utilisation",
            text="Fraction of the time each engine was busy. Low for weeks: fewer workers are enough. Near 1 for hours: "
            "requests wait.",
            queries=(
                Query(
                    expr=f"max by (worker) (rate(appliance_worker_busy_seconds_total{{{JOB}}}[$__rate_interval])) ",
                    legend="{{worker}}",
                ),
            ),
            unit="percentunit", maximum=1,
            absent=NONE,
        ),
    ),
)  # fmt: skip


def _price(of: str) -> str:
    """A price from each installation's settings; no series if it is not set."""
    return f'max by ({BY_INSTALLATION}) (appliance_cost_price{{{JOB},of="{of}"}})'


def _priced(amount: str, of: str) -> str:
    """Sum of each installation's amount times its price; no series without a price."""
    return f"sum({amount} * on ({BY_INSTALLATION}) {_price(of)})"


def _each_second(counter: str) -> str:
    """Rate of a counter over all workers and an hour; each gateway observes every worker completely."""
    return f"sum by ({BY_INSTALLATION}) (max by ({BY_INSTALLATION}, worker) (rate({counter}{{{JOB}}}[1h])))"


MACHINES = _priced(_each_second("appliance_worker_observed_seconds_total"), "worker_hour")
ENERGY = _priced(_each_second("appliance_worker_energy_joules_total") + " / 1000", "kwh")
PEOPLE = f"sum({_price('site_hour')})"
PARTS = " + ".join(f"({part} or on() {ZERO})" for part in (MACHINES, ENERGY, PEOPLE))
TOTAL = f"({PARTS}) and on() count(appliance_cost_price{{{JOB}}})"
"""No series if no price is set."""
NO_PRICE = "No price in the settings"
DELIVERED = f'sum(rate(appliance_tokens_total{{{JOB},kind="completion"}}[1h]))'
COST = Row(
    title="Costs at the prices in the settings (section cost)",
    panels=(
        Panel(
            title="Cost per hour",
            text="Of all workers, busy or not: machines, energy of the last hour, and the people who run them. "
            "`appliance cost report` has it by tenant and day.",
            queries=(
                Query(expr=MACHINES, legend="machines"),
                Query(expr=ENERGY, legend="energy"),
                Query(expr=PEOPLE, legend="people"),
            ),
            unit="none", stacked=True, width=6,
            absent=NO_PRICE,
        ),
        Panel(
            title="Cost per million delivered tokens",
            text="Cost of the last hour divided by the answer tokens that were sent in it, including idle time. Rises "
            "when there is little traffic; a gap: nothing was delivered.",
            queries=(
                Query(expr=f"({TOTAL}) / ({DELIVERED} * 3600 > 0) * 1000000", legend="cost"),
            ),
            unit="none", width=6,
            absent=f"{NO_PRICE}, or nothing delivered",
        ),
        replace(SAVED, width=6),
        Panel(
            title="Money saved by drafting",
            text="Cost of the saved engine time on these machines, at least, as measured and at most; without energy.",
            queries=tuple(
                Query(expr=_priced(f"{saved(bound)} / 3600", "worker_hour"), legend=legend)
                for bound, legend in BOUNDS
            ),
            unit="none", kind="stat", width=6,
            absent="No price of a worker in the settings",
        ),
    ),
)  # fmt: skip
LIMITS = Row(
    title="Limits and keys",
    panels=(
        Panel(
            title="Limits in use",
            text="Fraction of each limit that is used or held; at 1 requests are refused. 0 without a name: no tenant has "
            "limits.",
            queries=(
                Query(
                    expr=f'max by (tenant, limit) (appliance_limit_used_ratio{{{JOB},tenant=~"$tenant"}}) ',
                    legend="{{tenant}}: {{limit}}",
                ),
            ),
            unit="percentunit", kind="bargauge", maximum=1, thresholds=((0.8, "orange"), (1, "red")),
            absent=NONE,
        ),
        Panel(
            title="Refusals by limit",
            text="Requests answered 429 because of the tenant's own limit; other tenants are not affected.",
            queries=(
                Query(
                    expr="sum by (tenant, limit) (rate(appliance_limit_refusals_total"
                    f'{{{JOB},tenant=~"$tenant"}}[$__rate_interval]))',
                    legend="{{tenant}}: {{limit}}",
                ),
            ),
            unit="reqps",
            absent=NONE,
        ),
        Panel(
            title="Refused callers",
            text="Requests answered 401, by the reason.",
            queries=(
                Query(
                    expr=f"sum by (reason) (rate(appliance_callers_refused_total{{{JOB}}}[$__rate_interval])) ",
                    legend="{{reason}}",
                ),
            ),
            unit="reqps",
            absent=NONE,
        ),
        Panel(
            title="Next API key expires in",
            text="Of valid keys without a successor; `appliance key list` shows their tenants.",
            queries=(Query(expr=until("appliance_keys_next_end_timestamp_seconds")),),
            unit="s", kind="stat", width=6, height=4, mappings={"-1": ("none expires", "green")},
            base="red", thresholds=((7 * 86400, "green"),),
        ),
        Panel(
            title="Batch lines",
            text="Finished requests of batches in the time range, by result.",
            queries=(
                Query(
                    expr="sum by (result) (increase(appliance_batch_lines_total"
                    f'{{{JOB},tenant=~"$tenant"}}[$__range]))',
                    legend="{{result}}",
                ),
            ),
            kind="stat", width=6, height=4,
            absent=NONE,
        ),
        Panel(
            title="Age of tenants and keys",
            text="Time since the tenants were last confirmed by the database. If it grows, a revoked key may still work "
            "here.",
            queries=(Query(expr=f"max(appliance_tenants_age_seconds{{{JOB}}})"),),
            unit="s", kind="stat", width=6, height=4, thresholds=((5, "orange"), (60, "red")),
        ),
        Panel(
            title="All tenants shown by name",
            text="`no`: the maximum of series with a tenant is reached, and further tenants are counted as `(other)`.",
            queries=(Query(expr=f"max(appliance_tenant_series_full{{{JOB}}})"),),
            kind="stat", width=6, height=4, mappings={"0": ("yes", "green"), "1": ("no", "orange")},
        ),
    ),
)  # fmt: skip
DRAFTS = Row(
    title="Acceptance by tenant",
    panels=(
        acceptance_by_tenant(TENANT),
        rejected_by_tenant(TENANT),
    ),
)  # fmt: skip

TENANTS_AND_COST = Dashboard(
    uid="appliance-tenants",
    title="Appliance: tenants and cost",
    text="Usage, limits, costs, and tokens at a price, by tenant.",
    variables=(*INSTALLATION, MODELS, TENANTS),
    events=EVENTS[:1],
    rows=(USE, ENGINES, COST, LIMITS, DRAFTS),
    price=True,
)
