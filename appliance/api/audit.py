"""
Admin route that records a read of the audit log before it happens.

Fails closed: unless the entry is durable the answer is an error, and the command shows nothing.
"""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.auth import AdminCaller
from appliance.api.body import read_line, read_members
from appliance.api.services import Services
from appliance.audit.entry import MAX_INTEGER
from appliance.audit.entry_types import EntryType
from appliance.audit.reading import MAX_PURPOSE_CHARACTERS, OPERATIONS, Reading
from appliance.errors import InvalidRequestError

MAX_ACCOUNT_CHARACTERS = 64

router = APIRouter()


@router.post("/audit/reads")
async def read(request: Request, caller: AdminCaller) -> Response:
    """Record a read; the account is the caller's claim, the key is verified."""
    services: Services = request.app.state.services
    members = await read_members(request, "account", "operation", "start", "end", "purpose")
    reading = parse_reading(members)
    receipt = await services.audit.append(EntryType.AUDIT_READ, **reading.fields(caller.key.key_id))
    return JSONResponse({"index": receipt.index, "entry": receipt.entry_id}, status_code=201)


def parse_reading(members: dict[str, Any]) -> Reading:
    start, end = _index(members, "start"), _index(members, "end")
    if end < start:
        raise InvalidRequestError("`end` must not be before `start`.", param="end")
    operation = read_line(members, "operation", MAX_PURPOSE_CHARACTERS)
    if operation not in OPERATIONS:
        raise InvalidRequestError(f"`operation` must be one of {', '.join(OPERATIONS)}.", param="operation")
    account = read_line(members, "account", MAX_ACCOUNT_CHARACTERS)
    if not account:
        raise InvalidRequestError("`account` must name who reads.", param="account")
    purpose = read_line(members, "purpose", MAX_PURPOSE_CHARACTERS) if "purpose" in members else ""
    return Reading(account=account, operation=operation, start=start, end=end, purpose=purpose)


def _index(members: dict[str, Any], name: str) -> int:
    value = members.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_INTEGER:
        raise InvalidRequestError(f"`{name}` must be the index of an entry.", param=name)
    return value
