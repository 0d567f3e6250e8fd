"""
Every route of a model that embeds and of one that scores, on real vLLM workers with the demo target.
"""

import base64
import struct
from collections.abc import Iterator

import openai
import pytest

from tests.clients.conftest import EMBEDDING_MODEL, RERANKING_MODEL, Served
from tests.integration.caller import PROMPT, TURN, Caller

pytestmark = [pytest.mark.worker, pytest.mark.xdist_group("clients")]

QUERY = "def add(a, b):"
DOCUMENTS = ["return a", "import os", "x"]
SIDES = [("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items")]


@pytest.fixture(scope="module")
def embedding(served: Served) -> Iterator[Caller]:
    with Caller(served, EMBEDDING_MODEL) as caller:
        yield caller


@pytest.fixture(scope="module")
def scoring(served: Served) -> Iterator[Caller]:
    with Caller(served, RERANKING_MODEL) as caller:
        yield caller


def test_texts_become_vectors(embedding):
    """One each, as numbers or packed, and the prompt is what they cost."""
    plain = embedding.post("/v1/embeddings", input=[PROMPT, "x"])
    assert [len(each["embedding"]) for each in plain["data"]] == [256, 256]
    packed = embedding.post("/v1/embeddings", input=[PROMPT], encoding_format="base64")
    vector = struct.unpack("<256f", base64.b64decode(packed["data"][0]["embedding"]))
    assert vector == pytest.approx(plain["data"][0]["embedding"], abs=0.02)
    outcome = embedding.outcome("/v1/embeddings")
    assert (outcome["prompt_tokens"], outcome["completion_tokens"]) == (packed["usage"]["prompt_tokens"], 0)


def test_the_openai_client_gets_its_vectors(embedding):
    """It requests base64 by default."""
    site = embedding.site
    with openai.OpenAI(base_url=site.url + "/v1", api_key=site.key, max_retries=0) as client:
        answer = client.embeddings.create(model=EMBEDDING_MODEL, input="x")
    assert len(answer.data[0].embedding) == 256


def test_embeddings_rank_by_likeness(embedding):
    """An identical text ranks first."""
    ranked = embedding.post("/v1/rerank", query=PROMPT, documents=["x = 1", PROMPT])["results"]
    assert [each["index"] for each in ranked] == [1, 0]
    scores = embedding.post("/v1/score", queries=PROMPT, documents=["x = 1", PROMPT])["data"]
    assert scores[1]["score"] > scores[0]["score"]


def test_embedding_model_refuses_other_tasks(embedding):
    """The other way round."""
    for path in ("/v1/chat/completions", "/v1/messages"):
        error = embedding.post(path, status=404, messages=[TURN], max_tokens=1)["error"]
        assert "another task" in error["message"]
    assert embedding.post("/tokenize", prompt=PROMPT)["count"] > 3


def scores(scoring: Caller, sides: tuple[str, str]) -> list[float]:
    """Of each document with the query, in the order in which they were given."""
    answer = scoring.post("/v1/score", **dict(zip(sides, (QUERY, DOCUMENTS), strict=True)))["data"]
    assert [each["index"] for each in answer] == list(range(len(DOCUMENTS)))
    return [each["score"] for each in answer]


@pytest.mark.parametrize("sides", SIDES)
def test_a_cross_encoder_scores_pairs(scoring, sides):
    """By whichever names the sides are called: each pair has the score it has alone."""
    found = scores(scoring, sides)
    assert len(set(found)) == len(DOCUMENTS)
    assert all(0 < score < 1 for score in found)
    alone = scoring.post("/v1/score", **dict(zip(sides, (QUERY, DOCUMENTS[-1]), strict=True)))["data"]
    assert alone[0]["score"] == pytest.approx(found[-1], abs=0.02)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_a_cross_encoder_ranks(scoring, path):
    """Best first, each with score and index of the document, and not more than requested."""
    expected = dict(enumerate(scores(scoring, SIDES[0])))
    best = sorted(expected, key=expected.__getitem__, reverse=True)
    answer = scoring.post(path, query=QUERY, documents=DOCUMENTS, top_n=2)
    results = answer["results"]
    assert [each["index"] for each in results] == best[:2]
    for each in results:
        assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=0.02)
    outcome = scoring.outcome(path)
    assert (outcome["prompt_tokens"], outcome["completion_tokens"]) == (answer["usage"]["total_tokens"], 0)
