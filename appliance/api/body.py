"""
The small JSON bodies that operators send.
"""

from typing import Any

from starlette.requests import Request

from appliance.errors import InvalidRequestError
from appliance.infra.json_members import parse_members


async def read_members(request: Request, *known: str) -> dict[str, Any]:
    """
    Return the members of a JSON body, nothing for none; unless `known` is empty, only those.

    Raises:
        InvalidRequestError: it is not such a body.
    """
    try:
        text = (await request.body()).decode()
    except UnicodeDecodeError as error:
        message = "The body is not UTF-8 text. Send JSON with `Content-Type: application/json`."
        raise InvalidRequestError(message, code="invalid_json") from error
    members = {name: member.value for name, member in parse_members(text).items()} if text else {}
    unknown = sorted(members.keys() - set(known)) if known else []
    if unknown:
        message = f"`{unknown[0]}` is not known here; use {' and '.join(known)}."
        raise InvalidRequestError(message, param=unknown[0])
    return members
