"""
Envoy's external processor: answers each request's headers with the endpoints to use, changes nothing else.

As the endpoint picker protocol asks, the endpoints are in a header and in dynamic metadata.  A body that the
proxy streams through the processor is sent back unchanged, piece by piece; nothing of it is kept or read.
When the request is complete the processor closes the stream, so that the proxy asks nothing about the answer:
no token waits for a picker, and no answer is lost with one.

Fails closed only if there is nothing to pick: then the proxy answers 503.  If the processor is gone, the
failure mode of the proxy decides (`FailOpen`: it picks by itself).
"""

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Protocol

import grpc

from appliance.api.picker.messages import FULL_DUPLEX, METHOD, OVERWRITE, SERVICE, UNSAID, load_messages

DESTINATION = "x-gateway-destination-endpoint"
METADATA = "envoy.lb"
SUBSET_METADATA, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
MODEL = "x-gateway-model-name"
"""Header that a body-based router in front of the picker sets."""
UNAVAILABLE = 503
PARTS = ("request_body", "request_trailers", "response_headers", "response_body", "response_trailers")
NONE_READY = b'{"error":{"message":"No worker is ready. Try again in a moment.","type":"server_error"}}'


class Picker(Protocol):
    def pick(self, *, allowed: Collection[str] | None, model: str) -> Sequence[str]:
        """Addresses for a request, best first; empty if there is none."""


def processor(picker: Picker) -> grpc.GenericRpcHandler:
    """The gRPC service, for a server."""
    messages = load_messages()

    async def process(requests: AsyncIterator[Any], _context: object) -> AsyncIterator[Any]:
        mode = UNSAID
        async for request in requests:
            if request.HasField("protocol_config"):  # in the first message only
                mode = request.protocol_config.request_body_mode
            response = messages.response()
            if request.HasField("request_headers"):
                picked = picker.pick(allowed=_subset(request), model=_header(request, MODEL))
                _tell(response, picked)
            else:
                _pass_on(response, request, mode)
            yield response
            if _is_last(request):
                return

    handler = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=messages.request.FromString,
        response_serializer=messages.response.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})


def _tell(response: Any, picked: Sequence[str]) -> None:  # noqa: ANN401 - a message, as below
    if not picked:
        response.immediate_response.status.code = UNAVAILABLE
        response.immediate_response.body = NONE_READY
        response.immediate_response.details = "no endpoint to pick"
        return
    chosen = ",".join(picked)
    header = response.request_headers.response.header_mutation.set_headers.add(append_action=OVERWRITE).header
    header.key, header.raw_value = DESTINATION, chosen.encode()
    response.dynamic_metadata.update({METADATA: {DESTINATION: chosen}})


def _pass_on(response: Any, request: Any, mode: int) -> None:  # noqa: ANN401
    for part in PARTS:
        if request.HasField(part):
            getattr(response, part).SetInParent()
    # A proxy that does not say its mode streams, as the protocol asks.
    if request.HasField("request_body") and mode in {FULL_DUPLEX, UNSAID}:
        piece = response.request_body.response.body_mutation.streamed_response
        piece.SetInParent()
        piece.body, piece.end_of_stream = request.request_body.body, request.request_body.end_of_stream


def _is_last(request: Any) -> bool:  # noqa: ANN401
    """Whether this completes the request; the answer is none of the picker's business."""
    return bool(
        request.request_headers.end_of_stream
        or request.request_body.end_of_stream
        or not (request.HasField("request_headers") or request.HasField("request_body"))
    )


def _subset(request: Any) -> Collection[str] | None:  # noqa: ANN401
    """The endpoints that the proxy restricts the choice to; None if it does not."""
    for entry in request.metadata_context.filter_metadata:
        if entry.key == SUBSET_METADATA and SUBSET in entry.value.fields:
            hint = entry.value.fields[SUBSET]
            listed = [value.string_value for value in hint.list_value.values]
            return {each.strip() for each in (listed or hint.string_value.split(",")) if each.strip()}
    return None


def _header(request: Any, wanted: str) -> str:  # noqa: ANN401
    for header in request.request_headers.headers.headers:
        if header.key == wanted:
            return str(header.raw_value.decode("utf-8", "replace") or header.value)
    return ""
