"""
What every test runs under: no way out of this machine, and hypothesis without a stopwatch.
"""

import sys

import hypothesis

from tests.wall import stay_here

# A busy machine is slow, not wrong.
hypothesis.settings.register_profile("appliance", deadline=None)
hypothesis.settings.load_profile("appliance")

sys.addaudithook(stay_here)

pytest_plugins = ("tests.leaks",)
