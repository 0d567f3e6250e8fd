"""
The steps of a disposal that read and write the log: what the rules need, the entry, and who has seen it.

The entry is appended next to those of gateways, which sign it with their next checkpoint.
"""

from base64 import b64encode
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from appliance.audit.append import append_entry
from appliance.audit.content.payloads import SqlPayloadStore
from appliance.audit.cosigned import CosignedCheckpoints, newest_by_witness
from appliance.audit.disposal.plan import Facts, Plan
from appliance.audit.disposal.store import DisposalStore
from appliance.audit.entry import JSON
from appliance.audit.entry_types import EntryType
from appliance.audit.forward.cursor import ForwardStore
from appliance.audit.merkle import HashTree
from appliance.audit.store import CHUNK, SqlAuditStore
from appliance.audit.stored import Disposal, Leaf
from appliance.audit.timestamps.store import Timestamps


@dataclass(frozen=True, slots=True, kw_only=True)
class Disposing:
    """Every method blocks, and may raise AuditUnavailableError."""

    store: SqlAuditStore
    witnesses: Collection[str] = ()
    """Names of the configured witnesses."""
    destination: str | None = None
    """Of the SIEM; None if the log is not forwarded."""
    is_timestamped: bool = False

    def facts(self, files: Collection[str]) -> Facts:
        """Read what the rules need; `files` are the stored files and batches."""
        database, latest = self.store.database, self.store.latest_checkpoint()
        content, disposal = SqlPayloadStore(database), DisposalStore(database)
        readings = [entry for _, entry in content.entries(EntryType.AUDIT_READ)]
        exports = [entry.get("end", 0) for entry in readings if entry["operation"] == "export"]
        forwarded = ForwardStore(database).load(self.destination).size if self.destination else None
        return Facts(
            disposed=self.store.disposal().below,
            signed=latest.size if latest else 0,
            exported=max(exports, default=0),
            witnessed=min(self._cosigned()) if self.witnesses else None,
            forwarded=forwarded,
            open_from=disposal.open_from(),
            content_from=disposal.content_from(),
            held=content.holds().keys(),
            files=files,
        )

    def evidence_ms(self) -> list[int]:
        """Return the newest times of others' clocks, of those that are configured; 0 if there is none yet."""
        times = []
        if self.witnesses:
            newest = newest_by_witness(CosignedCheckpoints(self.store.database).all())
            times += [newest[name].time if name in newest else 0 for name in self.witnesses]
        if self.is_timestamped:
            stamp = Timestamps(self.store.database).newest()
            times.append(stamp.time if stamp else 0)
        return [time * 1000 for time in times]

    def leaves(self, start: int) -> Iterator[Leaf]:
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
        """Return the newest disposal that is recorded and not carried out, or not completely."""
        entries = SqlPayloadStore(self.store.database).entries(EntryType.AUDIT_DISPOSED)
        if not entries:
            return None
        index, entry = entries[-1]
        return Disposal(below=entry["below"], index=index)

    def unseen(self, index: int) -> str | None:
        """Say who has to see an entry before its disposal may be carried out, or None if all have."""
        latest = self.store.latest_checkpoint()
        if latest is None or latest.size <= index:
            return f"no checkpoint covers entry {index} yet: a gateway signs it while it runs"
        behind = [name for name, size in self._by_witness().items() if size <= index]
        return f"not cosigned yet by {', '.join(sorted(behind))}" if behind else None

    def _cosigned(self) -> Collection[int]:
        return self._by_witness().values()

    def _by_witness(self) -> dict[str, int]:
        newest = newest_by_witness(CosignedCheckpoints(self.store.database).all())
        return {name: newest[name].size if name in newest else 0 for name in self.witnesses}
