"""What the worker's plugin counts of a request, against a stand-in for vLLM's output processor."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.serving.vllm import token_counts
from appliance.serving.vllm.token_counts import KEPT, MAX_LIVE, TokenCounts, count_sequences


class Sequence:
    """vLLM's `RequestState`, as far as it is read."""

    def __init__(self, request_id: str, external_req_id: str, prompt_len: int, *, pools: bool = False):
        self.request_id = request_id
        self.external_req_id = external_req_id
        self.prompt_len = prompt_len
        self.tokens = 0
        self.detokenizer = None if pools else SimpleNamespace(num_output_tokens=lambda: self.tokens)


def make_processor() -> Any:
    """vLLM's `OutputProcessor`, with our hook."""

    class OutputProcessor:
        def __init__(self) -> None:
            self.request_states: dict[str, Any] = {}

        def add_request(self, request: Any, *_more: Any) -> None:
            self.request_states[request.request_id] = request

    count_sequences(OutputProcessor)
    count_sequences(OutputProcessor)
    return OutputProcessor()


@pytest.fixture
def processor() -> Any:
    return make_processor()


async def test_answers_to_one_prompt_are_added_up_and_their_prompt_counts_once(processor):
    """And several prompts count each; a task that the handler started counts for its request."""
    counts = TokenCounts()
    with counts.counting("one"):
        sequences = [Sequence(f"{at}_a", "cmpl-one-0", 7) for at in range(3)]
        sequences.append(Sequence("b", "cmpl-one-1", 5))

        async def start() -> None:
            for sequence in sequences:
                processor.add_request(sequence)

        await asyncio.create_task(start())
        for tokens, sequence in enumerate(sequences, start=1):
            sequence.tokens = tokens
        processor.request_states.clear()
    assert await counts.read("one") == {"prompt_tokens": 12, "completion_tokens": 10}
    assert await counts.read("two") is None


async def test_reader_waits_until_the_request_has_ended(processor):
    """The engine stops a request soon after its client left: tokens until then count."""
    counts = TokenCounts()
    with counts.counting("one"):
        sequence = Sequence("a", "chatcmpl-one", 7)
        processor.add_request(sequence)
        reading = asyncio.create_task(counts.read("one"))
        await asyncio.sleep(0)
        assert not reading.done()
        sequence.tokens = 9
    assert await reading == {"prompt_tokens": 7, "completion_tokens": 9}


async def test_reader_of_a_request_that_does_not_end_gets_its_tokens_so_far(processor, monkeypatch):
    monkeypatch.setattr(token_counts, "ENDING_SECONDS", 0)
    counts = TokenCounts()
    with counts.counting("one"):
        sequence = Sequence("a", "chatcmpl-one", 7)
        processor.add_request(sequence)
        sequence.tokens = 4
        assert await counts.read("one") == {"prompt_tokens": 7, "completion_tokens": 4}


async def test_request_that_never_reached_the_engine_is_not_counted_as_free(processor):
    """Neither is one of an engine whose structure is unknown: the gateway then estimates."""
    counts = TokenCounts()
    with counts.counting("unseen"):
        pass
    with counts.counting("strange"):
        processor.add_request(Sequence("a", "chatcmpl-strange", 7))
        processor.add_request(SimpleNamespace(request_id="b"))
    assert set(processor.request_states) == {"a", "b"}
    assert await counts.read("unseen") is None
    assert await counts.read("strange") is None


async def test_beam_search_counts_its_prompt_once_and_holds_no_ended_sequences(processor):
    """Each step is a sequence of its own, with all tokens so far as its prompt."""
    counts = TokenCounts()
    with counts.counting("one"):
        for step in range(4 * MAX_LIVE):
            sequence = Sequence(f"{step}", f"cmpl-one-0-{step:016x}-beam-0", 7 + step)
            processor.add_request(sequence)
            sequence.tokens = 1
            del processor.request_states[sequence.request_id]
        held = counts._running["one"]._live
        assert len(held) <= MAX_LIVE
    assert await counts.read("one") == {"prompt_tokens": 7, "completion_tokens": 4 * MAX_LIVE}


async def test_pooling_counts_its_prompt(processor):
    counts = TokenCounts()
    with counts.counting("one"):
        processor.add_request(Sequence("a", "embd-one-0", 7, pools=True))
    assert await counts.read("one") == {"prompt_tokens": 7, "completion_tokens": 0}


async def test_memory_is_bounded(processor):
    """By number, and no ended request keeps its sequences, which hold the prompts."""
    counts = TokenCounts()
    for number in range(2 * KEPT):
        with counts.counting(f"{number}"):
            processor.add_request(Sequence(f"{number}", f"chatcmpl-{number}", 7))
    with counts.counting("x" * 65), counts.counting(""):
        pass
    assert len(counts._ended) == KEPT
    assert not counts._running
    assert not any(count._live for count in counts._ended.values())


async def test_a_vllm_without_the_method_stays_unchanged():
    class Strange:
        pass

    count_sequences(Strange)
    assert not hasattr(Strange, "add_request")
