"""
The audit log for operators: recording that somebody is about to read it.

Fails closed: unless the entry is durable the answer is an error, and the reader is shown nothing.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.auth import admin_caller
from appliance.api.body import read_members
from appliance.api.services import Services
from appliance.audit.entry import MAX_INTEGER
from appliance.audit.reading import MAX_PURPOSE_CHARACTERS, OPERATIONS, Reading
from appliance.audit.registry import EntryType
from appliance.errors import InvalidRequestError
from appliance.tenancy import Caller

MAX_ACCOUNT_CHARACTERS = 64

router = APIRouter()
AdminCaller = Annotated[Caller, Depends(admin_caller)]


@router.post("/audit/reads")
async def read(request: Request, caller: AdminCaller) -> Response:
    """Record a reading; the account is the reader's word, the key is not."""
    services: Services = request.app.state.services
    members = await read_members(request, "account", "operation", "start", "end", "purpose")
    reading = parse_reading(members)
    receipt = await services.audit.append(EntryType.AUDIT_READ, **reading.fields(caller.key.key_id))
    return JSONResponse({"index": receipt.index, "entry": receipt.entry_id}, status_code=201)


def parse_reading(members: dict[str, Any]) -> Reading:
    """
    Read what a reader says about the reading.

    Raises:
        InvalidRequestError: a member is missing or malformed.
    """
    start, end = _index(members, "start"), _index(members, "end")
    if end < start:
        raise InvalidRequestError("`end` must not be before `start`.", param="end")
    operation = _text(members, "operation", MAX_PURPOSE_CHARACTERS)
    if operation not in OPERATIONS:
        raise InvalidRequestError(f"`operation` must be one of {', '.join(OPERATIONS)}.", param="operation")
    account = _text(members, "account", MAX_ACCOUNT_CHARACTERS)
    if not account:
        raise InvalidRequestError("`account` must name who reads.", param="account")
    purpose = _text(members, "purpose", MAX_PURPOSE_CHARACTERS) if "purpose" in members else ""
    return Reading(account=account, operation=operation, start=start, end=end, purpose=purpose)


def _index(members: dict[str, Any], name: str) -> int:
    value = members.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_INTEGER:
        raise InvalidRequestError(f"`{name}` must be the index of an entry.", param=name)
    return value


def _text(members: dict[str, Any], name: str, characters: int) -> str:
    value = members.get(name)
    if not isinstance(value, str) or len(value) > characters or not value.isprintable():
        message = f"`{name}` must be one line of at most {characters} characters."
        raise InvalidRequestError(message, param=name)
    return value
