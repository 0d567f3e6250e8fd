"""
A label for the prompt template of a request, so that traffic can be distinguished without storing content.

Acceptance depends on the template: a draft that was not trained on one fails on all traffic that uses it.
A label is a keyed hash of the members that determine the template, so a system prompt cannot be looked up
among the labels without the key.  Fails open: any JSON has a label.
"""

import json
import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from appliance.infra.json_members import Member, value_of

CHATS = MappingProxyType(
    {"/v1/chat/completions": "", "/v1/responses": "instructions", "/v1/messages": "system"}
)
"""Routes whose messages go through the model's chat template, and the member that may hold a system text."""
RAW_ROUTE = "/v1/completions"
NO_TEMPLATE = "none"
SYSTEM_ROLES = ("system", "developer")
LABEL_BYTES = 4
READ_CHARACTERS = 2000
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

    `chat-` and a hash of the chat template, its arguments, whether tools are given and the system message,
    the same for every API; `raw-` and a hash of the markers in a text prompt, each once, in order;
    `raw-plain` for a text without markers; `raw-tokens` for anything but text; `none` on routes that
    generate nothing.  `key` is 16 to 64 secret bytes.
    """
    if route in CHATS:
        decides = [
            value_of(members, "chat_template"),
            value_of(members, "chat_template_kwargs") or None,
            bool(value_of(members, "tools")),
            _system_text(members, CHATS[route]),
        ]
        return f"chat-{_hash(decides, key)}"
    if route != RAW_ROUTE:
        return NO_TEMPLATE
    prompt = value_of(members, "prompt")
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        return "raw-tokens"
    markers = list(dict.fromkeys(MARKER.findall(prompt[:READ_CHARACTERS])))
    return f"raw-{_hash(markers, key)}" if markers else "raw-plain"


def _hash(content: Any, key: bytes) -> str:  # noqa: ANN401 - decoded JSON
    # As JSON no two values have the same bytes, and a lone surrogate can be encoded.
    text = json.dumps(content, sort_keys=True)
    return blake2b(text.encode(), digest_size=LABEL_BYTES, key=key).hexdigest()


def _system_text(members: Mapping[str, Member], member: str) -> str | None:
    given = value_of(members, member)
    if given:
        return _text(given)
    messages = value_of(members, "messages") or value_of(members, "input")
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
