"""Pages of the lists of OpenAI's API."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.errors import InvalidRequestError
from appliance.gateway.batch.store import Window

MAX_ID_CHARACTERS = 64
T = TypeVar("T")


def parse_window(request: Request, *, usual: int, most: int) -> Window:
    """Read `after`, `limit` and `order` of a query; `usual` is the default limit, `most` the maximum."""
    query = request.query_params
    limit, order, after = query.get("limit", str(usual)), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= len(str(most)) and 1 <= int(limit) <= most):
        raise InvalidRequestError(f"`limit` must be a number from 1 to {most}.", param="limit")
    if order not in {"asc", "desc"}:
        raise InvalidRequestError("`order` must be `asc` or `desc`.", param="order")
    if after is not None and not 0 < len(after) <= MAX_ID_CHARACTERS:
        raise InvalidRequestError("`after` must be the last id of the previous page.", param="after")
    return Window(limit=int(limit), after=after, ascending=order == "asc")


def page(found: Sequence[T], window: Window, show: Callable[[T], dict[str, Any]]) -> Response:
    """Answer with at most `window.limit` items; one more in `found` shows that there are more."""
    data = [show(each) for each in found[: window.limit]]
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(found) > window.limit,
        }
    )
