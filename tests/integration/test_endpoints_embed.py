"""
Every route of a model that embeds, on a real vLLM worker: the demo target, of which nothing else is asked.
"""

import base64
import struct
from collections.abc import Iterator

import openai
import pytest

from tests.integration.caller import MODEL, PROMPT, TURN, Caller, appliance

pytestmark = pytest.mark.worker


@pytest.fixture(scope="module")
def embedding(tmp_path_factory) -> Iterator[Caller]:
    directory = tmp_path_factory.mktemp("embed")
    with appliance(directory, APPLIANCE_WORKER__TASK="embed") as process, Caller(process) as caller:
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
    """It asks for base64 unless told otherwise."""
    process = embedding.process
    with openai.OpenAI(base_url=process.url + "/v1", api_key=process.key, max_retries=0) as client:
        answer = client.embeddings.create(model=MODEL, input="x")
    assert len(answer.data[0].embedding) == 256


def test_embeddings_rank_by_likeness(embedding):
    """What is the same comes first."""
    ranked = embedding.post("/v1/rerank", query=PROMPT, documents=["x = 1", PROMPT])["results"]
    assert [each["index"] for each in ranked] == [1, 0]
    scores = embedding.post("/v1/score", queries=PROMPT, documents=["x = 1", PROMPT])["data"]
    assert scores[1]["score"] > scores[0]["score"]


def test_a_model_that_embeds_says_that_it_does_nothing_else(embedding):
    """The other way round."""
    for path in ("/v1/chat/completions", "/v1/messages"):
        error = embedding.post(path, status=404, messages=[TURN], max_tokens=1)["error"]
        assert "another task" in error["message"]
    assert embedding.post("/tokenize", prompt=PROMPT)["count"] > 3
