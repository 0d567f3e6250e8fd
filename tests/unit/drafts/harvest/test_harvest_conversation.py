"""
Bodies and answers are parsed as the worker parsed them, or refused with a reason.
"""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.harvest.conversation import EOS, PromptSource, SampledAnswer, Skipped, UnusableError
from appliance.drafts.harvest.request_body import read_body
from appliance.drafts.harvest.response_body import read_answer

USER = {"role": "user", "content": "hello"}


def read(kind, body):
    return read_body(kind, json.dumps(body).encode())


def reason(call, *arguments):
    with pytest.raises(UnusableError) as caught:
        call(*arguments)
    return caught.value.reason


def frames(*events, names=False, end=b"data: [DONE]\n\n"):
    """Server-sent events as the gateway passes them on."""
    out = b": keep-alive\n\n"
    for event in events:
        name = f"event: {event['type']}\n".encode() if names else b""
        out += name + f"data: {json.dumps(event)}\n\n".encode()
    return out + end


# Bodies.


def test_chat_body_is_parsed_like_the_worker():
    """Text parts are joined or kept apart; no other member is lost."""
    system = {"role": "system", "content": [{"type": "text", "text": "be kind"}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "name": "eve"}
    empty = {"role": "assistant", "content": None}
    asked = read("chat", {"messages": [system, parts, empty], "temperature": 0.3, "stream": True})
    assert asked == PromptSource(
        messages=(
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": ["a", "b"], "name": "eve"},
            {"role": "assistant", "content": ""},
        )
    )


def test_earlier_tool_calls_have_object_arguments():
    calls = [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": text}}
        for text in ('{"x": 1}', "nonsense", "[]", "", None)
    ]
    messages = [USER, {"role": "assistant", "tool_calls": calls}]
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "found"}]}
    asked = read("chat", {"messages": [*messages, result]})
    given_ = [call["function"]["arguments"] for call in asked.messages[1]["tool_calls"]]
    assert given_ == [{"x": 1}, {}, {}, {}, {}]
    assert asked.messages[2] == {"role": "tool", "content": "found", "tool_call_id": "1"}


def test_tools_and_arguments_of_the_template_are_kept():
    tool = {"function": {"parameters": {}, "name": "look", "odd": 1}, "type": "function"}
    body = {"messages": [USER], "tools": [tool], "reasoning_effort": "low", "documents": [{"a": 1}]}
    asked = read("chat", body | {"chat_template_kwargs": {"flavour": "x"}})
    assert json.dumps(asked.tools[0]) == (
        '{"type": "function", "function": {"name": "look", "description": null, "parameters": {}}}'
    )
    assert asked.arguments == {
        "flavour": "x",
        "reasoning_effort": "low",
        "enable_thinking": True,
        "documents": [{"a": 1}],
    }


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("x = 1", PromptSource(text="x = 1")),
        (["x = 1"], PromptSource(text="x = 1")),
        ([5, 6], PromptSource(tokens=(5, 6))),
        ([[5, 6]], PromptSource(tokens=(5, 6))),
    ],
)
def test_text_prompt_is_a_text_or_its_tokens(prompt, asked):
    assert read("text", {"prompt": prompt}) == asked


def test_messages_and_responses_become_a_chat():
    chat = ({"role": "system", "content": "be kind"}, USER)
    system = [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]
    body = {"system": system, "messages": [USER], "max_tokens": 5}
    assert read("messages", body) == PromptSource(messages=chat)
    assert read("responses", {"instructions": "be kind", "input": "hello"}) == PromptSource(messages=chat)
    item = {"role": "user", "type": "message", "content": [{"type": "input_text", "text": "hello"}]}
    assert read("responses", {"input": [item]}) == PromptSource(messages=(USER,))


