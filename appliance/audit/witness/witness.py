"""
A witness: cosigns a log's checkpoint if it continues the last one it cosigned, and no other.

It runs on another party's machine.  Because it never cosigns two histories of one log, a reader that requires
its cosignature sees the same history as all others.

Protocol: C2SP `tlog-witness`, call `add-checkpoint`.  Statuses are those of HTTP; the same decision
serves requests and files that were carried.  Fails closed: what was not made durable is not answered.

Source: c2sp.org/tlog-witness@v1.0.0.
"""

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.audit.checkpoint import (
    HASH_BYTES,
    MAX_NOTE_CHARACTERS,
    Checkpoint,
    VerifierKey,
    parse_body,
    parse_note,
    signature_lines,
    verify_checkpoint,
    with_signatures,
)
from appliance.audit.merkle import EMPTY_ROOT, verify_consistency
from appliance.audit.signing_keys import Signer
from appliance.audit.witness.witness_state import Session, WitnessedHead, WitnessState
from appliance.errors import AuditVerificationError, MalformedCheckpointError

MAX_PROOF = 63
MAX_SIZE = 2**63 - 1
MAX_REQUEST_BYTES = 2**20
SIZE_TYPE = "text/x.tlog.size"
TEXT_TYPE = "text/plain; charset=utf-8"

OK, BAD_REQUEST, FORBIDDEN, NOT_FOUND, CONFLICT, UNPROCESSABLE = 200, 400, 403, 404, 409, 422

_OLD = re.compile(r"old (0|[1-9][0-9]{0,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddCheckpoint:
    """What a witness is asked: to cosign a checkpoint that continues the tree of size `old`."""

    old: int
    proof: tuple[bytes, ...]
    """Consistency proof (RFC 6962) from `old` to the checkpoint; empty from an empty tree."""
    note: str
    """The signed checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    text: str
    """Signature lines, the size it knows (409), or why not; ends in a newline."""

    @property
    def content_type(self) -> str:
        return SIZE_TYPE if self.status == CONFLICT else TEXT_TYPE


def encode_request(request: AddCheckpoint) -> str:
    """Return the text of a request; also the file that is carried to a witness."""
    lines = [f"old {request.old}", *(base64.b64encode(node).decode("ascii") for node in request.proof)]
    return "\n".join(lines) + f"\n\n{request.note}"


def parse_request(text: str) -> AddCheckpoint:
    """Read a request, without judging it; raises MalformedCheckpointError if it is none."""
    head, blank, note = text.partition("\n\n")
    old, *lines = head.split("\n")
    match = _OLD.fullmatch(old)
    if match is None or not blank or len(lines) > MAX_PROOF or len(note) > MAX_NOTE_CHARACTERS:
        raise MalformedCheckpointError(
            "a witness is asked with `old SIZE`, at most 63 proof lines, an empty line and a checkpoint"
        )
    return AddCheckpoint(old=int(match[1]), proof=tuple(map(_parse_node, lines)), note=note)


class Witness:
    """
    Judges requests by what the state remembers.

    `log_keys` are those of the logs it knows, of which one may have several; `clock` is Unix time.
    """

    def __init__(
        self,
        *,
        state: WitnessState,
        signer: Signer,
        log_keys: Sequence[VerifierKey],
        clock: Callable[[], float],
    ) -> None:
        self._state, self._signer, self._clock = state, signer, clock
        self._log_keys = tuple(log_keys)

    def add_checkpoint(self, text: str) -> Answer:
        """
        Cosign the checkpoint if it continues what was cosigned before; blocks on the disk.

        Raises AuditUnavailableError if the state cannot be used; nothing was cosigned then.
        """
        try:
            request = parse_request(text)
            origin = parse_note(request.note).text.partition("\n")[0]
            checkpoint = parse_body(parse_note(request.note).text)
        except MalformedCheckpointError as error:
            return _refusal(BAD_REQUEST, str(error))
        keys = [key for key in self._log_keys if key.name == origin]
        if not keys:
            return _refusal(NOT_FOUND, "this log is not known here")
        if problem := _signature_problem(request.note, keys):
            return _refusal(FORBIDDEN, problem)
        if request.old > checkpoint.size or checkpoint.size > MAX_SIZE:
            return _refusal(BAD_REQUEST, "the old size is larger than the checkpoint's, or that is too large")
        with self._state.exclusive() as session:
            # A crash inside this block: nothing was cosigned.  After it: the state knows a cosignature
            # that was never received; asked again, it answers 409 with that size, and then cosigns it again.
            return self._judge(session, request, checkpoint, text)

    def checkpoints(self) -> dict[str, str]:
        """Return the newest cosigned checkpoint of each log, by origin; raises AuditUnavailableError."""
        with self._state.exclusive() as session:
            return session.notes()

    def _judge(self, session: Session, request: AddCheckpoint, new: Checkpoint, text: str) -> Answer:
        known = session.latest(new.origin)
        old_size, old_root = (known.size, known.root) if known else (0, EMPTY_ROOT)
        now = int(self._clock())
        if request.old != old_size:
            return Answer(status=CONFLICT, text=f"{old_size}\n")
        if problem := _consistency_problem(request, new, old_root):
            session.refuse(new.origin, now, problem, text)
            return _refusal(UNPROCESSABLE, problem)
        body = parse_note(request.note).text
        lines = signature_lines(body, self._signer.signers, time=now)
        # Lines of other signers are not kept: they are not verified.
        signed = "".join(signature_lines_of(request.note, self._log_keys))
        note = with_signatures(f"{body}\n{signed}", lines.splitlines(keepends=True))
        session.save(new.origin, WitnessedHead(size=new.size, root=new.root, note=note))
        return Answer(status=OK, text=lines)


def _signature_problem(note: str, keys: Sequence[VerifierKey]) -> str | None:
    """Return why the note is not signed by the log: one key must have signed, and none wrongly."""
    present = {(line.name, line.key_id) for line in parse_note(note).signatures}
    signed = [key for key in keys if (key.name, key.key_id) in present]
    if not signed:
        return "the checkpoint is not signed by a key of this log that is known here"
    try:
        verify_checkpoint(note, *signed)
    except (AuditVerificationError, MalformedCheckpointError) as error:
        return str(error)
    return None


def _consistency_problem(request: AddCheckpoint, new: Checkpoint, old_root: bytes) -> str | None:
    if new.size == 0 and new.root != EMPTY_ROOT:
        return "an empty tree has another root"
    if request.old == 0:
        return "there is nothing to prove from an empty tree" if request.proof else None
    try:
        verify_consistency(
            old_size=request.old, new_size=new.size, old_root=old_root, new_root=new.root, proof=request.proof
        )
    except AuditVerificationError as error:
        return str(error)
    return None


def signature_lines_of(note: str, keys: Sequence[VerifierKey]) -> list[str]:
    """Return the signature lines of a note that are of these keys."""
    block = note.rpartition("\n\n")[2]
    known = {(key.name, key.key_id) for key in keys}
    lines = zip(parse_note(note).signatures, block.splitlines(keepends=True), strict=True)
    return [line for signature, line in lines if (signature.name, signature.key_id) in known]


def _refusal(status: int, reason: str) -> Answer:
    return Answer(status=status, text=f"{reason}\n")


def _parse_node(line: str) -> bytes:
    try:
        node = base64.b64decode(line, validate=True)
    except ValueError:
        node = b""
    if len(node) != HASH_BYTES or base64.b64encode(node).decode("ascii") != line:
        raise MalformedCheckpointError("a proof has one base64 SHA-256 hash per line")
    return node
