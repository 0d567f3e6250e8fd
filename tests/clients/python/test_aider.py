"""Aider's model layer, unmodified: its `Model`, and below it the versions of litellm and openai it pins."""

import json

import litellm
import pytest
from aider.models import Model
from questions import ASK, TOOL, is_report

CHAT = [{"role": "user", "content": ASK}]


@pytest.fixture
def aider(model):
    made = Model(f"openai/{model}", weak_model=False, editor_model=False)
    made.extra_params = {"max_tokens": 160, "num_retries": 0}
    return made


def test_a_chat_is_answered(aider):
    """As aider calls without streaming: temperature 0, with a timeout."""
    _, answer = aider.send_completion(CHAT, functions=None, stream=False)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage.total_tokens > 0


def test_a_stream_comes_in_pieces(aider):
    """Read as aider reads it: `choices[0]` of every chunk, without looking whether it is there."""
    _, chunks = aider.send_completion(CHAT, functions=None, stream=True)
    text = ""
    count = 0
    for chunk in chunks:
        count += 1
        if len(chunk.choices) and chunk.choices[0].delta.content:
            text += chunk.choices[0].delta.content
    assert count > 5
    assert len(text) > 10


def test_a_function_is_called(aider):
    """Aider's older edit formats name one function and want its arguments."""
    _, answer = aider.send_completion(CHAT, functions=[TOOL["function"]], stream=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "report"
    assert is_report(json.loads(call.function.arguments))


def test_short_side_jobs_are_done(aider):
    """Commit messages and summaries."""
    said = aider.simple_send_with_retries(
        [{"role": "system", "content": "You write commit messages."}, {"role": "user", "content": "+ x = 1"}]
    )
    assert isinstance(said, str)


def test_errors_have_the_classes_aider_acts_on(aider, model):
    """It retries, shortens the chat or gives up by these."""
    with pytest.raises(litellm.ContextWindowExceededError):
        aider.send_completion([{"role": "user", "content": "word " * 9000}], functions=None, stream=False)
    with pytest.raises(litellm.NotFoundError):
        Model("openai/gpt-9", weak_model=False, editor_model=False).send_completion(
            CHAT, functions=None, stream=False
        )
    aider.extra_params = {"api_key": "sk-wrong", "num_retries": 0}
    with pytest.raises(litellm.AuthenticationError):
        aider.send_completion(CHAT, functions=None, stream=False)
