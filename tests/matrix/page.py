"""
The page docs/reference/vllm-versions.md, written from the results of `make matrix`.
"""

import inspect
import json
from pathlib import Path
from typing import Any

from tests.integration import test_control_contract

CONTRACT = "tests/integration/test_control_contract.py"
RESULTS = Path(__file__).parent / "results.json"
OLDER_TORCH, TORCH = "2.11.0", "2.13.0"
VERSIONS = {
    "0.26.0": OLDER_TORCH,
    "0.27.1": TORCH,
    "0.28.0": TORCH,
    "0.29.0": TORCH,
    "0.30.0": TORCH,
    "0.31.0": TORCH,
    "0.32.0": TORCH,
}
"""vLLM's CPU builds and the torch that each requires."""
REMARKS = {
    "0.30.0": "Its CPU build fails at the first draft, in its own `jit_warmup_triton_helper.py`: it inspects"
    " the parameters of a Triton kernel where there is no Triton.",
}
"""What the log of a worker says beyond its answers."""

BEFORE = """\
# Versions of vLLM

<!-- Written by `make matrix` and `python -m docs.generate` from tests/matrix; run it instead of editing. -->

*For operators who bring their own vLLM.* The appliance installs vLLM 0.32.0, and everything else in these
pages is about that version. `make matrix` installs each version below in an environment of its own, starts it
through the launcher on the CPU with the demo pair and the plugin as a [worker
kit](../how-to/attach-to-your-vllm.md), and runs `tests/integration/test_control_contract.py`. What a version
lacks is in the table. Not tested on any of them: a GPU, vLLM's second model runner, several GPUs or nodes.

"""


def page() -> str:
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = [
        f"| | {' | '.join(VERSIONS)} |",
        f"|---|{'---|' * len(VERSIONS)}",
        f"| torch | {' | '.join(VERSIONS.values())} |",
    ]
    reasons: list[str] = []
    for name, sentence in checks().items():
        cells = [_cell(results.get(version), name, reasons) for version in VERSIONS]
        lines.append(f"| {sentence.rstrip('.')} | {' | '.join(cells)} |")
    lines += [
        "",
        *(f"{number}. {why}" for number, why in enumerate(reasons, start=1)),
        *([""] if reasons else []),
    ]
    lines += [f"vLLM {version}: {remark}\n" for version, remark in REMARKS.items()]
    runs: dict[str, list[str]] = {}
    for version, result in results.items():
        where = f"commit {result['commit']}, {result['date']}, {result['hardware']}"
        runs.setdefault(where, []).append(version)
    lines += ["Measured:", ""]
    lines += [f"- {', '.join(versions)}: {where}" for where, versions in runs.items()]
    return BEFORE + "\n".join(lines) + "\n"


def checks() -> dict[str, str]:
    """Name and sentence of each check of the contract, in order."""
    return {
        name: " ".join((inspect.getdoc(test) or "").split())
        for name, test in vars(test_control_contract).items()
        if name.startswith("test_")
    }


def _cell(result: dict[str, Any] | None, name: str, reasons: list[str]) -> str:
    if result is None or (not result["problem"] and name not in result["checks"]):
        return "not run"
    why = result["problem"] or result["checks"][name]
    if not why:
        return "yes"
    if why not in reasons:
        reasons.append(why)
    return f"no ({reasons.index(why) + 1})"
