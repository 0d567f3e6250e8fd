"""
Tenants: usage, limits, costs, and tokens at a price.
"""

from deploy.monitoring.source.common import EVENTS, JOB, JOBS, MODELS, TENANT, TENANTS, ZERO, until
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
                    f'{{{TENANT},outcome!="completed"}}[$__rate_interval]))) or on() {ZERO}',
                    legend="{{tenant}}: {{outcome}}",
                ),
            ),
            unit="reqps",
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
            kind="table", width=12,
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
            unit="none", kind="table", width=12,
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
                    expr=f"topk(10, sum by (tenant) (rate(appliance_engine_seconds_total{{{TENANT}}}[$__rate_interval]))) "
                    f"or on() {ZERO}",
                    legend="{{tenant}}",
                ),
            ),
            unit="none", stacked=True,
        ),
        Panel(
            title="Power by tenant",
            text="Energy for each tenant's requests, per second: measured by GPUs, or computed from the watts in the "
            "settings; 0 without either.",
            queries=(
                Query(
                    expr=f"topk(10, sum by (tenant) (rate(appliance_energy_joules_total{{{TENANT}}}[$__rate_interval]))) "
                    f"or on() {ZERO}",
                    legend="{{tenant}}",
                ),
            ),
            unit="watt", stacked=True,
        ),
        Panel(
            title="Engine utilisation",
            text="Fraction of the time each engine was busy. Low for weeks: fewer workers are enough. Near 1 for hours: "
            "requests wait.",
            queries=(
                Query(
                    expr=f"max by (worker) (rate(appliance_worker_busy_seconds_total{{{JOB}}}[$__rate_interval])) "
                    f"or on() {ZERO}",
                    legend="{{worker}}",
                ),
            ),
            unit="percentunit", maximum=1,
        ),
    ),
)  # fmt: skip


SITE = "namespace, job"
"""Labels that identify an installation; each has prices of its own."""


def _price(of: str) -> str:
    """A price from each installation's settings; no series if it is not set."""
    return f'max by ({SITE}) (appliance_cost_price{{{JOB},of="{of}"}})'


def _priced(amount: str, of: str) -> str:
    """Sum of each installation's amount times its price; 0 without a price."""
    return f"(sum({amount} * on ({SITE}) {_price(of)}) or on() {ZERO})"


def _each_second(counter: str) -> str:
    """Rate of a counter over all workers and an hour; each gateway observes every worker completely."""
    return f"sum by ({SITE}) (max by ({SITE}, worker) (rate({counter}{{{JOB}}}[1h])))"


def _saved(bound: str | None) -> str:
    """Engine seconds that drafting saved; a gateway counts them while it holds the lease."""
    metric = "appliance_speculation_saved_engine_seconds"
    if bound is not None:
        metric = "appliance_speculation_saved_bound_engine_seconds"
    selector = JOB if bound is None else f'{JOB},bound="{bound}"'
    return f"sum by ({SITE}) ({metric}{{{selector}}})"


MACHINES = _priced(_each_second("appliance_worker_observed_seconds_total"), "worker_hour")
ENERGY = _priced(_each_second("appliance_worker_energy_joules_total") + " / 1000", "kwh")
PEOPLE = f"(sum({_price('site_hour')}) or on() {ZERO})"
DELIVERED = f'sum(rate(appliance_tokens_total{{{JOB},kind="completion"}}[1h]))'
BOUNDS = (("low", "at least"), (None, "measured"), ("high", "at most"))
"""95 % confidence, as if all measurements erred the same way."""

