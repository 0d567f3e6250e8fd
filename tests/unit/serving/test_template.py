"""Equal templates have equal labels, and no content is in them."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.infra.json_members import parse_members
from appliance.serving.template import template_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
KEY = bytes(range(16))
LABEL = re.compile(r"chat-[0-9a-f]{8}|raw-[0-9a-f]{8}|raw-plain|raw-tokens|none")
CHATS = (CHAT, RESPONSES, MESSAGES)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "type", "system"]), inner)
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(
    st.sampled_from(
        [
            *("messages", "input", "instructions", "system"),
            *("prompt", "chat_template", "chat_template_kwargs", "tools"),
        ]
    ),
    JSON,
)


def label(route: str, body: dict, key: bytes = KEY) -> str:
    """Label a body."""
    return template_of(route, parse_members(json.dumps(body)), key=key)


def chat(system: object = "Be brief.", user: str = "hello", **more: object) -> str:
    """Label a chat."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return label(CHAT, {"messages": messages, **more})


def raw(prompt: object) -> str:
    """Label a text prompt."""
    return label(TEXT, {"prompt": prompt})


@given(BODIES, st.sampled_from([*CHATS, TEXT, "/v1/embeddings", "/tokenize"]))
def test_any_body_has_a_label_of_the_documented_form(body: dict, route: str):
    """Labels fail open: a request never fails for one, and is always found again under the same one."""
    first = label(route, body)
    assert LABEL.fullmatch(first)
    assert first.startswith("chat-") == (route in CHATS)
    assert first.startswith("raw-") == (route == TEXT)
    assert label(route, dict(reversed(body.items()))) == first


def test_user_messages_do_not_change_the_label():
    """One template, many conversations."""
    assert chat(user="one") == chat(user="another")
    turns = [{"role": "system", "content": "Be brief."}, *({"role": "user", "content": "x"},) * 9]
    assert label(CHAT, {"messages": turns, "temperature": 0.5}) == chat()


@pytest.mark.parametrize(
    "other",
    [
        {"system": "Be long."},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
)
def test_template_members_change_the_label(other: dict):
    """System message, chat template, its arguments, and whether there are tools."""
    assert chat(**other) != chat()


def test_empty_members_do_not_change_the_label():
    """Null, empty and absent arguments give the same prompt; so do tools of any name."""
    assert chat(tools=[], chat_template=None, chat_template_kwargs={}) == chat()
    assert chat(tools=[{"a": 1}]) == chat(tools=[{"b": 1}, {"c": 1}])


def test_a_system_message_in_parts_is_the_same_as_in_one():
    """Clients spell it either way, and a developer is a system by another name."""
    assert chat([{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]) == chat()
    assert label(CHAT, {"messages": [{"role": "developer", "content": "Be brief."}]}) == chat()


@pytest.mark.parametrize("text", ["Be brief.", [{"type": "text", "text": "Be "}, {"text": "brief."}]])
def test_system_text_has_the_same_label_in_every_api(text: object):
    """The worker makes the same prompt of it."""
    turn = {"role": "user", "content": "hello"}
    assert label(MESSAGES, {"system": text, "messages": [turn]}) == chat()
    assert label(RESPONSES, {"instructions": text, "input": "hello"}) == chat()
    assert label(RESPONSES, {"input": [{"role": "developer", "content": text}, turn]}) == chat()
    assert label(MESSAGES, {"messages": [turn]}) == label(CHAT, {"messages": [turn], "system": text})


def test_a_label_cannot_be_guessed_without_the_key():
    """Who knows a system prompt cannot look for its label."""
    body = {"messages": [{"role": "system", "content": "Be brief."}]}
    assert label(CHAT, body, bytes(16)) != label(CHAT, body, bytes(15) + b"\1")


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ("<|user|>\nhi<|end|>\n<|assistant|>\n", "<|user|>\nwhy?<|end|>\n<|assistant|>\nso<|end|>\n<|user|>"),
        ("<s>[INST] a [/INST]", "<s>[INST] b [/INST] c [INST] d [/INST]"),
        ("### Instruction:\nx\n### Response:\n", "### Instruction:\ny\n\n### Response:\nz"),
        ("<start_of_turn>user\nx<end_of_turn>", "<start_of_turn>user\ny<end_of_turn>"),
        ("<\uff5cUser\uff5c>x<\uff5cAssistant\uff5c>", "<\uff5cUser\uff5c>y<\uff5cAssistant\uff5c>"),
    ],
)
def test_a_raw_prompt_is_labelled_by_its_markers(one: str, same: str):
    """Their order of first appearance counts, the text between them and the number of turns do not."""
    assert raw(one) == raw(same)
    assert re.fullmatch(r"raw-[0-9a-f]{8}", raw(one))


def test_other_markers_are_another_template():
    """Also the same ones in another order."""
    prompts = ["<|user|><|end|>", "<|end|><|user|>", "<|user|>", "[INST]", "<s>", "### Input:"]
    assert len({raw(prompt) for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize(
    "prompt", ["", "def add(a, b):", "a <| b |> c", "# Usage:\n### Usage: x", "x[0]", "[]"]
)
def test_a_text_without_markers_is_plain(prompt: str):
    """What only looks like a marker does not split plain traffic into labels of its own."""
    assert raw(prompt) == "raw-plain"


def test_only_the_beginning_of_a_raw_prompt_is_read():
    """Markers are at the beginning, and a long prompt costs no more than a short one."""
    assert raw("x" * 2000 + "<|user|>") == "raw-plain"


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2], [3]], None, [], 5, {}, [None]])
def test_prompt_of_tokens_is_labelled_raw_tokens(prompt: object):
    """Token ids hide the template."""
    assert raw(prompt) == "raw-tokens"


def test_a_batch_of_prompts_is_labelled_by_its_first():
    """Batches come from one program."""
    assert raw(["[INST] a [/INST]", "plain"]) == raw("[INST] b [/INST]")
