"""
The tested clients, with environment, version and settings.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".clients"


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client in one version."""

    name: str
    package: str
    environment: str
    """Name of its environment, made by `install.sh`."""
    suite: str
    """File of its tests, relative to this directory."""
    routes: frozenset[str]
    """Routes its tests must use, so that the check of the answers is significant."""
    covers: str
    """What the tests cover, for the reference page."""
    settings: str
    """Settings of a user, for the reference page."""
    leaves: bool = True
    """Whether its tests disconnect before an answer ends."""

    @property
    def version(self) -> str:
        """The version that is pinned."""
        if self.environment == "node":
            packages = json.loads((HERE / "node" / "package-lock.json").read_text(encoding="utf-8"))[
                "packages"
            ]
            return str(packages[f"node_modules/{self.package}"]["version"])
        text = (HERE / "requirements" / f"{self.environment}.txt").read_text(encoding="utf-8")
        found = re.search(rf"^{re.escape(self.package)}==(\S+)$", text, re.MULTILINE)
        if found is None:
            message = f"{self.package} is not pinned in requirements/{self.environment}.txt"
            raise LookupError(message)
        return found[1]

    @property
    def identity(self) -> str:
        """Its name in test ids: the package, and the environment."""
        return f"{self.package.rpartition('/')[2]}-{self.environment}"

    @property
    def executable(self) -> Path:
        """The interpreter of its tests."""
        return ENVIRONMENTS / self.environment / "bin" / ("node" if self.environment == "node" else "python")


def is_installed(environment: str) -> bool:
    """Whether an environment exists, with the current pins."""
    pins = HERE / "requirements" / f"{environment}.txt"
    installed = ENVIRONMENTS / environment / "installed.txt"
    return installed.is_file() and installed.read_bytes() == pins.read_bytes()


CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
RESPONSES, EMBEDDINGS, MESSAGES = "/v1/responses", "/v1/embeddings", "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
OPENAI_COVERS = (
    "chat, streams and their usage, tools, structured outputs, logprobs, `n`, stop, embeddings, "
    "responses, models, files and batches, errors, limits, timeouts, disconnects"
)
OPENAI_SETTINGS = "`base_url` (ends in `/v1`), `api_key`"

CLIENTS = (
    Client(
        name="OpenAI Python",
        package="openai",
        environment="current",
        suite="python/test_openai.py",
        routes=frozenset({CHAT, COMPLETIONS, MODELS, RESPONSES, EMBEDDINGS}),
        covers=OPENAI_COVERS,
        settings=OPENAI_SETTINGS,
    ),
    Client(
        name="OpenAI Python, older",
        package="openai",
        environment="aider",
        suite="python/test_openai.py",
        routes=frozenset({CHAT, COMPLETIONS, MODELS, RESPONSES, EMBEDDINGS}),
        covers="the same tests",
        settings=OPENAI_SETTINGS,
    ),
    Client(
        name="OpenAI Node",
        package="openai",
        environment="node",
        suite="node/openai.test.mjs",
        routes=frozenset({CHAT, MODELS, RESPONSES, EMBEDDINGS}),
        covers="chat, streams, tools, structured outputs, embeddings, responses, models, errors, disconnects",
        settings="`baseURL` (ends in `/v1`), `apiKey`",
    ),
    Client(
        name="LangChain",
        package="langchain-openai",
        environment="current",
        suite="python/test_langchain.py",
        routes=frozenset({CHAT, RESPONSES, EMBEDDINGS}),
        covers="`invoke`, `stream`, `batch`, tools, `with_structured_output`, embeddings, responses, errors",
        settings=(
            "`base_url`, `api_key`; `stream_usage=True` for usage of streams; "
            "`check_embedding_ctx_length=False` for embeddings, or it downloads a tokenizer"
        ),
        leaves=False,
    ),
    Client(
        name="Anthropic Python",
        package="anthropic",
        environment="current",
        suite="python/test_anthropic.py",
        routes=frozenset({MESSAGES, COUNT_TOKENS}),
        covers="messages, streams, tools, stop sequences, `count_tokens`, errors, disconnects",
        settings="`base_url` (without `/v1`), `api_key`",
    ),
    Client(
        name="Vercel AI SDK",
        package="ai",
        environment="node",
        suite="node/ai.test.mjs",
        routes=frozenset({CHAT, RESPONSES, EMBEDDINGS}),
        covers="`generateText`, `streamText`, tools, output, `embedMany`, errors, with two providers",
        settings="`createOpenAI` or `createOpenAICompatible` with `baseURL` (ends in `/v1`) and `apiKey`",
    ),
    Client(
        name="aider",
        package="aider-chat",
        environment="aider",
        suite="python/test_aider.py",
        routes=frozenset({CHAT}),
        covers="its model layer: plain, streamed, with a function, the errors it handles",
        settings="`OPENAI_API_BASE` (ends in `/v1`), `OPENAI_API_KEY`, `--model openai/NAME`",
        leaves=False,
    ),
)
