"""
The clock: whether it is synchronised, and the time zone of token budgets.

The audit log's times, token limits, certificates and leases depend on it.
"""

import ctypes
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

from appliance.cli.preflight.check import Check, Inquiry, Subject, family

SYNCHRONISED = Subject("clock.synchronised", "Clock")
ZONE = Subject("clock.zone", "Time zone")
UNSYNCHRONISED = 0x40
"""STA_UNSYNC of adjtimex(2)."""
ERROR_SECONDS = 1.0
"""Maximum acceptable error, by the kernel's own estimate."""
EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)
"""Before this release; an earlier clock is wrong."""
PADDING = 400


class _Timex(ctypes.Structure):
    """The beginning of `struct timex` of adjtimex(2) on 64-bit Linux."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * PADDING),
    )


@family(SYNCHRONISED, ZONE)
def check_clock(inquiry: Inquiry) -> Iterable[Check]:
    """Query the kernel; no time server is contacted."""
    synchronised, error_seconds = read_clock()
    yield judge_clock(inquiry.clock(), synchronised=synchronised, error_seconds=error_seconds)
    inquiry.require_gateway()
    yield judge_zone(inquiry.settings.limits.time_zone, read_zone())


def read_clock() -> tuple[bool | None, float]:
    """
    Whether the clock is synchronised, and its maximum error in seconds as reported by the time service.

    None if the kernel does not report it.  Needs no privilege, since nothing is changed.
    """
    seen = _Timex()
    answered = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(seen)) >= 0
    return not seen.status & UNSYNCHRONISED if answered else None, seen.maxerror / 1e6


def judge_clock(now: float, *, synchronised: bool | None, error_seconds: float) -> Check:
    time = datetime.fromtimestamp(now, UTC)
    text = f"{time:%Y-%m-%d %H:%M:%S} UTC"
    todo = "configure chrony with a time server of your network, then see `chronyc tracking` or `timedatectl`"
    if time < EARLIEST:
        return SYNCHRONISED.fail(f"{text} is in the past", "set the clock")
    if synchronised is None:
        return SYNCHRONISED.skipped(f"{text}; the kernel does not report synchronisation")
    if not synchronised:
        return SYNCHRONISED.warn(f"{text}; not synchronised", todo)
    if error_seconds > ERROR_SECONDS:
        return SYNCHRONISED.warn(f"{text}; it may be {error_seconds:.1f} s off", todo)
    return SYNCHRONISED.ok(f"{text}, synchronised to {error_seconds * 1000:.0f} ms")


def read_zone(*, variable: str | None = None, link: Path = Path("/etc/localtime")) -> str | None:
    """
    The time zone of this machine; None if it has none or an unnamed one.

    `variable` is the value of `TZ`; without it `link` decides.
    """
    if variable:
        return variable.removeprefix(":")
    try:
        target = str(link.readlink())
    except OSError:
        return None
    return target.partition("zoneinfo/")[2] or None


def judge_zone(wanted: str, system: str | None) -> Check:
    offset = datetime.now(ZoneInfo(wanted)).strftime("%z")
    seen = f"token budgets start their days in {wanted} ({offset[:3]}:{offset[3:]})"
    if system is None or wanted != "UTC" or system.upper() in {"UTC", "ETC/UTC", "UCT", "ETC/UCT", "GMT"}:
        return ZONE.ok(seen)
    todo = f"set limits.time_zone: {system}, unless UTC is intended"
    return ZONE.warn(f"{seen}, this machine is in {system}", todo)
