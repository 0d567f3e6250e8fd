"""
What the audit log says of the tenants and keys in the database, before they get a new MAC.

A MAC is computed again when its key was lost or replaced, when something changed the rows, and once after an
upgrade from a version without MACs.  The log is the evidence: what it contradicts is not sealed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from appliance.audit.entry import Entry, decode
from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.tenancy.keys import ApiKey
from appliance.tenancy.roster import Roster
from appliance.tenancy.store import SqlTenantStore, StoredRoster
from appliance.tenancy.tenant import Tenant

NOT_IN_LOG = "not as the audit log has it"
EVIDENCE = (
    EntryType.TENANT_CREATED,
    EntryType.TENANT_DELETED,
    EntryType.KEY_CREATED,
    EntryType.KEY_ROTATED,
    EntryType.KEY_REVOKED,
    EntryType.TENANTS_SEALED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealingPlan:
    before: Roster
    after: tuple[Tenant, ...]
    generation: int
    findings: tuple[str, ...] = ()
    """What the log contradicts, and how `after` corrects it."""
    is_recorded: bool = False
    """Whether an entry announced exactly these rows, and nothing newer was accepted here."""
    was_sealed: bool = False
    """Whether there was a MAC before: then its absence is no upgrade."""


class _LoggedTenants:
    """Tenants and keys that entries lead to, as far as entries say."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.tenants: set[str] = set()
        self.keys: dict[str, tuple[str, bool]] = {}
        """Tenant of each key, and whether it is for the admin API."""
        self.revoked: set[str] = set()
        self.sealed: set[tuple[int, str]] = set()
        for entry in entries:
            self._follow(entry)

    def _follow(self, entry: Entry) -> None:
        fields = {name: str(value) for name, value in entry.fields.items()}
        match entry.type:
            case EntryType.TENANT_CREATED:
                self.tenants.add(fields["tenant"])
            case EntryType.TENANT_DELETED:
                self.tenants.discard(fields["tenant"])
            case EntryType.KEY_CREATED:
                self.keys[fields["key_id"]] = fields["tenant"], entry.fields["admin"] is True
                self.revoked.discard(fields["key_id"])
            case EntryType.KEY_ROTATED:
                _, admin = self.keys.get(fields["previous_key_id"], ("", False))
                self.keys[fields["key_id"]] = fields["tenant"], admin
            case EntryType.KEY_REVOKED:
                self.revoked.add(fields["key_id"])
            case EntryType.TENANTS_SEALED:
                self.sealed.add((int(fields["generation"]), fields["digest"]))


def read_plan(store: SqlTenantStore, log: SqlAuditStore, now: float) -> SealingPlan:
    """Compare the database with the whole log; raises TenantsUnavailableError or AuditError."""
    entries = (decode(leaf.leaf) for leaf in log.leaves_of(EVIDENCE))
    return plan_sealing(store.read_unverified(), entries, accepted=store.mac.newest.generation, now=int(now))


def plan_sealing(stored: StoredRoster, entries: Iterable[Entry], *, accepted: int, now: int) -> SealingPlan:
    """`accepted` is the newest generation that this machine has read."""
    logged, before = _LoggedTenants(entries), stored.roster
    plan = SealingPlan(
        before=before,
        after=before.tenants,
        generation=max(before.generation, accepted) + 1,
        is_recorded=before.generation >= accepted and (before.generation, stored.digest) in logged.sealed,
        was_sealed=bool(logged.sealed) or accepted > 0,
    )
    if plan.is_recorded:
        return plan
    kept, findings = [], []
    for tenant in before.tenants:
        if tenant.name not in logged.tenants:
            findings.append(f"tenant {tenant.name}: no entry created it; it is removed with its keys")
            continue
        keys = []
        for key in tenant.keys:
            corrected, finding = _correct(tenant.name, key, logged, now)
            keys += [corrected] if corrected else []
            findings += [finding] if finding else []
        kept.append(tenant.with_keys(tuple(keys)))
    return replace(plan, after=tuple(kept), findings=tuple(findings))


def _correct(tenant: str, key: ApiKey, logged: _LoggedTenants, now: int) -> tuple[ApiKey | None, str]:
    where = f"{'admin key' if key.admin else 'key'} {key.key_id} of {tenant}"
    if logged.keys.get(key.key_id) != (tenant, key.admin):
        return None, f"{where}: no entry created it so; it is removed"
    if key.key_id in logged.revoked and key.revoked_at is None:
        return replace(key, revoked_at=now), f"{where}: an entry revoked it; it is revoked again"
    return key, ""
