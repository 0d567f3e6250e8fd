"""
Every route of a model that scores, on a real vLLM worker: the demo target, made a reranker.
"""

import json
from collections.abc import Iterator

import pytest

from tests.integration.caller import Caller, appliance

pytestmark = pytest.mark.worker

RERANKER = {
    "architectures": ["LlamaForSequenceClassification"],
    "classifier_from_token": ["self", "def"],
    "method": "from_2_way_softmax",
}
"""Makes a reranker of any model: the chance of one token against another."""


@pytest.fixture(scope="module")
def scoring(tmp_path_factory) -> Iterator[Caller]:
    settings = {
        "APPLIANCE_WORKER__TASK": "score",
        "APPLIANCE_WORKER__EXTRA_ARGUMENTS": json.dumps(["--hf-overrides", json.dumps(RERANKER)]),
    }
    with appliance(tmp_path_factory.mktemp("score"), **settings) as process, Caller(process) as caller:
        yield caller


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_a_cross_encoder_ranks(scoring, path):
    """Best first, each with its place among the documents."""
    answer = scoring.post(path, query="def add(a, b):", documents=["return a", "import os"], top_n=2)
    results = answer["results"]
    assert sorted(each["index"] for each in results) == [0, 1]
    assert results[0]["relevance_score"] >= results[1]["relevance_score"]
    outcome = scoring.outcome(path)
    assert (outcome["prompt_tokens"], outcome["completion_tokens"]) == (answer["usage"]["total_tokens"], 0)


def test_a_cross_encoder_scores_pairs(scoring):
    """By whichever names the sides are called."""
    for sides in (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items")):
        answer = scoring.post(
            "/v1/score", **dict(zip(sides, ("def add(a, b):", ["return a", "x"]), strict=True))
        )
        assert [each["index"] for each in answer["data"]] == [0, 1]
        assert all(0 <= each["score"] <= 1 for each in answer["data"])
