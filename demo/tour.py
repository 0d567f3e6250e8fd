"""
A tour of the appliance in two minutes: `make tour`.

Starts it on the demo pair, streams a completion, measures acceptance length and speed, starts it
again without the draft and measures the same, verifies the audit log, and shows the receipt of a
request it made.  Everything goes through the public API and the command line, as a user would.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.machine import cpu_name
from demo.process import ApplianceProcess
from demo.training.corpus import held_out_prompts, load_corpus

PROMPTS = 12
TOKENS = 128
COMMAND = "make tour"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one round of prompts showed."""

    tokens: int
    seconds: float
    drafts: float
    accepted: float

    @property
    def tokens_per_second(self) -> float:
        """Delivered tokens per second at concurrency 1."""
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per draft with the bonus token."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


def main() -> None:
    """Walk through it; any failure ends the tour with a traceback and a non-zero exit code."""
    prompts = held_out_prompts(load_corpus(), count=PROMPTS + 1)
    with tempfile.TemporaryDirectory(prefix="appliance-tour-") as scratch:
        data = Path(scratch)
        say("1. Start: gateway, control loop and a vLLM worker with its EAGLE 3.1 draft")
        with running(data) as appliance:
            say("2. Stream a completion")
            receipt_index = stream(appliance, prompts[0])
            say(f"3. Measure: {PROMPTS} held-out code prompts, {TOKENS} tokens each, greedy, concurrency 1")
            speculative = measure(appliance, prompts[1:])
            command("status", "--once", "--data", str(data), "--url", appliance.url)
            key = appliance.key
        say("4. The same without the draft: a worker that serves the target alone")
        with running(data, "--no-draft", key=key) as appliance:
            target_only = measure(appliance, prompts[1:])
        say("5. Verify the audit log of both runs, with the verifier an auditor would use")
        command("audit", "verify", "--data", str(data))
        say(f"6. The receipt of the streamed request (entry {receipt_index})")
        command("audit", "receipt", receipt_index, "--data", str(data))
    ratio = speculative.tokens_per_second / target_only.tokens_per_second
    say("7. What speculation bought")
    print(f"  acceptance length   {speculative.acceptance_length:.2f} (EAGLE 3.1, K=3, code prompts)")
    print(f"  with draft          {speculative.tokens_per_second:.0f} tokens/s")
    print(f"  target only         {target_only.tokens_per_second:.0f} tokens/s")
    print(f"  ratio               {ratio:.2f}x at concurrency 1")
    print(f"  measured by `{COMMAND}` on {os.cpu_count()} {cpu_name()} cores, just now")


@contextmanager
def running(data: Path, *arguments: str, key: str = "") -> Iterator[ApplianceProcess]:
    """Run `appliance up`, showing what it prints, and insist on a clean exit."""
    environment = {"APPLIANCE_LOG__LEVEL": "warning"}
    with ApplianceProcess(
        "up", *arguments, data=data, key=key, environment=environment, show=show
    ) as appliance:
        yield appliance
    if status := appliance.process.returncode:
        message = f"the appliance exited with {status}, not 0"
        raise SystemExit(message)


def show(line: str) -> None:
    """Indent what the appliance prints."""
    print("   |", line, end="", flush=True)


def stream(appliance: ApplianceProcess, prompt: str) -> str:
    """Print a streamed completion as it comes; return the index of its audit entry."""
    body = {
        "model": model(appliance),
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    print("\x1b[2m" + prompt + "\x1b[0m", end="")
    with post(appliance, "/v1/completions", body) as response:
        index = response.headers["x-appliance-audit"].rpartition("/")[2]
        for line in response:
            content = line.decode().removeprefix("data:").strip()
            if content and content != "[DONE]" and not content.startswith(":"):
                print(json.loads(content)["choices"][0]["text"], end="", flush=True)
    print()
    return index


def measure(appliance: ApplianceProcess, prompts: list[str]) -> Measurement:
    """Send the prompts one after the other; the first once before, to warm everything up."""
    name = model(appliance)
    body = {"model": name, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    with post(appliance, "/v1/completions", {**body, "prompt": prompts[0]}) as response:
        response.read()
    before, tokens, started = counters(appliance), 0, time.monotonic()
    for prompt in prompts:
        with post(appliance, "/v1/completions", {**body, "prompt": prompt}) as response:
            tokens += json.load(response)["usage"]["completion_tokens"]
    seconds = time.monotonic() - started
    after = counters(appliance)
    measured = Measurement(
        tokens=tokens,
        seconds=seconds,
        drafts=after.get("appliance_drafts_total", 0) - before.get("appliance_drafts_total", 0),
        accepted=after.get("appliance_accepted_tokens_total", 0)
        - before.get("appliance_accepted_tokens_total", 0),
    )
    print(
XX {measured.seconds:.1f} s: {measured.tokens_per_second:.0f} tokens/s"
    )
    return measured


def counters(appliance: ApplianceProcess) -> dict[str, float]:
    """The gateway's own counters, summed over labels."""
    totals: dict[str, float] = {}
    with urllib.request.urlopen(appliance.url + "/metrics", timeout=30) as response:
        for line in response.read().decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                totals[name] = totals.get(name, 0) + float(value)
    return totals


def model(appliance: ApplianceProcess) -> str:
    """The one model the appliance serves."""
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


def command(*arguments: str) -> None:
    """Run `appliance ...`, showing the command and its output."""
    print("   $ appliance", *arguments[:2], flush=True)
    subprocess.run([sys.executable, "-m", "appliance", *arguments], check=True)


def say(title: str) -> None:
    """A heading."""
    print(f"\n\x1b[1m{title}\x1b[0m", flush=True)


if __name__ == "__main__":
    main()
