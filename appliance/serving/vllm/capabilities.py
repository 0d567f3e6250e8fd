"""
What this engine lacks of what the plugin offers, each with the reason; control has its own problems.

The runner that would defer the draft's prefill may be in another process.  The engine asks it once, before
its first step.
"""

from typing import Any

ATTRIBUTION, DEFERRED_PREFILL = "attribution", "deferred_prefill"
"""As in `appliance.speculation.values.Capability`."""
ASK_RUNNER = "appliance_deferred_prefill_problem"
"""Method of vLLM's worker wrapper: why its runner does not defer the draft's prefill, or an empty text."""


def find_missing(core: Any, deferred_prefill: str) -> dict[str, str]:  # noqa: ANN401 - an engine core of vLLM
    """
    Ask the runner, unless `deferred_prefill` names why none defers.

    Only in the thread of the engine, before its first step.
    """
    found = {
        ATTRIBUTION: _attribution_problem(core),
        DEFERRED_PREFILL: deferred_prefill or _ask_runner(core),
    }
    return {name: why for name, why in found.items() if why}


def _ask_runner(core: Any) -> str:  # noqa: ANN401 - an engine core of vLLM
    try:
        # No time limit: an answer that nobody awaits would be taken for that to the next call.
        answers = core.model_executor.collective_rpc(ASK_RUNNER)
    except Exception as error:  # noqa: BLE001 - an engine of another structure; it must go on serving
        return f"the engine's runner cannot be asked: {type(error).__name__}"
    return next((str(answer) for answer in answers if answer), "")


def _attribution_problem(core: Any) -> str:  # noqa: ANN401 - an engine core of vLLM
    settings = getattr(getattr(core, "vllm_config", None), "observability_config", None)
    match getattr(settings, "per_request_spec_decode_metrics", None):
        case None:
            return "this vLLM does not report the drafts of a request"
        case "none":
            return "the engine was started without --per-request-spec-decode-metrics"
        case _:
            return ""