COST = Row(
    title="Costs (prices from the settings, section `cost`)",
    panels=(
        Panel(
            title="Cost per hour",
            text="Of all workers, busy or not: machines, energy of the last hour, and the people who run them. 0: no "
            "price in the settings. `appliance cost report` has it by tenant and day.",
            queries=(
                Query(expr=MACHINES, legend="machines"),
                Query(expr=ENERGY, legend="energy"),
                Query(expr=PEOPLE, legend="people"),
            ),
            unit="none", stacked=True, width=6,
        ),
        Panel(
            title="Cost per million delivered tokens",
            text="Cost of the last hour divided by the answer tokens that were sent in it, including idle time. Rises "
            "when there is little traffic; a gap: nothing was delivered.",
            queries=(
                Query(expr=f"({MACHINES} + {ENERGY} + {PEOPLE}) / ({DELIVERED} * 3600 > 0) * 1000000", legend="cost"),
            ),
            unit="none", width=6,
        ),
        Panel(
            title="Engine time saved by drafting",
            text="Since the gateways started, compared with the time without drafts; below 0: lost. The outer lines are "
            "95 % bounds. If 0 is between them, it is not known whether drafting saves.",
            queries=tuple(
                Query(expr=f"sum({_saved(bound)}) or on() {ZERO}", legend=legend) for bound, legend in BOUNDS
            ),
            unit="s", width=6, minimum=None,
        ),
        Panel(
            title="Money saved by drafting",
            text="Cost of the saved engine time on these machines, at least, as measured and at most; without energy. "
            "0: nothing was saved, or there is no price.",
            queries=tuple(
                Query(expr=_priced(f"{_saved(bound)} / 3600", "worker_hour"), legend=legend)
                for bound, legend in BOUNDS
            ),
            unit="none", kind="stat", width=6,
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
                    expr=f'max by (tenant, limit) (appliance_limit_used_ratio{{{JOB},tenant=~"$tenant"}}) '
                    f"or on() {ZERO}",
                    legend="{{tenant}}: {{limit}}",
                ),
            ),
            unit="percentunit", kind="bargauge", thresholds=((0.8, "orange"), (1, "red")),
        ),
        Panel(
            title="Refusals by limit",
            text="Requests answered 429 because of the tenant's own limit; other tenants are not affected.",
            queries=(
                Query(
                    expr="sum by (tenant, limit) (rate(appliance_limit_refusals_total"
                    f'{{{JOB},tenant=~"$tenant"}}[$__rate_interval])) or on() {ZERO}',
                    legend="{{tenant}}: {{limit}}",
                ),
            ),
            unit="reqps",
        ),
        Panel(
            title="Refused callers",
            text="Requests answered 401, by the reason.",
            queries=(
                Query(
                    expr=f"sum by (reason) (rate(appliance_callers_refused_total{{{JOB}}}[$__rate_interval])) "
                    f"or on() {ZERO}",
                    legend="{{reason}}",
                ),
            ),
            unit="reqps",
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
                    f'{{{JOB},tenant=~"$tenant"}}[$__range])) or on() {ZERO}',
                    legend="{{result}}",
                ),
            ),
            kind="stat", width=6, height=4,
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
        Panel(
            title="Acceptance length by tenant",
            text="The ten lowest over an hour. A tenant far below the others slows down requests in the same batch: it can "
            "opt out of speculation (docs/how-to/opt-out-of-speculation.md).",
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
            title="Rejected draft tokens by tenant",
            text="Draft tokens of a tenant's requests that were not accepted, per second.",
            queries=(
                Query(
                    expr="topk(10, sum by (tenant) ("
                    f"rate(appliance_draft_tokens_total{{{TENANT}}}[$__rate_interval]) "
                    f"- rate(appliance_accepted_tokens_total{{{TENANT}}}[$__rate_interval])))",
                    legend="{{tenant}}",
                ),
            ),
            width=12, unit=TOKENS_PER_SECOND, stacked=True,
        ),
    ),
)  # fmt: skip

TENANTS_AND_COST = Dashboard(
    uid="appliance-tenants",
    title="Appliance: tenants and cost",
    text="Usage, limits, costs, and tokens at a price, by tenant.",
    variables=(JOBS, MODELS, TENANTS),
    events=EVENTS[:1],
    rows=(USE, ENGINES, COST, LIMITS, DRAFTS),
    price=True,
)
