"""
Every route of a model that generates, on a real vLLM worker with the demo pair.
"""

import itertools
from collections.abc import Iterator

import openai
import pytest

from tests.integration.caller import MODEL, PROMPT, TURN, Caller

pytestmark = [pytest.mark.worker, pytest.mark.xdist_group("appliance")]


@pytest.fixture(scope="module")
def caller(appliance) -> Iterator[Caller]:
    with Caller(appliance) as caller:
        yield caller


@pytest.fixture(scope="module")
def client(appliance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=appliance.url + "/v1", api_key=appliance.key, max_retries=0) as client:
        yield client


def test_a_response_comes_whole(client, caller):
    """Without state: `store` was not requested."""
    answer = client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=8, temperature=0)
    assert answer.output_text
    assert answer.usage.output_tokens == 8
    outcome = caller.outcome("/v1/responses")
    assert (outcome["completion_tokens"], outcome["prompt_tokens"]) == (8, answer.usage.input_tokens)


def test_a_response_streams_typed_events_to_its_end(client, caller):
    """In order and numbered, from the first to the one that carries the whole of it."""
    stream = client.responses.create(
        model=MODEL, input=PROMPT, max_output_tokens=8, temperature=0, stream=True, instructions="Be brief."
    )
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    assert (
        caller.outcome("/v1/responses")["completion_tokens"] == events[-1].response.usage.output_tokens == 8
    )


def test_a_response_that_needs_another_is_refused(client):
    """By the gateway, with advice."""
    with pytest.raises(openai.BadRequestError, match="`input`"):
        client.responses.create(model=MODEL, input=PROMPT, previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="`store`"):
        client.responses.create(model=MODEL, input=PROMPT, store=True)


def test_a_message_comes_whole(caller):
    """As Anthropic's clients parse it; the record has what it cost."""
    answer = caller.post("/v1/messages", messages=[TURN], system="Be brief.", max_tokens=8, temperature=0)
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert answer["content"][0]["text"]
    outcome = caller.outcome("/v1/messages")
    assert (outcome["completion_tokens"], outcome["finish_reason"]) == (8, "max_tokens")
    assert outcome["prompt_tokens"] >= answer["usage"]["input_tokens"] > 0


def test_a_message_streams_typed_events_to_its_end(caller):
    """From `message_start` to `message_stop`, and nothing of another API in between."""
    events = caller.events("/v1/messages", messages=[TURN], max_tokens=8, temperature=0)
    names = [name for name, _ in events]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert {name for name, _ in itertools.groupby(names)} == {
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    }
    assert all(name == content["type"] for name, content in events)
    outcome = caller.outcome("/v1/messages")
    assert (outcome["completion_tokens"], outcome["tokens_estimated"]) == (8, False)


def test_a_messages_tokens_are_counted_as_they_are_charged(caller):
    """The count beforehand is the prompt's in the record."""
    asked = {"messages": [TURN], "system": "Be brief."}
    counted = caller.post("/v1/messages/count_tokens", **asked)["input_tokens"]
    caller.post("/v1/messages", **asked, max_tokens=1)
    assert caller.outcome("/v1/messages")["prompt_tokens"] == counted


def test_text_becomes_tokens_and_text_again(caller):
    """Both ways, and a chat by its template."""
    answer = caller.post("/tokenize", prompt=PROMPT, add_special_tokens=False)
    assert answer["count"] == len(answer["tokens"]) > 3
    assert caller.post("/detokenize", tokens=answer["tokens"])["prompt"] == PROMPT
    assert caller.post("/tokenize", messages=[TURN])["count"] > answer["count"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score"])
def test_generating_model_refuses_other_tasks(caller, path):
    """404 with an error code, not the web framework's two words."""
    bodies = {
        "/v1/embeddings": {"input": "x"},
        "/v1/rerank": {"query": "a", "documents": ["b"]},
        "/v1/score": {"text_1": "a", "text_2": "b"},
    }
    error = caller.post(path, status=404, **bodies[path])["error"]
    assert (error["code"], error["type"]) == ("route_not_served", "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 3000}]}),
        ("/v1/completions", {"prompt": "x " * 3000}),
        ("/v1/responses", {"input": "x " * 3000}),
    ],
)
def test_a_prompt_that_is_too_long_has_one_code_on_every_route(caller, path, body):
    """Editors check it before they shorten their context."""
    error = caller.post(path, status=400, **body)["error"]
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"]


def test_a_workers_refusal_of_a_message_has_anthropics_shape(caller):
    """With the worker's own words."""
    content = caller.post("/v1/messages", status=400, messages=[TURN], max_tokens=0)
    assert (content["type"], content["error"]["type"]) == ("error", "invalid_request_error")
    assert "max_tokens" in content["error"]["message"]


def test_the_salt_reaches_the_workers_cache(caller):
    """The same prompt is found again under the same salt, and under no other."""
    long = "".join(f"def f{number}(a, b):\n    return a + b\n" for number in range(20))

    def cached(**more: str) -> int:
        usage = caller.post("/v1/completions", prompt=long, max_tokens=1, **more)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"] if usage["prompt_tokens_details"] else 0

    assert cached() == 0
    assert cached() > 0
    assert cached(cache_salt="another") == 0
    assert cached(cache_salt="another") > 0
    salted = caller.post("/v1/messages", messages=[{"role": "user", "content": long}], max_tokens=1)
    assert salted["usage"]["input_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [TURN]}),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/responses", {"input": PROMPT}),
        ("/v1/messages", {"messages": [TURN]}),
    ],
)
def test_a_priority_that_would_be_refused_is_taken_out(caller, path, body):
    """VLLM fails on a priority that its scheduler does not have; the gateway takes it out."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    caller.post(path, **body, **{limit: 2}, priority=-1)
    assert caller.outcome(path)["verdicts"] == ("priority_removed",)
