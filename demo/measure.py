"""
Measure a running appliance through its public API: acceptance length and speed at concurrency 1.
"""

import json
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

from demo.process import ApplianceProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The result of one round of prompts."""

    tokens: int
    seconds: float
    drafts: float
    accepted: float

    @property
    def tokens_per_second(self) -> float:
        """At concurrency 1."""
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per draft with the bonus token."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


def measure(
    appliance: ApplianceProcess, prompts: list[str], *, tokens_each: int, temperature: float = 0.0
) -> Measurement:
    """Send the prompts one after the other, after a warm-up with the first."""
    body = {
        "model": model(appliance),
        "max_tokens": tokens_each,
        "temperature": temperature,
        "seed": 7,
        "ignore_eos": True,
    }
    with post(appliance, "/v1/completions", {**body, "prompt": prompts[0]}) as response:
        response.read()
    before, tokens, started = counters(appliance), 0, time.monotonic()
    for prompt in prompts:
        with post(appliance, "/v1/completions", {**body, "prompt": prompt}) as response:
            tokens += json.load(response)["usage"]["completion_tokens"]
    seconds = time.monotonic() - started
    after = counters(appliance)
    return Measurement(
        tokens=tokens,
        seconds=seconds,
        drafts=after.get("appliance_drafts_total", 0) - before.get("appliance_drafts_total", 0),
        accepted=after.get("appliance_accepted_tokens_total", 0)
        - before.get("appliance_accepted_tokens_total", 0),
    )


def counters(appliance: ApplianceProcess) -> dict[str, float]:
    """The gateway's own counters, summed over labels."""
    totals: dict[str, float] = {}
    with urllib.request.urlopen(appliance.admin_url + "/metrics", timeout=30) as response:
        for line in response.read().decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                totals[name] = totals.get(name, 0) + float(value)
    return totals


def model(appliance: ApplianceProcess) -> str:
    """The only model the appliance serves."""
    request = urllib.request.Request(
        appliance.url + "/v1/models", headers={"Authorization": f"Bearer {appliance.key}"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        name: str = json.load(response)["data"][0]["id"]
    return name


def post(appliance: ApplianceProcess, path: str, body: dict[str, Any]) -> Any:
    """Send JSON with the tenant's key."""
    request = urllib.request.Request(
        appliance.url + path,
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {appliance.key}", "Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=300)
