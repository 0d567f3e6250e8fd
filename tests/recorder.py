"""
Records what a real worker answers on each route, for the tests that need no worker.

    python -m tests.recorder URL generate|embed|score

The worker serves the demo target under the name `demo-coder`; see `docs/reference/openai-api.md`.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

RECORDED_AT = Path(__file__).parent / "data" / "vllm-0.32.0"
PROMPT = "def add(a, b):"
TURN = {"role": "user", "content": PROMPT}
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "generate": {
        "chat.json": ("/v1/chat/completions", {"messages": [TURN], **SHORT}),
        "chat.sse": ("/v1/chat/completions", {"messages": [TURN], **SHORT, **STREAM}),
        "text.json": ("/v1/completions", {"prompt": PROMPT, **SHORT}),
        "text.sse": ("/v1/completions", {"prompt": PROMPT, **SHORT, **STREAM}),
        "responses.json": ("/v1/responses", {"input": PROMPT, "temperature": 0, "max_output_tokens": 6}),
        "responses.sse": (
            "/v1/responses",
            {"input": PROMPT, "temperature": 0, "max_output_tokens": 6, "stream": True},
        ),
        "messages.json": ("/v1/messages", {"messages": [TURN], **SHORT}),
        "messages.sse": ("/v1/messages", {"messages": [TURN], **SHORT, "stream": True}),
        "count_tokens.json": ("/v1/messages/count_tokens", {"messages": [TURN]}),
        "tokenize.json": ("/tokenize", {"prompt": PROMPT}),
        "detokenize.json": ("/detokenize", {"tokens": [1, 2, 3]}),
        "no_route.json": ("/v1/embeddings", {"input": PROMPT}),
        "too_long.chat.json": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x " * 9999}]},
        ),
        "too_long.text.json": ("/v1/completions", {"prompt": "x " * 9999}),
        "too_long.responses.json": ("/v1/responses", {"input": "x " * 9999}),
        "too_long.messages.json": (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "x " * 9999}], "max_tokens": 5},
        ),
        "invalid.chat.json": ("/v1/chat/completions", {"messages": [TURN], "temperature": -1}),
        "invalid.messages.json": ("/v1/messages", {"messages": [TURN], "max_tokens": 0}),
        "invalid.responses.json": ("/v1/responses", {"input": PROMPT, "tool_choice": "required"}),
    },
    "embed": {
        "embeddings.json": ("/v1/embeddings", {"input": [PROMPT, "x"]}),
        "rerank_by_likeness.json": ("/rerank", {"query": PROMPT, "documents": ["x", "def add"]}),
        "score_by_likeness.json": ("/score", {"queries": PROMPT, "documents": ["x", "def add"]}),
        "too_long.embeddings.json": ("/v1/embeddings", {"input": "x " * 9999}),
        "no_chat.json": ("/v1/chat/completions", {"messages": [TURN]}),
    },
    "score": {
        "rerank.json": ("/rerank", {"query": PROMPT, "documents": ["x", "def add"]}),
        "score.json": ("/score", {"queries": PROMPT, "documents": ["x", "def add"]}),
    },
}


async def record(url: str, task: str) -> None:
    """Ask for everything of one task, and keep the answers as they came."""
    RECORDED_AT.mkdir(parents=True, exist_ok=True)
    async with aiohttp.ClientSession() as session:
        for name, (path, body) in REQUESTS[task].items():
            async with session.post(url + path, json={"model": "demo-coder", **body}) as answer:
                content = await answer.read()
            if name.endswith(".json"):
                content = json.dumps({"status": answer.status, "body": content.decode()}, indent=1).encode()
            (RECORDED_AT / name).write_bytes(content)
            print(answer.status, name, len(content))  # noqa: T201 - it is a command


if __name__ == "__main__":
    asyncio.run(record(sys.argv[1], sys.argv[2]))
