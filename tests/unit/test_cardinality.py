"""
Promises of `appliance.cardinality`: however many tenants, a monitoring server can hold the series.
"""

from itertools import product

from prometheus_client import CollectorRegistry, generate_latest

from appliance.api.errors import RENDERINGS
from appliance.audit.registry import EntryType
from appliance.cardinality import OTHER, TenantSeries
from appliance.exchange import Outcome
from appliance.limits.quota import Measure
from appliance.metrics import TENANT_SERIES, Metrics
from appliance.speculation import Reason, SpeculationMode, buckets_up_to
from appliance.tenancy import PriorityClass

SITE_SERIES = 5000
TENANTS = tuple(f"tenant-{number}" for number in range(200))
MODELS = ("general", "coder", "small")
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
VALUES = {
    "model": MODELS,
    "route": ROUTES,
    "outcome": tuple(Outcome),
    "kind": ("prompt", "completion"),
    "limit": tuple(Measure),
    "result": ("ok", "failed"),
    "code": tuple({rendering.code for rendering in RENDERINGS.values()}),
    "type": tuple(EntryType),
    "worker": tuple(f"10.0.0.{number}:8000" for number in range(4)),
    "mode": tuple(SpeculationMode),
    "reason": tuple(Reason),
    "batch": buckets_up_to(64),
    "position": range(3),
    "priority": tuple(PriorityClass),
    "verdict": ("closed", "open", "inconclusive"),
    "disk": ("database", "spool", "data"),
    "state": ("known", "cosigned"),
    "version": ("0.1.0",),
}
"""What each label can be; a new label brings its values."""


def series(metrics: Metrics) -> int:
    """Series on the page, as a server counts them; when each began is not exported (see `appliance.run`)."""
    lines = generate_latest(metrics.registry).decode().splitlines()
    return sum(not line.startswith("#") and "_created" not in line for line in lines)


def busy_site(tenants: tuple[str, ...]) -> Metrics:
    """Metrics after everything that can happen has happened: to every tenant, on every model and worker."""
    metrics = Metrics(CollectorRegistry())
    values = {**VALUES, "tenant": tenants}
    for family in vars(metrics).values():
        names = getattr(family, "_labelnames", ())
        for labels in product(*(values[name] for name in names)) if names else ():
            family.labels(*labels)
    return metrics


def test_two_hundred_tenants_stay_under_five_thousand_series():
    """Even if each of them uses every model and meets every outcome and every limit."""
    assert series(busy_site(TENANTS)) < SITE_SERIES


def test_a_quiet_site_of_two_hundred_tenants_shows_each_by_name():
    """One model and the usual outcomes: nobody is put together with others."""
    metrics = Metrics(CollectorRegistry())
    for tenant in TENANTS:
        for outcome in (Outcome.COMPLETED, Outcome.CLIENT_GONE, Outcome.NOT_ADMITTED):
            metrics.meters(tenant, "general", ROUTES[0], outcome).requests.inc()
        for family in (metrics.drafts, metrics.draft_tokens, metrics.accepted_tokens):
            family.labels(tenant, "general").inc()
        for limit in Measure:
            metrics.limit_used.labels(tenant, limit).set(0.5)
    page = generate_latest(metrics.registry).decode()
    assert f'tenant="{OTHER}"' not in page
    assert all(f'tenant="{tenant}"' in page for tenant in TENANTS)
    assert "appliance_tenant_series_full 0.0" in page


def test_more_tenants_make_no_more_series():
    """What grows with tenants ends at the bound, and says that it did."""
    many = busy_site(tuple(f"tenant-{number}" for number in range(1000)))
    assert series(many) < SITE_SERIES
    assert many.registry.get_sample_value("appliance_tenant_series_full") == 1


def test_sums_stay_whole_where_tenants_share_a_series():
    """Every request is counted, under a name or under `(other)`."""
    metrics = Metrics(CollectorRegistry())
    tenants = [f"tenant-{number}" for number in range(2 * TENANT_SERIES)]
    for tenant in tenants:
        metrics.drafts.labels(tenant, "general").inc()
    samples = [sample for sample in metrics.drafts.collect()[0].samples if sample.name.endswith("_total")]
    assert sum(sample.value for sample in samples) == len(tenants)
    assert next(sample.value for sample in samples if sample.labels["tenant"] == OTHER) == TENANT_SERIES


def test_who_is_known_stays_known_by_name():
    """The bound turns nobody away whose series are there."""
    registry = CollectorRegistry()
    counter = TenantSeries(1).counter("made", "Made.", ("tenant",), registry)
    counter.labels("first").inc()
    counter.labels("second").inc()
    counter.labels(tenant="first").inc()
    assert registry.get_sample_value("made_total", {"tenant": "first"}) == 2
    assert registry.get_sample_value("made_total", {"tenant": OTHER}) == 1


def test_states_of_several_tenants_are_not_mixed():
    """A gauge shows nobody in the place of others."""
    registry = CollectorRegistry()
    gauge = TenantSeries(1).gauge("used", "Used.", ("tenant",), registry)
    gauge.labels("first").set(1)
    gauge.labels("second").set_function(lambda: 2.0)
    assert [sample.labels["tenant"] for sample in gauge.collect()[0].samples] == ["first"]
