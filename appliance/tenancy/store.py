"""
Tenants and keys in the audit log's database, SQLite or PostgreSQL.

Every change is one transaction that first increments the generation it was based on, so of two concurrent
changes one is refused and has to be retried.  All failures raise; the caller decides what that means for
serving.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sqlalchemy import Connection, Row, Table, delete, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from appliance.errors import ConfigurationError, TenantConflictError, TenantsUnavailableError
from appliance.infra.database import SqlStore, first_line
from appliance.tenancy.file import encode_policy, parse_policy
from appliance.tenancy.keys import AdminScope, ApiKey
from appliance.tenancy.roster import Roster, sorted_tenants
from appliance.tenancy.tables import api_keys, tenancy_generation, tenants
from appliance.tenancy.tenant import Tenant

_AS_JSON = ("models", "may", "limits")


class TenantStore(Protocol):
    """Storage of tenants; every method may raise `TenantsUnavailableError`."""

    def generation(self) -> int:
        """Number of changes so far; cheap to poll."""

    def read(self) -> Roster: ...

    def write(self, before: Roster, after: tuple[Tenant, ...]) -> Roster:
        """Durable on return; raises TenantConflictError if the stored state is no longer `before`."""


class SqlTenantStore(SqlStore):
    def generation(self) -> int:
        with self._errors("read"), self._reader.begin() as connection:
            return _read_generation(connection)

    def read(self) -> Roster:
        with self._errors("read"), self._reader.begin() as connection:
            # First: a concurrent change then makes this generation too old, never too new, so the next poll
            # or the comparison in `write` notices it.
            generation = _read_generation(connection)
            keys: dict[str, list[ApiKey]] = {}
            for row in connection.execute(select(api_keys)):
                keys.setdefault(row.tenant, []).append(_decode_key(row))
            rows = connection.execute(select(tenants))
            found = [_decode_tenant(row, keys.get(row.name, [])) for row in rows]
        return Roster(generation=generation, tenants=sorted_tenants(found))

    def write(self, before: Roster, after: tuple[Tenant, ...]) -> Roster:
        old, new = (_rows(each) for each in (before.tenants, after))
        move = (
            update(tenancy_generation)
            .where(tenancy_generation.c.generation == before.generation)
            .values(generation=before.generation + 1)
        )
        with self._errors("written"), self._engine.begin() as connection:
            if connection.execute(move).rowcount != 1:
                raise TenantConflictError("The tenants were changed at the same time. Try again.")
            for table in (tenants, api_keys):
                _replace_rows(connection, table, old[table], new[table])
        # A crash before this line: the change is committed or not; its audit entry exists.
        return Roster(generation=before.generation + 1, tenants=sorted_tenants(after))

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            message = f"the tenants could not be {verb}: {first_line(error)}"
            raise TenantsUnavailableError(message) from error
        except (ConfigurationError, ValueError, TypeError) as error:
            message = f"the tenants in the database cannot be understood: {error}"
            raise TenantsUnavailableError(message) from error


def _read_generation(connection: Connection) -> int:
    return int(connection.execute(select(tenancy_generation.c.generation)).scalar_one())


def _rows(all_tenants: tuple[Tenant, ...]) -> dict[Table, dict[str, dict[str, Any]]]:
    return {
        tenants: {tenant.name: _encode_tenant(tenant) for tenant in all_tenants},
        api_keys: {
            key.key_id: _encode_key(tenant.name, key) for tenant in all_tenants for key in tenant.keys
        },
    }


def _replace_rows(
    connection: Connection, table: Table, old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]
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


def _decode_tenant(row: Row[Any], keys: list[ApiKey]) -> Tenant:
    policy = dict(row._mapping)  # noqa: SLF001 - SQLAlchemy's public name for it
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
    }


def _decode_key(row: Row[Any]) -> ApiKey:
    values = dict(row._mapping)  # noqa: SLF001 - as above
    del values["tenant"]
    models, scopes = values.pop("models"), values.pop("scopes")
    return ApiKey(
        models=None if models is None else tuple(json.loads(models)),
        # NULL is every scope, as of keys from before there were scopes.
        scopes=None if scopes is None else frozenset(map(AdminScope, json.loads(scopes))),
        **values,
    )
