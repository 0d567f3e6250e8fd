"""
Parses request bodies as the worker parsed them.

Follows vLLM 0.32: `renderers/chat_utils.py` (messages), `entrypoints/openai/chat_completion/protocol.py`
(template arguments, tools), `entrypoints/anthropic/serving.py` and
`entrypoints/openai/responses/utils.py` (conversion to messages).  Pure.
"""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from appliance.drafts.harvest.conversation import (
    PromptSource,
    Skipped,
    list_of,
    object_of,
    parse_object,
    refuse,
    text_of,
)

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "add_generation_prompt": (True,),
        "add_special_tokens": (),
        "best_of": (1,),
        "chat_template": (),
        "continue_final_message": (False,),
        "conversation": (),
        "detokenize": (True,),
        "echo": (False,),
        "include_stop_str_in_output": (False,),
        "previous_response_id": (),
        "prompt_embeds": (),
        "skip_special_tokens": (True,),
        "suffix": (),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
    }
)
"""Members that change how text maps to tokens, with the values besides null that do not."""
# Tuples, not sets: client values may be unhashable.
TEXT_PARTS = ("text", "input_text", "output_text")
UNSUPPORTED_PARTS = ("refusal", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference")
CHAT_ROLES = ("system", "user", "assistant", "tool")
TOOL_FIELDS = ("name", "description", "parameters")


def read_body(kind: str, content: bytes) -> PromptSource:
    """Parse a body; `kind` is one of `candidate.ROUTES`' values.  Raises UnusableError."""
    body = parse_object(content)
    for name, neutral in NEUTRAL_VALUES.items():
        if body.get(name) is not None and body[name] not in neutral:
            refuse(Skipped.UNUSUAL)
    if body.get("n") not in (None, 1):
        refuse(Skipped.SEVERAL_ANSWERS)
    return _READERS[kind](body)


def _chat(body: Mapping[str, Any]) -> PromptSource:
    arguments = dict(object_of(body.get("chat_template_kwargs") or {}))
    effort = body.get("reasoning_effort")
    if effort is not None:
        arguments |= {"reasoning_effort": effort}
        arguments.setdefault("enable_thinking", effort != "none")
    if body.get("documents") is not None:
        arguments["documents"] = body["documents"]
    return PromptSource(
        messages=tuple(_message(object_of(each)) for each in list_of(body.get("messages"))),
        tools=tuple(_tool(object_of(each)) for each in list_of(body.get("tools") or [])),
        arguments=arguments,
    )


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    role = given.get("role")
    if role not in CHAT_ROLES:
        refuse(Skipped.UNUSUAL)
    if given.get("reasoning") or given.get("reasoning_content"):
        refuse(Skipped.REASONING)
    if any(given.get(name) for name in ("function_call", "refusal", "audio")):
        refuse(Skipped.UNUSUAL)
    message: dict[str, Any] = {"role": role, "content": _content(given.get("content"))}
    if isinstance(given.get("name"), str):
        message["name"] = given["name"]
    if role == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = [_call(object_of(each)) for each in list_of(given["tool_calls"])]
    if role == "tool" and "tool_call_id" in given:
        message["tool_call_id"] = given["tool_call_id"]
    return message


def _content(content: object) -> str | list[str]:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part if isinstance(part, str) else _part(object_of(part)) for part in list_of(content)]
    return texts if len(texts) > 1 else "".join(texts)


def _part(part: Mapping[str, Any]) -> str:
    kind = part.get("type", "text")
    if kind in UNSUPPORTED_PARTS:
        refuse(Skipped.UNUSUAL)
    return text_of(part.get("text")) if kind in TEXT_PARTS else refuse(Skipped.MEDIA)


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier tool call; templates take its arguments as an object."""
    function = object_of(given.get("function"))
    if given.get("type", "function") != "function":
        refuse(Skipped.UNUSUAL)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    named = {**function, "arguments": arguments if isinstance(arguments, dict) else {}}
    return {**given, "function": named}


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    """An offered tool, its members in the order the worker passes them to the template."""
    function = object_of(given.get("function"))
    shown = {name: function.get(name) for name in TOOL_FIELDS}
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    return {"type": given.get("type", "function"), "function": shown}


def _text(body: Mapping[str, Any]) -> PromptSource:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return PromptSource(text=prompt)
    tokens = list_of(prompt)
    if not tokens or not all(type(token) is int and token >= 0 for token in tokens):
        refuse(Skipped.SEVERAL_ANSWERS)
    return PromptSource(tokens=tuple(tokens))


def _messages(body: Mapping[str, Any]) -> PromptSource:
    thinking = body.get("thinking")
    if body.get("tools") or (isinstance(thinking, dict) and thinking.get("type") != "disabled"):
        refuse(Skipped.UNUSUAL)
    system = _content(body.get("system"))
    system = system if isinstance(system, str) else "".join(system)
    first = [{"role": "system", "content": system}] if system else []
    messages = [object_of(each) for each in list_of(body.get("messages"))]
    if any(message.get("role") not in ("user", "assistant") for message in messages):
        refuse(Skipped.UNUSUAL)
    return PromptSource(messages=(*first, *(_message(message) for message in messages)))


def _responses(body: Mapping[str, Any]) -> PromptSource:
    if any(body.get(name) for name in ("tools", "reasoning", "prompt", "chat_template_kwargs")):
        refuse(Skipped.UNUSUAL)
    instructions = body.get("instructions")
    first = [{"role": "system", "content": text_of(instructions)}] if instructions else []
    given = body.get("input")
    if isinstance(given, str):
        return PromptSource(messages=(*first, {"role": "user", "content": given}))
    messages = []
    for each in map(object_of, list_of(given)):
        if each.get("type", "message") != "message":
            refuse(Skipped.UNUSUAL)
        message = _message(each)
        if message["role"] == "assistant" and isinstance(message["content"], list):
            refuse(Skipped.UNUSUAL)  # the worker uses the first text only
        messages.append(message)
    return PromptSource(messages=(*first, *messages))


_READERS: Mapping[str, Callable[[Mapping[str, Any]], PromptSource]] = MappingProxyType(
    {"chat": _chat, "text": _text, "messages": _messages, "responses": _responses}
)
