"""
What a gateway exports for Prometheus.

Labels come from closed sets: tenants and models from the configuration, workers from the pool, the rest from
enumerations or capped.  Metrics fail open: nothing here may refuse a request.
"""

from appliance.infra.metrics.families import TENANT_SERIES, Meters, Metrics
from appliance.infra.metrics.observing import (
    AuditView,
    TenantsView,
    WitnessView,
    observe_audit,
    observe_tenants,
    observe_witnesses,
)

__all__ = [
    "TENANT_SERIES",
    "AuditView",
    "Meters",
    "Metrics",
    "TenantsView",
    "WitnessView",
    "observe_audit",
    "observe_tenants",
    "observe_witnesses",
]
