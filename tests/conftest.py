"""
Conditions of every test: no egress, loopback up, a time limit, no silent skip, one process for each file.
"""

import functools
import gc
import os
import random
import re
import sys
from asyncio import selector_events
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.wall import raise_loopback, stay_here

WORKER_SECONDS, ENGINE_SECONDS = 900, 1800
"""Time limits of a test that starts a model server, and of one that builds images and starts containers."""
LONGEST = ("engine", "test_draft_promotion", "test_draft_training", "test_draft_evaluation")
"""Groups that one process each has for ten minutes: started last, they would end alone."""
SEED_OPTION = "hypothesis_seed"
PASSED = "TESTS_PASSED"
"""Variable with the directory where `make test` collects the names of tests that passed (`docs.promises`)."""

# A busy machine is slow, not wrong; the time limit of the test remains.
hypothesis.settings.register_profile("appliance", deadline=None, max_examples=40)
hypothesis.settings.load_profile("appliance")

raise_loopback()
sys.addaudithook(stay_here)


def name_transports() -> None:
    """Have the warning of an unclosed transport, which comes tests later, tell where it was opened."""
    kind: Any = selector_events._SelectorTransport  # type: ignore[attr-defined]
    opens, shows = kind.__init__, kind.__repr__

    @functools.wraps(opens)
    def opening(transport: Any, loop: Any, sock: Any, protocol: Any, *more: Any, **named: Any) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
        transport.origin = f"of {type(protocol).__qualname__}, opened in {test}"
        opens(transport, loop, sock, protocol, *more, **named)

    kind.__init__, kind.__repr__ = opening, lambda transport: f"{shows(transport)} {transport.origin}"


name_transports()

pytest_plugins = ("tests.leaks", "tests.foreign")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed of hypothesis here, so that it is printed and all test processes share it."""
    if getattr(config.option, SEED_OPTION, None) is None:
        setattr(config.option, SEED_OPTION, str(random.SystemRandom().randrange(2**32)))


def pytest_report_header(config: pytest.Config) -> str:
    return f"hypothesis: repeat these examples with --hypothesis-seed={getattr(config.option, SEED_OPTION)}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file in one process, all tests of the container engine too, and start the longest first."""
    for item in items:
        # Only the folder `deploy` has the fixture; elsewhere it is a parameter of that name.
        needs_engine = "engine" in getattr(item, "fixturenames", ()) and "deploy" in item.path.parts
        if needs_engine or item.get_closest_marker("worker"):
            item.add_marker(pytest.mark.timeout(ENGINE_SECONDS if needs_engine else WORKER_SECONDS))
        if needs_engine:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.xdist_group("engine"))
        elif not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=_start)


def _start(item: pytest.Item) -> int:
    """Place in the order of starts."""
    marker = item.get_closest_marker("xdist_group")
    group = marker.args[0] if marker else ""
    others = len(LONGEST) + (not item.get_closest_marker("worker"))
    return LONGEST.index(group) if group in LONGEST else others


def pytest_collection_finish() -> None:
    """Thousands of collected tests are no garbage: the collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Runs in each process of pytest-xdist, and then in the one that distributes the tests."""
    directory = os.environ.get(PASSED)
    if directory and report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        with (Path(directory) / f"{os.getpid()}").open("a", encoding="utf-8") as file:
            # Without parameters, and without the group that `--dist loadgroup` adds.
            file.write(re.split(r"[\[@]", report.nodeid)[0] + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    return _without_skips((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[Any]:
    return _without_skips((yield))


def _without_skips(report: Any) -> Any:
    """Fail what is skipped in CI, where every tool has to be there."""
    if report.skipped and os.environ.get("CI") == "true":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"skipped, and CI skips nothing: {reason}"
    return report
