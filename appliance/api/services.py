"""
What the HTTP layer is given: built by the composition root, never looked up.
"""

from collections.abc import Callable
from dataclasses import dataclass

from appliance.api.control import Control
from appliance.attribution import Attribution
from appliance.audit.content.retention import Retention
from appliance.audit.durability.health import AuditHealth
from appliance.audit.log import AuditLog
from appliance.gateway import Gateway
from appliance.logs import Logger
from appliance.metrics import Metrics
from appliance.override import OverrideStore
from appliance.serving.pool import WorkerPool
from appliance.settings import ApiSettings
from appliance.tenancy import TenantDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything a route may use."""

    settings: ApiSettings
    tenants: TenantDirectory
    pool: WorkerPool
    gateway: Gateway
    audit: AuditLog
    """The log itself; requests are recorded by way of the gateway."""
    attribution: Attribution
    control: Control
    overrides: OverrideStore
    metrics: Metrics
    logger: Logger
    clock: Callable[[], float]
    """Unix time."""
    new_request_id: Callable[[], str]
    version: str
    audit_health: Callable[[], AuditHealth] = AuditHealth
    """Where entries are kept now, free space, the log's own check; without one, all is well."""
    retention: Retention | None = None
    """Erases kept content; None where none is kept."""
