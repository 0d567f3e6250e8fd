"""
The steps that start the whole appliance: the drill, and the paired benchmark.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.steps import Found, Slice
from benchmarks.gpu.training import pair_of
from demo.process import ApplianceProcess

SITTING_MINUTES = 4.0
"""Of paired measurements in one slice, and in addition to the start of the worker."""


def drill(sizes: Sizes, part: Slice) -> Found:
    """One drill, with its timeline; a drill that fails is a result, too."""
    target, draft = pair_of(sizes, part.state)
    pair = ("--model", str(target), "--draft", str(draft))
    with (
        tempfile.TemporaryDirectory(prefix="appliance-bench-") as data,
        ApplianceProcess("up", *pair, data=Path(data), environment=environment_of(sizes)) as appliance,
    ):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "appliance", "speculation", "drill", "--json"),
                *("--key", appliance.key, "--data", data, "--url", appliance.admin_url),
            ],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def paired(sizes: Sizes, part: Slice) -> Found | None:
    """A sitting of the paired benchmark, which keeps its rounds in a file of its own."""
    # Its report names its command, and is published.
    state = Path(os.path.relpath(part.state))
    rows = state / "paired.jsonl"
    environment = {**os.environ, **environment_of(sizes)}
    subprocess.run(
        [sys.executable, "-m", "benchmarks.speculation", *paired_options(sizes, state, rows)],
        check=True,
        env=environment,
    )
    rounds = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()[1:]]
    if len(rounds) < sizes.pairs * len(sizes.concurrency):
        return None
    return {"report": rows.with_suffix(".md").read_text(encoding="utf-8"), "speeds": speeds_of(rounds)}


def paired_options(sizes: Sizes, state: Path, rows: Path) -> tuple[str, ...]:
    target, draft = pair_of(sizes, state)
    return (
        *("--model", str(target), "--draft", str(draft), "--draft-tokens", str(sizes.draft_tokens)),
        *("--kinds", "code", "--concurrency", *map(str, sizes.concurrency), "--pairs", str(sizes.pairs)),
        *("--learn", str(sizes.learn_seconds), "--minutes", str(SITTING_MINUTES), "--state", str(rows)),
    )


def environment_of(sizes: Sizes) -> dict[str, str]:
    return {
        "APPLIANCE_LOG__LEVEL": "warning",
        "APPLIANCE_WORKER__DEVICE": sizes.device,
        "APPLIANCE_WORKER__DRAFT_TOKENS": str(sizes.draft_tokens),
        "APPLIANCE_WORKER__MAX_NUM_SEQS": str(sizes.largest_batch),
    }


def speeds_of(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median tokens per second of each concurrency and mode."""
    speeds: dict[tuple[int, str], list[float]] = {}
    for each in rounds:
        for segment in each["segments"]:
            key = each["cell"]["concurrency"], segment["mode"]
            speeds.setdefault(key, []).append(segment["tokens"] / segment["seconds"])
    return [
        {"concurrency": concurrency, "mode": mode, "speed": median(found)}
        for (concurrency, mode), found in sorted(speeds.items())
    ]
