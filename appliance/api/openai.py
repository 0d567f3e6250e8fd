"""
The routes of models, an explicit list; each request is parsed as far as the gateway must read it.

`serving.dialects` defines the members, bodies and frames of each route.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from appliance.api.auth import TenantCaller, address_class, tenant_caller
from appliance.api.services import Services
from appliance.api.streaming import relay_call
from appliance.errors import InvalidRequestError, ModelNotFoundError
from appliance.gateway.body import Body, ParsedBody
from appliance.gateway.body_parsers import Reading
from appliance.gateway.call import PRIORITY_HEADER, SPECULATION_HEADER, Call
from appliance.serving.dialects import routes
from appliance.serving.dialects.policy import may_call
from appliance.serving.worker import ServedModel
from appliance.tenancy import Caller, PriorityClass, SpeculationPolicy
from appliance.tenancy.limits.limiting import UNLIMITED, Reservation

METRICS_HEADER = "X-Appliance-Metrics"
OUR_HEADERS = b"x-appliance-"
TRACEPARENT = b"traceparent"

router = APIRouter()


class Relayed:
    """
    A route whose requests go to a worker.

    Plain ASGI: resolving a function's arguments takes the framework as long as the gateway's own work.
    """

    def __init__(self, route: routes.Route) -> None:
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services: Services = scope["app"].state.services
        gateway, state = services.gateway, scope["state"]
        request = Request(scope)
        caller = await tenant_caller(request)
        entry = await gateway.enter(state["request_id"], caller, self._route.path)
        reading = gateway.bodies.reading(caller.tenant.name)
        try:
            try:
                body = await _read(receive, reading)
                if body is None:
                    return
                terms = gateway.terms(
                    caller, self._route.path, salted=not services.settings.share_prefix_cache
                )
                parsed = await gateway.bodies.parse(body, terms)
            finally:
                reading.end()
            call = make_call(request, caller, body, parsed, terms.route, traced=gateway.traces, entry=entry)
            state["model"] = call.model
            gateway.admit(call)
            await relay_call(gateway, call, scope, send)
        finally:
            entry.release()


router.routes += [Route(path, Relayed(route), methods=["POST"]) for path, route in routes.ROUTES.items()]


async def _read(receive: Receive, reading: Reading) -> Body | None:
    """The whole body; None if the client disconnected before its end."""
    before = bytearray()  # not a list, which takes forty bytes for each piece of one byte
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        if not more and not before:
            return part
        before += part
        if not more:
            return before
        # What is not received is not read from the connection either, beyond a small buffer.
        await reading.go_on(len(before))


@router.get("/v1/models")
async def list_models(request: Request, caller: TenantCaller) -> Response:
    """The models this key may use."""
    services: Services = request.app.state.services
    models = services.pool.models().values()
    return JSONResponse(
        {"object": "list", "data": [_model(served) for served in models if may_call(caller, served)]}
    )


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str, caller: TenantCaller) -> Response:
    """One model this key may use."""
    services: Services = request.app.state.services
    served = services.pool.models().get(name)
    if served is None or not may_call(caller, served):
        raise ModelNotFoundError(f"The model `{name}` does not exist or you do not have access to it.")
    return JSONResponse(_model(served))


def make_call(
    request: Request,
    caller: Caller,
    body: Body,
    parsed: ParsedBody,
    route: str,
    *,
    traced: bool = False,
    entry: Reservation = UNLIMITED,
) -> Call:
    """
    A call of which the body is read; `traced`: read the client's `traceparent`.

    Raises InvalidRequestError for unknown values of our headers.
    """
    headers = request.scope["headers"]
    ours = [(name, value) for name, value in headers if name.startswith(OUR_HEADERS)]
    return Call(
        request_id=request.scope["state"]["request_id"],
        client_request_id=request.scope["state"]["client_request_id"],
        caller=caller,
        route=route,
        body=body,
        parsed=parsed,
        client=address_class(request.client.host if request.client else ""),
        priority=_priority(ours, caller.tenant.priority) if ours else caller.tenant.priority,
        speculation=SpeculationPolicy(_choice(ours, SPECULATION_HEADER, "auto", "off")),
        wants_metrics=_choice(ours, METRICS_HEADER, "off", "on") == "on",
        traceparent=_traceparent(headers) if traced else None,
        entry=entry,
    )


def _priority(headers: Sequence[tuple[bytes, bytes]], own: PriorityClass) -> PriorityClass:
    """The tenant's class, or a lower one that the client requests."""
    asked = PriorityClass(_choice(headers, PRIORITY_HEADER, own, *PriorityClass))
    return max(own, asked, key=list(PriorityClass).index)


def _choice(headers: Sequence[tuple[bytes, bytes]], name: str, usual: str, *others: str) -> str:
    """The value of one of our headers; repeated ones must agree."""
    wanted = name.lower().encode()
    values = {value.strip().lower().decode("latin-1") for given, value in headers if given == wanted}
    if not values:
        return usual
    if not values <= {usual, *others} or len(values) > 1:
        known = " or ".join(f"`{each}`" for each in dict.fromkeys((usual, *others)))
        raise InvalidRequestError(f"The header `{name}` must be {known}.", param=name)
    return values.pop()


def _traceparent(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """The `traceparent` header; None if it is sent twice."""
    values = [value for given, value in headers if given == TRACEPARENT]
    return values[0].decode("latin-1") if len(values) == 1 else None


def _model(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "appliance",
        "max_model_len": served.max_model_len,
    }
