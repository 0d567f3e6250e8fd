"""
The messages of Envoy's external processing protocol (`envoy.service.ext_proc.v3`), as far as they are used.

They are described here by field numbers, because the published Python package has 3,000 modules and
overwrites files of two other packages.  Fields that are not described are skipped when a message is read.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

PACKAGE = "appliance.ext_proc"
SERVICE, METHOD = "envoy.service.ext_proc.v3.ExternalProcessor", "Process"
OVERWRITE = 2
"""`HeaderValueOption.append_action`: replace the header, or add it."""
UNSAID, FULL_DUPLEX = 0, 4
"""`BodySendMode` of the filter's configuration: NONE, which is also what old proxies send, and
FULL_DUPLEX_STREAMED."""

STRUCT = "google.protobuf.Struct"
FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "repeated HeaderValue")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "HeaderMutation": {"set_headers": (1, "repeated HeaderValueOption")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse")},
    "CommonResponse": {"header_mutation": (2, "HeaderMutation"), "body_mutation": (3, "BodyMutation")},
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {"status": (1, "HttpStatus"), "body": (3, "bytes"), "details": (5, "string")},
    "MetadataEntry": {"key": (1, "string"), "value": (2, STRUCT)},
    "Metadata": {"filter_metadata": (1, "repeated MetadataEntry")},
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, STRUCT),
    },
}

Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    "string": Field.TYPE_STRING,
    "bytes": Field.TYPE_BYTES,
    "bool": Field.TYPE_BOOL,
    "int32": Field.TYPE_INT32,  # of enumerations as well: they are the same on the wire
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    request: Any
    """Class of the messages that a proxy sends."""
    response: Any


@lru_cache(maxsize=1)
def load_messages() -> Messages:
    file = descriptor_pb2.FileDescriptorProto(
        name="appliance/ext_proc.proto",
        package=PACKAGE,
        syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
    )
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            of, is_repeated = kind.removeprefix("repeated "), kind.startswith("repeated ")
            field = message.field.add(
                name=field_name,
                number=number,
                type=SCALARS.get(of, Field.TYPE_MESSAGE),
                label=Field.LABEL_REPEATED if is_repeated else Field.LABEL_OPTIONAL,
            )
            if of not in SCALARS:
                field.type_name = f".{of}" if of == STRUCT else f".{PACKAGE}.{of}"
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    request, response = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in ("ProcessingRequest", "ProcessingResponse")
    )
    return Messages(request=request, response=response)
