"""
What this engine lacks of what the plugin offers, each with the reason; control has its own problems.

The runner that would defer the draft's prefill may be in another process.  The engine asks it once and only
while no request runs, so that no step waits.
"""

from typing import Any

ATTRIBUTION, DEFERRED_PREFILL = "attribution", "deferred_prefill"
"""As in `appliance.speculation.values.Capability`."""
ASK_RUNNER = "appliance_deferred_prefill_problem"
"""Method of vLLM's worker wrapper: why its runner does not defer the draft's prefill, or an empty text."""
NOT_ASKED = "not known yet: the engine is asked once no request runs"


class Capabilities:
    """One for each engine core."""

    def __init__(self, core: Any, deferred_prefill: str) -> None:  # noqa: ANN401 - an engine core of vLLM
        self._core = core
        self._deferred: str | None = deferred_prefill or None
        """Why the draft's prefill is not deferred; None before the runner was asked."""

    def missing(self) -> dict[str, str]:
        if self._deferred is None and not self._core.scheduler.has_unfinished_requests():
            self._deferred = _ask_runner(self._core)
        found = {
            ATTRIBUTION: _attribution_problem(self._core),
            DEFERRED_PREFILL: NOT_ASKED if self._deferred is None else self._deferred,
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
