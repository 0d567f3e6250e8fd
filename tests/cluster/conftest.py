"""
Fixtures: one cluster for all tests.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import tools
from tests.cluster.cluster import Cluster, Namespace, from_kubeconfig
from tests.cluster.network_policies import enforced
from tests.cluster.node import SYSTEM_IMAGES, Node, NoNodeError, kubernetes_node
from tests.cluster.release import Release, installed
from tests.deploy.build_cache import BuildCache
from tests.deploy.chart.site import Values
from tests.deploy.conftest import (
    BASE,
    PIP_WHEEL,
    POSTGRES,
    Images,
    build_images,
    build_postgres,
    packages,
    run,
    use_packages,
)
from tests.deploy.container_engine import (
    KNOCKED_PORT,
    OUTSIDE,
    ROOT,
    ContainerEngine,
    NoEngineError,
    container_engine,
)
from tests.deploy.monitoring_files import tool

VALUES = "CLUSTER_VALUES"
"""Variable with a values file for the cluster of KUBECONFIG: where its images and the demo models are."""
MODELS = "sovereign-appliance/demo-models:1"
PROMETHEUS = "sovereign-appliance/prometheus:debian"
TEST_SECONDS = 1800
"""Time limit of each test; the first one builds the images and starts the cluster."""
REGISTRY = "docker.io"
"""What the image store puts before names without a registry."""
FORMER = "b8f7e63"
"""The commit whose chart and images are upgraded."""
FORMER_IMAGE = """
FROM {image}
USER 0:0
RUN rm -rf {packages}/appliance {packages}/sovereign_appliance-*
COPY site {packages}
USER 10001:0
"""
PACKAGES = "/opt/appliance/lib/python3.11/site-packages"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    if os.environ.get("KUBECONFIG"):
        if not os.environ.get(VALUES):
            pytest.fail(f"KUBECONFIG is set: {VALUES} must name a values file, see CONTRIBUTING.md")
        yield from_kubeconfig(Path(os.environ[VALUES]), tmp_path_factory.mktemp("cluster"))
        return
    programs = tools.built()
    if programs is None:
        pytest.skip(f"NO KUBERNETES HERE, SO THE CHART IS INSTALLED IN NO CLUSTER: {tools.HOW}")
    cache = BuildCache()
    try:
        with cache.scratch() as place:
            yield from _built_in(cache, place, programs)
    except (NoEngineError, NoNodeError) as error:
        pytest.skip(f"NO NODE CAN RUN HERE, SO THE CHART IS INSTALLED IN NO CLUSTER: {error}")


def _built_in(cache: BuildCache, place: Path, programs: Path) -> Iterator[Cluster]:
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"\ncluster: {what} after {(time.monotonic() - began) / 60:.1f} minutes")  # noqa: T201

    def import_images(node: Node) -> None:
        """The engine runs only for this: its memory is a worker's afterwards."""
        built = place / "engine"
        built.mkdir()
        use_packages(packages(cache), built)
        with container_engine(built / "data") as engine:
            product = build_images(engine)
            own = [*_small_images(engine, built, programs), *_former_images(engine, built, product)]
            build_postgres(cache, engine)
            say("images built")
            save = ["docker", "save", product.gateway, product.worker, POSTGRES, *own]
            node.import_images(engine.command(*save), engine.environment)
        shutil.rmtree(built, ignore_errors=True)
        say("images imported")
        values.update(_values(product, node.digests()))

    values: Values = {}
    directory = place / "node"
    directory.mkdir()
    with (
        kubernetes_node(directory, programs, import_images, tools.kubernetes_version()) as node,
        enforced(node, directory / "policies"),
    ):
        say("node ready, policies enforced")
        outside = (f"{OUTSIDE}:{KNOCKED_PORT}",)
        programs_of_helm = {"helm3": "helm3", "helm4": "helm4"}
        former = FORMER if any(name.endswith(f":{FORMER}") for name in node.digests()) else ""
        yield Cluster(node.run, programs_of_helm, values, directory, PROMETHEUS, outside, former)
        say("tests ended")
    say("removed")


def _small_images(engine: ContainerEngine, place: Path, programs: Path) -> list[str]:
    """Images of one program each, and of the demo models."""
    contents = {
        name: ("scratch", programs / program, f'ENTRYPOINT ["/{program}"]')
        for name, program in SYSTEM_IMAGES.items()
    }
    contents[MODELS] = ("scratch", ROOT / "demo" / "models", 'CMD ["nothing"]')
    # Debian's program needs Debian's C library.
    contents[PROMETHEUS] = (BASE, Path(tool("prometheus")), 'USER 65534\nENTRYPOINT ["/prometheus"]')
    for name, (base, content, line) in contents.items():
        context = place / "context"
        copy = shutil.copytree if content.is_dir() else shutil.copy2
        context.mkdir()
        copy(content, context / content.name)
        text = f"FROM {base}\nCOPY {content.name} /{content.name}\n{line}\n"
        (context / "Dockerfile").write_text(text, encoding="utf-8")
        engine.docker("build", "--quiet", "--tag", name, context)
        shutil.rmtree(context)
    return list(contents)


def _former_images(engine: ContainerEngine, place: Path, product: Images) -> list[str]:
    """The present images with `FORMER`'s appliance in place of the present one; none without its commit."""
    source = former_source(place / FORMER)
    if source is None:
        return []
    run(*PIP_WHEEL, "--find-links", place / "wheels" / "build", "--wheel-dir", source / "wheel", source)
    (wheel,) = (source / "wheel").glob("*.whl")
    context = source / "context"
    shutil.unpack_archive(wheel, context / "site", "zip")
    names = []
    for image in (product.gateway, product.worker):
        text = FORMER_IMAGE.format(image=image, packages=PACKAGES)
        (context / "Dockerfile").write_text(text, encoding="utf-8")
        names.append(f"{image.rpartition(':')[0]}:{FORMER}")
        engine.docker("build", "--quiet", "--network=none", "--tag", names[-1], context)
    return names


def former_source(place: Path, *paths: str) -> Path | None:
    """Files of `FORMER`, all without `paths`, in a new directory; None if this checkout lacks the commit."""
    place.mkdir()
    words = ("git", "-C", str(ROOT), "archive", "--output", str(place / "all.tar"), FORMER, *paths)
    if subprocess.run(words, capture_output=True, check=False).returncode:
        return None
    shutil.unpack_archive(place / "all.tar", place, filter="data")
    return place


def _values(product: Images, digests: dict[str, str]) -> Values:
    def image(name: str) -> Values:
        return {"repository": name.rpartition(":")[0], "digest": digests[f"{REGISTRY}/{name}"]}

    models = {"source": "image", "image": image(MODELS)}
    return {
        "images": {
            "gateway": image(product.gateway),
            "workerCpu": image(product.worker),
            "postgres": image(POSTGRES),
        },
        "modelDefaults": {"target": models, "draft": models},
    }


@pytest.fixture(scope="session")
def release(cluster) -> Iterator[Release]:
    """The chart with the demo models, as a site with strict pod security would install it."""
    with cluster.namespace() as namespace:
        yield installed(namespace)


@pytest.fixture
def namespace(cluster) -> Iterator[Namespace]:
    with cluster.namespace() as namespace:
        yield namespace
