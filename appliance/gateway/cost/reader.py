"""
Reads the rows of some days and reports on them: for the CLI at once, for a running gateway in a process.

A month of many tenants has some hundred thousand rows.  A thread that reads these holds the interpreter's
lock, and with it every request, for hundreds of milliseconds.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from contextlib import closing
from datetime import date
from zoneinfo import ZoneInfo

from pydantic import ValidationError

from appliance.errors import ApplianceError, CostUnavailableError
from appliance.gateway.cost.report import CostReport, ReportPart
from appliance.gateway.cost.rows import begin_of
from appliance.gateway.cost.series import UsageSpan, usage_by_span
from appliance.gateway.cost.store import CostStore
from appliance.gateway.cost.summary import make_report
from appliance.infra.settings import CostSettings

MODULE = "appliance.gateway.cost.reader"
READ_SECONDS = 120.0
"""Maximum duration of a process."""
NICENESS = 10
"""Of a process: requests come first."""


class UsageQuery(ReportPart):
    database_url: str
    first: date
    end: date
    """Exclusive."""
    time_zone: str
    settings: CostSettings
    now: float
    """Unix time."""


class RecordedUsage(ReportPart):
    report: CostReport
    spans: tuple[UsageSpan, ...]
    """Hours of a single day, else days."""
    written_until: int
    """Unix time of the last write of any gateway; 0 for none."""


def read_usage(query: UsageQuery) -> RecordedUsage:
    """Blocks; raises CostUnavailableError."""
    zone = ZoneInfo(query.time_zone)
    with closing(CostStore(query.database_url)) as store:
        recorded = store.read(begin_of(query.first, zone), begin_of(query.end, zone))
    report = make_report(
        recorded, first=query.first, end=query.end, settings=query.settings, zone=zone, now=query.now
    )
    spans = usage_by_span(recorded, report, first=query.first, end=query.end, zone=zone)
    until = max((period.until for period in recorded.periods), default=0)
    return RecordedUsage(report=report, spans=spans, written_until=until)


class UsageReader:
    """Reads in a process of its own, one at a time, and keeps the last result until gateways write again."""

    def __init__(self, *, database_url: str, settings: CostSettings, time_zone: str) -> None:
        self._database_url, self._settings, self.time_zone = database_url, settings, time_zone
        self._turn = asyncio.Lock()
        self._kept: tuple[UsageQuery, RecordedUsage] | None = None

    async def read(self, first: date, end: date, now: float) -> RecordedUsage:
        """Of the days from `first` to before `end`; `now` is Unix time; raises CostUnavailableError."""
        query = UsageQuery(
            database_url=self._database_url,
            first=first,
            end=end,
            time_zone=self.time_zone,
            settings=self._settings,
            now=now,
        )
        async with self._turn:
            if self._kept is not None:
                known, usage = self._kept
                is_same = query == known.model_copy(update={"now": now})
                if is_same and 0 <= now - known.now < self._settings.flush_seconds:
                    return usage
            usage = await _read_in_process(query)
            self._kept = query, usage
            return usage


async def _read_in_process(query: UsageQuery) -> RecordedUsage:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", MODULE), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        async with asyncio.timeout(READ_SECONDS):
            # Not in its arguments, which other users of the machine can read: the URL may have a password.
            answer, problem = await process.communicate(query.model_dump_json().encode())
    except TimeoutError:
        message = f"reading took more than {READ_SECONDS:.0f} seconds: use `appliance cost report`"
        raise CostUnavailableError(message) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return RecordedUsage.model_validate_json(answer)
    except ValidationError as error:
        lines = problem.decode(errors="replace").strip().splitlines()
        message = lines[-1] if lines else f"the process that read it ended with {process.returncode}"
        raise CostUnavailableError(message) from error


def _main() -> None:
    os.nice(NICENESS)
    try:
        usage = read_usage(UsageQuery.model_validate_json(sys.stdin.read()))
    except ApplianceError as error:
        sys.exit(str(error))
    sys.stdout.write(usage.model_dump_json())


if __name__ == "__main__":
    _main()
