"""
The contents of `deploy/monitoring`, and the tools of Prometheus to check it with.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = tuple(sorted((MONITORING / "rules").glob("*.yaml")))
RECORDING = MONITORING / "rules" / "recording.yaml"
DASHBOARDS = tuple(sorted((MONITORING / "dashboards").glob("*.json")))


def tool(name: str) -> str:
    """
    Return the path of `promtool` or `prometheus`; the test skips where it is missing.

    Both are in the Debian package `prometheus`.
    """
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} IS NOT INSTALLED: apt-get install prometheus (see deploy/debian-packages.txt)")
    return found


def groups(*files: Path) -> dict[str, list[dict[str, Any]]]:
    """The rules of every group in these files, by default in all."""
    files = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files or RULES]
    return {group["name"]: group["rules"] for content in files for group in content["groups"]}


def rules() -> list[dict[str, Any]]:
    """Every rule, recorded ones and alerts."""
    return [rule for group in groups().values() for rule in group]


def alerts() -> dict[str, dict[str, Any]]:
    """Every alert by its name."""
    found = [rule for rule in rules() if "alert" in rule]
    by_name = {rule["alert"]: rule for rule in found}
    assert len(by_name) == len(found), "two alerts have one name"
    return by_name
