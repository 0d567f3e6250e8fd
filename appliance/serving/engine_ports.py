"""
TCP ports that vLLM's processes connect to among themselves.

Read in vllm 0.32.0: one process on a CPU needs none.  Its queues are Unix sockets (`v1/engine/utils.py`),
and processes of one machine meet by a file (`get_file_store_init_method` in `utils/network_utils.py`).  On
GPUs NCCL listens on ports that the kernel chooses, and connects to them even from one GPU to itself (NCCL's
`src/bootstrap.cc`); gloo, between several processes, does the same.  Several machines meet at one port
first.
"""

from pathlib import Path

from appliance.infra.settings import WorkerSettings
from appliance.serving.devices import Device, DeviceKind

MEETING_POINTS = frozenset({29500, 29501, 29550})
"""Defaults of `--data-parallel-master-port`, `--master-port` and `--data-parallel-rpc-port`
(`vllm/config/parallel.py`)."""
LINUX_DEFAULT = range(32768, 61000)
SEVERAL = ("--nnodes", "--data-parallel", "--master", "--node-rank", "-dp")


def engine_ports(settings: WorkerSettings, device: Device, chosen_by_kernel: range) -> frozenset[int]:
    several = any(argument.replace("_", "-").startswith(SEVERAL) for argument in settings.extra_arguments)
    if several:
        return MEETING_POINTS | frozenset(chosen_by_kernel)
    return frozenset(chosen_by_kernel) if device.kind is DeviceKind.GPU else frozenset()


def ports_chosen_by_kernel(proc: Path = Path("/proc")) -> range:
    """Ports of listeners that did not ask for one: `ip_local_port_range` of this network namespace."""
    try:
        first, last = (proc / "sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    except OSError:  # a container may hide it
        return LINUX_DEFAULT
    return range(int(first), int(last) + 1)
