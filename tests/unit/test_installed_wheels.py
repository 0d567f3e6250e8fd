"""The wheels, installed outside a checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
FIND_THE_PAIR = """
from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from appliance.serving.weights import inspect_weights
print(*(inspect_weights(path).path for path in (DEMO_TARGET, DEMO_DRAFT)))
"""


class Site:
    """A directory of installed packages; what they need is in the environment of the tests."""

    def __init__(self, directory: Path) -> None:
        self.packages = directory / "packages"
        self._wheels = directory / "wheels"
        self._directory = directory

    def install(self, project: Path) -> None:
        offline = ("--no-index", "--no-deps", "--quiet")
        build = [*PIP, "wheel", *offline, "--no-build-isolation", "--wheel-dir", self._wheels, project]
        subprocess.run(build, check=True)
        (wheel,) = self._wheels.iterdir()
        subprocess.run([*PIP, "install", *offline, "--target", self.packages, wheel], check=True)
        wheel.unlink()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {name: text for name, text in os.environ.items() if not name.startswith("APPLIANCE_")}
        environment["PYTHONPATH"] = str(self.packages)
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=self._directory,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    made = Site(tmp_path_factory.mktemp("site"))
    made.install(ROOT)
    return made


def test_up_without_the_demo_models_says_what_to_do(site):
    done = site.run("-m", "appliance", "up", "--port", "0", "--admin-port", "0")
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("appliance: the demo models are not installed: ")
    assert all(word in line for word in ("sovereign-appliance-demo", "--model", "worker.model"))


def test_demo_models_are_found_once_their_package_is_installed(site):
    site.install(ROOT / "demo")
    done = site.run("-c", FIND_THE_PAIR)
    pair = site.packages / "appliance_demo"
    assert done.stdout.split() == [str(pair / "demo-coder"), str(pair / "demo-coder-eagle31")], done.stderr
