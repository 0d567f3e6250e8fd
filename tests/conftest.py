"""
What every test runs under: no way out of this machine, loopback up, hypothesis without a stopwatch, and
which tests share a process where there are several.
"""

import os
import sys

import hypothesis
import pytest

from tests.wall import raise_loopback, stay_here

# A busy machine is slow, not wrong.  `make test` tries the same cases each time, so that it fails for
# what was changed; run by hand, tests look for new ones.
hypothesis.settings.register_profile(
    "appliance", deadline=None, derandomize=os.environ.get("SAME_CASES") == "1"
)
hypothesis.settings.load_profile("appliance")

raise_loopback()
sys.addaudithook(stay_here)

pytest_plugins = ("tests.leaks",)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Say what stays together under `--dist loadgroup`: a file, with what it builds once for all its tests.

    All tests with a real worker are one group: two workers on two cores would measure each other.  So are
    those with the container engine, whose images take minutes to build.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    if item.get_closest_marker("worker") is not None:
        return "worker"
    if "engine" in getattr(item, "fixturenames", ()):
        return "engine"
    return item.nodeid.partition("::")[0]
