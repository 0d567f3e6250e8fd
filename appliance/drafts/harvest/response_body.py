"""Parses answers, streamed or whole, as vLLM 0.32 sends them on the four routes.  Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from appliance.drafts.harvest.conversation import (
    EOS,
    SampledAnswer,
    Skipped,
    list_of,
    object_of,
    parse_object,
    refuse,
    text_of,
)
from appliance.serving.sse import SEPARATOR, is_done, split_frames

COMMENT = b":"

Events = Iterable[tuple[bytes, dict[str, Any]]]
"""Name and data of each."""


def read_answer(kind: str, content: bytes) -> SampledAnswer:
    """Parse all a client received; `kind` is one of `candidate.ROUTES`' values.  Raises UnusableError."""
    whole, streamed = _READERS[kind]
    is_whole = content.lstrip().startswith(b"{")
    answer = whole(parse_object(content)) if is_whole else streamed(_events(content))
    return answer if answer.text else refuse(Skipped.NO_ANSWER)


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    finish: Any = None
    stop: Any = None

    def answer(self) -> SampledAnswer:
        return _finished("".join(self.texts), self.finish, self.stop)

    def add(self, choice: Mapping[str, Any], part: Mapping[str, Any], name: str) -> None:
        if choice.get("index", 0) != 0:
            refuse(Skipped.SEVERAL_ANSWERS)
        if part.get("tool_calls") or part.get("function_call"):
            refuse(Skipped.TOOL_CALL)
        if part.get("reasoning") or part.get("reasoning_content"):
            refuse(Skipped.REASONING)
        if part.get("refusal") or part.get("audio"):
            refuse(Skipped.UNUSUAL)
        if part.get(name) is not None:
            self.texts.append(text_of(part[name]))
        if choice.get("finish_reason") is not None:
            self.finish, self.stop = choice["finish_reason"], choice.get("stop_reason")


def _finished(text: str, finish: object, stop: object) -> SampledAnswer:
    if finish == "length":
        return SampledAnswer(text=text, end=None)
    if finish in ("tool_calls", "function_call"):
        refuse(Skipped.TOOL_CALL)
    if finish != "stop":
        refuse(Skipped.UNUSUAL)
    if isinstance(stop, str):
        return SampledAnswer(text=text, end=None, stop=stop)
    return SampledAnswer(text=text, end=stop if type(stop) is int else EOS)


def _whole_choice(body: Mapping[str, Any], part: str | None, name: str) -> SampledAnswer:
    choices = list_of(body.get("choices"))
    if len(choices) != 1:
        refuse(Skipped.SEVERAL_ANSWERS)
    choice, found = object_of(choices[0]), _Choice()
    found.add(choice, object_of(choice.get(part)) if part else choice, name)
    return found.answer()


def _streamed_choice(events: Events, part: str | None, name: str) -> SampledAnswer:
    found = _Choice()
    for _, event in events:
        if "error" in event:
            refuse(Skipped.UNREADABLE)
        for choice in map(object_of, list_of(event.get("choices"))):
            found.add(choice, object_of(choice.get(part)) if part else choice, name)
    return found.answer()


def _messages(body: Mapping[str, Any]) -> SampledAnswer:
    blocks = [object_of(block) for block in list_of(body.get("content"))]
    for block in blocks:
        _check_block(block)
    texts = [text_of(block.get("text")) for block in blocks]
    return _message_end("".join(texts), body)


def _messages_stream(events: Events) -> SampledAnswer:
    texts: list[str] = []
    ended: Mapping[str, Any] = {}
    for name, event in events:
        match name:
            case b"content_block_start":
                _check_block(object_of(event.get("content_block")))
            case b"content_block_delta":
                delta = object_of(event.get("delta"))
                texts.append(text_of(delta.get("text")))
            case b"message_delta":
                ended = object_of(event.get("delta"))
            case b"error":
                refuse(Skipped.UNREADABLE)
            case _:
                pass
    return _message_end("".join(texts), ended)


def _check_block(block: Mapping[str, Any]) -> None:
    kind = block.get("type")
    if kind == "tool_use":
        refuse(Skipped.TOOL_CALL)
    if kind in ("thinking", "redacted_thinking"):
        refuse(Skipped.REASONING)
    if kind != "text":
        refuse(Skipped.UNUSUAL)


def _message_end(text: str, end: Mapping[str, Any]) -> SampledAnswer:
    match end.get("stop_reason"):
        case "end_turn":
            return SampledAnswer(text=text, end=EOS)
        case "max_tokens":
            return SampledAnswer(text=text, end=None)
        case "stop_sequence":
            return SampledAnswer(text=text, end=None, stop=text_of(end.get("stop_sequence")))
        case other:
            return refuse(Skipped.TOOL_CALL if other == "tool_use" else Skipped.UNUSUAL)


def _responses(body: Mapping[str, Any]) -> SampledAnswer:
    texts = []
    for item in map(object_of, list_of(body.get("output"))):
        kind = item.get("type")
        if kind == "reasoning":
            refuse(Skipped.REASONING)
        if kind != "message":
            refuse(Skipped.TOOL_CALL if str(kind).endswith("call") else Skipped.UNUSUAL)
        for part in map(object_of, list_of(item.get("content"))):
            if part.get("type") != "output_text":
                refuse(Skipped.UNUSUAL)
            texts.append(text_of(part.get("text")))
    if body.get("status") == "completed":
        return SampledAnswer(text="".join(texts), end=EOS)
    details = body.get("incomplete_details")
    if isinstance(details, dict) and details.get("reason") == "max_output_tokens":
        return SampledAnswer(text="".join(texts), end=None)
    return refuse(Skipped.UNUSUAL)


def _responses_stream(events: Events) -> SampledAnswer:
    """The final event of a stream carries the whole response."""
    last: dict[str, Any] | None = None
    for name, event in events:
        if name in {b"response.completed", b"response.incomplete"}:
            last = object_of(event.get("response"))
    return _responses(last) if last is not None else refuse(Skipped.UNREADABLE)


def _events(content: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Name and data of each event, without comments and OpenAI's last frame."""
    if not content.endswith(SEPARATOR):
        refuse(Skipped.UNREADABLE)
    for frame in split_frames(content):
        lines = [line for line in frame.strip(b"\n").split(b"\n") if not line.startswith(COMMENT)]
        if not lines or is_done(frame):
            continue
        name, data = b"", b""
        for line in lines:
            label, _, value = line.partition(b":")
            if label == b"event":
                name = value.strip()
            elif label == b"data":
                data += value.strip()
        yield name, parse_object(data)


Reader = tuple[Callable[[Mapping[str, Any]], SampledAnswer], Callable[[Events], SampledAnswer]]
_READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "chat": (
            partial(_whole_choice, part="message", name="content"),
            partial(_streamed_choice, part="delta", name="content"),
        ),
        "text": (
            partial(_whole_choice, part=None, name="text"),
            partial(_streamed_choice, part=None, name="text"),
        ),
        "messages": (_messages, _messages_stream),
        "responses": (_responses, _responses_stream),
    }
)
"""By kind: how to parse a whole answer and a streamed one."""
