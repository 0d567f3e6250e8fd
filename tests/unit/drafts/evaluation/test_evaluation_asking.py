"""Replies of a worker are parsed strictly, and never repeated in an error."""

import asyncio
import json

import pytest

from appliance.drafts.evaluation.arms import Prompt
from appliance.drafts.evaluation.asking import ask_all, parse_completion
from appliance.errors import WorkerFailedError
from tests.unit.drafts.evaluation.evaluation_parts import prompt


def completion(**more) -> str:
    choice = {
        "token_ids": [7, 8],
        "logprobs": {
            "top_logprobs": [
                {"token_id:7": -0.5, "token_id:9": -0.75},
                {"token_id:3": -0.1, "token_id:8": -0.2, "token_id:1": -9999.0},
            ]
        },
    }
    drafting = {
        "num_spec_steps": 10,
        "num_draft_tokens": 30,
        "num_accepted_draft_tokens": 14,
        "acceptance_histogram": [3, 3, 1, 3],
    }
    content = {"choices": [choice], "metrics": {"speculative_decoding": drafting}}
    return json.dumps({**content, **more})


def test_drafts_are_counted_by_position():
    """Of 10 drafts 7 had their first token accepted, 4 the second as well, 3 all."""
    found = parse_completion(completion())
    assert (found.token_ids, found.drafts, found.draft_tokens) == ((7, 8), 10, 30)
    assert found.accepted_at == (7, 4, 3)
    assert found.accepted == 14


def test_likeliest_tokens_are_sorted_with_their_gap():
    first, second = parse_completion(completion(), likeliest=True).choices
    assert [(each.token_id, each.gap) for each in first] == [(7, 0.0), (9, 0.25)]
    assert [each.token_id for each in second] == [3, 8, 1]
    assert second[1].gap == pytest.approx(0.1)


def test_answer_without_draft_metrics_counts_no_drafts():
    for metrics in ({"metrics": None}, {"metrics": {}}, {"metrics": {"speculative_decoding": None}}):
        found = parse_completion(completion(**metrics))
        assert (found.drafts, found.accepted_at, found.accepted) == (0, (), 0)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"choices": []}', '{"choices": [{"text": "secret"}]}',
        '{"choices": [{"token_ids": null}]}', '{"choices": [{"token_ids": ["secret"]}]}',
        completion(choices=[{"token_ids": [7], "logprobs": None}]),
        completion(choices=[{"token_ids": [7], "logprobs": {"top_logprobs": []}}]),
        completion(choices=[{"token_ids": [7], "logprobs": {"top_logprobs": [{}]}}]),
        completion(choices=[{"token_ids": [7], "logprobs": {"top_logprobs": [{"secret": -1}]}}]),
        completion(choices=[{"token_ids": [7], "logprobs": {"top_logprobs": [{"token_id:7": "nan"}]}}]),
        completion(metrics={"speculative_decoding": {"acceptance_histogram": "secret"}}),
    ],
)  # fmt: skip
def test_unexpected_reply_raises_an_error_without_its_content(text):
    """The reply may be a tenant's content."""
    with pytest.raises(WorkerFailedError) as failed:
        parse_completion(text, likeliest=True)
    assert "secret" not in str(failed.value)


async def test_ask_all_keeps_the_order_and_the_concurrency_limit():
    under_way = most = 0

    async def ask(asked: Prompt) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01 * (asked.seed % 3))
        under_way -= 1
        return asked.seed

    prompts = [prompt(place) for place in range(11)]
    assert await ask_all(ask, prompts, at_once=4) == list(range(11))
    assert most == 4


async def test_failed_request_cancels_the_others():
    ended = []

    async def ask(asked: Prompt) -> int:
        if asked.seed == 1:
            raise WorkerFailedError("no more")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(asked.seed)
        return 0

    with pytest.raises(WorkerFailedError, match="no more"):
        await ask_all(ask, [prompt(place) for place in range(9)], at_once=3)
    assert sorted(ended) == [0, 2]
