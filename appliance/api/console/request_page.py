"""
The page that looks up a request: its entries, what each field means, and whether they are in the signed log.

A read of the log is recorded before anything is shown; if it cannot be, nothing is.
"""

import asyncio
from contextlib import closing
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from appliance.api.console.console import Console
from appliance.api.console.operators import Operator, page
from appliance.api.services import Services
from appliance.audit.entry import JSON, decode
from appliance.audit.entry_types import REGISTRY, EntryType
from appliance.audit.lookup import Receipt, entries_of, receipt_of
from appliance.audit.stored import Leaf
from appliance.errors import ApplianceError, ConfigurationError, InvalidRequestError

MAX_NAME = 100
"""Characters of an index or of a request's id."""


async def show(request: Request, services: Services, console: Console, operator: Operator) -> Response:
    """Look up the request or entry that `id` names, if there is one."""
    name = request.query_params.get("id", "").strip()
    entries: list[dict[str, Any]] = []
    problem, code = "", HTTPStatus.OK
    if name:
        try:
            found = await asyncio.to_thread(_find, console, name)
            start, end = found[0][0].index, found[-1][0].index + 1
            await _record(services, operator, "show", start, end)
            entries = [_entry(leaf, receipt) for leaf, receipt in found]
        except ConfigurationError as error:
            problem, code = f"{str(error).capitalize()}.", HTTPStatus.NOT_FOUND
    return page(
        console, "requests", code=code, operator=operator, wanted=name, entries=entries, problem=problem
    )


async def download(request: Request, services: Services, console: Console, operator: Operator) -> Response:
    """A receipt, or the entry it is for (`part=entry`): the two files that `verify.py` takes."""
    index = request.query_params.get("index", "")
    if not (index.isascii() and index.isdecimal() and len(index) <= MAX_NAME):
        raise InvalidRequestError("`index` must be the index of an entry.", param="index")
    receipt = await asyncio.to_thread(_receipt, console, int(index))
    await _record(services, operator, "receipt", int(index), int(index) + 1)
    is_entry = request.query_params.get("part") == "entry"
    content, suffix = (receipt.leaf, "json") if is_entry else (receipt.text.encode(), "tlog-proof")
    return Response(
        content,
        media_type="application/octet-stream",
        headers={"Content-Disposition": f'attachment; filename="entry-{int(index)}.{suffix}"'},
    )


async def _record(services: Services, operator: Operator, operation: str, start: int, end: int) -> None:
    await services.audit.append(
        EntryType.AUDIT_READ,
        actor=operator.actor,
        operation=operation,
        start=start,
        end=end,
        key_id=operator.caller.key.key_id,
    )


def _find(console: Console, name: str) -> list[tuple[Leaf, Receipt | str]]:
    """The entries with their receipts, or why there is none yet."""
    if len(name) > MAX_NAME:
        message = f"an index or the id of a request has at most {MAX_NAME} characters"
        raise ConfigurationError(message)
    vkey = console.vkey()
    with closing(console.open_log()) as store:
        found: list[tuple[Leaf, Receipt | str]] = []
        for leaf in entries_of(store, name):
            try:
                found.append((leaf, receipt_of(store, leaf.index, vkey)))
            except ApplianceError as error:
                found.append((leaf, str(error)))
        return found


def _receipt(console: Console, index: int) -> Receipt:
    with closing(console.open_log()) as store:
        return receipt_of(store, index, console.vkey())


def _entry(leaf: Leaf, receipt: Receipt | str) -> dict[str, Any]:
    entry = decode(leaf.leaf)
    schema = REGISTRY[entry.type]
    shown = {
        "index": leaf.index,
        "type": str(entry.type),
        "id": entry.id,
        "time": entry.time,
        "fields": [
            {
                "name": name,
                "value": _words(value),
                "meaning": schema.fields[name].meaning if name in schema.fields else "",
            }
            for name, value in entry.fields.items()
        ],
    }
    if isinstance(receipt, str):
        return shown | {"verdict": None, "meaning": receipt, "covered": 0}
    return shown | {"verdict": receipt.verdict, "meaning": receipt.meaning, "covered": receipt.covered}


def _words(value: JSON) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, tuple) else str(value)
