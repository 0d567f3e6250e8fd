"""
Signs the head and publishes it, in an order that makes every rollback detectable.

Entries are durable before: a failed publication delays evidence and loses none.  It is retried and reported,
and appending continues.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note, verify_checkpoint
from appliance.audit.entry import format_time
from appliance.audit.sealed import SealedHead
from appliance.audit.signing_keys import Signer
from appliance.audit.store import AuditStore, Head, StoredCheckpoint
from appliance.errors import AuditForkError, AuditVerificationError, MalformedCheckpointError
from appliance.infra.settings import AuditSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    size: int
    """Entries it covers; 0 for none."""
    time: float
    """When it was signed, in seconds since the epoch; 0 if this process neither signed nor sealed it."""


class Publisher:
    """
    Makes checkpoints and knows when the next one is due.

    `now` is in seconds of one monotonic clock; `clock` is the wall clock.
    """

    def __init__(
        self,
        *,
        store: AuditStore,
        signer: Signer,
        sealed: SealedHead,
        settings: AuditSettings,
        clock: Callable[[], float],
        signed_size: int,
        now: float,
    ) -> None:
        self._store, self._signer, self._sealed = store, signer, sealed
        self._settings, self._clock = settings, clock
        self.published = Published(size=signed_size, time=0.0)
        self.failure: str | None = None
        """Why the last publication failed, or None."""
        self._uncovered_since: float | None = None
        self._tried_at = now

    def committed(self, now: float) -> None:
        """Note that there are entries no checkpoint covers."""
        if self._uncovered_since is None:
            self._uncovered_since = now

    def due_at(self) -> float:
        """Return when the next checkpoint is due, whatever the number of entries."""
        if self._uncovered_since is None:
            return self._tried_at + self._settings.heartbeat_seconds
        due = self._uncovered_since + self._settings.checkpoint_seconds
        return max(due, self._retry_at()) if self.failure else due

    def is_due(self, size: int, now: float) -> bool:
        enough = size - self.published.size >= self._settings.checkpoint_entries
        return now >= self.due_at() or (enough and (not self.failure or now >= self._retry_at()))

    def publish(self, head: Head) -> Published:
        """
        Sign `head`, seal it, and only then publish it.  Blocks; for the writer's thread.

        Raises AuditUnavailableError if it is not published; it may be sealed.
        """
        time = self._clock()
        checkpoint = Checkpoint(origin=self._signer.name, size=head.size, root=head.root)
        note = sign_note(encode_body(checkpoint), self._signer.signers, time=int(time))
        # In this order, a crash between the two leaves a sealed head that the log has reached; in the other
        # order, others could hold a head that is not sealed.
        self._sealed.write(note)
        self._store.save_checkpoint(
            StoredCheckpoint(size=head.size, note=note, time=format_time(int(time * 1000)))
        )
        return Published(size=head.size, time=time)

    def verified(self, checkpoint: StoredCheckpoint) -> Checkpoint:
        """Return what another gateway signed; raises AuditForkError if it did not, with the log's key."""
        try:
            signed = verify_checkpoint(checkpoint.note, self._signer.verifier_key)
        except (AuditVerificationError, MalformedCheckpointError) as error:
            raise AuditForkError(
                f"the log's latest checkpoint was not signed with this key: {error}"
            ) from error
        if signed.size != checkpoint.size:
            raise AuditForkError(
                f"the latest checkpoint covers {signed.size} entries, but is kept as {checkpoint.size}"
            )
        return signed

    def adopt(self, checkpoint: StoredCheckpoint) -> Published:
        """Seal what another gateway signed and this one compared with its tree; raises as `publish`."""
        self._sealed.write(checkpoint.note)
        time = datetime.fromisoformat(checkpoint.time).timestamp()
        return Published(size=checkpoint.size, time=time)

    def succeeded(self, published: Published, now: float) -> None:
        """Note a publication that covers every durable entry."""
        self.published, self.failure, self._uncovered_since, self._tried_at = published, None, None, now

    def failed(self, reason: str, now: float) -> None:
        """Note a publication that failed; it is retried after `checkpoint_seconds`."""
        self.failure, self._tried_at = reason, now

    def _retry_at(self) -> float:
        return self._tried_at + self._settings.checkpoint_seconds
