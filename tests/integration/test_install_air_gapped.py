"""
docs/how-to/install-air-gapped.md as far as it needs no container engine.

A bundle with the demo pair is built and cut into parts on one machine, verified and loaded on another, and
preflight compares what was loaded with it.
"""

import json
from pathlib import Path

import pytest
import yaml

from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from tests.command import run_command

NAME = "example.com/releases"


def appliance(*words: object, check: bool = True) -> str:
    done = run_command(*words)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def carrier(tmp_path_factory) -> tuple[Path, str]:
    """The medium with the bundle's parts, and the line on the paper."""
    place = tmp_path_factory.mktemp("connected")
    said = {"licence": "Apache-2.0", "origin": "demo/build.py", "version": "1"}
    models = [{"name": path.name, "directory": str(path), **said} for path in (DEMO_TARGET, DEMO_DRAFT)]
    recipe = {"name": "sovereign-appliance", "version": "0.1.0", "upgrade_from": "0.1.0", "models": models}
    (place / "bundle.yaml").write_text(yaml.safe_dump(recipe))
    line = appliance("bundle", "new-key", place / "release.key", "--key-name", NAME).strip()
    appliance(
        *("bundle", "build", place / "bundle.yaml", place / "bundle", "--key", place / "release.key"),
        *("--key-name", NAME, "--key-not-after", "2099-12-31", "--created", 1790000000),
    )
    appliance("bundle", "split", place / "bundle", place / "carrier", "--part-bytes", 4 * 2**20)
    assert len(list((place / "carrier").iterdir())) > 3
    return place / "carrier", line


@pytest.fixture
def enclave(tmp_path, carrier) -> Path:
    """A machine that trusts the key and has loaded the bundle."""
    medium, line = carrier
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / "bundle-keys.txt").write_text(line + "\n")
    appliance("bundle", "verify", medium, "--data", data)
    assert "demo-coder" in appliance(
        "bundle", "plan", medium, "--models", tmp_path / "models", "--data", data
    )
    appliance("bundle", "load", medium, "--models", tmp_path / "models", "--data", data)
    settings = {
        "data": {"directory": str(data)},
        "worker": {
            "model": str(tmp_path / "models" / DEMO_TARGET.name / "current"),
            "draft": str(tmp_path / "models" / DEMO_DRAFT.name / "current"),
            "served_name": "demo-coder",
        },
    }
    (tmp_path / "appliance.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def asked(enclave: Path, medium: Path) -> dict[str, dict]:
    answer = appliance(
        *("preflight", "--json", "--config", enclave / "appliance.yaml", "--against", medium),
        *("--skip", "tokenizer", "--skip", "ports"),
        check=False,
    )
    return {check["id"]: check for check in json.loads(answer)["checks"]}


def test_loaded_bundle_equals_the_signed_one(enclave, carrier):
    """Until a byte of it changes; with another trusted key nothing is compared."""
    medium, _ = carrier
    checks = asked(enclave, medium)
    assert checks["weights.digests"]["result"] == "ok", checks["weights.digests"]
    assert checks["draft.fits"]["result"] == "ok"
    template = enclave / "models" / DEMO_TARGET.name / "current" / "chat_template.jinja"
    template.chmod(0o600)
    template.write_text(template.read_text() + " ")
    assert asked(enclave, medium)["weights.digests"]["result"] == "fail"
    other = appliance("bundle", "new-key", enclave / "other.key", "--key-name", NAME).strip()
    (enclave / "data" / "bundle-keys.txt").write_text(other + "\n")
    refused = asked(enclave, medium)["weights.digests"]
    assert refused["result"] == "fail"
    assert "cannot compare" in refused["seen"]
