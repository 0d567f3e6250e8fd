"""
OpenAI's Python client, unmodified, on the chat and other endpoints.
"""

import asyncio
import json
import os
import time
from typing import Literal

import openai
import pytest
from pydantic import BaseModel
from pydantic_core import from_json
from questions import CALLED, CHAT, OTHER_TOOL, PIXEL, REPORT_SCHEMA, TOOL, TURNS, is_report

BATCH_SECONDS = 90
LONG = {"max_completion_tokens": 1500, "extra_body": {"ignore_eos": True}}


class Report(BaseModel):
    """What a structured answer is parsed into."""

    language: Literal["python", "rust"]
    lines: Literal[1, 2, 3]
    tested: bool


@pytest.fixture
def client():
    with openai.OpenAI() as client:
        yield client


def test_models_are_listed_and_found(client, model, embedder):
    """A client with a key finds the names of the models in the list."""
    names = [entry.id for entry in client.models.list()]
    assert {model, embedder} <= set(names)
    found = client.models.retrieve(model)
    assert (found.id, found.object, found.owned_by) == (model, "model", "appliance")
    assert found.created > 0


def test_a_chat_of_several_turns_is_answered(client, model):
    """An answer is an assistant's, ends for a reason and says what it cost."""
    answer = client.chat.completions.create(
        model=model, messages=TURNS, temperature=0, max_completion_tokens=24
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.message.tool_calls is None
    assert choice.finish_reason in {"stop", "length"}
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens > 20
    assert answer.model == model


def test_a_developers_word_is_taken(client, model):
    """The role that newer clients send in place of `system`."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "developer", "content": "You write Python."}, *CHAT],
        max_completion_tokens=4,
    )
    assert answer.choices[0].message.role == "assistant"


@pytest.mark.parametrize("name", ["max_completion_tokens", "max_tokens"])
def test_the_length_is_kept(client, model, name):
    """With both names of the limit; the finish reason is `length`."""
    answer = client.chat.completions.create(
        model=model, messages=CHAT, extra_body={"ignore_eos": True}, **{name: 7}
    )
    assert answer.usage.completion_tokens == 7
    assert answer.choices[0].finish_reason == "length"


def test_a_stream_comes_in_pieces(client, model):
    """A role first, then text, then a finish reason; usage only on request."""
    chunks = list(
        client.chat.completions.create(
            model=model, messages=CHAT, temperature=0, max_completion_tokens=40, stream=True
        )
    )
    assert len(chunks) > 5
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len("".join(chunk.choices[0].delta.content or "" for chunk in chunks)) > 10
    assert chunks[-1].choices[0].finish_reason in {"stop", "length"}
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert all(chunk.usage is None for chunk in chunks)


def test_the_usage_of_a_stream_comes_last_when_asked_for(client, model):
    """In a separate chunk, without choices."""
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=CHAT,
            max_completion_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_stream_helper_collects_an_answer(client, model):
    """The client's own accumulation of a stream, which trips over chunks of an odd shape."""
    with client.chat.completions.stream(model=model, messages=CHAT, temperature=0, stop="\n") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= set(kinds)
    assert final.choices[0].message.content


def test_two_answers_to_one_question(client, model):
    """`n` answers, whole and streamed."""
    asked = {"model": model, "messages": CHAT, "n": 2, "max_completion_tokens": 6}
    answer = client.chat.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1]
    chunks = client.chat.completions.create(**asked, stream=True)
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


def test_stop_ends_the_text_before_it(client, model):
    """The text ends where the stop would begin."""
    answer = client.chat.completions.create(
        model=model, messages=CHAT, temperature=0, max_completion_tokens=64, stop=["(", "\n"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert not {"(", "\n"} & set(answer.choices[0].message.content or "")


def test_sampling_parameters_are_taken(client, model):
    """Seed, temperature, top_p and penalties, and a user's name."""
    answer = client.chat.completions.create(
        model=model,
        messages=CHAT,
        seed=7,
        temperature=0.8,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        user="somebody",
        max_completion_tokens=6,
    )
    assert answer.choices[0].finish_reason in {"stop", "length"}


def test_logprobs_are_those_of_the_text(client, model):
    """One for each token with its alternatives, and their bytes are the text."""
    answer = client.chat.completions.create(
        model=model,
        messages=CHAT,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=8,
        extra_body={"ignore_eos": True},
    )
    found = answer.choices[0].logprobs.content
    assert len(found) == 8
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) >= 2 for entry in found)
    said = b"".join(bytes(entry.bytes or b"") for entry in found)
    assert said.decode("utf-8", "replace") == answer.choices[0].message.content


