"""
Weights from a signed bundle: built in one claim, placed in another by the chart's Job, served from there.
"""

from tests.cluster.cluster import Namespace
from tests.cluster.release import MODEL, SLEEP, VALUES, installed
from tests.deploy.chart.site import Values, over

DRAFT = f"{MODEL}-eagle31"
KEY_NAME = "example.com/releases"
BUILD = f"""
import subprocess, yaml
said = {{"licence": "Apache-2.0", "origin": "demo", "version": "r1"}}
models = [{{"name": name, "directory": "/demo/models/" + name, **said}} for name in ("{MODEL}", "{DRAFT}")]
recipe = {{"name": "sovereign-appliance", "version": "0.2.0", "upgrade_from": "0.1.0", "models": models}}
open("/medium/bundle.yaml", "w").write(yaml.safe_dump(recipe))
def bundle(*words):
    words = ["appliance", "bundle", *words, "--key-name", "{KEY_NAME}"]
    return subprocess.run(words, cwd="/medium", check=True, stdout=subprocess.PIPE, text=True).stdout
line = bundle("new-key", "release.key")
dates = ("--created", "1780000000", "--key-not-after", "2099-12-31")
bundle("build", "bundle.yaml", "bundle", "--key", "release.key", *dates)
print(line, end="")
"""


def claim(namespace: Namespace, name: str) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    namespace.apply(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
    )


def build_bundle(namespace: Namespace) -> str:
    """Make a bundle of the demo models in the claim `medium`; returns the key that signed it."""
    claim(namespace, "medium")
    volumes = {
        "medium": {"persistentVolumeClaim": {"claimName": "medium"}},
        "demo": {"image": {"reference": namespace.cluster.demo_models()}},
    }
    namespace.pod("workshop", {"app": "workshop"}, SLEEP, volumes)
    line = namespace.python("workshop", BUILD)
    namespace.kubectl("delete", "pod", "workshop")
    return line


def values(content: Values) -> Values:
    """Of a release that fills the claim `weights` from `medium`, and serves from it."""
    model = VALUES["models"][0]
    paths = {"target": MODEL, "draft": DRAFT}
    served = {
        kind: {"source": "pvc", "claimName": "weights", "path": f"{name}/current"}
        for kind, name in paths.items()
    }
    load = {"enabled": True, "claimName": "weights", **content}
    return over(VALUES, {"models": [over(model, served)], "weightsLoad": load})


def test_the_job_fills_the_claim_from_a_signed_bundle_and_a_worker_serves_from_it(namespace):
    line = build_bundle(namespace)
    assert KEY_NAME in line
    keys = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "bundle-keys"}}
    namespace.apply({**keys, "data": {"bundle-keys.txt": line}})
    claim(namespace, "weights")
    medium = {"source": "pvc", "claimName": "medium", "path": "bundle"}
    trusted = {"existingConfigMap": "bundle-keys"}
    release = installed(namespace, values({"from": medium, "trustedKeys": trusted}))
    job = namespace.kubectl("logs", "--selector", "app.kubernetes.io/component=weights-load", "--tail=-1")
    assert job.splitlines()[-1] == "sovereign-appliance 0.2.0 is loaded"
    assert release.chat(release.key("clinic"))["status"] == 200