@pytest.mark.parametrize(
    ("kind", "body", "why"),
    [
        ("chat", {}, Skipped.UNREADABLE),
        ("chat", {"messages": "x"}, Skipped.UNREADABLE),
        ("chat", {"messages": [5]}, Skipped.UNREADABLE),
        ("chat", {"messages": [USER], "n": 2}, Skipped.SEVERAL_ANSWERS),
        ("chat", {"messages": [USER], "n": [1]}, Skipped.SEVERAL_ANSWERS),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, Skipped.MEDIA),
        ("chat", {"messages": [{"role": "user", "content": [{"type": {"a": 1}}]}]}, Skipped.MEDIA),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, Skipped.UNREADABLE),
        ("chat", {"messages": [{"role": "developer", "content": "x"}]}, Skipped.UNUSUAL),
        ("chat", {"messages": [{"role": ["user"], "content": "x"}]}, Skipped.UNUSUAL),
        ("chat", {"messages": [{"role": "assistant", "reasoning": "hm"}]}, Skipped.REASONING),
        ("chat", {"messages": [{"role": "assistant", "refusal": "no"}]}, Skipped.UNUSUAL),
        ("chat", {"messages": [USER], "continue_final_message": True}, Skipped.UNUSUAL),
        ("chat", {"messages": [USER], "add_generation_prompt": False}, Skipped.UNUSUAL),
        ("chat", {"messages": [USER], "skip_special_tokens": False}, Skipped.UNUSUAL),
        ("chat", {"messages": [USER], "truncate_prompt_tokens": 5}, Skipped.UNUSUAL),
        ("text", {"prompt": "x", "echo": True}, Skipped.UNUSUAL),
        ("text", {"prompt": "x", "suffix": "y"}, Skipped.UNUSUAL),
        ("text", {"prompt": "x", "add_special_tokens": False}, Skipped.UNUSUAL),
        ("text", {"prompt": ["x", "y"]}, Skipped.SEVERAL_ANSWERS),
        ("text", {"prompt": []}, Skipped.SEVERAL_ANSWERS),
        ("text", {"prompt": None}, Skipped.UNREADABLE),
        ("messages", {"messages": [USER], "tools": [{}]}, Skipped.UNUSUAL),
        ("messages", {"messages": [USER], "thinking": {"type": "enabled"}}, Skipped.UNUSUAL),
        ("messages", {"messages": [{"role": "system", "content": "x"}]}, Skipped.UNUSUAL),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, Skipped.UNUSUAL),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, Skipped.MEDIA),
        ("responses", {"input": [{"type": "function_call"}]}, Skipped.UNUSUAL),
        ("responses", {"input": "x", "reasoning": {"effort": "low"}}, Skipped.UNUSUAL),
        ("responses", {"input": "x", "tools": [{"type": "function"}]}, Skipped.UNUSUAL),
    ],
)
def test_unusable_body_has_a_reason(kind, body, why):
    assert reason(read, kind, body) is why


@given(st.sampled_from(["chat", "text", "messages", "responses"]), st.binary(max_size=60))
def test_bytes_without_a_json_object_are_unreadable(kind, content):
    with suppress(UnusableError):
        read_body(kind, content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MEMBERS = ("messages", "prompt", "input", "system", "n", "tools", "choices", "content", "output", "thinking")
INNER = (*MEMBERS, "role", "type", "text", "delta", "message", "finish_reason", "stop_reason")
PIECES = st.dictionaries(st.sampled_from(INNER), JSON)
OBJECTS = st.dictionaries(st.sampled_from(MEMBERS), JSON | PIECES | st.lists(PIECES, max_size=2))


@given(st.sampled_from(["chat", "text", "messages", "responses"]), OBJECTS)
def test_any_json_is_parsed_or_refused(kind, content):
    text = json.dumps(content).encode()
    for call in (
        lambda: read_body(kind, text),
        lambda: read_answer(kind, text),
        lambda: read_answer(kind, b"event: message_delta\ndata: " + text + b"\n\n"),
    ):
        with suppress(UnusableError):
            call()


# Answers.


def choice(text, **more):
    return {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", **more}


def whole(*choices):
    return json.dumps({"choices": choices, "usage": {}}).encode()


def test_whole_chat_answer_is_its_text_and_how_it_ended():
    """By EOS, by another token, by a stop text, or by its length."""
    assert read_answer("chat", whole(choice("hi"))) == SampledAnswer(text="hi", end=EOS)
    assert read_answer("chat", whole(choice("hi", stop_reason=7))) == SampledAnswer(text="hi", end=7)
    stopped = SampledAnswer(text="hi", end=None, stop="\n")
    assert read_answer("chat", whole(choice("hi", stop_reason="\n"))) == stopped
    cut = whole(choice("hi", finish_reason="length"))
    assert read_answer("chat", cut) == SampledAnswer(text="hi", end=None)


def test_streamed_chat_answer_is_the_same():
    deltas = [{"role": "assistant", "content": ""}, {"content": "h\n\ni"}, {"content": "!"}, {}]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events[-1]["choices"][0] |= {"finish_reason": "stop", "stop_reason": None}
    usage = {"choices": [], "usage": {"prompt_tokens": 1}}
    assert read_answer("chat", frames(*events, usage)) == SampledAnswer(text="h\n\ni!", end=EOS)


def test_completion_is_read_both_ways():
    body = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
    assert read_answer("text", json.dumps(body).encode()) == SampledAnswer(text="x", end=None)
    events = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in "xy"]
    events[1]["choices"][0] |= {"finish_reason": "stop", "stop_reason": 2}
    assert read_answer("text", frames(*events)) == SampledAnswer(text="xy", end=2)


def test_messages_are_read_both_ways():
    body = {"content": [{"type": "text", "text": "hi"}], "stop_reason": "end_turn"}
    assert read_answer("messages", json.dumps(body).encode()) == SampledAnswer(text="hi", end=EOS)
    events = [
        {"type": "message_start", "message": {}},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "h"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "i"}},
        {"type": "content_block_stop"},
        {"type": "message_delta", "delta": {"stop_reason": "stop_sequence", "stop_sequence": "."}},
        {"type": "message_stop"},
    ]
    got = read_answer("messages", frames(*events, names=True, end=b""))
    assert got == SampledAnswer(text="hi", end=None, stop=".")


