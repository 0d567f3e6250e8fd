"""
The page `docs/reference/clients.md`, generated from the pins of the tested clients.
"""

from tests.clients.contract import DEVIATIONS
from tests.clients.pins import CLIENTS

BEFORE = """\
# Clients

<!-- Written by `python -m docs.generate`; edit tests/clients/pins.py or tests/clients/page.py instead. -->

*For developers and operators.* Change the base URL and the key, and nothing else. `make clients` and
`make test` install each client below, unmodified, in an environment of its own, and run its tests against a
gateway with a real vLLM worker for chat and one for embeddings. Every answer and every frame of every stream
is checked against the schemas of OpenAI's public API description, and every refusal against its error schema.

If a client cannot be installed, because no package index is reachable or Python is too new for it, the output
names it in capitals, and its tests are skipped. The routes, refusals and differences from OpenAI's service
are in [the API](openai-api.md), and as an OpenAPI document in [openapi.json](openapi.json), which
schemathesis tests against the same appliance.

| Client | Version | Tested | Settings |
|---|---|---|---|
"""

AFTER = """\

## Worker settings

| For | Set |
|---|---|
| tools | `worker.tool_call_parser`: the model's format of calls, such as `hermes` or `mistral` |
| reasoning separated from the answer | `worker.reasoning_parser`, such as `qwen3` |
| embeddings | a separate worker with `worker.task: embed`, listed in `pool.urls` |

Without a tool call parser the worker refuses a request with `tools` with 400.

## Short examples

For clients that read address and key from the environment:

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

## Not tested

These use the same API and are set up in the same way, but no test runs them.

**Open WebUI**, by its environment; switch its other connections off, or it tries them first:

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

## Differences from OpenAI's description

Optional members may be `null`, and answers have members of vLLM that the description does not have; typed
clients accept both. Other differences:

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
