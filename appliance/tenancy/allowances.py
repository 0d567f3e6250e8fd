"""A tenant's limits; `appliance.tenancy.limits` enforces them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from appliance.errors import ConfigurationError

BY_MODEL = "by_model"
LARGEST = 2**53
"""Larger numbers are not the same in every JSON reader."""
MOST_MODELS, LONGEST_MODEL = 256, 256
"""Maximum models with their own limits, and characters of a model's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits; None for no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Maximum tokens of prompts and answers per minute."""
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    """Maximum tokens of prompts and answers per calendar day (`limits.time_zone`)."""
    tokens_per_month: int | None = None
    """Maximum tokens of prompts and answers per calendar month (`limits.time_zone`)."""
    by_model: "Mapping[str, Limits]" = field(default_factory=lambda: MappingProxyType({}), hash=False)
    """Additional limits of single models, by served name; they have no `by_model`."""


class KeyLimits(NamedTuple):
    """Limits of an API key."""

    ledger: str
    """Names what is used of them; no name of a tenant has a colon."""
    limits: Limits
    holder: str
    """The key, in the words of a message to its caller."""


UNLIMITED = Limits()
BOUNDS = tuple(each.name for each in fields(Limits) if each.name != BY_MODEL)
"""Names of the fields that are numbers."""


def parse_limits(where: str, body: object, *, models: bool = True) -> Limits:
    """
    Read limits of the tenants file and the admin API; `models`: whether `by_model` is allowed.

    Raises ConfigurationError: one line that names the limit and what is wrong with it.
    """
    known = (*BOUNDS, BY_MODEL) if models else BOUNDS
    if not isinstance(body, Mapping):
        raise ConfigurationError(f"{where}: limits must be numbers by name, such as requests_per_minute: 60")
    for name in body:
        if name not in known:
            raise ConfigurationError(f"{where}: {name!s:.80} is not a limit; use {', '.join(known)}")
    by_model = {} if body.get(BY_MODEL) is None else body[BY_MODEL]
    if not isinstance(by_model, Mapping) or not all(map(is_model, by_model)) or len(by_model) > MOST_MODELS:
        raise ConfigurationError(
            f"{where}: by_model must hold limits by the name of a model, for at most {MOST_MODELS}"
        )
    return Limits(
        **{name: _parse_bound(where, name, body.get(name)) for name in BOUNDS},
        by_model=MappingProxyType(
            {
                model: parse_limits(f"{where}, model {model}", limits, models=False)
                for model, limits in by_model.items()
            }
        ),
    )


def encode_limits(limits: Limits) -> dict[str, Any]:
    """The limits that are set, by name; `parse_limits` reads them back."""
    encoded: dict[str, Any] = {name: bound for name in BOUNDS if (bound := getattr(limits, name)) is not None}
    if limits.by_model:
        encoded[BY_MODEL] = {model: encode_limits(each) for model, each in limits.by_model.items()}
    return encoded


def exceeded_limit(limits: Limits, most: Limits) -> str | None:
    """The name of a limit that is set and above that of `most`, such as `demo:tokens_per_day`; or None."""
    for name in BOUNDS:
        bound, highest = getattr(limits, name), getattr(most, name)
        if bound is not None and highest is not None and bound > highest:
            return name
    for model, bounds in most.by_model.items():
        if (name_of := exceeded_limit(limits.by_model.get(model, UNLIMITED), bounds)) is not None:
            return f"{model}:{name_of}"
    return None


def is_model(name: object) -> bool:
    """Whether this is a valid model name: one line of printable text."""
    return isinstance(name, str) and name.isprintable() and 0 < len(name) <= LONGEST_MODEL


def _parse_bound(where: str, name: str, value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
        raise ConfigurationError(f"{where}: {name} must be a whole number from 0 on, or null for no limit")
    return value
