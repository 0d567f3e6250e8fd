"""
What the wards ask, and what drafting for it comes to.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.draft_refresh.site import Site
from demo.measure import counters

TOKENS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What drafting for some requests came to."""

    requests: int
    drafts: int
    acceptance_length: float
    """Mean tokens per draft, the bonus token included."""
    tokens_per_second: float
    """Of all users, by the wall clock."""


def ask_all(
    site: Site,
    asks: Sequence[str],
    *,
    concurrency: int,
    harvested: bool = True,
    say: Callable[[str], None] = lambda _line: None,
) -> Acceptance:
    """Ask everything, so many at a time, greedy, and read the gateway's own counters."""
    before, began, done, tokens = counters(site.gateway), time.monotonic(), 0, 0
    with ThreadPoolExecutor(max_workers=concurrency) as threads:
        for answer in threads.map(lambda ask: site.chat(ask, tokens=TOKENS, harvested=harvested), asks):
            done += 1
            tokens += answer["usage"]["completion_tokens"]
            if done % 50 == 0:
                say(f"asked {done} of {len(asks)}")
    seconds = time.monotonic() - began
    after = counters(site.gateway)
    drafts, accepted = (
        after.get(name, 0) - before.get(name, 0)
        for name in ("appliance_drafts_total", "appliance_accepted_tokens_total")
    )
    return Acceptance(
        requests=len(asks),
        drafts=round(drafts),
        acceptance_length=1 + accepted / drafts if drafts else 1.0,
        tokens_per_second=tokens / seconds,
    )
