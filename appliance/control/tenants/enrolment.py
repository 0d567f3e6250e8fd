"""
Enrolment of tenants at a gateway's start: the tenants file, and at the first start an admin key.

The file is imported at each start: it adds and changes, and removes nothing.  The first start on a database
makes the tenant `operator` with an admin key, unless the file has one.  Without a file `appliance up` also
makes the tenant `demo`, which has no limits.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from appliance.audit.store import SqlAuditStore
from appliance.control.tenants.registrar import Registrar
from appliance.control.tenants.sealing import read_plan
from appliance.errors import ConfigurationError, TenantConflictError
from appliance.infra.data_directory import Installation
from appliance.infra.files import write_private
from appliance.tenancy import KEY_BYTES, ApiKey, Tenant, make_key, parse_tenants
from appliance.tenancy.edits import Tenants, add_key, import_tenants
from appliance.tenancy.roster import Roster, has_admin
from appliance.tenancy.store import SqlTenantStore

OPERATOR = "operator"
DEMO = "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstKey:
    """A key that the first start makes."""

    purpose: str
    tenant: Tenant
    text: str
    """The key in clear."""
    key: ApiKey
    file: Path
    """Where it is in clear, mode 0600."""


async def enrol(
    registrar: Registrar,
    installation: Installation,
    *,
    file: Path | None,
    demo: bool,
    actor: str,
    clock: Callable[[], float],
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> tuple[Roster, tuple[FirstKey, ...]]:
    """
    Import the file into the database, and make the first keys if it never had one.

    `file` is None for the one in the data directory, if there is one; `demo` allows the tenant `demo`;
    `actor` starts the gateway.  Returns the new keys.  Raises ConfigurationError if the file cannot be used.
    """
    wanted = _load(installation, file)
    now, before = int(clock()), await registrar.roster()
    is_first = before.generation == 0
    first: list[FirstKey] = []
    if is_first and not has_admin(wanted or (), now):
        text, key = make_key(random_bytes(KEY_BYTES), admin=True, created_at=now)
        tenant = Tenant(name=OPERATOR, models=())
        first.append(
            FirstKey(purpose="admin", tenant=tenant, text=text, key=key, file=installation.admin_key)
        )
    if is_first and demo and wanted is None:
        text, key = make_key(random_bytes(KEY_BYTES), created_at=now)
        tenant = Tenant(name=DEMO)
        first.append(
            FirstKey(purpose="demo tenant", tenant=tenant, text=text, key=key, file=installation.demo_key)
        )

    def edit(tenants: Tenants) -> Tenants:
        enrolled = import_tenants(tenants, wanted or (), prune=False, now=now)
        if tenants:
            return enrolled  # another gateway may have been first meanwhile
        for each in first:
            enrolled = _with_key(enrolled, each.tenant, each.key)
        return enrolled

    for each in first:
        # In the file before the key works: a crash in between leaves a file that the next start replaces.
        write_private(each.file, each.text + "\n")
    after = await registrar.apply(edit, actor=actor)
    made = {key.key_id for tenant in after.tenants for key in tenant.keys}
    for each in first:
        if each.key.key_id not in made:
            each.file.unlink(missing_ok=True)
    return after, tuple(each for each in first if each.key.key_id in made)


async def seal_upgraded(
    registrar: Registrar,
    store: SqlTenantStore,
    log: SqlAuditStore,
    *,
    continues: bool,
    actor: str,
    clock: Callable[[], float],
) -> None:
    """
    Give tenants and keys of a version without MACs their first one; otherwise do nothing.

    Only if the log agrees with them and never recorded a MAC: one that was removed stays missing, and the
    start fails.  `continues` is whether this machine has signed this log before, so that it is the true one.
    """
    stored = await asyncio.to_thread(store.read_unverified)
    if not continues or stored.state.mac is not None or stored.state.generation == 0:
        return
    plan = await asyncio.to_thread(read_plan, store, log, clock())
    if not plan.was_sealed and not plan.findings:
        try:
            await registrar.seal(plan, actor=actor)
        except TenantConflictError:
            return  # another gateway was first


def _with_key(tenants: Tenants, tenant: Tenant, key: ApiKey) -> Tenants:
    if all(each.name != tenant.name for each in tenants):
        tenants = (*tenants, tenant)
    return add_key(tenants, tenant.name, key)


def _load(installation: Installation, file: Path | None) -> Tenants | None:
    path = file or installation.tenants
    if file is None and not path.exists():
        return None
    try:
        return parse_tenants(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the tenants file {path}: {error}") from error
