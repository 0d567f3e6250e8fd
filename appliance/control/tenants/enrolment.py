"""
Enrolment of tenants at a gateway's start: the tenants file, and at the first start an admin key.

The file is imported at each start: it adds and changes, and removes nothing.  The first start on a database
makes the tenants `operator` and `demo` with a key each; with a file there is no `demo`, and an admin key only
if the file has none.
"""

import asyncio
import secrets
from collections.abc import Callable
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


async def enrol(
    registrar: Registrar,
    installation: Installation,
    *,
    file: Path | None,
    actor: str,
    clock: Callable[[], float],
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> tuple[Roster, dict[str, str]]:
    """
    Import the file into the database, and make the first keys if it never had one.

    `file` is None for the one in the data directory, if there is one; `actor` starts the gateway.  Returns
    the new keys by purpose: this is the only time they can be shown.  Raises ConfigurationError if the file
    cannot be used.
    """
    wanted = _load(installation, file)
    now, before = int(clock()), await registrar.roster()
    is_first = before.generation == 0
    lacks_admin = is_first and not has_admin(wanted or (), now)
    admin_text, admin = make_key(random_bytes(KEY_BYTES), admin=True, created_at=now)
    demo_text, demo = make_key(random_bytes(KEY_BYTES), created_at=now)

    def edit(tenants: Tenants) -> Tenants:
        enrolled = import_tenants(tenants, wanted or (), prune=False, now=now)
        if tenants or not is_first:
            return enrolled  # another gateway may have been first meanwhile
        if lacks_admin:
            enrolled = _with_key(enrolled, Tenant(name=OPERATOR, models=()), admin)
        if wanted is None:
            enrolled = _with_key(enrolled, Tenant(name=DEMO), demo)
        return enrolled

    if lacks_admin:
        # In the file before the key works: a crash in between leaves a file that the next start replaces.
        write_private(installation.admin_key, admin_text + "\n")
    after = await registrar.apply(edit, actor=actor)
    made = {key.key_id for tenant in after.tenants for key in tenant.keys}
    shown = {"admin": (admin_text, admin), "demo tenant": (demo_text, demo)}
    if lacks_admin and admin.key_id not in made:
        installation.admin_key.unlink(missing_ok=True)
    return after, {purpose: text for purpose, (text, key) in shown.items() if key.key_id in made}


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
