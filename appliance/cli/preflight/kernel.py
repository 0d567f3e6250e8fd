"""The kernel: Landlock, and the limit of open files."""

import resource
from collections.abc import Iterable

from appliance.api.http.server import OTHER_FILES
from appliance.cli.preflight.check import Check, Subject
from appliance.cli.preflight.inquiry import Inquiry
from appliance.sovereignty.landlock import NETWORK_ABI, abi_version

LANDLOCK = Subject("kernel.landlock", "Landlock")
OPEN_FILES = Subject("kernel.open_files", "Open files")
SUBJECTS = (LANDLOCK, OPEN_FILES)


def check_kernel(inquiry: Inquiry) -> Iterable[Check]:
    yield judge_landlock(landlock_version(), wall=inquiry.settings.sovereignty.wall)
    if inquiry.gateway:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        limit = None if hard == resource.RLIM_INFINITY else hard
        yield judge_open_files(limit, inquiry.settings.api.max_connections)
    else:
        yield OPEN_FILES.skipped("no gateway runs on this machine")


def landlock_version() -> int | None:
    """The kernel's version of Landlock; None if it has none."""
    try:
        return abi_version()
    except OSError:
        return None


def judge_landlock(version: int | None, *, wall: str) -> Check:
    """Whether connections can be restricted by port; `wall` is `sovereignty.wall`."""
    if wall == "off":
        return LANDLOCK.warn(
            "sovereignty.wall is off, so connections are not restricted", "set sovereignty.wall: on"
        )
    if version is not None and version >= NETWORK_ABI:
        return LANDLOCK.ok(f"version {version}: the kernel can refuse connections by port")
    seen = (
        "this kernel has no Landlock"
        if version is None
        else f"version {version} has no port rules ({NETWORK_ABI} has)"
    )
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
        return OPEN_FILES.warn(
            f"{seen}, so {fitting} fit",
            f"raise the limit (LimitNOFILE={wanted}), or lower api.max_connections",
        )
    return OPEN_FILES.ok(seen)
