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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo.machine import cpu_name
from demo.measure import Measurement, measure, model, post
from demo.process import ApplianceProcess
from demo.training.corpus import held_out_prompts, load_corpus

PROMPTS = 12
TOKENS = 128
COMMAND = "make tour"


def main() -> None:
    """Run every step; a failure ends the tour with a traceback and a non-zero exit code."""
    prompts = held_out_prompts(load_corpus(), count=PROMPTS + 1)
    with tempfile.TemporaryDirectory(prefix="appliance-tour-") as scratch:
        data = Path(scratch)
        heading("1. Start: gateway, control loop and a vLLM worker with its EAGLE 3.1 draft")
        with running(data) as appliance:
            heading("2. Stream a completion")
            receipt_index = stream(appliance, prompts[0])
            heading(
                f"3. Measure: {PROMPTS} held-out code prompts, {TOKENS} tokens each, greedy, concurrency 1"
            )
            speculative = measure(appliance, prompts[1:], tokens_each=TOKENS)
            show_measurement(speculative)
            command("status", "--once", "--data", str(data), "--url", appliance.admin_url)
            key = appliance.key
        heading("4. The same without the draft: a worker that serves the target alone")
        with running(data, "--no-draft", key=key) as appliance:
            target_only = measure(appliance, prompts[1:], tokens_each=TOKENS)
            show_measurement(target_only)
        heading("5. Verify the audit log of both runs, with the verifier an auditor would use")
        command("audit", "verify", "--data", str(data))
        heading(f"6. The receipt of the streamed request (entry {receipt_index})")
        command("audit", "receipt", receipt_index, "--data", str(data))
    ratio = speculative.tokens_per_second / target_only.tokens_per_second
    heading("7. Effect of speculation")
    print(f"  acceptance length   {speculative.acceptance_length:.2f} (EAGLE 3.1, K=3, code prompts)")
    print(f"  with draft          {speculative.tokens_per_second:.0f} tokens/s")
    print(f"  target only         {target_only.tokens_per_second:.0f} tokens/s")
    print(f"  ratio               {ratio:.2f}x at concurrency 1")
    print(f"  measured by `{COMMAND}` on {os.cpu_count()} {cpu_name()} cores, just now")


@contextmanager
def running(data: Path, *arguments: str, key: str = "") -> Iterator[ApplianceProcess]:
    """Run `appliance up`, show its output, and require a clean exit."""
    environment = {"APPLIANCE_LOG__LEVEL": "warning"}
    with ApplianceProcess(
        "up", *arguments, data=data, key=key, environment=environment, show=show
    ) as appliance:
        yield appliance
    if status := appliance.process.returncode:
        message = f"the appliance exited with {status}, not 0"
        raise SystemExit(message)


def show(line: str) -> None:
    print("   |", line, end="", flush=True)


def stream(appliance: ApplianceProcess, prompt: str) -> str:
    """Print a streamed completion; return the index of its audit entry."""
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


def show_measurement(measured: Measurement) -> None:
    print(f"   {measured.tokens} tokens in {measured.seconds:.1f} s", end=": ")
    print(f"{measured.tokens_per_second:.0f} tokens/s, acceptance length {measured.acceptance_length:.2f}")


def command(*arguments: str) -> None:
    """Run `appliance ...`, showing the command and its output."""
    print("   $ appliance", *arguments[:2], flush=True)
    subprocess.run([sys.executable, "-m", "appliance", *arguments], check=True)


def heading(title: str) -> None:
    print(f"\n\x1b[1m{title}\x1b[0m", flush=True)


if __name__ == "__main__":
    main()
