"""
The installed vLLM: whether the plugin knows its version, and what it cannot do there.

What an engine really lacks it says itself once it runs (`appliance speculation status`).
"""

from collections.abc import Iterable

from appliance.cli.preflight.check import Check, Inquiry, SkippedError, Subject, family
from appliance.serving.launch import PER_REQUEST_DRAFTS_SINCE, engine_version, version_of
from appliance.speculation.values import Capability

VERSION = Subject("engine.version", "vLLM version")
OLDEST, NEWEST = (0, 26), (0, 32)
"""`make matrix` runs the control contract on them; the table says which were."""
TABLE = "docs/reference/vllm-versions.md"


@family(VERSION)
def check_engine(inquiry: Inquiry) -> Iterable[Check]:
    inquiry.require_worker()
    yield judge_engine(engine_version())


def judge_engine(engine: str) -> Check:
    """`engine` is an `engine_version`."""
    version = version_of(engine)
    if version is None:
        raise SkippedError("vLLM is not installed in this Python")
    oldest, newest = (".".join(map(str, known)) for known in (OLDEST, NEWEST))
    if not OLDEST <= version <= NEWEST:
        return VERSION.warn(
            f"{engine}; the plugin is made for {oldest} to {newest}",
            f"install one of them, or expect a worker that lacks capabilities ({TABLE})",
        )
    if version < PER_REQUEST_DRAFTS_SINCE:
        since = ".".join(map(str, PER_REQUEST_DRAFTS_SINCE))
        return VERSION.warn(
            f"{engine} lacks the capability `{Capability.ATTRIBUTION}`",
            f"install {since} or newer to know acceptance by tenant and template ({TABLE})",
        )
    return VERSION.ok(f"{engine}, of {oldest} to {newest} that the plugin is made for")
