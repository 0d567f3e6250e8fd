"""
Tenants and keys in the audit log's database, SQLite or PostgreSQL.

Every change is one transaction that first increments the generation it was based on, so of two concurrent
changes one is refused and has to be retried.  It also writes the MAC of what results, and nothing is read
whose MAC is wrong.  All failures raise; the caller decides what that means for serving.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Connection, Table, delete, insert, select, update

from appliance.errors import ConfigurationError, TenantConflictError, TenantsUnavailableError
from appliance.infra.data_directory import Installation
from appliance.infra.database import Database, SqlStore
from appliance.tenancy.allowances import UNLIMITED, encode_limits, parse_limits
from appliance.tenancy.file import encode_policy, parse_policy
from appliance.tenancy.keys import AdminScope, ApiKey
from appliance.tenancy.roster import Roster, sorted_tenants
from appliance.tenancy.roster_mac import RosterMac, RosterState, digest_of
from appliance.tenancy.tables import api_keys, tenancy_generation, tenants
from appliance.tenancy.tenant import Tenant

_AS_JSON = ("models", "may", "limits")
_READS = 5  # of tables that others change meanwhile

_Rows = Mapping[Table, Mapping[str, Mapping[str, Any]]]


class TenantStore(Protocol):
    """Storage of tenants; every method may raise `TenantsUnavailableError`."""

    def generation(self) -> int:
        """Number of changes so far; cheap to poll.  Raises TenantsAlteredError if it went back."""

    def read(self) -> Roster: ...

    def write(self, before: Roster, after: tuple[Tenant, ...]) -> Roster:
        """Durable on return; raises TenantConflictError if the stored state is no longer `before`."""

    def rewrite(self, before: int, generation: int, after: tuple[Tenant, ...]) -> Roster:
        """Replace all rows, whatever they are; `before` is the generation they have now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRoster:
    """What the database holds, whether or not its MAC is right."""

    roster: Roster
    state: RosterState
    digest: str


class SqlTenantStore(SqlStore):
    subject = "the tenants"
    unavailable = TenantsUnavailableError

    def __init__(self, database: Database | str, mac: RosterMac) -> None:
        super().__init__(database)
        self.mac = mac

    def generation(self) -> int:
        known = self.mac.newest
        with self._reading() as connection:
            state = _read_state(connection)
        self.mac.check_age(state, known=known)
        return state.generation

    def read(self) -> Roster:
        known = self.mac.newest
        with self._errors("read"):
            state, rows = self._read()
            if state != RosterState() or any(rows.values()):  # otherwise it is the first start
                self.mac.check(state, _canonical(state.generation, rows), known=known)
            else:
                self.mac.check_age(state, known=known)
            return _decode(state.generation, rows)

    def read_unverified(self) -> StoredRoster:
        """For `tenant seal`, which compares it with the log."""
        with self._errors("read"):
            state, rows = self._read()
            digest = digest_of(_canonical(state.generation, rows))
            return StoredRoster(roster=_decode(state.generation, rows), state=state, digest=digest)

    def write(self, before: Roster, after: tuple[Tenant, ...]) -> Roster:
        old = _rows(before.tenants)
        with self._moving(before.generation, before.generation + 1, after) as (connection, new):
            for table in (tenants, api_keys):
                _replace_rows(connection, table, old[table], new[table])
        # A crash before this line: the change is committed or not; its audit entry exists.
        return Roster(generation=before.generation + 1, tenants=sorted_tenants(after))

    def rewrite(self, before: int, generation: int, after: tuple[Tenant, ...]) -> Roster:
        self.mac.create_key()
        with self._moving(before, generation, after) as (connection, new):
            for table in (tenants, api_keys):
                connection.execute(delete(table))
                if new[table]:
                    connection.execute(insert(table), list(new[table].values()))
        return Roster(generation=generation, tenants=sorted_tenants(after))

    @contextmanager
    def _moving(
        self, before: int, generation: int, after: tuple[Tenant, ...]
    ) -> Iterator[tuple[Connection, _Rows]]:
        if before == 0:
            self.mac.create_key()
        new = _rows(after)
        state = RosterState(generation=generation, mac=self.mac.compute(_canonical(generation, new)))
        move = (
            update(tenancy_generation)
            .where(tenancy_generation.c.generation == before)
            .values(generation=state.generation, mac=state.mac)
        )
        with self._writing() as connection:
            if connection.execute(move).rowcount != 1:
                raise TenantConflictError("The tenants were changed at the same time. Try again.")
            yield connection, new
        self.mac.accept(state)

    def _read(self) -> tuple[RosterState, _Rows]:
        for _ in range(_READS):
            with self._reader.begin() as connection:
                state = _read_state(connection)
                rows = {table: _read_rows(connection, table) for table in (tenants, api_keys)}
                # Every change moves the state: if it is the same, no change came between the statements.
                if _read_state(connection) == state:
                    return state, rows
        raise TenantsUnavailableError("the tenants are changed all the time: try again")

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            with super()._errors(verb):
                yield
        except (ConfigurationError, ValueError, TypeError) as error:
            message = f"the tenants in the database cannot be understood: {error}"
            raise TenantsUnavailableError(message) from error


