"""
The tenants file (YAML), and the same values in JSON: read strictly, written losslessly.

Pure; the roots read and write the file.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import yaml

from appliance.errors import ConfigurationError
from appliance.tenancy.allowances import BY_MODEL, UNLIMITED, Limits, encode_limits, is_model, parse_limits
from appliance.tenancy.keys import DIGEST_FORMAT, KEY_ID_FORMAT, MAKER_FORMAT, AdminScope, ApiKey
from appliance.tenancy.moments import format_moment, parse_moment
from appliance.tenancy.tenant import (
    ANY_MODEL,
    NAME_FORMAT,
    ContentPolicy,
    Permission,
    PriorityClass,
    SpeculationPolicy,
    Tenant,
)

POLICY = ("models", "speculation", "content", "priority", "may", "limits", "disabled")
"""Members of a tenant other than its keys."""
MOMENTS = ("created_at", "expires_at", "rotated_at", "revoked_at")
MODELS_BYTES, PER_NAME_BYTES = 2048, 3
"""Maximum bytes of a list of models, including quotes and commas: one audit entry names them all."""
_KEY = (
    "key_id",
    "digest",
    "admin",
    "scopes",
    "models",
    "limits",
    "manage_keys",
    "made_by",
    "replaces",
    *MOMENTS,
)
_Choice = TypeVar("_Choice", bound=StrEnum)


def parse_tenants(text: str) -> tuple[Tenant, ...]:
    """Raises ConfigurationError: one line that names the entry of the file and what is wrong with it."""
    try:
        content = yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError) as error:  # a ValueError is a date that does not exist
        message = f"the tenants file is not YAML: {' '.join(str(error).split())}"
        raise ConfigurationError(message) from error
    try:
        tenants = tuple(_parse_with_keys(name, body) for name, body in content["tenants"].items())
    except (KeyError, TypeError, AttributeError) as error:
        message = (
            f"the tenants file needs `tenants:` with names, and keys of key_id and digest below: {error}"
        )
        raise ConfigurationError(message) from error
    ids = [key.key_id for tenant in tenants for key in tenant.keys]
    if len(ids) != len(set(ids)):
        raise ConfigurationError("the tenants file holds the same key_id twice: remove one of them")
    return tenants


def encode_tenants(tenants: Iterable[Tenant]) -> str:
    """The tenants file; `parse_tenants` reads it back.  It holds digests of keys, no keys."""
    content = {
        "tenants": {
            tenant.name: {**encode_policy(tenant), "keys": [encode_key(key) for key in tenant.keys]}
            for tenant in tenants
        }
    }
    return yaml.safe_dump(content, sort_keys=False)


def parse_policy(name: object, body: Mapping[str, Any]) -> Tenant:
    """
    Read a tenant without its keys; absent members have their defaults.

    Raises ConfigurationError: one line that names the tenant and what is wrong with it.
    """
    if not isinstance(name, str) or not NAME_FORMAT.fullmatch(name):
        message = f"tenant name {name!r:.80}: use lower-case letters, digits, dots, dashes, at most 63"
        raise ConfigurationError(message)
    where = f"tenant {name}"
    for member in body:
        if member not in POLICY:
            message = f"{where}: {member!s:.80} is not a known member; use {', '.join(POLICY)}"
            raise ConfigurationError(message)
    may = body.get("may", [])
    if not isinstance(may, list):
        raise ConfigurationError(f"{where}: may must be a list of {_named(Permission)}")
    speculation = body.get("speculation", "auto")
    return Tenant(
        name=name,
        models=parse_models(where, body.get("models", [ANY_MODEL])),
        # YAML reads a bare `off` as false.
        speculation=_parse_choice(
            where, "speculation", SpeculationPolicy, "off" if speculation is False else speculation
        ),
        content=_parse_choice(where, "content", ContentPolicy, body.get("content", "none")),
        priority=_parse_choice(where, "priority", PriorityClass, body.get("priority", "standard")),
        may=frozenset(_parse_choice(where, "may", Permission, each) for each in may),
        limits=parse_limits(where, body.get("limits", {})),
        disabled=_parse_flag(where, "disabled", body.get("disabled", False)),
    )


def encode_policy(tenant: Tenant) -> dict[str, Any]:
    """A tenant without its name and keys; `parse_policy` reads it back."""
    return {
        "models": list(tenant.models),
        "speculation": str(tenant.speculation),
        "content": str(tenant.content),
        "priority": str(tenant.priority),
        "may": sorted(map(str, tenant.may)),
        "limits": encode_limits(tenant.limits),
        "disabled": tenant.disabled,
    }


def parse_models(where: str, models: object) -> tuple[str, ...]:
    if not isinstance(models, list) or not all(map(is_model, models)):
        raise ConfigurationError(f"{where}: models must be a list of names, such as [demo]")
    if sum(len(model.encode()) + PER_NAME_BYTES for model in models) > MODELS_BYTES:
        raise ConfigurationError(
            f"{where}: models may have {MODELS_BYTES} bytes together; '*' names all of them"
        )
    return tuple(models)


def parse_scopes(where: str, scopes: object, *, admin: bool) -> frozenset[AdminScope] | None:
    """Scopes of a key; None, for all, is not the same as an empty list."""
    if scopes is None:
        return None
    if not admin:
        raise ConfigurationError(f"{where}: only an admin key has scopes")
    if not isinstance(scopes, list) or not scopes:
        raise ConfigurationError(f"{where}: scopes must be a list of {_named(AdminScope)}")
    return frozenset(_parse_choice(where, "scopes", AdminScope, scope) for scope in scopes)


def parse_key_limits(where: str, limits: object, *, admin: bool) -> Limits:
    """Limits of a key: as a tenant's, in fewer bytes, because its audit entry has them."""
    if limits is None:
        return UNLIMITED
    parsed = parse_limits(where, limits)
    if admin and parsed != UNLIMITED:
        raise ConfigurationError(f"{where}: an admin key calls no models and has no limits")
    # As the entry has them, where quotes are escaped.
    if len(json.dumps(spell_limits(parsed), ensure_ascii=False).encode()) > MODELS_BYTES:
        raise ConfigurationError(f"{where}: limits of a key may have {MODELS_BYTES} bytes together")
    return parsed


