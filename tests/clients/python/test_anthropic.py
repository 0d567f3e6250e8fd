"""Anthropic's Python client, unmodified, and strict: an answer of another shape is an error."""

import asyncio

import anthropic
import pytest
from questions import ASK, REPORT_SCHEMA, is_report

CHAT = [{"role": "user", "content": ASK}]
# The client has no argument for it, and the API still does.
GREEDY = {"extra_body": {"temperature": 0}}
TOOL = {
    "name": "report",
    "description": "Report what was written.",
    "input_schema": REPORT_SCHEMA,
    "strict": True,
}

# Its input has no end within the tokens of a test: the API cannot ask for an answer that goes on otherwise.
LONG_TOOL = {
    "name": "count",
    "description": "Write many numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 700}},
        "required": ["numbers"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture
def client():
    with anthropic.Anthropic(_strict_response_validation=True, max_retries=0) as client:
        yield client


def test_a_message_of_several_turns_is_answered(client, model):
    """With a system prompt, what it cost and why it ended."""
    answer = client.messages.create(
        model=model,
        system="You write Python.",
        messages=[
            {"role": "user", "content": "Write a function `add`."},
            {"role": "assistant", "content": "def add(a, b):\n    return a + b\n"},
            {"role": "user", "content": [{"type": "text", "text": ASK}]},
        ],
        max_tokens=16,
        **GREEDY,
    )
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", model)
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    assert answer.stop_reason in {"end_turn", "max_tokens"}
    assert answer.usage.input_tokens > 10
    assert answer.usage.output_tokens > 0


def test_a_stream_has_typed_events(client, model):
    """From `message_start` to `message_stop`, and the pieces add up."""
    with client.messages.stream(model=model, messages=CHAT, max_tokens=16, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_message()
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert "content_block_delta" in kinds
    assert kinds[-1] == "message_stop"
    assert final.content[0].text == "".join(event.text for event in events if event.type == "text")
    assert final.usage.output_tokens > 0


def test_tokens_are_counted_without_an_answer(client, model):
    """As many as a message of the same turns says it read."""
    counted = client.messages.count_tokens(model=model, messages=CHAT).input_tokens
    answer = client.messages.create(model=model, messages=CHAT, max_tokens=1)
    assert counted == answer.usage.input_tokens


@pytest.mark.parametrize(
    "choice",
    [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "report"}],
    ids=str,
)
def test_a_tool_is_used_when_it_must_be(client, model, choice):
    """Its input keeps to the schema, and its result is read in the next turn."""
    answer = client.messages.create(
        model=model, messages=CHAT, tools=[TOOL], tool_choice=choice, max_tokens=160, **GREEDY
    )
    used = next(block for block in answer.content if block.type == "tool_use")
    assert used.name == "report"
    assert is_report(used.input)
    after = client.messages.create(
        model=model,
        messages=[
            *CHAT,
            {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "noted"}],
            },
        ],
        tools=[TOOL],
        max_tokens=6,
    )
    assert after.role == "assistant"


def test_a_tool_use_streams(client, model):
    """The client puts the pieces of the input together."""
    with client.messages.stream(
        model=model,
        messages=CHAT,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "report"},
        max_tokens=160,
        **GREEDY,
    ) as stream:
        final = stream.get_final_message()
    used = next(block for block in final.content if block.type == "tool_use")
    assert is_report(used.input)


def test_stop_sequences_end_the_text(client, model):
    """And are named as the reason, or at least the text ends before them."""
    answer = client.messages.create(
        model=model, messages=CHAT, max_tokens=64, **GREEDY, stop_sequences=["(", "\n"]
    )
    assert answer.stop_reason in {"stop_sequence", "end_turn"}
    assert not {"(", "\n"} & set("".join(block.text for block in answer.content))


def test_errors_have_the_classes_applications_catch(client, model):
    """Wrong key, unknown model, nonsense."""
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="sk-wrong").messages.create(model=model, messages=CHAT, max_tokens=1)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude-9", messages=CHAT, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=model, messages=[{"role": "nobody", "content": 1}], max_tokens=1)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(
            model=model, messages=[{"role": "user", "content": "word " * 9000}], max_tokens=1
        )


def test_a_stream_may_be_left_in_the_middle(model):
    """And the next request is served; the asynchronous client does it here."""

    async def talk() -> None:
        async with anthropic.AsyncAnthropic(max_retries=0) as client:
            asked = {"model": model, "messages": CHAT, "max_tokens": 1500, "tools": [LONG_TOOL]}
            choice = {"type": "tool", "name": "count"}
            async with client.messages.stream(**asked, tool_choice=choice) as stream:
                async for event in stream:
                    if event.type == "content_block_delta":
                        break
            answer = await client.messages.create(model=model, messages=CHAT, max_tokens=1)
            assert answer.usage.output_tokens == 1

    asyncio.run(talk())
