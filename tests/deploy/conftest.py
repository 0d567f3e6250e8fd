"""
What tests of the deployment share: a container engine, and the images built in it from local wheels.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.container_engine import ROOT, ContainerEngine, NoEngineError, container_engine

BUILD_SECONDS = 3600
IMAGES = ROOT / "deploy" / "images"


@dataclass(frozen=True)
class Images:
    """The images, and where their wheels and bills of materials are."""

    engine: ContainerEngine
    wheels: Path
    gateway: str
    worker: str
    base: str
    knocks_of_the_build: list[dict[str, str]]


@pytest.fixture(scope="session")
def engine() -> Iterator[ContainerEngine]:
    try:
        with container_engine() as running:
            yield running
    except NoEngineError as error:
        pytest.skip(f"NO CONTAINER ENGINE, SO IMAGES AND COMPOSE ARE NOT TRIED HERE: {error}")


@pytest.fixture(scope="session")
def images(engine) -> Images:
    """Gateway and worker-cpu, built from a base of Debian packages and from wheels, without a network."""
    wheels = engine.directory / "wheels"
    collected = subprocess.run(
        ["sh", IMAGES / "wheels.sh", "--python", sys.executable, wheels, "gateway", "worker-cpu"],
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    assert collected.returncode == 0, collected.stderr[-4000:]
    # The base comes from Debian's packages, so this one step is not in the engine's network.
    made = subprocess.run(
        ["sh", IMAGES / "base.sh"],
        env=engine.environment,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-4000:]
    built = engine.run("sh", IMAGES / "build.sh", wheels, "gateway", "worker-cpu", seconds=BUILD_SECONDS)
    gateway, worker = built.stdout.split()
    # They are in the worker's image now; only its bill of materials still speaks of them.
    for wheel in (wheels / "worker-cpu").glob("*.whl"):
        wheel.unlink()
    return Images(
        engine=engine,
        wheels=wheels,
        gateway=gateway,
        worker=worker,
        base="sovereign-appliance/base:bookworm",
        knocks_of_the_build=engine.knocks(),
    )
