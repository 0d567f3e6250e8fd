"""
What every test runs under: no way out of this machine, loopback up, hypothesis without a stopwatch.
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
    """Mark what needs the container engine, so that it can be chosen: its images take minutes to build."""
    for item in items:
        if "engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)
