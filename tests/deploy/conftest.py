"""
Fixtures of the deployment tests: a container engine, and the images built in it from local wheels.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.build_cache import BuildCache
from tests.deploy.container_engine import ROOT, ContainerEngine, NoEngineError, container_engine

BUILD_SECONDS = 3600
IMAGES = ROOT / "deploy" / "images"
BASE = "sovereign-appliance/base:bookworm"
BUILT = ("gateway", "worker-cpu")
IN_IMAGES = ("build", "cpu", "gateway", "hsm", "picker", "tools", "torch")
"""Lock files of what is in them and of what builds them."""
POSTGRES = "sovereign-appliance/postgresql:debian"
PIP_WHEEL = (
    sys.executable,
    "-m",
    "pip",
    "--disable-pip-version-check",
    "wheel",
    "--quiet",
    "--no-deps",
    "--no-index",
)
"""Needs `--find-links` with what builds a wheel."""


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
def build_cache() -> BuildCache:
    return BuildCache()


@pytest.fixture(scope="session")
def engine(request, build_cache) -> Iterator[ContainerEngine]:
    """One for all tests; if one of them needs the images, it starts with the packages in them."""
    wanted = any("images" in getattr(item, "fixturenames", ()) for item in request.session.items)
    try:
        with build_cache.scratch() as place:
            if wanted:
                use_packages(packages(build_cache), place)
            with container_engine(place / "data") as running:
                yield running
    except NoEngineError as error:
        pytest.skip(f"NO CONTAINER ENGINE, SO IMAGES AND COMPOSE ARE NOT TRIED HERE: {error}")


@pytest.fixture(scope="session")
def images(engine) -> Images:
    """Gateway and worker-cpu, built from a base of Debian packages and from wheels, without a network."""
    return build_images(engine)


def build_images(engine: ContainerEngine) -> Images:
    """Add the appliance to what `use_packages` has put into the engine's data."""
    place = (engine.directory / "data").resolve().parent
    wheels = place / "wheels"
    # As wheels.sh makes it; all else that it makes is from `packages`.
    run(*PIP_WHEEL, "--find-links", wheels / "build", "--wheel-dir", wheels / "own", ROOT)
    built = engine.run("sh", IMAGES / "build.sh", wheels, *BUILT, seconds=BUILD_SECONDS)
    gateway, worker = built.stdout.split()
    knocks = json.loads((place / "knocks.json").read_text(encoding="utf-8"))
    return Images(engine, wheels, gateway, worker, BASE, knocks + engine.knocks())


def packages(cache: BuildCache) -> Path:
    """An engine's data after a build of the images, the wheels for it, and its connections to the outside."""
    locks = ROOT / "deploy" / "locks"
    installed = [locks / f"{name}.txt" for name in IN_IMAGES]
    version = run("dockerd", "--version")

    def make(place: Path) -> None:
        wheels = place / "wheels"
        with container_engine(place / "data") as builder, ThreadPoolExecutor() as side_by_side:
            collect = ("sh", IMAGES / "wheels.sh", "--python", sys.executable, wheels, *BUILT)
            collected = side_by_side.submit(run, *collect)
            load_base(cache, builder, BASE)
            collected.result()
            builder.run("sh", IMAGES / "build.sh", wheels, *BUILT, seconds=BUILD_SECONDS)
            # The engine's copies of the wheels.
            builder.docker("builder", "prune", "--force", "--filter", "type=source.local")
            (place / "knocks.json").write_text(json.dumps(builder.knocks()), encoding="utf-8")
        for other in {path.name for path in wheels.iterdir()} - {"build", "tools", *BUILT}:
            run("rm", "-r", wheels / other)

    inputs = (version, IMAGES, *installed, locks.with_name("torch.sh"))
    return cache.entry("packages", inputs, make)


def use_packages(packages: Path, place: Path) -> None:
    """Copy the result of `packages`; wheels and lower layers, which never change, as links."""
    layers = [mark.with_name("diff") for mark in packages.glob("data/overlay2/*/committed")]
    wheels = list(packages.glob("wheels/*/*"))
    others = [f"--exclude=./{path.relative_to(packages)}" for path in (*layers, *wheels)]
    archive = place / "others.tar"
    run("tar", "--create", "--file", archive, "--directory", packages, "--xattrs", *others, ".")
    run("tar", "--extract", "--file", archive, "--directory", place, "--xattrs", "--xattrs-include=*")
    for path in layers:
        (place / path.relative_to(packages)).symlink_to(path)
    for path in wheels:
        (place / path.relative_to(packages)).hardlink_to(path)


def load_base(cache: BuildCache, engine: ContainerEngine, image: str, *more: str) -> None:
    """Have the engine load a base image with more Debian packages in it."""

    def make(place: Path) -> None:
        # It comes from Debian's packages, so this one step is not in the engine's network.
        run("sh", IMAGES / "base.sh", *more, environment={**engine.environment, "BASE_IMAGE": image})
        engine.docker("save", "--output", place / "image.tar", image)

    entry = cache.entry("-".join(("base", *more)), (image, *more, IMAGES / "base.sh"), make)
    if not engine.docker("images", "--quiet", image):
        engine.docker("load", "--input", entry / "image.tar")


def build_postgres(cache: BuildCache, engine: ContainerEngine) -> None:
    """Build `POSTGRES`: Debian's PostgreSQL in place of the official image."""
    base = "base-with-postgresql:bookworm"
    load_base(cache, engine, base, "postgresql-15")
    build = ("build", "--quiet", "--network=none", f"--build-arg=BASE_IMAGE={base}", f"--tag={POSTGRES}")
    engine.docker(*build, Path(__file__).with_name("postgres_image"))


def run(*words: str | Path, environment: dict[str, str] | None = None) -> str:
    """Run a program; what it printed."""
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
