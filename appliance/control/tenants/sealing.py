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
from appliance.tenancy.file import spell_limits
from appliance.tenancy.keys import ApiKey
from appliance.tenancy.roster import Roster
from appliance.tenancy.store import SqlTenantStore, StoredRoster
from appliance.tenancy.tenant import Tenant

NOT_IN_LOG = "not as the audit log has it"
EVIDENCE = (
    EntryType.TENANT_CREATED,
    EntryType.TENANT_CHANGED,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoggedKey:
    """What entries say of a key's permissions."""

    tenant: str
    admin: bool = False
    manage_keys: bool = False
    made_by: str | None = None
    limits: tuple[str, ...] = ()


class _LoggedTenants:
    """Tenants and keys that entries lead to, as far as entries say."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.tenants: set[str] = set()
        self.keys: dict[str, _LoggedKey] = {}
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
                self.keys[fields["key_id"]] = _LoggedKey(
                    tenant=fields["tenant"],
                    admin=entry.fields["admin"] is True,
                    manage_keys=entry.fields.get("manage_keys") is True,
                    made_by=fields.get("made_by"),
                    limits=_words(entry.fields.get("limits")),
                )
                self.revoked.discard(fields["key_id"])
            case EntryType.KEY_ROTATED:
                previous, successor = fields["previous_key_id"], fields["key_id"]
                known = self.keys.get(previous, _LoggedKey(tenant=fields["tenant"]))
                for key_id, key in self.keys.items():
                    if key.made_by == previous:
                        self.keys[key_id] = replace(key, made_by=successor)
                self.keys[successor] = replace(known, tenant=fields["tenant"], made_by=fields.get("made_by"))
            case EntryType.TENANT_CHANGED:
                self._change(entry)
            case EntryType.KEY_REVOKED:
                self.revoked.add(fields["key_id"])
            case EntryType.TENANTS_SEALED:
                self.sealed.add((int(fields["generation"]), fields["digest"]))

    def _change(self, entry: Entry) -> None:
        for change in _words(entry.fields["changes"]):
            match change.split("."):
                case ["keys", key_id, "limits"] if key_id in self.keys:
                    limits = _words(entry.fields.get("limits"))
                    self.keys[key_id] = replace(self.keys[key_id], limits=limits)
                case ["keys", key_id, "manage_keys"] if key_id in self.keys:
                    manages = entry.fields.get("manage_keys") is True
                    self.keys[key_id] = replace(self.keys[key_id], manage_keys=manages)


def _words(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, tuple) else ()


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
    known = logged.keys.get(key.key_id)
    if known != _LoggedKey(
        tenant=tenant,
        admin=key.admin,
        manage_keys=key.manage_keys,
        made_by=key.made_by,
        limits=tuple(spell_limits(key.limits)),
    ):
        return None, f"{where}: no entry created it so; it is removed"
    if key.key_id in logged.revoked and key.revoked_at is None:
        return replace(key, revoked_at=now), f"{where}: an entry revoked it; it is revoked again"
    return key, ""
