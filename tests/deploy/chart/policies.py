"""
The policies in tests/deploy/policy, asked in this process.
"""

from functools import cache
from pathlib import Path
from typing import Any

from regopy import Interpreter

POLICY_AT = Path(__file__).parents[1] / "policy"
SHARED = "pods"
"""What the policies have in common: which pods and containers there are."""
NAMES = sorted(path.stem for path in POLICY_AT.glob("*.rego") if path.stem != SHARED)


def denied(
    policy: str,
    objects: list[dict[str, Any]],
    *,
    exceptions: dict[str, list[str]] | None = None,
    offline: dict[str, str] | None = None,
) -> list[str]:
    """
    What `policy` has against `objects`, a sentence each.

    `exceptions` are what a site chose knowingly, by volume type; `offline` is the environment that every
    worker must have.
    """
    interpreter = _interpreter(policy)
    interpreter.set_input({"objects": objects, "exceptions": exceptions or {}, "offline": offline or {}})
    output = interpreter.query(f"data.{policy}.deny")
    assert output.ok(), f"{policy}: {output}"
    return sorted(str(sentence) for sentence in output.results[0].expressions[0])


@cache
def _interpreter(policy: str) -> Interpreter:
    """One for each policy: an interpreter is megabytes that are not given back."""
    interpreter = Interpreter()
    for name in (SHARED, policy):
        interpreter.add_module(f"{name}.rego", (POLICY_AT / f"{name}.rego").read_text(encoding="utf-8"))
    return interpreter