def test_logprobs_of_a_stream(client, model):
    """As many as there are tokens."""
    chunks = client.chat.completions.create(
        model=model,
        messages=CHAT,
        logprobs=True,
        top_logprobs=1,
        max_completion_tokens=8,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    found = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert len(found) == 8


def test_json_mode_speaks_json(client, model):
    """The text is JSON, or the beginning of it if the length ended it."""
    answer = client.chat.completions.create(
        model=model,
        messages=CHAT,
        temperature=0,
        response_format={"type": "json_object"},
        max_completion_tokens=32,
    )
    choice = answer.choices[0]
    whole = choice.finish_reason == "stop"
    said = from_json(choice.message.content, allow_partial=False if whole else "trailing-strings")
    assert isinstance(said, dict)


def test_a_schema_is_kept(client, model):
    """Structured outputs by hand."""
    answer = client.chat.completions.create(
        model=model,
        messages=CHAT,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "report", "schema": REPORT_SCHEMA, "strict": True},
        },
        max_completion_tokens=128,
    )
    assert is_report(json.loads(answer.choices[0].message.content))


def test_a_schema_is_parsed_into_a_model(client, model):
    """Structured outputs by the client's own helper."""
    answer = client.chat.completions.parse(
        model=model, messages=CHAT, temperature=0, response_format=Report, max_completion_tokens=128
    )
    assert isinstance(answer.choices[0].message.parsed, Report)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "report"}}], ids=str
)
def test_a_tool_is_called_when_it_must_be(client, model, choice):
    """The arguments keep to the tool's schema, and the reason to stop is the call."""
    answer = client.chat.completions.create(
        model=model,
        messages=CHAT,
        temperature=0,
        tools=[TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_completion_tokens=160,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert (call.type, call.function.name) == ("function", "report")
    assert call.id
    assert is_report(json.loads(call.function.arguments))
    assert answer.choices[0].finish_reason in {"tool_calls", "stop"}


def test_a_tool_call_streams_in_pieces(client, model):
    """The name comes once and the arguments add up."""
    chunks = client.chat.completions.create(
        model=model,
        messages=CHAT,
        temperature=0,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "report"}},
        max_completion_tokens=160,
        stream=True,
    )
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert len(pieces) > 2
    assert {piece.index for piece in pieces} == {0}
    assert [piece.function.name for piece in pieces if piece.function.name] == ["report"]
    assert [piece.id for piece in pieces if piece.id]
    assert is_report(json.loads("".join(piece.function.arguments or "" for piece in pieces)))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_when_the_model_decides_to(client, model, streamed):
    """`auto`: a call is parsed from the model's text, and is not in the content."""
    asked = {
        "model": model,
        "messages": CHAT,
        "temperature": 0,
        "tools": [TOOL, OTHER_TOOL],
        "tool_choice": "auto",
        "max_completion_tokens": 160,
        # The model is too small to decide anything: a grammar makes it say what one that decides says.
        "extra_body": {"structured_outputs": {"choice": [CALLED]}},
    }
    if streamed:
        with client.chat.completions.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            answer = stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
    else:
        answer = client.chat.completions.create(**asked)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert not (choice.message.content or "").strip()
    (call,) = choice.message.tool_calls
    assert call.function.name == "report"
    assert json.loads(call.function.arguments) == {"language": "python", "lines": 2, "tested": True}


def test_tools_that_are_not_needed_change_nothing(client, model):
    """`auto` and `none` answer in text."""
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(
            model=model, messages=CHAT, tools=[TOOL], tool_choice=choice, max_completion_tokens=6
        )
        assert answer.choices[0].message.tool_calls is None


