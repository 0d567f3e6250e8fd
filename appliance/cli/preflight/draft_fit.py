"""Whether the draft fits its target (`appliance draft lint`), and tokenizer and chat template load."""

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from appliance.cli.preflight.accelerator import require_pair
from appliance.cli.preflight.check import Check, Inquiry, Subject, family
from appliance.drafts.lint.methods import lint_settings
from appliance.drafts.lint.rules import Finding, Severity
from appliance.errors import ConfigurationError
from appliance.infra.settings import process_environment
from appliance.sovereignty.environment import offline_environment

DRAFT = Subject("draft.fits", "Draft")
TOKENIZER = Subject("tokenizer.loads", "Tokenizer")
CHILD = "appliance.cli.preflight.tokenizer_child"
LOAD_SECONDS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerLoad:
    alone: bool
    """Whether that process had no network at all, rather than settings that forbid its use."""
    tokens: int
    """Tokens of one chat message; 0 without a chat template."""
    problem: str
    """Why it could not be loaded; empty if it could."""


@family(DRAFT, TOKENIZER)
def check_pair(inquiry: Inquiry) -> Iterable[Check]:
    """Lint the draft; load tokenizer and chat template in a process without a network."""
    inquiry.require_worker()
    settings = inquiry.settings.worker
    target, draft = require_pair(settings)
    findings = lint_settings(settings, target, draft)
    if draft is None and not findings:
        why = "the target is served alone" if settings.method == "none" else f"{settings.method} needs none"
        yield DRAFT.skipped(why)
    else:
        yield judge_draft(findings, may_go=settings.bad_draft != "refuse")
    if find_spec("transformers") is None:
        yield TOKENIZER.skipped("no engine is installed here: run preflight in the worker's image")
    else:
        yield judge_tokenizer(load_tokenizer(target.path), chats=settings.task == "generate")


def judge_draft(findings: tuple[Finding, ...], *, may_go: bool) -> Check:
    """Decide on the findings of lint; with `may_go` the target is served alone if there are errors."""
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    first = next(iter(errors or findings), None)
    if first is None:
        return DRAFT.ok("fits its target")
    more = f" (and {len(findings) - 1} more: `appliance draft lint`)" if len(findings) > 1 else ""
    seen = f"{first.rule}: {first.message}{more}"
    if errors and not may_go:
        return DRAFT.fail(seen, first.advice)
    return DRAFT.warn(f"{seen}; the target is served alone" if errors else seen, first.advice)


def load_tokenizer(model: Path) -> TokenizerLoad:
    """Load it as the engine does, in a process of its own."""
    try:
        child = subprocess.run(  # noqa: S603 - our own module, by a list of arguments
            [sys.executable, "-m", CHILD, str(model)],
            env=offline_environment(process_environment(), plugins=()),
            capture_output=True,
            text=True,
            timeout=LOAD_SECONDS,
            check=False,
        )
        # Libraries may print before; the answer is the last line.
        answer = json.loads(child.stdout.rstrip().rpartition("\n")[2])
        return TokenizerLoad(
            alone=bool(answer["alone"]), tokens=int(answer["tokens"]), problem=str(answer["problem"])
        )
    except subprocess.TimeoutExpired:
        problem = f"it did not finish within {LOAD_SECONDS} s"
    except ConfigurationError as error:
        problem = str(error)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"it could not be loaded: {error}"
    return TokenizerLoad(alone=False, tokens=0, problem=problem)


def judge_tokenizer(loaded: TokenizerLoad, *, chats: bool) -> Check:
    """Whether the tokenizer works without a network; `chats` if a chat template is needed."""
    how = "in a network namespace of its own" if loaded.alone else "with an offline environment"
    if loaded.problem:
        todo = "copy all tokenizer files of the model, with tokenizer_config.json"
        return TOKENIZER.fail(loaded.problem, todo)
    if chats and not loaded.tokens:
        todo = "add the model's chat_template.jinja; without it clients can use /v1/completions only"
        return TOKENIZER.warn(f"the tokenizer loads {how}, and there is no chat template", todo)
    seen = f"both load {how}: {loaded.tokens} tokens" if chats else f"it loads {how}"
    return TOKENIZER.ok(seen)
