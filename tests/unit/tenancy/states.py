"""
Tenants and keys of every kind, made up by hypothesis, and some of fixed values.
"""

from dataclasses import replace
from types import MappingProxyType

from hypothesis import strategies as st

from appliance.tenancy import (
    NAME_FORMAT,
    AdminScope,
    ContentPolicy,
    Limits,
    Permission,
    PriorityClass,
    SpeculationPolicy,
    Tenant,
    make_key,
)
from appliance.tenancy.allowances import BOUNDS, LARGEST
from appliance.tenancy.moments import LATEST
from appliance.tenancy.roster import sorted_tenants

KEY, STORED = make_key(b"a" * 37)
OTHER_KEY, OTHER = make_key(b"b" * 37)
ADMIN_KEY, ADMIN = make_key(b"c" * 37, admin=True)

NAMES = st.from_regex(NAME_FORMAT, fullmatch=True).filter(lambda name: not name.endswith("\n"))
PRINTABLE = st.characters(exclude_categories=("C", "Z"), include_characters=" ")
MODEL = st.text(PRINTABLE, min_size=1, max_size=20)
MODELS = st.lists(MODEL, max_size=3).map(tuple)
MOMENTS = st.none() | st.integers(0, LATEST)
SCOPES = st.none() | st.frozensets(st.sampled_from(AdminScope), min_size=1)
KEY_IDS = st.from_regex(r"[a-z2-7]{8}", fullmatch=True)


SUBJECTS = st.from_regex(r"jwt:[0-9a-f]{16}", fullmatch=True)


def _key(raw, permissions, models, made_by, replaces, moments):
    admin, scopes, limits, manage_keys = permissions
    _, key = make_key(raw, admin=admin, scopes=scopes, models=models)
    created_at, expires_at, rotated_at, revoked_at = moments
    return type(key)(
        key_id=key.key_id,
        digest=key.digest,
        admin=admin,
        scopes=scopes,
        models=models,
        limits=limits,
        manage_keys=manage_keys,
        made_by=made_by,
        replaces=replaces,
        created_at=created_at,
        expires_at=expires_at,
        rotated_at=rotated_at,
        revoked_at=revoked_at,
    )


_BOUNDS = st.fixed_dictionaries({}, optional={name: st.integers(0, LARGEST) for name in BOUNDS})
LIMITS = st.builds(
    lambda bounds, by_model: Limits(**bounds, by_model=MappingProxyType(by_model)),
    _BOUNDS,
    st.dictionaries(MODEL, _BOUNDS.map(lambda bounds: Limits(**bounds)), max_size=2),
)
KEYS = st.builds(
    _key,
    st.binary(min_size=37, max_size=37),
    st.tuples(st.just(False), st.none(), LIMITS, st.booleans())
    | st.tuples(st.just(True), SCOPES, st.just(Limits()), st.just(False)),
    st.none() | MODELS,
    st.none() | KEY_IDS | SUBJECTS,
    st.none() | KEY_IDS,
    st.tuples(MOMENTS, MOMENTS, MOMENTS, MOMENTS),
)
TENANT = st.builds(
    Tenant,
    name=NAMES,
    models=MODELS,
    keys=st.lists(KEYS, max_size=3).map(tuple),
    speculation=st.sampled_from(SpeculationPolicy),
    content=st.sampled_from(ContentPolicy),
    priority=st.sampled_from(PriorityClass),
    may=st.frozensets(st.sampled_from(Permission)),
    limits=LIMITS,
    disabled=st.booleans(),
)


def _with_keys_of_their_own(tenants):
    """No key twice: only the first of two stays."""
    kept, seen = [], set()
    for tenant in tenants:
        keys = {key.key_id: key for key in tenant.keys if key.key_id not in seen}
        seen |= set(keys)
        kept.append(replace(tenant, keys=tuple(keys.values())))
    return sorted_tenants(kept)


TENANTS = st.lists(TENANT, unique_by=lambda tenant: tenant.name, max_size=3).map(_with_keys_of_their_own)
"""All tenants of an appliance, in the order a store gives them."""
