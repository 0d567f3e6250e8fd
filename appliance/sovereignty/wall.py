"""
The wall around a process: it can open TCP connections to the ports of its configuration, and to no other.

Raised once, before the process has a second thread and before it starts a worker, so that all of it is
inside.  It is the second wall, not the first: it knows ports and no addresses, and neither UDP nor Multipath
TCP.  What keeps packets inside is the network; see docs/explanation/no-egress.md.
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
    """What `sovereignty.landlock` offers."""

    def abi_version(self) -> int:
        """Version of Landlock; raises `OSError` where there is none."""

    def allow_connections(self, ports: Iterable[int]) -> None:
        """Refuse connections to other ports; raises `OSError` where that cannot be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """Whether there is one, and where its doors are."""

    is_up: bool
    detail: str
    """One line, for operators."""
    ports: frozenset[int] = frozenset()
    """TCP ports that can be connected to; of no meaning where the wall is not up."""

    def check(self, ports: Iterable[int], setting: str) -> None:
        """
        Refuse what the wall would make fail later.

        Raises:
            ConfigurationError: one of the ports is outside; a wall cannot be changed while it stands.
        """
        outside = frozenset(ports) - self.ports
        if self.is_up and outside:
            message = (
                f"{setting}: port {spell(outside)} is outside the wall that was raised at the start;"
                " restart, or name it in sovereignty.connect_ports before the next start"
            )
            raise ConfigurationError(message)


NO_WALL = Wall(is_up=False, detail="none was asked for")


def raise_wall(mode: Mode, ports: frozenset[int], kernel: Kernel = landlock) -> Wall:
    """
    Close all TCP ports but these to this process and its children, for good.

    Args:
        mode: `sovereignty.wall`.
        ports: those it may connect to.
        kernel: who does it (for tests).

    Raises:
        ConfigurationError: it could not be done, and the mode is `required`.
    """
    if mode == "off":
        return Wall(is_up=False, detail="off, by sovereignty.wall")
    try:
        version = kernel.abi_version()
        if version < landlock.NETWORK_ABI:
            reason = f"this kernel's Landlock (version {version}) does not know ports; Linux 6.7 does"
        else:
            kernel.allow_connections(sorted(ports))
            doors = f"only to ports {spell(ports)}" if ports else "nowhere"
            return Wall(is_up=True, detail=f"TCP connections {doors}", ports=ports)
    except OSError as error:
        reason = REASONS.get(error.errno or 0, str(error.strerror))
    if mode == "required":
        message = f"sovereignty.wall is required, but {reason}"
        raise ConfigurationError(message)
    return Wall(is_up=False, detail=f"not up: {reason}")