def test_a_tools_answer_is_read(client, model):
    """The turn after a call: the call without text, then the tool's result."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "report", "arguments": '{"language": "python", "lines": 2, "tested": true}'},
    }
    answer = client.chat.completions.create(
        model=model,
        messages=[
            *CHAT,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "noted"},
        ],
        tools=[TOOL],
        max_completion_tokens=8,
    )
    assert answer.choices[0].message.role == "assistant"


def test_a_text_is_continued(client, model):
    """The older endpoint, whole and streamed."""
    asked = {"model": model, "prompt": "def add(a, b):\n    ", "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**asked)
    pieces = list(client.completions.create(**asked, stream=True))
    assert whole.choices[0].text
    assert len(pieces) > 1
    assert "".join(piece.choices[0].text for piece in pieces)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_texts_are_embedded(client, embedder, encoding):
    """As numbers, and in the packed form that this client requests by default."""
    more = {"encoding_format": "float"} if encoding == "float" else {}
    answer = client.embeddings.create(model=embedder, input=["one text", "another"], **more)
    assert [entry.index for entry in answer.data] == [0, 1]
    assert len({len(entry.embedding) for entry in answer.data}) == 1
    assert all(isinstance(number, float) for number in answer.data[0].embedding)
    assert answer.usage.prompt_tokens > 0


@pytest.mark.parametrize("url", [PIXEL, "https://images.example/pixel.png"])
def test_an_image_is_refused_by_a_model_of_texts(client, model, url):
    """A clear 400, whether the image came along or would have to be fetched."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=model,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image_url", "image_url": {"url": url}},
                    ],
                }
            ],
            max_completion_tokens=4,
        )
    assert len(refused.value.body["message"]) > 10


@pytest.mark.parametrize("parts", [1, 2])
def test_text_in_parts_is_read(client, model, parts):
    """Content as a list of text parts is content."""
    content = [{"type": "text", "text": "Write a function. "}] * parts
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], max_completion_tokens=4
    )
    assert answer.usage.prompt_tokens > 4


def test_a_wrong_key_is_an_authentication_error(client, model):
    """401, without the reason."""
    with pytest.raises(openai.AuthenticationError) as refused:
        client.with_options(api_key="sk-wrong").chat.completions.create(model=model, messages=CHAT)
    assert refused.value.code == "invalid_api_key"
    assert "sk-wrong" not in str(refused.value)


def test_an_unknown_model_is_not_found(client):
    """404, from every route that names a model."""
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-9", messages=CHAT)
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="gpt-9", input="x")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-9", input="x")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "hot"},
        {"max_completion_tokens": -1},
        {"messages": "hello"},
        {"messages": [{"role": "nobody-knows", "content": {"a": 1}}]},
        {"top_logprobs": 500, "logprobs": True},
        {"n": 0},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nothing"}},
            }
        },
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "unknown"}}},
    ],
    ids=str,
)
def test_invalid_parameters_are_a_bad_request(client, model, fields):
    """400 in the shape clients read, never a 500 that they would try again."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            **{"model": model, "messages": CHAT, "max_completion_tokens": 4, **fields}
        )
    assert set(refused.value.body) == {"message", "type", "param", "code"}
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize("streamed", [False, True])
def test_too_long_a_prompt_says_so(client, model, streamed):
    """The code that frameworks check; a stream is refused before it begins."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "word " * 9000}], stream=streamed
        )
    assert refused.value.code == "context_length_exceeded"
    assert "maximum context length" in refused.value.message


@pytest.mark.parametrize("path", ["/pooling", "/load_lora_adapter", "/fine_tuning/jobs"])
def test_routes_that_are_not_offered_are_not_found(client, path):
    """Only the routes on the list are reachable."""
    with pytest.raises(openai.NotFoundError) as refused:
        client.post(path, cast_to=object, body={})
    assert refused.value.code == "route_not_found"


def test_the_request_id_is_the_servers_or_the_clients(client, model):
    """An operator finds the request by the id the client shows."""
    answer = client.chat.completions.create(model=model, messages=CHAT, max_completion_tokens=1)
    assert answer._request_id
    given = client.chat.completions.create(
        model=model,
        messages=CHAT,
        max_completion_tokens=1,
        extra_headers={"X-Request-Id": "ticket-4711"},
    )
    assert given._request_id == "ticket-4711"


