"""
What the HTTP layer is given: built by the composition root, never looked up.
"""

from collections.abc import Callable
from dataclasses import dataclass

from appliance.api.console.console import Console
from appliance.audit.content.retention import Retention
from appliance.audit.durability.health import AuditHealth
from appliance.audit.log import AuditLog
from appliance.control.egress import EgressWatch
from appliance.control.loop import ControlLoop
from appliance.control.override import OverrideStore
from appliance.control.tenants.registrar import Registrar
from appliance.control.worker_list import WorkerList
from appliance.drafts.promotion.promoter import Promoter
from appliance.gateway.attribution import Attribution
from appliance.gateway.batch.batches import Batches
from appliance.gateway.batch.files import TenantFiles
from appliance.gateway.gateway import Gateway
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import ApiSettings
from appliance.serving.pool import WorkerPool
from appliance.sovereignty.egress.standing import Standing
from appliance.sovereignty.wall import NO_WALL, Wall
from appliance.tenancy import TenantDirectory
from appliance.tenancy.identity.authenticator import Authenticator


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything a route may use."""

    settings: ApiSettings
    tenants: TenantDirectory
    identity: Authenticator
    pool: WorkerPool
    workers: WorkerList
    gateway: Gateway
    audit: AuditLog
    """The log itself; requests are recorded by way of the gateway."""
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
    """Where entries are kept now, free space, the log's own check; without one, all is well."""
    registrar: Registrar | None = None
    """Changes tenants and keys; None where they are not in a database."""
    tenants_warning: Callable[[], str | None] = lambda: None
    """Why the tenants in force may be out of date; None while they are not."""
    retention: Retention | None = None
    """Erases kept content; None where none is kept."""
    files: TenantFiles | None = None
    """Tenants' files; None if files are not kept."""
    batches: Batches | None = None
    """Batches of tenants; None where none are run."""
    wall: Wall = NO_WALL
    """What this process can connect to."""
    egress: EgressWatch | None = None
    """Tries to get out, now and then; None where that is not done."""
    console: Console | None = None
    """The pages for operators; None where `console.enabled` is not set."""
    promoter: Promoter | None = None
    """Takes drafts into service and out of it; None where no drafts are kept."""

    def egress_standing(self) -> Standing:
        """How this gateway stands after its egress checks."""
        return self.egress.standing if self.egress else Standing(mode="off")
