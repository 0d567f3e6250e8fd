"""The gateway run as the chart's pod runs it: not as root, Secrets and disks as Kubernetes gives them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.deploy.chart.helm import HELM, render
from tests.deploy.pod import SECRETS

ROOT = Path(__file__).parents[2]
RUN_SECONDS = 300
VALUES = {
    "global": {"allowTags": True},
    "keys": {
        "controlToken": {"existingSecret": "control-token"},
        "signingKey": {"existingSecret": "signing-key"},
        "tenantsMac": {"existingSecret": "tenants-mac"},
        "payloadMasterKey": {"existingSecret": "payload-master-key"},
    },
    "gateway": {"drainSeconds": 5},
    # The namespace it runs in is empty, so the check would find all egress closed; it has its own tests.
    "settings": {"egress": {"mode": "off"}},
    "models": [{"name": "demo-coder", "device": "cpu", "target": {"claimName": "weights"}}],
}


def why_not():
    """Missing prerequisite of running a pod here."""
    if not HELM.exists():
        return "no helm: run `make deploy`"
    if os.geteuid() != 0:
        return "it needs root"
    if missing := [name for name in ("unshare", "setpriv", "openssl", "mount") if shutil.which(name) is None]:
        return f"there is no {', '.join(missing)}"
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False).returncode:
        return "namespaces cannot be made here"
    return None


def test_a_gateway_of_the_chart_serves_and_keeps_its_log_over_a_restart(tmp_path, wrote):
    """It finds its worker by name, gets ready, serves, ends on SIGTERM, restarts, and the log is valid."""
    if missing := why_not():
        pytest.skip(f"THE CHART'S GATEWAY IS NOT RUN HERE: {missing}")
    objects = render(VALUES)
    settings = objects.one("ConfigMap", "gateway")["data"]["appliance.yaml"]
    (tmp_path / "appliance.yaml").write_text(settings, encoding="utf-8")
    pod = objects.one("StatefulSet", "gateway")["spec"]["template"]["spec"]
    variables = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    (tmp_path / "environment.json").write_text(json.dumps(variables), encoding="utf-8")
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 10001
    secrets = {
        f"{volume['name']}/{item['path']}"
        for volume in pod["volumes"]
        for item in volume.get("secret", {}).get("items", [{"path": "audit.key"}])
        if "secret" in volume
    }
    assert secrets == set(SECRETS), "the pod below has other Secrets than the chart's"
    host = urlsplit(yaml.safe_load(settings)["pool"]["discover"]).hostname
    ended = subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, "-m", "tests.deploy.pod", tmp_path, host],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    logs = ""
    for log in sorted(tmp_path.glob("*.log")):
        logs += log.read_text(encoding="utf-8")
        wrote(log.name, log.read_text(encoding="utf-8"))
        log.unlink()  # it shows the keys of a first start
    assert ended.returncode == 0, ended.stderr[-3000:] + logs[-3000:]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    for start in ("first", "second"):
        assert report[start][0] == 200, (report[start], logs[-3000:])
        assert report[f"{start} chat"] == 200, logs[-3000:]
        assert report[f"{start} exit"] == 0
    assert report["alive"] == [200, '{"status":"ok"}']
    assert report["verify"][0] == 0, report["verify"]
    assert "request.outcome      2" in report["verify"][1]
    assert report["owners"] == [10001]
