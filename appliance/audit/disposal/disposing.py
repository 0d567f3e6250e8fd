"""
The steps of a disposal that read and write the log: what the rules need, the entry, and who has seen it.

The entry is appended next to those of gateways, which sign it with their next checkpoint.
"""

from base64 import b64encode
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Self

from appliance.audit.append import append_entry
from appliance.audit.content.payloads import SqlPayloadStore
from appliance.audit.cosigned import CosignedCheckpoints, newest_by_witness
from appliance.audit.disposal.plan import LEAST_DAYS, Facts, Plan, check_cutoff, latest_cutoff, make_plan
from appliance.audit.disposal.store import DisposalStore
from appliance.audit.entry import JSON, format_time
from appliance.audit.entry_types import EntryType
from appliance.audit.forward.cursor import ForwardStore
from appliance.audit.merkle import HashTree
from appliance.audit.store import CHUNK, SqlAuditStore
from appliance.audit.stored import Disposal, Leaf, place_of
from appliance.audit.timestamps.store import Timestamps
from appliance.errors import ControlRefusedError
from appliance.infra.settings import AuditSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Disposing:
    """Every method blocks, and may raise AuditUnavailableError."""

    store: SqlAuditStore
    witnesses: Collection[str] = ()
    """Names of the configured witnesses."""
    destination: str | None = None
    """Of the SIEM; None if the log is not forwarded."""
    is_timestamped: bool = False

    @classmethod
    def of(cls, store: SqlAuditStore, settings: AuditSettings) -> Self:
        return cls(
            store=store,
            witnesses=[witness.name for witness in settings.witnesses],
            destination=settings.forward.destination if settings.forward else None,
            is_timestamped=settings.timestamp_certificate_file is not None,
        )

    def plan(self, before_ms: int, *, now_ms: int, files: Collection[str]) -> Plan:
        """
        Decide what may be disposed of; `files` are as in `Facts`.

        Raises ControlRefusedError if `before_ms` is too late.
        """
        check_cutoff(format_time(before_ms), format_time(self.latest_cutoff(now_ms)))
        facts = self._facts(files)
        return make_plan(facts, self._leaves(facts.disposed), format_time(before_ms))

    def latest_cutoff(self, now_ms: int, days: int = LEAST_DAYS) -> int:
        """Return the time, in milliseconds, before which entries are older than so many days."""
        return max(0, latest_cutoff(now_ms, self._evidence_ms(), days))

    def _facts(self, files: Collection[str]) -> Facts:
        database, latest = self.store.database, self.store.latest_checkpoint()
        content, disposal = SqlPayloadStore(database), DisposalStore(database)
        readings = [entry for _, entry in content.entries(EntryType.AUDIT_READ)]
        exports = [int(entry["end"]) for entry in readings if entry.get("operation") == "export"]
        forwarded = ForwardStore(database).load(self.destination).size if self.destination else None
        disposed = self.store.disposal().below
        return Facts(
            disposed=disposed,
            signed=latest.size if latest else 0,
            exported=max(exports, default=0),
            witnessed=min(self._by_witness().values()) if self.witnesses else None,
            forwarded=forwarded,
            open_from=disposal.open_from(),
            content_from=disposal.content_from(),
            held=content.holds().keys(),
            files=files,
            sequences=dict(filter(None, map(place_of, self.store.leaves(0, disposed)))),
        )

    def _evidence_ms(self) -> list[int]:
        """Return the newest times of others' clocks, of those that are configured; 0 if there is none yet."""
        times = []
        if self.witnesses:
            newest = newest_by_witness(CosignedCheckpoints(self.store.database).all())
            times += [newest[name].time if name in newest else 0 for name in self.witnesses]
        if self.is_timestamped:
            stamp = Timestamps(self.store.database).newest()
            times.append(stamp.time if stamp else 0)
        return [time * 1000 for time in times]

    def _leaves(self, start: int) -> Iterator[Leaf]:
        while leaves := self.store.leaves(start, start + CHUNK):
            yield from leaves
            start += CHUNK

    def record(self, plan: Plan, basis: str, *, actor: str, origin: str, clock: Callable[[], float]) -> int:
        """Append the entry of a plan and return its index; nothing is removed yet."""
        facts = plan.facts
        fields: dict[str, JSON | None] = {
            "below": plan.below,
            "previous": plan.previous,
            "root": b64encode(HashTree(plan.below, self.store.hashes).root()).decode(),
            "newest": plan.newest,
            "exported": facts.exported,
            "legal_basis": basis,
            "actor": actor,
            "witnessed": facts.witnessed,
            "forwarded": facts.forwarded,
        }
        return append_entry(self.store, EntryType.AUDIT_DISPOSED, fields, origin=origin, clock=clock)

    def recorded(self) -> Disposal | None:
        """Return the newest disposal that is recorded and not carried out to its end."""
        entries = SqlPayloadStore(self.store.database).entries(EntryType.AUDIT_DISPOSED)
        if not entries:
            return None
        index, entry = entries[-1]
        disposal = Disposal(below=entry["below"], index=index)
        return None if DisposalStore(self.store.database).is_complete(disposal) else disposal

    def unseen(self, disposal: Disposal) -> str | None:
        """Say who has to see its entry before a disposal may be carried out, or None if all have."""
        latest = self.store.latest_checkpoint()
        if latest is None or latest.size <= disposal.index:
            return f"no checkpoint covers entry {disposal.index} yet: a gateway signs it while it runs"
        behind = [name for name, size in self._by_witness().items() if size <= disposal.index]
        return (
            f"entry {disposal.index} is not cosigned yet by {', '.join(sorted(behind))}" if behind else None
        )

    def carry_out(self, disposal: Disposal) -> Iterator[int]:
        """
        Remove the entries of a recorded disposal; yield how many entries are done, of twice `below`.

        Interrupted anywhere, it can be called again.  Raises ControlRefusedError if a rule has come to keep
        the entries since it was recorded, AuditVerificationError if they are not those of the log.
        """
        store = DisposalStore(self.store.database)
        if reason := self.unseen(disposal):
            raise ControlRefusedError(reason)
        yield from store.keep(disposal.below)
        self._check_rules(disposal, store)
        store.begin(disposal)
        for done in store.run():
            yield disposal.below + done

    def _check_rules(self, disposal: Disposal, store: DisposalStore) -> None:
        content = SqlPayloadStore(self.store.database)
        placed = {entry["tenant"]: at for at, entry in content.entries(EntryType.HOLD_PLACED)}
        since = [tenant for tenant in content.holds() if placed[tenant] > disposal.index]
        if since:
            raise ControlRefusedError(
                f"{', '.join(sorted(since))} came under a legal hold after entry {disposal.index}, which "
                "disposes of entries: release it first"
            )
        stored = store.content_from()
        if stored is not None and stored < disposal.below:
            raise ControlRefusedError(
                f"content of entry {stored} is stored again, from a backup: erase it first"
            )

    def _by_witness(self) -> dict[str, int]:
        newest = newest_by_witness(CosignedCheckpoints(self.store.database).all())
        return {name: newest[name].size if name in newest else 0 for name in self.witnesses}
