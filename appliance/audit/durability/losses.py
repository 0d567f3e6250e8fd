"""
Entries that are not known to be in the log, and what the log has to record about them.

A request whose intent was refused must not get an end.  A request that began and whose end was refused must
be closed.  An entry that was acknowledged from the spool and that the log then refused is counted: an
`audit.gap` entry admits it.  A gap that could not be admitted waits in one small file for the next start.
Bookkeeping only, but for `load_gap` and `save_gap`.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from appliance.audit.durability.in_flight import TrackedEntry
from appliance.audit.entry import format_time
from appliance.errors import ConfigurationError
from appliance.infra.files import OWNER_ONLY, write_atomically

NAME_CHARACTERS = 16
REASON_CHARACTERS = 150
ENTRY_NOT_DURABLE = "entry_not_durable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Entries that are missing from the log, and that it has not admitted yet."""

    reason: str
    entries: int
    since: str
    """Entry time of the first."""
    size: int
    """Durable entries when it began: an `audit.gap` that admits it comes after."""
    doubtful: tuple[str, ...] = ()
    """Those that may be in the log all the same, by `short_name`; older versions wrote them."""


def short_name(leaf_hash: bytes) -> str:
    """Beginning of a leaf hash, unique among the doubtful entries of one gap."""
    return leaf_hash.hex()[:NAME_CHARACTERS]


def load_gap(path: Path) -> Gap | None:
    """Read the gap that a former process left; raises ConfigurationError."""
    try:
        # Older versions padded the file with zeros.
        content = path.read_bytes().rstrip(b"\0 ") if path.exists() else b""
        if not content:
            return None
        fields = json.loads(content)
        return Gap(**fields | {"doubtful": tuple(fields["doubtful"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"{path} cannot be read ({error}): it counts unrecorded entries; note it, remove it"
        raise ConfigurationError(message) from error


def save_gap(path: Path, gap: Gap | None) -> None:
    """Replace what is kept, durably; raises OSError."""
    if gap is not None or path.exists():
        content = b"" if gap is None else json.dumps(asdict(gap), ensure_ascii=False).encode()
        write_atomically(path, content, mode=OWNER_ONLY)


class Losses:
    """
    What is missing, for as long as it has to be remembered.

    A former process left `gap`, and spooled an intent and no end of the requests `unended`; `clock` is Unix
    time; `count_dropped` counts entries that were acknowledged and lost.
    """

    def __init__(
        self,
        gap: Gap | None,
        unended: Iterable[str],
        clock: Callable[[], float],
        count_dropped: Callable[[], None],
    ) -> None:
        self.gap = gap
        """What the log has not admitted yet."""
        self.dropped = 0
        """Entries of this process that were acknowledged and lost."""
        self.unended: dict[str, str] = dict.fromkeys(unended, "gateway_stopped")
        """Requests that began, or may have, and whose end is kept nowhere; with the reason."""
        self._clock, self._count_dropped = clock, count_dropped
        # Requests whose spooled intent the log refused: their end must not get into it.
        self._lost: set[str | None] = set()
        self.doubtful: set[str] = set()
        """Ids of entries the log was given and may have taken although it reported an error."""

    def is_lost(self, entry: TrackedEntry) -> bool:
        """Whether it ends a request whose intent was lost."""
        return entry.ends_request and entry.request_id in self._lost

    def refuse(self, refused: Sequence[TrackedEntry]) -> None:
        """Note entries whose callers learn that they are not durable."""
        in_vain = {one.request_id for one in refused if one.begins_request}
        for entry in refused:
            self._leave_unended(entry, began_in_vain=entry.request_id in in_vain)

    def drop(self, entry: TrackedEntry, reason: str, size: int) -> None:
        """Count an acknowledged entry that the log refused; `size` is that of the log when spooling began."""
        self._leave_unended(entry, began_in_vain=self.is_lost(entry))
        if entry.begins_request:
            self._lost.add(entry.request_id)
        elif entry.ends_request:
            self._lost.discard(entry.request_id)
        if self.gap is None:
            since = format_time(int(self._clock() * 1000))
            self.gap = Gap(reason=reason[:REASON_CHARACTERS], entries=0, since=since, size=size)
        self.gap = replace(self.gap, entries=self.gap.entries + 1)
        self.dropped += 1
        self._count_dropped()

    def _leave_unended(self, entry: TrackedEntry, *, began_in_vain: bool) -> None:
        in_doubt = entry.begins_request and entry.entry.id in self.doubtful
        if entry.request_id and (in_doubt or (entry.ends_request and not began_in_vain)):
            self.unended[entry.request_id] = ENTRY_NOT_DURABLE
