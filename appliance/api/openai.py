"""
The OpenAI routes: an explicit list, each parsed as far as the gateway must read it.
"""

import ipaddress
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from appliance.api.auth import tenant_caller
from appliance.api.services import Services
from appliance.api.streaming import relay_call
from appliance.call import SPECULATION_HEADER, Call
from appliance.errors import InvalidRequestError, ModelNotFoundError
from appliance.members import Member, parse_members
from appliance.serving.worker import ServedModel
from appliance.tenancy import Caller, SpeculationPolicy

METRICS_HEADER = "X-Appliance-Metrics"

router = APIRouter()
TenantCaller = Annotated[Caller, Depends(tenant_caller)]


class Relayed:
    """
    A route whose requests go to a worker.

    Plain ASGI: what the framework does to find out a function's arguments takes as long as all the
    gateway does to answer.
    """

    def __init__(self, needs: str) -> None:
        """Take the member a body must have."""
        self._needs = needs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        services: Services = scope["app"].state.services
        request = Request(scope)
        caller = await tenant_caller(request)
        body = await _read(receive)
        if body is None:
            return
        call = parse_call(request, caller, body, needs=self._needs)
        services.gateway.admit(call)
        await relay_call(services.gateway, call, receive, send)


router.routes += [
    Route("/v1/chat/completions", Relayed("messages"), methods=["POST"]),
    Route("/v1/completions", Relayed("prompt"), methods=["POST"]),
]


async def _read(receive: Receive) -> bytes | None:
    """The whole body, or None if the client left before it had sent it."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


@router.get("/v1/models")
async def list_models(request: Request, caller: TenantCaller) -> Response:
    """The models this key may use."""
    services: Services = request.app.state.services
    models = services.pool.models().values()
    return JSONResponse(
        {
            "object": "list",
            "data": [_model(served) for served in models if caller.tenant.may_use(served.name)],
        }
    )


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str, caller: TenantCaller) -> Response:
    """One model this key may use."""
    services: Services = request.app.state.services
    served = services.pool.models().get(name)
    if served is None or not caller.tenant.may_use(name):
        message = f"The model `{name}` does not exist or you do not have access to it."
        raise ModelNotFoundError(message)
    return JSONResponse(_model(served))


def parse_call(request: Request, caller: Caller, body: bytes, *, needs: str) -> Call:
    """
    Read what the gateway acts on; everything else is the worker's to judge.

    Raises:
        InvalidRequestError: not UTF-8 JSON; `model`, `stream`, `stream_options` or the member the
            route lives on is missing or of the wrong type; or a header of ours has no value we know.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        message = "The body is not UTF-8 text. Send JSON with `Content-Type: application/json`."
        raise InvalidRequestError(message, code="invalid_json") from error
    members = parse_members(text)
    model = _member(members, "model")
    if not isinstance(model, str) or not model:
        message = "`model` must name a model; GET /v1/models lists them."
        raise InvalidRequestError(message, param="model", code="missing_model")
    if needs not in members:
        message = f"`{needs}` is missing."
        raise InvalidRequestError(message, param=needs, code="missing_required_parameter")
    stream = _member(members, "stream")
    if stream is not None and not isinstance(stream, bool):
        message = "`stream` must be true or false."
        raise InvalidRequestError(message, param="stream")
    options = _member(members, "stream_options")
    if options is not None and not isinstance(options, dict):
        message = "`stream_options` must be an object."
        raise InvalidRequestError(message, param="stream_options")
    return Call(
        request_id=request.scope["state"]["request_id"],
        client_request_id=request.scope["state"]["client_request_id"],
        caller=caller,
        route=request.scope["path"],
        model=model,
        text=text,
        members=members,
        is_stream=stream is True,
        wants_usage=(options or {}).get("include_usage") is True,
        client=address_class(request.client.host if request.client else ""),
        speculation=SpeculationPolicy(_choice(request.scope["headers"], SPECULATION_HEADER, "auto", "off")),
        wants_metrics=_choice(request.scope["headers"], METRICS_HEADER, "off", "on") == "on",
    )


@lru_cache(maxsize=1024)
def address_class(host: str) -> str:
    """Where a request came from, as coarse as the audit log wants it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "unknown"
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return "loopback"
    return "private" if address.is_private else "public"


def _choice(headers: Sequence[tuple[bytes, bytes]], name: str, usual: str, other: str) -> str:
    """The value of a header of ours; sent twice it must say the same."""
    wanted = name.lower().encode()
    values = {value.strip().lower().decode("latin-1") for given, value in headers if given == wanted}
    if not values:
        return usual
    if not values <= {usual, other} or len(values) > 1:
        message = f"The header `{name}` must be `{usual}` or `{other}`."
        raise InvalidRequestError(message, param=name)
    return values.pop()


def _member(members: dict[str, Member], name: str) -> Any:  # noqa: ANN401 - decoded JSON
    return members[name].value if name in members else None


def _model(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "appliance",
        "max_model_len": served.max_model_len,
    }
