"""
The page `docs/reference/clients.md`, from the pins of the clients that are tried.
"""

from tests.clients.contract import DEVIATIONS
from tests.clients.pins import CLIENTS

BEFORE = """\
# Clients

<!-- Written by `python -m docs.generate`; edit tests/clients/pins.py or tests/clients/page.py instead. -->

*For developers and operators.* A user changes the base URL and the key, and nothing else. `make clients`
installs each client below, unmodified, in an environment of its own, and runs its tests against a gateway
with a real vLLM worker for chat and one for embeddings; `make test` does so too. Every answer and every
frame of every stream that passes is checked against the schemas of OpenAI's public API description, and
every refusal against its error schema.

A client that cannot be installed, because no package index is in reach or Python is too new for it, is named
in capitals when it is left out, and its tests skip. The routes themselves, what is refused and what differs
from OpenAI's own service are in [the API](openai-api.md), and as an OpenAPI document in
[openapi.json](openapi.json), which schemathesis tries against the same appliance.

| Client | Version | What is tried | What to set |
|---|---|---|---|
"""

AFTER = """\

## What a worker has to be started with

| For | Set |
|---|---|
| tools | `worker.tool_call_parser`: how the model writes calls, such as `hermes` or `mistral` |
| reasoning apart from the answer | `worker.reasoning_parser`, such as `qwen3` |
| embeddings | a worker of its own with `worker.task: embed`, listed in `pool.urls` |

Without a tool call parser a request with `tools` is refused with 400 by the worker.

## Short examples

Where a client reads its address and key from the environment, that is all:

```sh
export OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=sk-...      # OpenAI's clients, LangChain
export OPENAI_API_BASE=http://127.0.0.1:8080/v1                            # aider, with --model openai/NAME
export ANTHROPIC_BASE_URL=http://127.0.0.1:8080 ANTHROPIC_API_KEY=sk-...   # Anthropic's client, without /v1
```

```python
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

appliance = {"base_url": "http://127.0.0.1:8080/v1", "api_key": "sk-..."}
chat = ChatOpenAI(model="demo-coder", stream_usage=True, **appliance)
embeddings = OpenAIEmbeddings(model="demo-embedder", check_embedding_ctx_length=False, **appliance)
```

```js
import { createOpenAI } from '@ai-sdk/openai';
import { generateText } from 'ai';

const appliance = createOpenAI({ baseURL: 'http://127.0.0.1:8080/v1', apiKey: 'sk-...' });
const { text } = await generateText({ model: appliance.chat('demo-coder'), prompt: 'Write a function.' });
```

## Not tried here

These speak the same API and are set up in the same way, but nothing in this repository runs them.

**Open WebUI**, by its environment; switch its other connections off, or it asks them first:

```sh
export OPENAI_API_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=sk-...
export ENABLE_OLLAMA_API=false OFFLINE_MODE=true
```

**Continue**, in its `config.yaml`:

```yaml
models:
  - name: appliance
    provider: openai
    model: demo-coder
    apiBase: http://127.0.0.1:8080/v1
    apiKey: sk-...
    roles: [chat, edit, apply]
```

## What differs from OpenAI's description

A member that may be absent may be `null`, and answers hold members of vLLM's that the description does not
know; typed clients read both. Beyond that:

| Answer | Member | Difference |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    clients = "".join(
        f"| {client.name} (`{client.package}`) | {client.version} | {client.covers} | {client.settings} |\n"
        for client in CLIENTS
    )
    deviations = "".join(
        f"| `{schema}` | `{member}` | {why} |\n" for (schema, member), why in DEVIATIONS.items()
    )
    return BEFORE + clients + AFTER + deviations