def test_responses_are_read_both_ways():
    """The last event of a stream carries the whole response."""
    message = {"type": "message", "content": [{"type": "output_text", "text": "hi"}]}
    response = {"output": [message], "status": "completed"}
    assert read_answer("responses", json.dumps(response).encode()) == SampledAnswer(text="hi", end=EOS)
    events = [
        {"type": "response.output_text.delta", "delta": "hi"},
        {"type": "response.completed", "response": response},
    ]
    assert read_answer("responses", frames(*events, names=True, end=b"")) == SampledAnswer(text="hi", end=EOS)
    cut = response | {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    assert read_answer("responses", json.dumps(cut).encode()) == SampledAnswer(text="hi", end=None)


@pytest.mark.parametrize(
    ("kind", "content", "why"),
    [
        ("chat", whole(), Skipped.SEVERAL_ANSWERS),
        ("chat", whole(choice("a"), choice("b", index=1)), Skipped.SEVERAL_ANSWERS),
        ("chat", whole(choice("")), Skipped.NO_ANSWER),
        ("chat", whole(choice(None)), Skipped.NO_ANSWER),
        ("chat", whole(choice("x", message={"tool_calls": [{}]})), Skipped.TOOL_CALL),
        ("chat", whole(choice("x", finish_reason="tool_calls")), Skipped.TOOL_CALL),
        ("chat", whole(choice("x", message={"content": "x", "reasoning": "hm"})), Skipped.REASONING),
        ("chat", whole(choice("x", finish_reason="content_filter")), Skipped.UNUSUAL),
        ("chat", whole(choice("x", finish_reason=None)), Skipped.UNUSUAL),
        ("chat", whole(choice(["x"])), Skipped.UNREADABLE),
        ("chat", frames({"error": {"message": "died"}}), Skipped.UNREADABLE),
        ("chat", frames({"choices": [{"index": 1, "delta": {"content": "x"}}]}), Skipped.SEVERAL_ANSWERS),
        ("chat", frames({"choices": [{"delta": {"content": "x"}}]}), Skipped.UNUSUAL),
        ("chat", b'data: {"choices": []}', Skipped.UNREADABLE),
        ("chat", b"", Skipped.UNREADABLE),
        ("messages", b'{"content": [{"type": "thinking"}]}', Skipped.REASONING),
        ("messages", b'{"content": [{"type": "tool_use"}]}', Skipped.TOOL_CALL),
        ("messages", b'{"content": [], "stop_reason": "refusal"}', Skipped.UNUSUAL),
        ("responses", b'{"output": [{"type": "function_call"}]}', Skipped.TOOL_CALL),
        ("responses", b'{"output": [{"type": "reasoning"}]}', Skipped.REASONING),
        ("responses", b'{"output": [], "status": "failed"}', Skipped.UNUSUAL),
        ("responses", frames({"type": "response.created"}, names=True, end=b""), Skipped.UNREADABLE),
    ],
)
def test_unusable_answer_has_a_reason(kind, content, why):
    assert reason(read_answer, kind, content) is why
