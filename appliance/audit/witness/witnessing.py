"""
The log's side of witnessing: has checkpoints cosigned, and knows how far.

`cosign` turns one answer of a witness into a kept statement, whether it came over HTTP or by file. The task
`Witnessing` asks every witness with a URL at intervals.  It only reads the store, so a slow, dead or hostile
witness does not affect the log.  Fails open: requests are served without cosignatures; the age of the newest
is a metric with an alert.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from appliance.audit.checkpoint import (
    Checkpoint,
    VerifierKey,
    parse_body,
    parse_note,
    verify_checkpoint,
    verify_cosignatures,
    with_signatures,
)
from appliance.audit.cosigned import Cosigned, CosignedCheckpoints, newest_by_witness
from appliance.audit.merkle import HashTree
from appliance.audit.store import AuditStore
from appliance.audit.witness.home import load_cosigner_keys
from appliance.audit.witness.witness import (
    CONFLICT,
    OK,
    AddCheckpoint,
    Answer,
    encode_request,
    signature_lines_of,
)
from appliance.errors import (
    AuditError,
    AuditUnavailableError,
    AuditVerificationError,
    ConfigurationError,
    MalformedCheckpointError,
)
from appliance.infra.settings import AuditSettings

RAREST_ROUNDS = 64
"""Maximum number of rounds between two attempts at a witness that keeps failing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownWitness:
    name: str
    keys: tuple[VerifierKey, ...]
    url: str | None
    """Base URL; None where cosignatures are carried by file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessLevel:
    """How far the log is witnessed."""

    known: int
    """Witnesses in the settings."""
    cosigned: int
    """Those that have cosigned any checkpoint of this log."""
    size: int
    """Entries the newest cosignature covers; 0 for none."""
    time: int
    """When it was given, in seconds since the epoch by the witness's clock; 0 for never."""

    @property
    def name(self) -> str:
        return "WITNESSED" if self.cosigned else "UNWITNESSED"


def load_witnesses(settings: AuditSettings) -> tuple[KnownWitness, ...]:
    """Raises as `load_cosigner_keys`, and ConfigurationError if a name appears twice."""
    known = tuple(
        KnownWitness(name=entry.name, keys=load_cosigner_keys(entry.name, entry.key), url=entry.url)
        for entry in settings.witnesses
    )
    if len({witness.name for witness in known}) < len(known):
        raise ConfigurationError("audit.witnesses names a witness twice: each has one name of its own")
    return known


def level_of(witnesses: Sequence[KnownWitness], statements: Sequence[Cosigned]) -> WitnessLevel:
    """Return how far the log is witnessed; only witnesses in the settings count."""
    names = {witness.name for witness in witnesses}
    newest_of = newest_by_witness(statements)
    counted = [statement for name, statement in newest_of.items() if name in names]
    newest = max(counted, key=lambda statement: (statement.size, statement.time), default=None)
    return WitnessLevel(
        known=len(names),
        cosigned=len(counted),
        size=newest.size if newest else 0,
        time=newest.time if newest else 0,
    )


def make_request(store: AuditStore, old: int) -> AddCheckpoint:
    """
    Return the request to a witness of size `old` to cosign the latest checkpoint; blocks.

    Raises AuditUnavailableError if the log cannot be read, and AuditVerificationError if there is no
    checkpoint, it is older than `old`, or the log is damaged.
    """
    checkpoint, note = latest_checkpoint(store)
    if old > checkpoint.size:
        raise AuditVerificationError(
            f"the witness has cosigned {old} entries and this log signed {checkpoint.size}: it was "
            "rolled back, or another log has its name and key"
        )
    tree = HashTree(checkpoint.size, store.hashes)
    if tree.root() != checkpoint.root:
        raise AuditVerificationError(
            f"the entries are not those of the checkpoint of {checkpoint.size}: the database is damaged"
        )
    proof = tree.consistency_proof(old) if 0 < old < checkpoint.size else []
    return AddCheckpoint(old=old, proof=tuple(proof), note=note)


def latest_checkpoint(store: AuditStore) -> tuple[Checkpoint, str]:
    """Return the latest checkpoint and its note; raises AuditVerificationError if nothing was signed yet."""
    stored = store.latest_checkpoint()
    if stored is None:
        raise AuditVerificationError("nothing was signed yet; wait for the first checkpoint")
    return parse_body(parse_note(stored.note).text), stored.note


def cosign(note: str, witness: KnownWitness, lines: str = "") -> Cosigned:
    """
    Return what the witness stated about the checkpoint in `note`, with the signature lines it answered.

    Raises AuditVerificationError if not every key of this witness cosigned it, and MalformedCheckpointError
    if the lines are no signature lines.
    """
    candidate = f"{note}{lines}"
    statements = verify_cosignatures(candidate, witness.keys)
    if len(statements) < len(witness.keys):
        message = f"the checkpoint is not cosigned by {witness.name} with the keys in the settings"
        raise AuditVerificationError(message)
    return Cosigned(
        witness=witness.name,
        size=parse_body(parse_note(candidate).text).size,
        time=min(statement.time for statement in statements),
        # Lines of other witnesses are not kept: they are not verified.
        note=with_signatures(note, signature_lines_of(candidate, witness.keys)),
    )


