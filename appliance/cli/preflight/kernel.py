"""The kernel: Landlock, and the limit of open files."""

import resource
from collections.abc import Iterable

from appliance.api.http.server import OTHER_FILES
from appliance.cli.preflight.check import Check, Inquiry, Subject, family
from appliance.sovereignty.landlock import NETWORK_ABI, abi_version

LANDLOCK = Subject("kernel.landlock", "Landlock")
OPEN_FILES = Subject("kernel.open_files", "Open files")


@family(LANDLOCK, OPEN_FILES)
def check_kernel(inquiry: Inquiry) -> Iterable[Check]:
    yield judge_landlock(landlock_version(), wall=inquiry.settings.sovereignty.wall)
    inquiry.require_gateway()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = None if hard == resource.RLIM_INFINITY else hard
    yield judge_open_files(limit, inquiry.settings.api.max_connections)


def landlock_version() -> int | None:
    try:
        return abi_version()
    except OSError:
        return None


def judge_landlock(version: int | None, *, wall: str) -> Check:
    """Whether connections can be restricted by port; `wall` is `sovereignty.wall`."""
    if wall == "off":
        seen = "sovereignty.wall is off, so connections are not restricted"
        return LANDLOCK.warn(seen, "set sovereignty.wall: on")
    if version is not None and version >= NETWORK_ABI:
        return LANDLOCK.ok(f"version {version}: the kernel can refuse connections by port")
    known = f"version {version} has no port rules ({NETWORK_ABI} has)"
    seen = "this kernel has no Landlock" if version is None else known
    todo = "use Linux 6.7 or newer with `landlock` among the modules of /sys/kernel/security/lsm"
    if wall == "required":
        return LANDLOCK.fail(f"{seen}, and sovereignty.wall is required", todo)
    return LANDLOCK.warn(f"{seen}: connections are not restricted", todo)


def judge_open_files(limit: int | None, connections: int) -> Check:
    """Whether the configured number of connections fits, each with one to a worker."""
    wanted = 2 * connections + OTHER_FILES
    if limit is None:
        return OPEN_FILES.ok(f"unlimited; {wanted} wanted")
    seen = f"maximum {limit}; {wanted} wanted for {connections} connections"
    if limit < wanted:
        fitting = max(0, (limit - OTHER_FILES) // 2)
        todo = f"raise the limit (LimitNOFILE={wanted}), or lower api.max_connections"
        return OPEN_FILES.warn(f"{seen}, so {fitting} fit", todo)
    return OPEN_FILES.ok(seen)
