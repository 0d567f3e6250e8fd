"""The dependencies of the HTTP layer, built by the composition root."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from appliance.api.console.console import Console
from appliance.api.refusals import RefusedCallers
from appliance.api.request_middleware import Stop
from appliance.audit.content.retention import Retention
from appliance.audit.durability.health import AuditHealth
from appliance.audit.log import AuditLog
from appliance.control.approvals import Approvals
from appliance.control.egress_checks import EgressWatch
from appliance.control.loop import ControlLoop
from appliance.control.override import OverrideStore
from appliance.control.tenants.registrar import Registrar
from appliance.control.worker_list import WorkerList
from appliance.drafts.promotion.promoter import Promoter
from appliance.gateway.attribution import Attribution
from appliance.gateway.batch.batches import Batches
from appliance.gateway.batch.bounds import TENANT_REQUESTS, TenantSlots
from appliance.gateway.batch.files import TenantFiles
from appliance.gateway.gateway import Gateway
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import ApiSettings
from appliance.serving.pool import WorkerPool
from appliance.sovereignty.egress.egress_status import EgressStatus
from appliance.sovereignty.wall import NO_WALL, Wall
from appliance.tenancy import TenantDirectory
from appliance.tenancy.identity.authenticator import Authenticator


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    settings: ApiSettings
    tenants: TenantDirectory
    identity: Authenticator
    refused: RefusedCallers
    pool: WorkerPool
    workers: WorkerList
    gateway: Gateway
    audit: AuditLog
    """For entries of routes; the gateway records requests."""
    attribution: Attribution
    control: ControlLoop
    overrides: OverrideStore
    metrics: Metrics
    logger: Logger
    clock: Callable[[], float]
    """Unix time."""
    new_request_id: Callable[[], str]
    version: str
    audit_health: Callable[[], AuditHealth] = AuditHealth
    registrar: Registrar | None = None
    """Changes tenants and keys; None if they are in a file."""
    tenants_warning: Callable[[], str | None] = lambda: None
    """Why the tenants in force may be out of date; None if they are not."""
    forward_warning: Callable[[], str | None] = lambda: None
    """Why the log is not forwarded to the SIEM; None if it is, or need not be."""
    retention: Retention | None = None
    """Erases stored content; None if none is stored."""
    approvals: Approvals | None = None
    """Requests for a second administrator; None unless `audit.two_person` is set."""
    files: TenantFiles | None = None
    """Tenants' files; None if files are not kept."""
    batches: Batches | None = None
    """None if the gateway runs none."""
    storage_slots: TenantSlots = field(
        default_factory=lambda: TenantSlots("requests for files and batches", per_tenant=TENANT_REQUESTS)
    )
    stop: Stop = field(default_factory=Stop)
    wall: Wall = NO_WALL
    """Which connections this process may open."""
    egress: EgressWatch | None = None
    """Checks egress regularly; None if it is off."""
    console: Console | None = None
    """The pages for operators; None unless `console.enabled` is set."""
    documentation: Path | None = None
    """The documentation as a site; None if it was not built."""
    promoter: Promoter | None = None
    """Deploys and rolls back drafts; None without a draft registry."""

    def egress_status(self) -> EgressStatus:
        return self.egress.status if self.egress else EgressStatus(mode="off")
