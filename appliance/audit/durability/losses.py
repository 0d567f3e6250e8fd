"""
Entries that got into neither the log nor the spool, and what the log has to be told because of them.

Three things follow from a lost entry.  A request whose intent was lost must not get an end.  A request
that began and whose end was lost must be closed.  And what was let pass (mode `open`) must be counted,
so that an `audit.gap` entry can admit it.  Bookkeeping only; no I/O.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from appliance.audit.durability.arrivals import Arrivals
from appliance.audit.durability.gap import REASON_CHARACTERS, Gap, name_of
from appliance.audit.durability.handed import Handed
from appliance.audit.entry import format_time
from appliance.audit.merkle import hash_leaf

ENTRY_NOT_DURABLE = "entry_not_durable"


class Losses:
    """What is missing, and for how long that has to be remembered."""

    def __init__(
        self,
        gap: Gap | None,
        unended: Iterable[str],
        clock: Callable[[], float],
        dropped: Callable[[int], None],
    ) -> None:
        """
        Start with what a former process left.

        Args:
            gap: entries it did not record.
            unended: requests it spooled an intent of, and no end.
            clock: seconds since the epoch.
            dropped: told of every loss that was let pass.
        """
        self.gap = gap
        """What the log has not admitted yet."""
        self.dropped = 0
        """Entries of this process that were let pass."""
        self.unended: dict[str, str] = dict.fromkeys(unended, "gateway_stopped")
        """Requests that began, or may have, and whose end is kept nowhere; with the reason."""
        self._clock, self._tell = clock, dropped
        # Running requests whose intent was dropped: their end is dropped too.
        self._lost: set[str | None] = set()
        # Entries the log was given and may have taken although it said no.
        self._doubtful: set[str] = set()

    def is_lost(self, handed: Handed) -> bool:
        """Whether it ends a request whose intent was dropped."""
        return handed.ends and handed.request_id in self._lost

    def doubt(self, handed: Handed) -> None:
        """Remember that the log may have taken an entry, whatever it says."""
        self._doubtful.add(handed.entry.id)

    def refuse(self, refused: Sequence[Handed]) -> None:
        """Note entries whose callers are told that they are not durable."""
        in_vain = {one.request_id for one in refused if one.begins}
        for handed in refused:
            self._leave_unended(handed, began_in_vain=handed.request_id in in_vain)

    def drop(self, dropped: Sequence[Handed], reason: str, size: int) -> bool:
        """
        Note entries whose callers go on without them.

        Args:
            dropped: in order.
            reason: why, for `audit.gap`.
            size: durable entries when this began.

        Returns:
            Whether this is the first of a gap.
        """
        for handed in dropped:
            self._leave_unended(handed, began_in_vain=self.is_lost(handed))
            if handed.begins:
                self._lost.add(handed.request_id)
            elif handed.ends:
                self._lost.discard(handed.request_id)
        began = self.gap is None
        if self.gap is None:
            self.gap = Gap(reason=reason[:REASON_CHARACTERS], entries=0, since=self._time(), size=size)
        in_doubt = (one for one in dropped if one.entry.id in self._doubtful)
        self.gap = self.gap.grown(len(dropped), (name_of(hash_leaf(one.leaf)) for one in in_doubt))
        self.dropped += len(dropped)
        self._tell(len(dropped))
        return began

    def missing(self, gap: Gap, seen: Arrivals) -> int:
        """Entries of a gap that the log neither holds after all nor has admitted."""
        doubtful = set(gap.doubtful)
        recorded = sum(name_of(leaf_hash) in doubtful for leaf_hash in seen.leaf_hashes) if doubtful else 0
        return gap.entries - seen.gaps[gap.since] - recorded

    def admit(self, gap: Gap, until: str, size: int) -> None:
        """Note that the log has admitted a gap; what came on top of it is the next one."""
        more = self.gap.entries - gap.entries if self.gap else 0
        self.gap = replace(gap, entries=more, since=until, size=size, doubtful=()) if more else None

    def recovered(self) -> None:
        """Note that nothing is in doubt any more."""
        self._doubtful.clear()

    def _leave_unended(self, handed: Handed, *, began_in_vain: bool) -> None:
        in_doubt = handed.begins and handed.entry.id in self._doubtful
        if handed.request_id and (in_doubt or (handed.ends and not began_in_vain)):
            self.unended[handed.request_id] = ENTRY_NOT_DURABLE

    def _time(self) -> str:
        return format_time(int(self._clock() * 1000))
