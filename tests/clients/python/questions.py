"""
Prompts of the client tests: a very small model answers them in few tokens, with a grammar if needed.
"""

from typing import Any

ASK = "Write a Python function `read_lines`."
CHAT = [{"role": "user", "content": ASK}]
TURNS = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "Write a function `add`."},
    {"role": "assistant", "content": "def add(a, b):\n    return a + b\n"},
    {"role": "user", "content": ASK},
]
PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)
REPORT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "language": {"type": "string", "enum": ["python", "rust"]},
        "lines": {"type": "integer", "enum": [1, 2, 3]},
        "tested": {"type": "boolean"},
    },
    "required": ["language", "lines", "tested"],
    "additionalProperties": False,
}
"""Every model gives a short answer to it."""
# Strict, or vLLM lets a model fill in arguments as it likes.
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "report",
        "description": "Report what was written.",
        "parameters": REPORT_SCHEMA,
        "strict": True,
    },
}
OTHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "stop",
        "description": "Stop.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"why": {"type": "string", "enum": ["done", "stuck"]}},
            "required": ["why"],
            "additionalProperties": False,
        },
    },
}
CALLED = """\
<tool_call>
{"name": "report", "arguments": {"language": "python", "lines": 2, "tested": true}}
</tool_call>"""
"""What a model says that decides by itself to call a tool."""


def is_report(value: dict[str, Any]) -> bool:
    """Whether a value keeps to `REPORT_SCHEMA`."""
    return (
        set(value) == {"language", "lines", "tested"}
        and value["language"] in {"python", "rust"}
        and value["lines"] in {1, 2, 3}
        and isinstance(value["tested"], bool)
    )