def test_a_client_that_will_not_wait_gives_up(client, model):
    """Its timeout is its own error, and the next request is served."""
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1.0, max_retries=0).chat.completions.create(
            model=model, messages=CHAT, **LONG
        )
    assert client.chat.completions.create(model=model, messages=CHAT, max_completion_tokens=1).usage


def test_a_stream_may_be_left_in_the_middle(client, model):
    """After a client closes a stream, the next request is served."""
    stream = client.chat.completions.create(model=model, messages=CHAT, stream=True, **LONG)
    for _, _chunk in zip(range(5), stream, strict=False):
        pass
    stream.close()
    assert client.chat.completions.create(model=model, messages=CHAT, max_completion_tokens=1).usage


def test_the_asynchronous_client_works_too(model):
    """Side by side, streamed, and cancelled."""

    async def talk() -> None:
        async with openai.AsyncOpenAI() as client:
            asked = {"model": model, "messages": CHAT, "max_completion_tokens": 6}
            answers = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(4)))
            assert all(answer.choices[0].message.role == "assistant" for answer in answers)
            stream = await client.chat.completions.create(**asked, stream=True)
            assert [chunk async for chunk in stream]
            task = asyncio.create_task(client.chat.completions.create(model=model, messages=CHAT, **LONG))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.chat.completions.create(**asked)).usage

    asyncio.run(talk())


def test_a_response_is_given(client, model):
    """The newer endpoint, without state."""
    answer = client.responses.create(
        model=model,
        instructions="You write Python.",
        input=CHAT[0]["content"],
        temperature=0,
        max_output_tokens=24,
        store=False,
    )
    assert answer.object == "response"
    assert answer.status in {"completed", "incomplete"}
    assert answer.output_text
    assert answer.usage.output_tokens > 0


def test_a_response_streams_typed_events(client, model):
    """From `response.created` to the terminal event, in order."""
    events = list(
        client.responses.create(
            model=model, input=CHAT, temperature=0, max_output_tokens=16, store=False, stream=True
        )
    )
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds
    assert kinds[-1] in {"response.completed", "response.incomplete"}
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(numbers)
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == events[-1].response.output_text


def test_a_response_is_parsed_into_a_model(client, model):
    """Structured outputs of the newer endpoint."""
    answer = client.responses.parse(
        model=model, input=CHAT, temperature=0, text_format=Report, max_output_tokens=128, store=False
    )
    assert isinstance(answer.output_parsed, Report)


@pytest.mark.parametrize("fields", [{"store": True}, {"previous_response_id": "resp_1"}], ids=str)
def test_a_response_with_a_memory_is_refused(client, model, fields):
    """No state is kept: a clear 400 rather than an answer that forgets."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=model, input="hello", **fields)
    assert refused.value.param == next(iter(fields))


def test_a_batch_runs_in_the_background(client, model):
    """A file in, a batch over it, a file with every answer out, and everything deleted again."""
    body = {"model": model, "messages": CHAT, "max_completion_tokens": 2}
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(3)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    given = client.files.create(file=("questions.jsonl", content), purpose="batch")
    assert (given.object, given.bytes, given.purpose) == ("file", len(content), "batch")
    assert given.id in {file.id for file in client.files.list()}
    batch = client.batches.create(
        input_file_id=given.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert batch.id in {each.id for each in client.batches.list()}
    deadline = time.monotonic() + BATCH_SECONDS
    while batch.status not in {"completed", "failed", "expired", "cancelled"}:
        assert time.monotonic() < deadline, batch
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 0)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == {line["custom_id"] for line in lines}
    assert all(answer["response"]["status_code"] == 200 for answer in answers)
    for file_id in (given.id, batch.output_file_id):
        assert client.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(given.id)


@pytest.mark.skipif("LIMITED_KEY" not in os.environ, reason="no key with a limit was given")
def test_over_the_limit_is_a_rate_limit_error(client, model):
    """429 with word on when to come back, once the minute's requests are used up."""
    limited = client.with_options(api_key=os.environ["LIMITED_KEY"], max_retries=0)
    with pytest.raises(openai.RateLimitError) as refused:  # noqa: PT012 - which of them is refused is not said
        for _ in range(10):
            limited.chat.completions.create(model=model, messages=CHAT, max_completion_tokens=1)
    assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert 0 < float(refused.value.response.headers["retry-after"]) <= 120
