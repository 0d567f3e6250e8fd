"""An evaluation report without measurements."""

from typing import Any

from appliance.drafts.evaluation.evaluation_results import Evaluation, EvaluationVerdict

DATASET = f"sha256:{'d' * 64}"


def bare_report(draft: str, target: str, **more: Any) -> Evaluation:
    """A complete report that passed, with other fields as given."""
    fields: dict[str, Any] = {
        "draft": draft,
        "target": target,
        "dataset": DATASET,
        "verdict": EvaluationVerdict.PASSED,
        "reasons": (),
        "made": "2026-11-22T10:00:00.000Z",
        "engine": "vllm 0.32.0",
        "device": "cpu",
        "dtype": "float32",
        "draft_tokens": 3,
        "max_tokens": 64,
        "margin": 0.02,
        "epsilon": 1e-3,
        "prompts": 32,
        "compared": 32,
        "missing": 0,
        "unusable": 0,
        "complete": True,
    }
    return Evaluation(**{**fields, **more})
