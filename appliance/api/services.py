"""
What the HTTP layer is given: built by the composition root, never looked up.
"""

from collections.abc import Callable
from dataclasses import dataclass

from appliance.api.control import Control
from appliance.attribution import Attribution
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
    attribution: Attribution
    control: Control
    overrides: OverrideStore
    metrics: Metrics
    logger: Logger
    clock: Callable[[], float]
    """Unix time."""
    new_request_id: Callable[[], str]
    version: str
