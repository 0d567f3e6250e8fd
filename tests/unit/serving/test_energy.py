"""Promises of `appliance.serving.energy`, with bindings that answer as NVIDIA's do."""

from types import SimpleNamespace

import pytest

from appliance.serving.energy import open_meter


class NVMLError(Exception):
    """What the bindings raise."""


class Bindings(SimpleNamespace):
    """Four GPUs; `GPU-b` is the second."""

    NVMLError = NVMLError

    def __init__(self, counters: tuple[int | None, ...] = (1000, 200, 30, 4)) -> None:
        super().__init__(counters=list(counters))

    def nvmlInit(self) -> None:  # noqa: N802 - their names
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.counters)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index >= len(self.counters):
            raise NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:  # noqa: N802
        return {"GPU-b": 1}[name]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        counter = self.counters[handle]
        if counter is None:
            raise NVMLError
        return counter


@pytest.mark.parametrize(
    ("visible", "count", "millijoules"),
    [(None, 1, 1000), (None, 4, 1234), ("2,3", 1, 30), ("2, 3", 2, 34), ("GPU-b", 1, 200)],
)
def test_it_reads_the_gpus_of_its_worker(visible, count, millijoules):
    """Not those of others on the same machine."""
    meter = open_meter(visible, count, Bindings)
    assert meter.read() == millijoules
    assert meter.gpus == count


@pytest.mark.parametrize("visible", ["", "7", "MIG-1", "none"])
def test_gpus_it_cannot_name_are_not_measured(visible):
    assert open_meter(visible, 1, Bindings) is None


@pytest.mark.parametrize(("visible", "count"), [(None, 8), ("2,3", 4), ("0", 2)])
def test_a_worker_with_gpus_elsewhere_is_not_measured(visible, count):
    """It spans several machines, and the GPUs of this one would pass for all of them."""
    assert open_meter(visible, count, Bindings) is None


def test_without_bindings_or_counters_nothing_is_said():
    """No library, or a GPU older than Volta, or one that is lost later on."""
    assert open_meter(None, 1, lambda: None) is None
    assert open_meter(None, 1, lambda: Bindings((None,))) is None
    bindings = Bindings()
    meter = open_meter(None, 2, lambda: bindings)
    bindings.counters[1] = None
    assert meter.read() is None