def import_cosigned(
    store: AuditStore, note: str, witnesses: Sequence[KnownWitness], log_keys: Sequence[VerifierKey]
) -> list[Cosigned]:
    """
    Return what known witnesses state in a checkpoint that was carried back; blocks.

    Raises AuditVerificationError if it is not this log's, or no known witness cosigned it,
    MalformedCheckpointError if it is none, and AuditUnavailableError if the log cannot be read.
    """
    checkpoint = verify_checkpoint(note, *log_keys)
    if checkpoint.size > store.head().size or (
        HashTree(checkpoint.size, store.hashes).root() != checkpoint.root
    ):
        raise AuditVerificationError(
            f"the checkpoint of {checkpoint.size} entries is not of this log as it is now: keep the file, "
            "it proves that the log was changed or cut"
        )
    signed = {signature.name for signature in parse_note(note).signatures}
    found = [cosign(note, witness) for witness in witnesses if witness.name in signed]
    if not found:
        raise AuditVerificationError("no witness in the settings (audit.witnesses) cosigned this checkpoint")
    return found


class Courier(Protocol):
    async def add_checkpoint(self, url: str, text: str) -> Answer:
        """Return what the witness answered; raises AuditUnavailableError when it cannot be reached."""


class Witnessing:
    """
    The task that asks the witnesses.

    `store` is only read, from other threads than the event loop's; of all `witnesses` in the settings those
    with a URL are asked; `seconds` pass from one round to the next; `report` is called with the name and
    problem of a witness when its problem changes, None if it is solved.
    """

    def __init__(
        self,
        *,
        store: AuditStore,
        kept: CosignedCheckpoints,
        witnesses: Sequence[KnownWitness],
        courier: Courier,
        seconds: float,
        report: Callable[[str, str | None], None],
    ) -> None:
        self._store, self._kept, self._courier = store, kept, courier
        self._witnesses, self._seconds, self._report = tuple(witnesses), seconds, report
        self._size: dict[str, int] | None = None
        """Assumed size of each witness; its own answer decides."""
        self._problems: dict[str, str | None] = {}
        self._failures: dict[str, int] = {}
        self._rounds = 0
        self.level = level_of(self._witnesses, ())
        """How far the log is witnessed, as of the last round."""

    async def run(self, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Ask every witness at intervals, until cancelled."""
        while True:
            await self.round()
            await pause(self._seconds)

    async def round(self) -> None:
        """Ask every witness that has a URL once; what fails is reported, and tried again later."""
        try:
            if self._size is None:
                statements = await asyncio.to_thread(self._kept.all)
                self._size = {name: known.size for name, known in newest_by_witness(statements).items()}
            due = [witness for witness in self._witnesses if witness.url and self._is_due(witness.name)]
            self._rounds += 1
            await asyncio.gather(*(self._ask_and_report(witness) for witness in due))
            statements = await asyncio.to_thread(self._kept.all)
        except AuditUnavailableError:
            return  # the log itself reports the same failure
        self.level = level_of(self._witnesses, statements)

    def _is_due(self, name: str) -> bool:
        """Whether to ask it in this round; the more often it failed in a row, the rarer."""
        every = min(1 << self._failures.get(name, 0), RAREST_ROUNDS)
        return self._rounds % every == 0

    async def _ask_and_report(self, witness: KnownWitness) -> None:
        try:
            await self._ask(witness)
            problem = None
        except AuditError as error:
            problem = str(error)
        if self._problems.get(witness.name) != problem:
            self._report(witness.name, problem)
        self._problems[witness.name] = problem
        self._failures[witness.name] = self._failures.get(witness.name, 0) + 1 if problem else 0

    async def _ask(self, witness: KnownWitness) -> None:
        """Ask once, and again if the witness has another size than assumed."""
        sizes = self._size if self._size is not None else {}
        answer, note = await self._try(witness, sizes.get(witness.name, 0))
        if answer.status == CONFLICT:
            answer, note = await self._try(witness, _parse_size(answer.text))
        if answer.status != OK:
            raise AuditVerificationError(f"{witness.name} answered {answer.status}: {answer.text.strip()}")
        statement = cosign(note, witness, answer.text)
        sizes[witness.name] = statement.size
        await asyncio.to_thread(self._kept.save, statement)

    async def _try(self, witness: KnownWitness, old: int) -> tuple[Answer, str]:
        made = await asyncio.to_thread(make_request, self._store, old)
        return await self._courier.add_checkpoint(witness.url or "", encode_request(made)), made.note


def _parse_size(text: str) -> int:
    size = text.removesuffix("\n")
    if not size.isascii() or not size.isdecimal() or len(size) > len(str(2**63)):
        raise MalformedCheckpointError("the witness did not name its size")
    return int(size)
