"""
Modes and reasons in the words operators read.
"""

from appliance.speculation.values import Reason, SpeculationMode

MODES: dict[SpeculationMode, str] = {
    SpeculationMode.SPECULATIVE: "speculative",
    SpeculationMode.PROBING: "probing",
    SpeculationMode.TARGET_ONLY: "target-only",
}
REASONS: dict[Reason, str] = {
    Reason.HEALTHY: "Drafts pay: more tokens a second with them than without.",
    Reason.TOO_FEW_DRAFTS: "Too few drafts lately to judge; it goes on as it was.",
    Reason.BELOW_BREAK_EVEN: "Drafts cost more than they give with this traffic, so they are off.",
    Reason.COLLAPSED: "Hardly a drafted token is accepted: look at draft, chat template and weights.",
    Reason.PROBING: "A short probe finds out whether drafts pay again.",
    Reason.PROBE_FAILED: "The last probe showed that drafts still do not pay; it will be tried again.",
    Reason.RECOVERED: "A probe showed that drafts pay again.",
    Reason.COUNTER_RESET: "The engine has restarted; counting began anew.",
    Reason.SCRAPE_FAILED: "The worker could not be asked how it does.",
    Reason.NOT_CONTROLLABLE: "It cannot be told to stop drafting; others are preferred meanwhile.",
    Reason.OPERATOR_OVERRIDE: "An operator ordered it.",
    Reason.DRAFT_LINT_FAILED: "The draft does not fit the model, so it was started without.",
}
