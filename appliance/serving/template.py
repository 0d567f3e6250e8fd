"""
A label for the prompt template of a request, so that traffic can be told apart without keeping any.

Acceptance depends on the template: a draft that never saw one fails on all traffic that uses it.  A
label is a keyed hash of what decides the template, so that nobody who knows a system prompt can look
for it among the labels without the key.  It fails open: any JSON has a label.
"""

import json
import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from appliance.infra.json_members import Member

CHATS = MappingProxyType(
    {"/v1/chat/completions": "", "/v1/responses": "instructions", "/v1/messages": "system"}
)
"""Routes whose messages go through the model's chat template, and where a system text may stand beside
them."""
RAW_ROUTE = "/v1/completions"
NO_TEMPLATE = "none"
SYSTEM_ROLES = ("system", "developer")
LABEL_BYTES = 4
READ_CHARACTERS = 2000
"""How much of a raw prompt is searched for markers."""
MARKER = re.compile(
    r"<[|\uff5c][^\s<>|\uff5c]{1,40}[|\uff5c]>"  # with wide bars in DeepSeek's templates
    r"|<(?:start|end)_of_turn>|<fim_(?:prefix|suffix|middle)>"
    r"|</?s>|<[be]os>|<</?SYS>>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
    r"|^### ?(?:System|Instruction|Input|Context|Question|Human|User|Response|Answer|Assistant):",
    re.MULTILINE,
)


def template_of(route: str, members: Mapping[str, Member], *, key: bytes) -> str:
    """
    Label the template of a request; equal templates have equal labels under one key.

    `chat-` and a hash of the chat template, its arguments, whether tools are given and the system
    message, the same whichever API it came by; `raw-` and a hash of the markers a text prompt holds, each
    once, in the order they are met; `raw-plain` for a text without markers; `raw-tokens` for anything but
    text; `none` on routes that generate nothing.

    Args:
        route: path of the API.
        members: of the request's body, whatever their types.
        key: secret the hash is made with, 16 to 64 bytes.
    """
    if route in CHATS:
        decides = [
            _value(members, "chat_template"),
            _value(members, "chat_template_kwargs") or None,
            bool(_value(members, "tools")),
            _system_text(members, CHATS[route]),
        ]
        return f"chat-{_hash(decides, key)}"
    if route != RAW_ROUTE:
        return NO_TEMPLATE
    prompt = _value(members, "prompt")
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        return "raw-tokens"
    markers = list(dict.fromkeys(MARKER.findall(prompt[:READ_CHARACTERS])))
    return f"raw-{_hash(markers, key)}" if markers else "raw-plain"


def _hash(content: Any, key: bytes) -> str:  # noqa: ANN401 - decoded JSON
    # As JSON no two values have the same bytes, and half a surrogate pair has some.
    text = json.dumps(content, sort_keys=True)
    return blake2b(text.encode(), digest_size=LABEL_BYTES, key=key).hexdigest()


def _system_text(members: Mapping[str, Member], beside: str) -> str | None:
    """What the first system message says."""
    given = _value(members, beside)
    if given:
        return _text(given)
    messages = _value(members, "messages") or _value(members, "input")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") in SYSTEM_ROLES:
            return _text(message.get("content"))
    return None


def _text(content: Any) -> str:  # noqa: ANN401 - decoded JSON
    return content if isinstance(content, str) else "".join(_texts(content))


def _texts(parts: Any) -> Iterable[str]:  # noqa: ANN401 - decoded JSON
    for part in parts if isinstance(parts, list) else ():
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def _value(members: Mapping[str, Member], name: str) -> Any:  # noqa: ANN401 - decoded JSON
    return members[name].value if name in members else None
