"""What a comparison asks, and with which methods."""

import json
from pathlib import Path

import pytest

from appliance.drafts.comparison.asked import (
    ComparedRequest,
    ComparisonPlan,
    choose_candidates,
    parse_requests,
)
from appliance.errors import ConfigurationError
from appliance.infra.settings import WorkerSettings

SECRET = "Frau Muster, geboren"


def request(line: int, **body) -> ComparedRequest:
    return ComparedRequest(line=line, path="/v1/completions", body={"prompt": SECRET, **body})


def plan(prompts: int, rounds: int = 5, concurrency: tuple[int, ...] = (1, 2)) -> ComparisonPlan:
    requests = tuple(request(line) for line in range(prompts))
    return ComparisonPlan(requests=requests, rounds=rounds, concurrency=concurrency, max_tokens=8)


def names(*methods: str, **settings) -> list[str]:
    return [each.name for each in choose_candidates(methods, WorkerSettings(**settings))]


def test_default_is_the_method_of_the_settings_and_those_without_weights():
    assert names() == ["eagle3", "ngram", "suffix", "mtp"]
    assert names(method="ngram") == ["ngram", "suffix", "mtp"]
    assert names(method="none") == ["ngram", "suffix", "mtp"]


def test_two_drafts_of_one_method_are_two_candidates():
    assert names("eagle3", "eagle3=/models/other", "ngram", "ngram") == [
        "eagle3", "eagle3=/models/other", "ngram",
    ]  # fmt: skip
    assert choose_candidates(["eagle3=heads"], WorkerSettings())[0].draft == Path("heads").absolute()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("medusa", "not one of"),
        ("none", "not one of"),
        ("ngram=/models/x", "reads no draft"),
        ("draft_model", "--method draft_model=DIRECTORY"),
    ],
)
def test_wrong_method_is_refused(method, message):
    with pytest.raises(ConfigurationError, match=message):
        names(method)


def test_request_bodies_and_lines_of_a_batch_are_read():
    messages = [{"role": "user", "content": "a"}]
    lines = [
        {"messages": messages},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages}},
        {"prompt": "def"},
    ]
    text = "\n\n".join(map(json.dumps, lines)) + "\n"
    found = sorted(parse_requests(text, most=9), key=lambda each: each.line)
    assert [(each.line, each.path.rpartition("/v1")[2]) for each in found] == [
        (1, "/chat/completions"), (3, "/chat/completions"), (5, "/completions"),
    ]  # fmt: skip
    assert found[1].body == {"messages": messages}


def test_at_most_so_many_prompts_are_chosen_always_the_same():
    text = "\n".join(json.dumps({"prompt": str(number)}) for number in range(50))
    found = parse_requests(text, most=8)
    assert len({each.line for each in found}) == 8
    assert found == parse_requests(text, most=8)
    assert {each.line for each in found} != set(range(1, 9))


@pytest.mark.parametrize(
    "line", ["{", "[]", "7", '{"input": "%s"}', '{"messages": "%s"}', '{"prompt": ["%s"]}']
)
def test_other_lines_are_refused_without_their_content(line):
    with pytest.raises(ConfigurationError, match=r"^line 2 of the prompts") as caught:
        parse_requests('{"prompt": "a"}\n' + line.replace("%s", SECRET), most=9)
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigurationError, match="has no line"):
        parse_requests("\n", most=9)


def test_body_is_sent_as_it_is_but_for_what_the_comparison_sets():
    sent = request(1, model="gpt", stream=True, n=3, temperature=0.2, max_tokens=500).body_with(
        model="evaluated", max_tokens=64, salt="s"
    )
    assert sent == {
        "prompt": SECRET, "temperature": 0.2, "model": "evaluated", "max_tokens": 64, "cache_salt": "s",
    }  # fmt: skip
    shorter = request(1, max_completion_tokens=9).body_with(model="m", max_tokens=64, salt="s")
    assert (shorter["max_tokens"], "max_completion_tokens" in shorter) == (9, False)
    tools = request(1, tools=[{}], tool_choice="auto").body_with(model="m", max_tokens=64, salt="s")
    assert tools["tool_choice"] == "none"


def test_each_prompt_is_asked_and_none_twice_in_a_round():
    rounds = list(plan(12).split())
    assert [len(each) for each in rounds] == [3] * 5
    assert {request.line for each in rounds for request in each} == set(range(12))
    few = list(plan(4, concurrency=(1, 4)).split())
    assert [len({request.line for request in each}) for each in few] == [4] * 5


def test_every_number_has_one_turn_at_each_concurrency_in_an_order_that_changes():
    orders = [plan(8).order(f"ngram {number}", (0, 1, 2, 3)) for number in range(5)]
    for order in orders:
        assert [(at_once, sorted(turn)) for at_once, turn in order] == [(1, [0, 1, 2, 3]), (2, [0, 1, 2, 3])]
    assert len({tuple(order[0][1]) for order in orders}) > 2


@pytest.mark.parametrize(
    ("concurrency", "settings", "message"),
    [((1, 8), {}, "needs at least as many prompts"), ((4,), {"max_num_seqs": 2}, "max_num_seqs")],
)
def test_concurrency_that_cannot_be_reached_is_refused(concurrency, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        plan(7, concurrency=concurrency).check(WorkerSettings(**settings))
    plan(8, concurrency=(1, 8)).check(WorkerSettings())
