"""
Tenants: who uses how much, who is at its limits, what it costs, and what the tokens come to at a price.
"""

from deploy.monitoring.source.common import EVENTS, JOB, JOBS, MODELS, TENANT, TENANTS, until
from deploy.monitoring.source.panels import Dashboard, Panel, Query, Row

USE = Row(
    title="Use",
    panels=(
        Panel(
            title="Requests by tenant",
            text="The ten tenants with most requests. `(other)`: those that came once 3100 series named a "
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
            title="Price in the time shown",
            text="What you charge: tokens of prompts and answers at the price of a million tokens that is typed in at "
            "the top, in its currency. What they cost you is below.",
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
            unit="none", stacked=True,
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
            unit="watt", stacked=True,
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
            unit="percentunit", most=1,
        ),
    ),
)  # fmt: skip


SITE = "namespace, job"
"""What tells one installation from another; each has prices of its own."""


def _price(of: str) -> str:
    """A price of each installation's settings; nothing where it is not set."""
    return f'max by ({SITE}) (appliance_cost_price{{{JOB},of="{of}"}})'


def _priced(amount: str, of: str) -> str:
    """An amount of each installation at its price, added up; 0 where there is no price."""
    return f"(sum({amount} * on ({SITE}) {_price(of)}) or on() vector(0))"


def _each_second(counter: str) -> str:
    """What all workers add to a counter, over an hour; each gateway sees all of every worker."""
    return f"sum by ({SITE}) (max by ({SITE}, worker) (rate({counter}{{{JOB}}}[1h])))"


def _saved(bound: str | None) -> str:
    """Engine seconds that drafting saved; a gateway has those of the time in which it steered."""
    metric = "appliance_speculation_saved_engine_seconds"
    if bound is not None:
        metric = "appliance_speculation_saved_bound_engine_seconds"
    selector = JOB if bound is None else f'{JOB},bound="{bound}"'
    return f"sum by ({SITE}) ({metric}{{{selector}}})"


MACHINES = _priced(_each_second("appliance_worker_observed_seconds_total"), "worker_hour")
ENERGY = _priced(_each_second("appliance_worker_energy_joules_total") + " / 1000", "kwh")
PEOPLE = f"(sum({_price('site_hour')}) or on() vector(0))"
DELIVERED = f'sum(rate(appliance_tokens_total{{{JOB},kind="completion"}}[1h]))'
BOUNDS = (("low", "at least"), (None, "measured"), ("high", "at most"))
"""95 % confidence, as if all measurements erred the same way."""

COST = Row(
    title="What it costs (prices of the settings, section `cost`)",
    panels=(
        Panel(
            title="Cost of an hour",
            text="Of all workers together, busy or not: their machines, the energy they took in the last hour, and the "
            "people who run them. 0: no price in the settings. `appliance cost report` has it by tenant and day.",
            queries=(
                Query(expr=MACHINES, legend="machines"),
                Query(expr=ENERGY, legend="energy"),
                Query(expr=PEOPLE, legend="people"),
            ),
            unit="none", stacked=True, width=6,
        ),
        Panel(
            title="Cost of a million delivered tokens",
            text="What the last hour cost, by the tokens of answers that were sent in it, idle time included. Rises "
            "when there is little to do; a gap: nothing was delivered.",
            queries=(
                Query(expr=f"({MACHINES} + {ENERGY} + {PEOPLE}) / ({DELIVERED} * 3600 > 0) * 1000000", legend="cost"),
            ),
            unit="none", width=6,
        ),
        Panel(
            title="Engine time saved by drafting",
            text="Since the gateways started, by what workers take without drafts; below 0: lost. With 95 % confidence "
            "it lies between the outer lines. 0 between them: whether drafting saves is not known.",
            queries=tuple(
                Query(expr=f"sum({_saved(bound)}) or on() vector(0)", legend=legend) for bound, legend in BOUNDS
            ),
            unit="s", width=6, least=None,
        ),
        Panel(
            title="Saved by drafting",
            text="What the saved engine time would have cost on these machines, at least, as measured and at most; "
            "energy left out. 0: nothing was saved, or a machine has no price.",
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
    text="Who uses how much, who is at its limits, what it costs, and what the tokens come to at a price.",
    variables=(JOBS, MODELS, TENANTS),
    events=EVENTS[:1],
    rows=(USE, ENGINES, COST, LIMITS, DRAFTS),
    price=True,
)
