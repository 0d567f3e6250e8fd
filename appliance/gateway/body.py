"""
The body of a request: what the gateway acts on, as small values, and the rest as the bytes that came.

Pure.  A large body is read in another process (`body_parsers`), which returns a `ParsedBody` as JSON: no
value of the body is in it that the client could make large.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from appliance.errors import InvalidRequestError
from appliance.infra.json_members import Member, decode_body, parse_members, value_of
from appliance.serving.connection import Piece
from appliance.serving.dialects.dialect import splices_of
from appliance.serving.dialects.policy import policy_edits, policy_verdicts, refuse_forbidden
from appliance.serving.dialects.routes import ROUTES, Route
from appliance.serving.target_only import refused_under_speculation
from appliance.serving.template import template_of
from appliance.tenancy import Permission
from appliance.tenancy.limits.estimate import RequestSize, size_of

CONVERSATION_MEMBERS = ("messages", "prompt", "input")  # by family of routes
MAX_MODEL_CHARACTERS = 1024
"""Of a model's name that are kept: longer ones cannot be served, and the error need not be larger."""
Body = bytes | bytearray
Refusal = tuple[str, str | None, str | None]  # message, param and code of an InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyTerms:
    """What decides about a body besides its bytes."""

    route: str  # one of `ROUTES`
    tenant: str
    may: frozenset[Permission]
    salted: bool  # whether workers separate the prefix cache by tenant (`cache_salt`)
    label_key: bytes  # of template labels

    def to_json(self) -> dict[str, Any]:
        return {
            "route": self.route,
            "tenant": self.tenant,
            "may": sorted(self.may),
            "salted": self.salted,
            "label_key": self.label_key.hex(),
        }

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> "BodyTerms":
        return cls(
            route=read["route"],
            tenant=read["tenant"],
            may=frozenset(map(Permission, read["may"])),
            salted=read["salted"],
            label_key=bytes.fromhex(read["label_key"]),
        )


@dataclass(slots=True, kw_only=True)
class ParsedBody:
    """Nothing changes it; to freeze it would take a microsecond of every request."""

    model: str
    is_stream: bool
    wants_usage: bool  # whether the client requested the usage frame of a stream
    sequences: int  # what the worker computes for it: inputs times answers
    size: RequestSize
    template: str  # its label
    drafts_refuse: str | None  # the parameter that a worker with a draft would refuse
    refusal: Refusal | None  # why policy refuses it
    verdicts: tuple[str, ...]  # the changes that policy makes, as the audit log names them
    edits: tuple[tuple[int, int, str], ...]  # start, end and replacement, in bytes, in ascending order
    conversation: tuple[int, int]  # start and end, in bytes

    def to_json(self) -> dict[str, Any]:
        size = (self.size.prompt, self.size.answer, self.size.sequences)
        return {name: getattr(self, name) for name in self.__slots__} | {"size": size}

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> "ParsedBody":
        prompt, answer, sequences = read["size"]
        changed = {
            "size": RequestSize(prompt=prompt, answer=answer, sequences=sequences),
            "refusal": read["refusal"] and tuple(read["refusal"]),
            "verdicts": tuple(read["verdicts"]),
            "edits": tuple(map(tuple, read["edits"])),
            "conversation": tuple(read["conversation"]),
        }
        return cls(**{**read, **changed})

    def edit(self, body: Body) -> list[Piece]:
        """The body as the worker receives it; in pieces, because a copy takes the event loop's time."""
        whole, at = memoryview(body), 0
        pieces: list[Piece] = []
        for start, end, value in self.edits:
            pieces += (whole[at:start], value.encode())
            at = end
        return [*pieces, whole[at:]]


def read_body(body: Body, terms: BodyTerms) -> ParsedBody:
    """
    Read the members that the gateway acts on; the worker validates the others.

    Raises InvalidRequestError for other than UTF-8 JSON with the members that the route needs.
    """
    text = decode_body(body)
    return decide(text, parse_members(text, max_numbers=ROUTES[terms.route].max_numbers), terms)


def decide(text: str, members: dict[str, Member], terms: BodyTerms) -> ParsedBody:
    """As `read_body`, for a body whose members are known."""
    route = ROUTES[terms.route]
    model = value_of(members, "model")
    if not isinstance(model, str) or not model:
        message = "`model` must name a model; GET /v1/models lists them."
        raise InvalidRequestError(message, param="model", code="missing_model")
    missing = route.missing(members)
    if missing is not None:
        message = f"`{missing}` is missing."
        raise InvalidRequestError(message, param=missing, code="missing_required_parameter")
    stream = value_of(members, "stream") if route.dialect.streams else None
    if stream is not None and not isinstance(stream, bool):
        raise InvalidRequestError("`stream` must be true or false.", param="stream")
    sequences = route.sequences(members)
    refusal, edits = _refusal(route, members, terms, sequences), dict[str, str | None]()
    if refusal is None:
        edits = policy_edits(members, terms.may, tenant=terms.tenant, salted=terms.salted and route.caches)
        edits.update(route.dialect.edits(members, is_stream=stream is True))
    splices = splices_of(text, members, edits) if edits else []
    conversation = (0, len(text))
    for name in CONVERSATION_MEMBERS:
        if name in members:
            conversation = (members[name].value_start, members[name].end)
            break
    if not text.isascii():
        offsets = _in_bytes(
            text, (*conversation, *(each for start, end, _ in splices for each in (start, end)))
        )
        splices = [(offsets[start], offsets[end], value) for start, end, value in splices]
        conversation = offsets[conversation[0]], offsets[conversation[1]]
    return ParsedBody(
        model=model[:MAX_MODEL_CHARACTERS],
        is_stream=stream is True,
        wants_usage=route.dialect.wants_usage(members),
        sequences=sequences,
        size=size_of(text, members, sequences=sequences),
        template=template_of(terms.route, members, key=terms.label_key),
        drafts_refuse=refused_under_speculation(members) if route.dialect.generates else None,
        refusal=refusal,
        verdicts=tuple(policy_verdicts(members, terms.may)),
        edits=tuple(splices),
        conversation=conversation,
    )


def _refusal(route: Route, members: Mapping[str, Member], terms: BodyTerms, sequences: int) -> Refusal | None:
    try:
        route.dialect.check(members)
        refuse_forbidden(members, terms.may, carriers=route.carriers)
    except InvalidRequestError as error:
        return str(error), error.param, error.code
    if sequences > route.max_sequences:
        message = (
            f"This request has {sequences} sequences (inputs times answers), and the maximum is "
            f"{route.max_sequences}. Send several requests."
        )
        return message, next(iter(route.inputs), "n"), "too_many_sequences"
    return None


def _in_bytes(text: str, offsets: Iterable[int]) -> dict[int, int]:
    """The offsets in UTF-8 of offsets in characters."""
    found, size = {0: 0}, 0
    for before, after in pairwise(sorted({0, *offsets})):
        size += len(text[before:after].encode())
        found[after] = size
    return found
