"""
Evaluates the policies in tests/deploy/policy in this process.
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
    return _asked([policy], objects, exceptions, offline)[policy]


def denied_by_any(
    objects: list[dict[str, Any]],
    *,
    exceptions: dict[str, list[str]] | None = None,
    offline: dict[str, str] | None = None,
) -> dict[str, list[str]]:
    """The same of every policy that denies something, by its name."""
    return {
        name: sentences
        for name, sentences in _asked(NAMES, objects, exceptions, offline).items()
        if sentences
    }


def _asked(
    names: list[str],
    objects: list[dict[str, Any]],
    exceptions: dict[str, list[str]] | None,
    offline: dict[str, str] | None,
) -> dict[str, list[str]]:
    interpreter = _interpreter()
    interpreter.set_input({"objects": objects, "exceptions": exceptions or {}, "offline": offline or {}})
    output = interpreter.query("{" + ", ".join(f'"{name}": data.{name}.deny' for name in names) + "}")
    assert output.ok(), output
    denials = output.results[0].expressions[0]
    return {name: sorted(str(sentence) for sentence in denials[name]) for name in names}


@cache
def _interpreter() -> Interpreter:
    """Shared: each interpreter takes megabytes that are never released."""
    interpreter = Interpreter()
    for name in (SHARED, *NAMES):
        interpreter.add_module(f"{name}.rego", (POLICY_AT / f"{name}.rego").read_text(encoding="utf-8"))
    return interpreter