def open_tenant_store(installation: Installation) -> SqlTenantStore:
    """On the database of a data directory, for one reader; the caller closes it."""
    return SqlTenantStore(installation.database_url, RosterMac.of(installation))


def roster_digest(generation: int, after: tuple[Tenant, ...]) -> str:
    """What an entry says of the tenants and keys that result from a change."""
    return digest_of(_canonical(generation, _rows(after)))


def _canonical(generation: int, rows: _Rows) -> bytes:
    """The same bytes for the same rows, from any database; without nulls, so a column can be added."""
    content = {
        table.name: [
            {name: value for name, value in row.items() if value is not None}
            for _, row in sorted(found.items())
        ]
        for table, found in rows.items()
    }
    named = {"generation": generation, **content}
    return json.dumps(named, sort_keys=True, separators=(",", ":")).encode()


def _read_state(connection: Connection) -> RosterState:
    row = connection.execute(select(tenancy_generation)).one()
    return RosterState(generation=int(row.generation), mac=row.mac)


def _read_rows(connection: Connection, table: Table) -> dict[str, dict[str, Any]]:
    (primary,) = table.primary_key.columns
    return {row[primary.name]: dict(row) for row in connection.execute(select(table)).mappings()}


def _decode(generation: int, rows: _Rows) -> Roster:
    keys: dict[str, list[ApiKey]] = {}
    for row in rows[api_keys].values():
        keys.setdefault(row["tenant"], []).append(_decode_key(row))
    found = [_decode_tenant(row, keys.get(row["name"], [])) for row in rows[tenants].values()]
    return Roster(generation=generation, tenants=sorted_tenants(found))


def _rows(all_tenants: tuple[Tenant, ...]) -> dict[Table, dict[str, dict[str, Any]]]:
    return {
        tenants: {tenant.name: _encode_tenant(tenant) for tenant in all_tenants},
        api_keys: {
            key.key_id: _encode_key(tenant.name, key) for tenant in all_tenants for key in tenant.keys
        },
    }


def _replace_rows(
    connection: Connection,
    table: Table,
    old: Mapping[str, Mapping[str, Any]],
    new: Mapping[str, Mapping[str, Any]],
) -> None:
    (primary,) = table.primary_key.columns
    for name in old.keys() - new.keys():
        connection.execute(delete(table).where(primary == name))
    for name, row in new.items():
        if name not in old:
            connection.execute(insert(table).values(row))
        elif row != old[name]:
            connection.execute(update(table).where(primary == name).values(row))


def _encode_tenant(tenant: Tenant) -> dict[str, Any]:
    policy = encode_policy(tenant)
    return {"name": tenant.name, **policy, **{name: json.dumps(policy[name]) for name in _AS_JSON}}


def _decode_tenant(row: Mapping[str, Any], keys: list[ApiKey]) -> Tenant:
    policy = dict(row)
    name = policy.pop("name")
    policy |= {member: json.loads(policy[member]) for member in _AS_JSON}
    return parse_policy(name, policy).with_keys(tuple(keys))


def _encode_key(tenant: str, key: ApiKey) -> dict[str, Any]:
    columns = [column.name for column in api_keys.columns if column.name != "tenant"]
    row = {name: getattr(key, name) for name in columns}
    return {
        "tenant": tenant,
        **row,
        "models": None if key.models is None else json.dumps(key.models),
        "scopes": None if key.scopes is None else json.dumps(sorted(key.scopes)),
        # NULL if it has none, so that rows from before there were such columns keep their MAC.
        "limits": None if key.limits == UNLIMITED else json.dumps(encode_limits(key.limits), sort_keys=True),
        "manage_keys": key.manage_keys or None,
    }


def _decode_key(row: Mapping[str, Any]) -> ApiKey:
    values = dict(row)
    del values["tenant"]
    models, scopes, limits = values.pop("models"), values.pop("scopes"), values.pop("limits")
    return ApiKey(
        models=None if models is None else tuple(json.loads(models)),
        # NULL is every scope, as of keys from before there were scopes.
        scopes=None if scopes is None else frozenset(map(AdminScope, json.loads(scopes))),
        limits=UNLIMITED if limits is None else parse_limits("a key", json.loads(limits)),
        manage_keys=bool(values.pop("manage_keys")),
        **values,
    )
