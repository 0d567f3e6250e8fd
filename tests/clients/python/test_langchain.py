"""LangChain's OpenAI integration, unmodified."""

import asyncio
import os

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from questions import ASK, REPORT_SCHEMA, is_report

SCHEMA = {"title": "report", "description": "Report what was written.", **REPORT_SCHEMA}


@tool
def stop(times: int) -> str:
    """Stop so many times."""
    return "stopped" * times


@pytest.fixture
def chat(model):
    # No temperature is what LangChain sends by default; no retries, so that an error is seen at once.
    return ChatOpenAI(model=model, temperature=0, max_completion_tokens=160, max_retries=0)


def test_a_chat_of_several_turns_is_answered(chat):
    """With what it cost and why it ended."""
    answer = chat.invoke(
        [
            SystemMessage("You write Python."),
            HumanMessage("Write a function `add`."),
            AIMessage("def add(a, b):\n    return a + b\n"),
            HumanMessage(ASK),
        ],
        max_completion_tokens=16,
    )
    assert answer.text
    assert answer.usage_metadata["total_tokens"] > 16
    assert answer.response_metadata["finish_reason"] in {"stop", "length"}
    assert answer.response_metadata["model_name"] == chat.model_name


def test_a_stream_adds_up_to_an_answer(chat):
    """In pieces that LangChain can add, with usage where it is wanted."""
    pieces = list(chat.stream(ASK, max_completion_tokens=16, stream_usage=True))
    assert len(pieces) > 3
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.text
    assert whole.usage_metadata["output_tokens"] > 0


def test_many_are_asked_at_once(chat):
    """A batch, and the asynchronous interface."""
    answers = chat.batch([ASK, "Write a class."], max_completion_tokens=4)
    assert all(isinstance(answer, AIMessage) for answer in answers)

    async def talk() -> list[str]:
        assert (await chat.ainvoke(ASK, max_completion_tokens=4)).id
        return [piece.text async for piece in chat.astream(ASK, max_completion_tokens=6)]

    assert len(asyncio.run(talk())) > 1


def test_a_tool_is_called(chat):
    """A bound tool that must be called; its answer is read in the next turn."""
    bound = chat.bind_tools([SCHEMA, stop], tool_choice="report", strict=True)
    answer = bound.invoke(ASK)
    (call,) = answer.tool_calls
    assert call["name"] == "report"
    assert is_report(call["args"])
    after = chat.bind_tools([SCHEMA, stop]).invoke(
        [HumanMessage(ASK), answer, ToolMessage("noted", tool_call_id=call["id"])], max_completion_tokens=6
    )
    assert isinstance(after, AIMessage)


def test_a_tool_call_streams(chat):
    """LangChain puts the pieces of a call together."""
    whole = None
    for piece in chat.bind_tools([SCHEMA], tool_choice="report", strict=True).stream(ASK):
        whole = piece if whole is None else whole + piece
    (call,) = whole.tool_calls
    assert is_report(call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_keeps_to_its_schema(chat, method):
    """By either way of asking for it."""
    assert is_report(chat.with_structured_output(SCHEMA, method=method, strict=True).invoke(ASK))


def test_logprobs_are_passed_on(chat):
    answer = chat.bind(logprobs=True, top_logprobs=1).invoke(ASK, max_completion_tokens=4)
    assert answer.response_metadata["logprobs"]["content"]


def test_the_responses_endpoint_works_too(model):
    """What newer versions prefer, without state."""
    chat = ChatOpenAI(
        model=model,
        use_responses_api=True,
        store=False,
        temperature=0,
        max_completion_tokens=16,
        max_retries=0,
    )
    assert chat.invoke(ASK).text
    assert "".join(piece.text for piece in chat.stream(ASK))


def test_texts_are_embedded(embedder):
    """Without the check that would fetch a tokenizer of OpenAI's models from the internet."""
    embeddings = OpenAIEmbeddings(model=embedder, check_embedding_ctx_length=False, max_retries=0)
    vectors = embeddings.embed_documents(["one text", "another"])
    assert len(vectors) == 2
    assert len(vectors[0]) == len(embeddings.embed_query("a third"))


def test_errors_are_those_of_the_openai_client(chat, model):
    """By their classes, which applications catch."""
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(model="gpt-9", max_retries=0).invoke(ASK)
    with pytest.raises(openai.AuthenticationError):
        ChatOpenAI(model=model, api_key="sk-wrong", max_retries=0).invoke(ASK)
    with pytest.raises(openai.BadRequestError) as refused:
        chat.invoke("word " * 9000)
    assert refused.value.code == "context_length_exceeded"
    assert os.environ["OPENAI_API_KEY"] not in str(refused.value)
