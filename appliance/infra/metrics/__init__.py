"""
What a gateway exports for Prometheus.

Labels come from closed sets: tenants and models from the configuration, workers from the pool, the rest from
enumerations or capped.  Metrics fail open: nothing here may refuse a request.
"""

from appliance.infra.metrics.families import TENANT_SERIES, Meters, Metrics

__all__ = ["TENANT_SERIES", "Meters", "Metrics"]
