"""Reads the small JSON bodies of operators' requests."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from appliance.errors import InvalidRequestError
from appliance.infra.json_members import decode_body, parse_members


async def read_members(request: Request, *known: str) -> dict[str, Any]:
    """The members of a JSON object, none of an empty body; raises InvalidRequestError if not `known`."""
    text = decode_body(await request.body())
    members = {name: member.value for name, member in parse_members(text).items()} if text else {}
    unknown = sorted(members.keys() - set(known)) if known else []
    if unknown:
        raise InvalidRequestError(f"`{unknown[0]}` is unknown; use {' and '.join(known)}.", param=unknown[0])
    return members


def read_flag(members: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    flag = members.get(name, default)
    if not isinstance(flag, bool):
        raise InvalidRequestError(f"`{name}` must be true or false.", param=name)
    return flag


def read_line(members: Mapping[str, Any], name: str, characters: int) -> str:
    """One line of printable text, possibly empty."""
    value = members.get(name)
    if not isinstance(value, str) or len(value) > characters or not value.isprintable():
        message = f"`{name}` must be one line of at most {characters} characters."
        raise InvalidRequestError(message, param=name)
    return value
