"""`appliance draft lint`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from appliance.drafts.lint.methods import lint_method
from appliance.drafts.lint.rules import Finding, Severity
from appliance.infra.settings import METHODS_WITH_DRAFT
from appliance.serving.weights import inspect_weights


def lint(
    target: Annotated[Path, typer.Argument(help="Directory of the target's weights.")],
    draft: Annotated[
        Path | None,
        typer.Argument(help="Directory of the draft's weights; with `--method mtp` there is none."),
    ] = None,
    method: Annotated[
        Literal["eagle3", "draft_model", "mtp"],
        typer.Option(help="Drafting method that will use it."),
    ] = "eagle3",
    draft_tokens: Annotated[
        int, typer.Option(min=1, max=16, help="Maximum draft tokens per step (`worker.draft_tokens`).")
    ] = 1,
    context: Annotated[
        int | None, typer.Option(min=1, help="Longest context to be served; default: the target's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002 - a flag
) -> None:
    """
    Check whether vLLM serves a draft as it was trained; loads no weights.

    The exit code is 0 if the draft fits (with or without warnings), 1 if it does not.
    """
    if (draft is None) == (method in METHODS_WITH_DRAFT):
        message = f"{method} needs a draft" if draft is None else f"{method} uses no draft"
        raise typer.BadParameter(message, param_hint="DRAFT")
    pair = inspect_weights(target), None if draft is None else inspect_weights(draft)
    findings = lint_method(method, *pair, context=context, draft_tokens=draft_tokens)
    errors = sum(finding.severity is Severity.ERROR for finding in findings)
    warnings = len(findings) - errors
    if as_json:
        verdict = "errors" if errors else "warnings" if warnings else "clean"
        report = {
            "target": str(pair[0].path),
            "draft": None if pair[1] is None else str(pair[1].path),
            "context": context,
            "verdict": verdict,
            "errors": errors,
            "warnings": warnings,
            "findings": [_shown(finding) for finding in findings],
        }
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        for finding in findings:
            typer.echo(f"{finding.severity:<7}  {finding.rule}: {finding.message}; {finding.advice}")
        typer.echo(f"verdict  {_verdict(errors, warnings)}")
    sys.exit(1 if errors else 0)


COMMANDS: dict[str, Callable[..., None]] = {"lint": lint}


def _shown(finding: Finding) -> dict[str, str]:
    """One finding as JSON; member names, rules and severities are stable."""
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "message": finding.message,
        "advice": finding.advice,
    }


def _verdict(errors: int, warnings: int) -> str:
    also = f", {count_of(warnings, 'warning')}" if warnings else ""
    if errors:
        return f"does not fit: {count_of(errors, 'error')}{also}"
    return f"fits{also}"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
