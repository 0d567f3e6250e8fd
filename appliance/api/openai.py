"""
The OpenAI routes: an explicit list, each parsed as far as the gateway must read it.
"""

import ipaddress
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from appliance.api.auth import tenant_caller
from appliance.api.services import Services
from appliance.api.streaming import RelayResponse
from appliance.call import SPECULATION_HEADER, Call
from appliance.errors import InvalidRequestError, ModelNotFoundError
from appliance.members import Member, parse_members
from appliance.serving.worker import ServedModel
from appliance.tenancy import Caller, SpeculationPolicy

METRICS_HEADER = "X-Appliance-Metrics"

router = APIRouter()
TenantCaller = Annotated[Caller, Depends(tenant_caller)]


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, caller: TenantCaller) -> Response:
    """Answer a chat."""
    return await _forward(request, caller, needs="messages")


@router.post("/v1/completions")
async def completions(request: Request, caller: TenantCaller) -> Response:
    """Continue a text."""
    return await _forward(request, caller, needs="prompt")


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


async def _forward(request: Request, caller: Caller, *, needs: str) -> Response:
    services: Services = request.app.state.services
    call = parse_call(request, caller, await request.body(), needs=needs)
    services.gateway.admit(call)
    return RelayResponse(services.gateway, call)


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
        route=request.url.path,
        model=model,
        text=text,
        members=members,
        is_stream=stream is True,
        wants_usage=(options or {}).get("include_usage") is True,
        client=address_class(request.client.host if request.client else ""),
        speculation=SpeculationPolicy(_choice(request, SPECULATION_HEADER, "auto", "off")),
        wants_metrics=_choice(request, METRICS_HEADER, "off", "on") == "on",
    )


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


def _choice(request: Request, name: str, usual: str, other: str) -> str:
    """The value of a header of ours; sent twice it must say the same."""
    values = {value.strip().lower() for value in request.headers.getlist(name)}
    if not values <= {usual, other} or len(values) > 1:
        message = f"The header `{name}` must be `{usual}` or `{other}`."
        raise InvalidRequestError(message, param=name)
    return values.pop() if values else usual


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
