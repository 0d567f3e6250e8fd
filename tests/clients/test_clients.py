"""
Unmodified clients against a real worker: tests in their own environments, and what they were answered.

A client's tests pass or fail as a whole here; their own report is shown when they fail.
"""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import CHAT_MODEL, EMBEDDING_MODEL, Served
from tests.clients.contract import problems
from tests.clients.pins import CLIENTS, HERE, Client, is_installed
from tests.clients.tap import Exchange, Tap
from tests.integration.caller import outcomes

pytestmark = [pytest.mark.worker, pytest.mark.xdist_group("clients")]

ROOT = HERE.parents[1]
SUITE_SECONDS = 600
RETRIES = "x-stainless-retry-count"
SHOWN = 20
"""Problems shown of many."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of one client's tests."""

    client: Client
    status: int
    output: str
    exchanges: list[Exchange]
    ended: list[dict[str, Any]]
    """How each of its requests ended, as the audit log has it."""


@pytest.fixture(scope="module", params=CLIENTS, ids=lambda client: client.identity)
def ran(
    request: pytest.FixtureRequest, served: Served, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """One client's tests, run once for all checks."""
    client: Client = request.param
    if not is_installed(client.environment):
        pytest.skip(f"{client.name} {client.version} IS NOT INSTALLED: `make clients` says why")
    home = tmp_path_factory.mktemp(client.identity) / "home.kept-by-the-client"
    home.mkdir()
    suite = HERE / client.suite
    if client.environment == "node":
        command = [client.executable, "--test", "--test-reporter=spec", suite]
    else:
        command = [client.executable, "-m", "pytest", "-c", suite.parent / "pytest.ini", suite]
    before = len(outcomes(served.data))
    with Tap(served.url) as tap:
        done = subprocess.run(
            list(map(str, command)),
            cwd=ROOT,
            env=environment(tap.url, served, home),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SUITE_SECONDS,
            check=False,
        )
        yield Run(
            client=client,
            status=done.returncode,
            output=done.stdout,
            exchanges=tap.exchanges(),
            ended=outcomes(served.data)[before:],
        )


def environment(url: str, served: Served, home: Path) -> dict[str, str]:
    """The variables the clients read for themselves, and nothing that points anywhere else."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": served.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": served.key,
        "CHAT_MODEL": CHAT_MODEL,
        "EMBEDDING_MODEL": EMBEDDING_MODEL,
        "LIMITED_KEY": served.limited_key,
        # What would call home: a price list and a tracing service.
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",
        "LANGSMITH_TRACING": "false",
    }


def test_an_unmodified_client_works(ran):
    """Every feature its tests try, by base URL and key alone."""
    assert ran.status == 0, ran.output
    assert not re.search(r"[1-9]\d* skipped|skipped [1-9]", ran.output), ran.output


def test_its_answers_keep_to_the_public_document(ran):
    """Each answer, each frame of each stream, each refusal."""
    used = {exchange.path for exchange in ran.exchanges if exchange.status == 200}
    assert ran.client.routes <= used
    found = problems(ran.exchanges)
    counted = Counter(found)
    shown = "\n".join(f"{count} x {problem}" for problem, count in counted.most_common(SHOWN))
    assert not found, f"{len(found)} problems in {len(ran.exchanges)} answers:\n{shown}"


def test_worker_needed_no_restart(ran):
    """Refusals are marked as not retryable, and nothing failed."""
    again = [exchange.path for exchange in ran.exchanges if exchange.asked.get(RETRIES, "0") != "0"]
    assert again == []
    # Not every client says which of its requests are another attempt.
    refused = Counter(
        (exchange.method, exchange.path, exchange.asked.get("authorization"), exchange.request)
        for exchange in ran.exchanges
        if exchange.status >= 400
    )
    assert ran.client.routes & {path for _, path, _, _ in refused}, "nothing was refused"
    assert {path: count for (_, path, _, _), count in refused.items() if count > 1} == {}
    assert [exchange.path for exchange in ran.exchanges if exchange.status >= 500] == []


def test_no_answer_holds_the_key(ran, served):
    """Neither in a header nor in a body, refusals of wrong keys included."""
    for exchange in ran.exchanges:
        assert served.key.encode() not in exchange.body
        assert served.key not in str(exchange.headers)


def test_what_clients_left_is_in_the_log(ran):
    """Only abandoned streams and requests ended as `client_gone`."""
    gone = {entry["request_id"] for entry in ran.ended if entry["outcome"] == "client_gone"}
    streams = [
        exchange.headers["x-request-id"]
        for exchange in ran.exchanges
        if exchange.is_stream and not exchange.complete
    ]
    unanswered = [exchange.path for exchange in ran.exchanges if not exchange.status]
    assert gone >= set(streams)
    assert len(gone) == len(streams) + len(unanswered), (streams, unanswered)
    assert bool(gone) == ran.client.leaves
