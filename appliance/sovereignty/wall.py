"""
The wall: this process can open TCP connections only to the ports of its configuration.

Raised once, before the process has a second thread and before it starts a worker, so that all of it is
covered.  It is a second line of defence: it filters ports and not addresses, and neither UDP nor Multipath
TCP.  The network must block egress as well; see docs/explanation/no-egress.md.
"""

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from appliance.errors import ConfigurationError
from appliance.sovereignty import landlock
from appliance.sovereignty.ports import spell

Mode = Literal["on", "off", "required"]
REASONS = {
    errno.ENOSYS: "the kernel has no Landlock",
    errno.EOPNOTSUPP: "Landlock is switched off in this kernel",
    errno.EPERM: "the container's seccomp profile forbids it",
}


class Kernel(Protocol):
    """Interface of `sovereignty.landlock`."""

    def abi_version(self) -> int:
        """Version of Landlock; raises `OSError` if there is none."""

    def allow_connections(self, ports: Iterable[int]) -> None:
        """Refuse connections to other ports; raises `OSError` if that fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    is_up: bool
    detail: str
    """One line, for operators."""
    ports: frozenset[int] = frozenset()
    """TCP ports that are allowed; meaningless if the wall is not up."""
    warning: str | None = None
    """Why it is not up although the settings want it."""

    def check(self, ports: Iterable[int], setting: str) -> None:
        """Raise ConfigurationError for a port that the wall would block: it cannot be changed later."""
        outside = frozenset(ports) - self.ports
        if self.is_up and outside:
            message = (
                f"{setting}: port {spell(outside)} is blocked by the wall that was raised at the start;"
                " restart, or add it to sovereignty.connect_ports before the next start"
            )
            raise ConfigurationError(message)


NO_WALL = Wall(is_up=False, detail="not configured")


def raise_wall(mode: Mode, ports: frozenset[int], kernel: Kernel = landlock) -> Wall:
    """Block all TCP ports except `ports`, irrevocably; raises ConfigurationError if required and failed."""
    if mode == "off":
        return Wall(is_up=False, detail="off, by sovereignty.wall")
    try:
        version = kernel.abi_version()
        if version < landlock.NETWORK_ABI:
            reason = f"this kernel's Landlock (version {version}) has no port rules; Linux 6.7 has"
        else:
            kernel.allow_connections(sorted(ports))
            doors = f"only to ports {spell(ports)}" if ports else "nowhere"
            return Wall(is_up=True, detail=f"TCP connections {doors}", ports=ports)
    except OSError as error:
        reason = REASONS.get(error.errno or 0, str(error.strerror))
    if mode == "required":
        raise ConfigurationError(f"sovereignty.wall is required, but {reason}")
    return Wall(
        is_up=False,
        detail=f"not up: {reason}",
        warning=f"the wall is not up ({reason}): this process can connect to any port",
    )
