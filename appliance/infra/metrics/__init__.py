"""
What a gateway exports for Prometheus.

- `families`: every metric, declared once.  `observing`: state that is read at every scrape.
- `gaps`: the time between two pieces of an answer, counted without a lock; counters copied from workers.
- `cardinality`: bounds on series by tenant and on labels that clients can invent.
- `page`: the text that Prometheus scrapes, written a few series at a time so that no stream waits for it.

Labels come from closed sets: tenants and models from the configuration, workers from the pool, the rest
from enumerations or capped.  Metrics fail open: nothing here may refuse a request.
"""

from appliance.infra.metrics.families import TENANT_SERIES, Meters, Metrics
from appliance.infra.metrics.observing import (
    AuditView,
    HealthView,
    TenantsView,
    WitnessView,
    observe_audit,
    observe_health,
    observe_tenants,
    observe_witnesses,
)

__all__ = [
    "TENANT_SERIES",
    "AuditView",
    "HealthView",
    "Meters",
    "Metrics",
    "TenantsView",
    "WitnessView",
    "observe_audit",
    "observe_health",
    "observe_tenants",
    "observe_witnesses",
]