def parse_manage_keys(where: str, value: object, *, admin: bool) -> bool:
    manages = _parse_flag(where, "manage_keys", value)
    if manages and admin:
        raise ConfigurationError(f"{where}: manage_keys is for keys of tenants; an admin key has scopes")
    return manages


def spell_limits(limits: Limits, model: str = "") -> list[str]:
    """As the commands take them: `requests_per_minute=60`, `demo:tokens_per_day=1000`."""
    own = encode_limits(limits)
    own.pop(BY_MODEL, None)
    words = [f"{model}{name}={bound}" for name, bound in own.items()]
    return words + [
        word for name, each in sorted(limits.by_model.items()) for word in spell_limits(each, f"{name}:")
    ]


def encode_key(key: ApiKey) -> dict[str, Any]:
    return {"key_id": key.key_id, "digest": key.digest, "admin": key.admin, **describe_key(key)}


def describe_key(key: ApiKey) -> dict[str, Any]:
    """A key's other members, times as text, without empty members."""
    described: dict[str, Any] = {}
    if key.scopes is not None:
        described["scopes"] = sorted(map(str, key.scopes))
    if key.models is not None:
        described["models"] = list(key.models)
    if key.limits != UNLIMITED:
        described["limits"] = encode_limits(key.limits)
    if key.manage_keys:
        described["manage_keys"] = True
    if key.made_by is not None:
        described["made_by"] = key.made_by
    if key.replaces is not None:
        described["replaces"] = key.replaces
    moments = {name: getattr(key, name) for name in MOMENTS}
    return described | {name: format_moment(at) for name, at in moments.items() if at is not None}


def _parse_with_keys(name: object, body: Mapping[str, Any]) -> Tenant:
    keys = tuple(_parse_key(name, key) for key in body.get("keys", ()))
    tenant = parse_policy(name, {member: value for member, value in body.items() if member != "keys"})
    return tenant.with_keys(keys)


def _parse_key(name: object, body: Mapping[str, Any]) -> ApiKey:
    where = f"tenant {name}"
    key_id, digest = str(body["key_id"]), str(body["digest"])
    if not KEY_ID_FORMAT.fullmatch(key_id) or not DIGEST_FORMAT.fullmatch(digest):
        message = f"{where}: a key needs the key_id and digest that `appliance tenant export` writes"
        raise ConfigurationError(message)
    where = f"{where}, key {key_id}"
    for member in body:
        if member not in _KEY:
            message = f"{where}: {member!s:.80} is not a known member; use {', '.join(_KEY)}"
            raise ConfigurationError(message)
    replaces = body.get("replaces")
    if replaces is not None and not KEY_ID_FORMAT.fullmatch(str(replaces)):
        raise ConfigurationError(f"{where}: replaces must be the id of the key it replaces")
    made_by = body.get("made_by")
    if made_by is not None and not MAKER_FORMAT.fullmatch(str(made_by)):
        raise ConfigurationError(f"{where}: made_by must be the id of a key or of a subject")
    models = body.get("models")
    admin = _parse_flag(where, "admin", body.get("admin", False))
    return ApiKey(
        key_id=key_id,
        digest=digest,
        admin=admin,
        scopes=parse_scopes(where, body.get("scopes"), admin=admin),
        models=None if models is None else parse_models(where, models),
        limits=parse_key_limits(where, body.get("limits"), admin=admin),
        manage_keys=parse_manage_keys(where, body.get("manage_keys", False), admin=admin),
        made_by=None if made_by is None else str(made_by),
        replaces=None if replaces is None else str(replaces),
        **{
            moment: parse_moment(f"{where}: {moment}", body[moment])
            for moment in MOMENTS
            if body.get(moment) is not None
        },
    )


def _parse_choice(where: str, member: str, kind: Callable[[Any], _Choice], value: object) -> _Choice:
    try:
        return kind(value)
    except ValueError as error:
        assert isinstance(kind, type)  # noqa: S101 - an enumeration
        raise ConfigurationError(f"{where}: {member} must be {_named(kind)}") from error


def _named(kind: type[StrEnum]) -> str:
    *first, last = kind
    return f"{', '.join(first)} or {last}"


def _parse_flag(where: str, member: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{where}: {member} must be true or false")
    return value
