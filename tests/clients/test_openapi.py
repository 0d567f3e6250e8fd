"""
Our own OpenAPI document against the running appliance: schemathesis asks what it allows and what it does not.

Runs after the clients, in the order of the files' names: it creates arbitrary tenants and overrides.
"""

import json
import os
import subprocess

import pytest

from docs.generate import PAGES_AT
from tests.clients.conftest import CHAT_MODEL, EMBEDDING_MODEL
from tests.clients.pins import ENVIRONMENTS, HERE, is_installed

pytestmark = [pytest.mark.worker, pytest.mark.xdist_group("clients")]

TIMEOUT_SECONDS = 600
MODELS = {
    "/v1/chat/completions": CHAT_MODEL,
    "/v1/completions": CHAT_MODEL,
    "/v1/messages": CHAT_MODEL,
    "/v1/messages/count_tokens": CHAT_MODEL,
    "/tokenize": CHAT_MODEL,
    "/detokenize": CHAT_MODEL,
    "/v1/embeddings": EMBEDDING_MODEL,
    "/v1/rerank": EMBEDDING_MODEL,
    "/v1/score": EMBEDDING_MODEL,
}
"""Routes whose requests name a model that exists, so that they reach a worker; the others try the refusal."""
PARTS = {"admin": "^/admin/", "tenant": "^/(?!admin/)"}
"""Paths by whose key opens them; health and metrics need none, and are tried with a tenant's."""


@pytest.mark.parametrize("part", ["tenant", "admin"])
def test_the_appliance_does_what_its_document_says(served, tmp_path, part):
    """No request is a 500, every answer is of a declared kind and shape, and no key means no entry."""
    if not is_installed("current"):
        pytest.skip("schemathesis IS NOT INSTALLED: `make clients` says why")
    key = served.admin_key if part == "admin" else served.key
    document = json.loads((PAGES_AT / "openapi.json").read_text(encoding="utf-8"))
    for path, model in MODELS.items():
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        body["schema"]["properties"]["model"] = {"const": model}
    (tmp_path / "openapi.json").write_text(json.dumps(document), encoding="utf-8")
    done = subprocess.run(
        [
            ENVIRONMENTS / "current" / "bin" / "st",
            *("--config-file", HERE / "schemathesis.toml"),
            *("run", "openapi.json", "--url", served.admin_url, "--no-color"),
            *("--include-path-regex", PARTS[part]),
            *("--header", f"Authorization: Bearer {key}"),
        ],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout.replace(key, "KEY")
