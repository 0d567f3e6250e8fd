# ruff: noqa: N802 - the names of NVIDIA's bindings
"""NVML, with bindings that answer as NVIDIA's do."""

from types import SimpleNamespace

import pytest

from appliance.serving.nvml import NvidiaDriver, NvidiaGpu, count_gpus, open_meter, read_driver


class NVMLError(Exception):
    pass


class Bindings(SimpleNamespace):
    """Four GPUs; `GPU-b` is the second."""

    NVMLError = NVMLError

    def __init__(self, counters=(1000, 200, 30, 4), *, driver=True, memory=True, count=True) -> None:
        super().__init__(counters=list(counters), driver=driver, memory=memory, count=count, open=0)

    def nvmlInit(self):
        if not self.driver:
            raise NVMLError
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        if not self.count:
            raise NVMLError
        return len(self.counters)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= len(self.counters):
            raise NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, name):
        return {"GPU-b": 1}[name]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        counter = self.counters[handle]
        if counter is None:
            raise NVMLError
        return counter

    def nvmlSystemGetDriverVersion(self):
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 13010

    def nvmlDeviceGetName(self, handle):
        return f"card {handle + 1}"

    def nvmlDeviceGetMemoryInfo(self, handle):
        if not self.memory:
            raise NVMLError
        return SimpleNamespace(total=100 * (handle + 1), free=90)


@pytest.mark.parametrize(
    ("visible", "count", "millijoules"),
    [(None, 1, 1000), (None, 4, 1234), ("2,3", 1, 30), ("2, 3", 2, 34), ("GPU-b", 1, 200)],
)
def test_meter_reads_only_the_gpus_of_its_worker(visible, count, millijoules):
    meter = open_meter(visible, count, Bindings)
    assert meter.read() == millijoules
    assert meter.gpus == count


@pytest.mark.parametrize("visible", ["", "7", "MIG-1", "none"])
def test_meter_is_none_for_gpus_it_cannot_name(visible):
    assert open_meter(visible, 1, Bindings) is None


@pytest.mark.parametrize(("visible", "count"), [(None, 8), ("2,3", 4), ("0", 2)])
def test_meter_is_none_for_a_worker_on_several_machines(visible, count):
    """The GPUs of this machine would be taken for all of them."""
    assert open_meter(visible, count, Bindings) is None


def test_meter_reports_nothing_without_bindings_or_counters():
    """Also with a GPU older than Volta, or one that is lost later."""
    assert open_meter(None, 1, lambda: None) is None
    assert open_meter(None, 1, lambda: Bindings((None,))) is None
    bindings = Bindings()
    meter = open_meter(None, 2, lambda: bindings)
    bindings.counters[1] = None
    assert meter.read() is None


def test_count_gpus_raises_without_bindings_or_driver():
    with pytest.raises(OSError, match="nvidia-ml-py"):
        count_gpus(lambda: None)
    with pytest.raises(OSError, match="no driver"):
        count_gpus(lambda: Bindings(driver=False))


def test_count_gpus_counts_what_the_driver_shows():
    bindings = Bindings()
    assert count_gpus(lambda: bindings) == 4
    assert count_gpus(lambda: Bindings(count=False)) == 0
    assert bindings.open == 0


def test_driver_reports_version_cuda_and_memory_of_each_gpu():
    bindings = Bindings((0, 0))
    assert read_driver(lambda: bindings) == NvidiaDriver(
        version="580.95.05",
        cuda=(13, 1),
        gpus=(
            NvidiaGpu(name="card 1", total_bytes=100, free_bytes=90),
            NvidiaGpu(name="card 2", total_bytes=200, free_bytes=90),
        ),
    )
    assert bindings.open == 0


def test_driver_is_none_without_a_device():
    """As in a container that was given the library and no device."""
    assert read_driver(lambda: Bindings(driver=False)) is None


def test_driver_is_none_without_bindings():
    assert read_driver(lambda: None) is None


def test_driver_that_answers_with_an_error_raises():
    """Otherwise it would report a GPU without memory."""
    bindings = Bindings(memory=False)
    with pytest.raises(OSError, match="memory of GPU 0"):
        read_driver(lambda: bindings)
    assert bindings.open == 0
