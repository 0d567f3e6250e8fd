"""
Acceptance length of the demo pair by kind of traffic: `python -m benchmarks.acceptance`.

Starts the appliance on the demo pair and sends each kind of prompt one after the other.  The code
prompts come from files the pair was not trained on.
"""

import os
import random
import subprocess
import tempfile
from pathlib import Path

from demo.machine import cpu_name
from demo.measure import measure
from demo.process import ApplianceProcess
from demo.training.corpus import held_out_prompts, load_corpus

PROMPTS = 16
TOKENS = 128
PROSE = (
    "The committee met in the afternoon and agreed that the report should be read by everyone who works on "
    "the ward. It was noted that patients wait too long, and that nobody had written down why. "
)
GERMAN = (
    "Die Sitzung begann am Nachmittag, und man war sich einig, dass der Bericht von allen gelesen werden "
    "soll, die auf der Station arbeiten. Niemand hatte aufgeschrieben, warum die Patienten so lange warten. "
)


def main() -> None:
    code = held_out_prompts(load_corpus(), count=PROMPTS)
    chat = [f"<|begin|><|user|>Write a Python function `{name}`.<|end|><|assistant|>" for name in NAMES]
    noise = random.Random(7)
    kinds: list[tuple[str, list[str], float]] = [
        ("held-out code, greedy", code, 0.0),
        ("held-out code, temperature 1", code, 1.0),
        ("chat for a function, greedy", chat, 0.0),
        ("English prose, greedy", [PROSE[i:] + PROSE for i in range(0, 4 * PROMPTS, 4)], 0.0),
        ("German prose, greedy", [GERMAN[i:] + GERMAN for i in range(0, 4 * PROMPTS, 4)], 0.0),
        ("random hex, greedy", [noise.randbytes(300).hex() for _ in range(PROMPTS)], 0.0),
    ]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    print(
        f"{cpu_name()}, {os.cpu_count()} cores, commit {commit}; {PROMPTS} prompts of {TOKENS} tokens, K=3\n"
    )
    print(f"{'traffic':<32}{'acceptance length':>18}{'drafts':>8}{'tokens/s':>10}")
    with (
        tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch,
        ApplianceProcess("up", data=Path(scratch)) as appliance,
    ):
        for name, prompts, temperature in kinds:
            found = measure(appliance, prompts, tokens_each=TOKENS, temperature=temperature)
            print(
                f"{name:<32}{found.acceptance_length:>18.2f}{found.drafts:>8.0f}{found.tokens_per_second:>10.0f}",
                flush=True,
            )


NAMES = (
    "read_lines", "parse_date", "open_file", "send", "get_value", "close", "split_path", "to_bytes",
    "is_valid", "find_module", "write", "encode", "copy_tree", "format_time", "connect", "walk",
)  # fmt: skip


if __name__ == "__main__":
    main()
