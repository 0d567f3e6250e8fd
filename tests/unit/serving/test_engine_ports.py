"""Which ports vLLM needs among its own processes."""

import pytest

from appliance.infra.settings import WorkerSettings
from appliance.serving.devices import Device, DeviceKind
from appliance.serving.engine_ports import MEETING_POINTS, engine_ports, ports_chosen_by_kernel

CPU = Device(kind=DeviceKind.CPU, count=1, bfloat16=True)
GPU = Device(kind=DeviceKind.GPU, count=1, bfloat16=True)
CHOSEN = range(40000, 40003)


def test_cpu_worker_needs_no_ports():
    """Its processes talk over Unix sockets."""
    assert engine_ports(WorkerSettings(), CPU, CHOSEN) == set()


def test_gpu_worker_needs_the_kernels_port_range():
    """Even one GPU connects to itself."""
    assert engine_ports(WorkerSettings(), GPU, CHOSEN) == set(CHOSEN)


@pytest.mark.parametrize(
    "arguments", [("--nnodes", "2"), ("--data-parallel-size=2",), ("--data_parallel_size", "2"), ("-dp", "2")]
)
@pytest.mark.parametrize("device", [CPU, GPU])
def test_worker_on_several_machines_needs_the_rendezvous_ports(arguments, device):
    """Several machines begin at a port they all know."""
    settings = WorkerSettings(extra_arguments=arguments)
    assert engine_ports(settings, device, CHOSEN) == MEETING_POINTS | set(CHOSEN)


def test_the_kernels_range_is_read_to_its_last_port(tmp_path):
    """Both ends belong to it."""
    file = tmp_path / "sys" / "net" / "ipv4" / "ip_local_port_range"
    file.parent.mkdir(parents=True)
    file.write_text("40000\t40099\n", encoding="ascii")
    assert ports_chosen_by_kernel(tmp_path) == range(40000, 40100)


def test_a_range_that_cannot_be_read_is_the_kernels_default(tmp_path):
    """Rather a worker with more doors than none."""
    assert ports_chosen_by_kernel(tmp_path) == range(32768, 61000)
