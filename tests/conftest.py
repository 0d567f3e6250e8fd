"""
What every test runs under: no way out of this machine, loopback up, and hypothesis without a stopwatch.
"""

import os
import sys

import hypothesis

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
