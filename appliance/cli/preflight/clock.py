"""
Whether this machine's clock is kept right, and where its days begin.

The audit log's times, token limits, certificates and leases all go by it.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

from appliance.cli.preflight.check import Check, Subject
from appliance.cli.preflight.inquiry import Inquiry

SYNCHRONISED = Subject("clock.synchronised", "Clock")
ZONE = Subject("clock.zone", "Time zone")
SUBJECTS = (SYNCHRONISED, ZONE)
UNSYNCHRONISED = 0x40
"""STA_UNSYNC of adjtimex(2)."""
ERROR_SECONDS = 1.0
"""Greatest error, by the kernel's own estimate, that nobody needs to mind."""
EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)
"""Before this release was made; a clock that stands earlier has lost its battery."""
PADDING = 400


class _Timex(ctypes.Structure):
    """The beginning of `struct timex`, as adjtimex(2) of 64-bit Linux has it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * PADDING),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenClock:
    """What the kernel says of its clock."""

    now: float
    """Unix time in seconds."""
    synchronised: bool | None
    """Whether somebody keeps it right; None where the kernel does not say."""
    error_seconds: float
    """Greatest error, as whoever keeps it right told the kernel."""


def check_clock(inquiry: Inquiry) -> Iterable[Check]:
    """Ask the kernel; nothing is sent, and no time server is asked."""
    yield judge_clock(look_at_clock(inquiry.clock()))
    if inquiry.gateway:
        yield judge_zone(inquiry.settings.limits.time_zone, look_at_zone())
    else:
        yield ZONE.skipped("no gateway runs on this machine")


def look_at_clock(now: float) -> SeenClock:
    """Ask without changing anything, which needs no privilege."""
    seen = _Timex()
    answered = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(seen)) >= 0
    return SeenClock(
        now=now,
        synchronised=not seen.status & UNSYNCHRONISED if answered else None,
        error_seconds=seen.maxerror / 1e6,
    )


def judge_clock(seen: SeenClock) -> Check:
    """Decide whether the clock can be believed."""
    time = datetime.fromtimestamp(seen.now, UTC)
    text = f"{time:%Y-%m-%d %H:%M:%S} UTC"
    todo = "have chrony follow a time server of yours, then see `chronyc tracking` or `timedatectl`"
    if time < EARLIEST:
        return SYNCHRONISED.fail(f"it says {text}, which is in the past", "set the clock")
    if seen.synchronised is None:
        return SYNCHRONISED.skipped(f"{text}; the kernel does not say who keeps it right")
    if not seen.synchronised:
        return SYNCHRONISED.warn(f"{text}; nothing keeps it right", todo)
    if seen.error_seconds > ERROR_SECONDS:
        return SYNCHRONISED.warn(f"{text}; it may be {seen.error_seconds:.1f} s off", todo)
    return SYNCHRONISED.ok(f"{text}, kept right to {seen.error_seconds * 1000:.0f} ms")


def look_at_zone(*, variable: str | None = None, link: Path = Path("/etc/localtime")) -> str | None:
    """
    Name of the zone that this machine shows people; None where it has none or an unnamed one.

    Args:
        variable: what `TZ` says; default: the zone in force decides.
        link: where systems name theirs.
    """
    if variable:
        return variable.removeprefix(":")
    try:
        target = str(link.readlink())
    except OSError:
        return None
    return target.partition("zoneinfo/")[2] or None


def judge_zone(wanted: str, system: str | None) -> Check:
    """Decide whether budgets of tokens begin their days when people do."""
    offset = datetime.now(ZoneInfo(wanted)).strftime("%z")
    seen = f"days of token budgets begin in {wanted} ({offset[:3]}:{offset[3:]})"
    if system is None or wanted != "UTC" or system.upper() in {"UTC", "ETC/UTC", "UCT", "ETC/UCT", "GMT"}:
        return ZONE.ok(seen)
    return ZONE.warn(
        f"{seen}, this machine is in {system}", f"set limits.time_zone: {system}, unless UTC is meant"
    )
