"""
However many tenants, a monitoring server can hold the series.
"""

from prometheus_client import CollectorRegistry, generate_latest

from appliance.errors import Outcome
from appliance.infra.metrics import TENANT_SERIES, Metrics
from appliance.infra.metrics.cardinality import OTHER, TenantSeries
from appliance.infra.metrics.families import OFTEN, TEMPLATES
from appliance.tenancy.limits.quota import Measure
from tests.full_metrics import MODELS, ROUTES, TENANTS, VALUES, full_metrics, record_template

SITE_SERIES = 5000


def series(metrics: Metrics) -> int:
    """Series on the page, as a server counts them; when each began is not exported, as in a real gateway."""
    lines = generate_latest(metrics.registry).decode().splitlines()
    return sum(not line.startswith("#") and "_created" not in line for line in lines)


def test_two_hundred_tenants_stay_under_five_thousand_series():
    """Even if each of them uses every model and meets every outcome and every limit."""
    assert series(full_metrics(TENANTS)) < SITE_SERIES


def test_a_quiet_site_of_two_hundred_tenants_shows_each_by_name():
    """One model and the usual outcomes: no tenant is counted under `(other)`."""
    metrics = Metrics(CollectorRegistry())
    for tenant in TENANTS:
        for outcome in (Outcome.COMPLETED, Outcome.CLIENT_GONE, Outcome.NOT_ADMITTED):
            metrics.meters(tenant, "general", ROUTES[0], outcome).requests.inc()
        for family in (metrics.drafts, metrics.draft_tokens, metrics.accepted_tokens):
            family.labels(tenant, "general").inc()
        for limit in Measure:
            metrics.limit_used.labels(tenant, limit).set(0.5)
        metrics.engine_seconds.labels(tenant, "general").inc()
        metrics.energy_joules.labels(tenant, "general").inc()
    page = generate_latest(metrics.registry).decode()
    assert f'tenant="{OTHER}"' not in page
    assert all(f'tenant="{tenant}"' in page for tenant in TENANTS)
    assert "appliance_tenant_series_full 0.0" in page


def test_full_metrics_have_every_family():
    """What the bound is held against: no family without a series, and none that is left out of the sum."""
    families = {family.name: family for family in full_metrics(TENANTS[:2]).registry.collect()}
    assert [name for name, family in families.items() if not family.samples] == []
    assert len(families["appliance_worker_step_tokens"].samples) >= len(VALUES["batch"]) * 4 * 4
    assert len(families["appliance_context_drafts"].samples) >= len(MODELS) * 9


def test_templates_that_clients_make_up_share_a_series():
    """Only frequent templates have their own series, and every draft is counted."""
    metrics = Metrics(CollectorRegistry())
    for number in range(5 * OFTEN):
        for template in ("chat-common", f"chat-{number:08x}"):
            record_template(metrics, template)
    samples = metrics.template_drafts.collect()[0].samples
    counts = {each.labels["template"]: each.value for each in samples if each.name.endswith("_total")}
    assert counts == {"chat-common": 4 * OFTEN + 1, OTHER: 6 * OFTEN - 1}


def test_a_template_that_is_gone_makes_room():
    """Its series leave the page."""
    metrics = Metrics(CollectorRegistry())
    fleeting = [f"chat-{number:08x}" for number in range(TEMPLATES)]
    for template, times in (*((each, OFTEN) for each in fleeting), ("chat-new", 3000)):
        for _ in range(times):
            record_template(metrics, template)
    page = generate_latest(metrics.registry).decode()
    assert "chat-new" in page
    assert [each for each in fleeting if each in page] == []


def test_more_tenants_make_no_more_series():
    """Series stop at the bound, and a metric reports it."""
    many = full_metrics(tuple(f"tenant-{number}" for number in range(1000)))
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


def test_named_tenants_keep_their_series():
    """The bound does not affect existing series."""
    registry = CollectorRegistry()
    counter = TenantSeries(1).counter("made", "Made.", ("tenant",), registry)
    counter.labels("first").inc()
    counter.labels("second").inc()
    counter.labels(tenant="first").inc()
    assert registry.get_sample_value("made_total", {"tenant": "first"}) == 2
    assert registry.get_sample_value("made_total", {"tenant": OTHER}) == 1


def test_states_of_several_tenants_are_not_mixed():
    """A gauge has no series for `(other)`."""
    registry = CollectorRegistry()
    gauge = TenantSeries(1).gauge("used", "Used.", ("tenant",), registry)
    gauge.labels("first").set(1)
    gauge.labels("second").set_function(lambda: 2.0)
    assert [sample.labels["tenant"] for sample in gauge.collect()[0].samples] == ["first"]
