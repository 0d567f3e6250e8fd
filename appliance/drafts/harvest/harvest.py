"""
From kept content to a data set: what the log knows, then what is read, then what is kept of it.

    survey ─► log says `begun` ─► open, tokenize, seal beside the content ─► manifest ─► log says `done`

Nothing is read before the log says so.  Killed anywhere it leaves samples that no manifest names,
which go with their requests, and which the next harvest finds and uses.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from appliance.audit.content.samples import Answered
from appliance.audit.entry import JSON, format_time
from appliance.audit.registry import EntryType
from appliance.drafts.harvest.answered import read_answer
from appliance.drafts.harvest.asked import read_body
from appliance.drafts.harvest.candidate import POLICY, ROUTES, Candidate, Wanted, judge
from appliance.drafts.harvest.conversation import Conversation, UnusableError
from appliance.drafts.harvest.dataset import save_manifest
from appliance.drafts.harvest.manifest import Entry, Manifest, is_held_out
from appliance.drafts.harvest.reasons import Skipped
from appliance.drafts.harvest.sample import Sample
from appliance.drafts.harvest.selection import Selection
from appliance.drafts.harvest.tokenizer import Tokens
from appliance.drafts.harvest.vault import Content
from appliance.errors import AuditError, DraftRefusedError

MOST_CANDIDATES = 200_000
"""Requests that are looked at in the log, the newest first."""
LOOK_AGAIN_AFTER = 100
"""Requests that are read between two looks at who allows it."""
TENANTS_PER_ENTRY = 40
"""Names of 63 characters that fit into one entry beside the rest."""

Journal = Callable[[EntryType, dict[str, JSON | None]], int]
"""Writes one entry of the audit log, durable on return; raises AuditError."""


class Samples(Protocol):
    """What is asked of `harvest.vault`."""

    def open_content(self, request_id: str, tenant: str) -> Content | Skipped:
        """Open body and answer."""

    def keep(self, sample: Sample) -> Sample | Skipped:
        """Keep a sample beside them."""


class Tokenizer(Protocol):
    """What is asked of `harvest.tokenizer`."""

    def tokenize(
        self, conversation: Conversation, *, prompt_tokens: int, completion_tokens: int
    ) -> Tokens | Skipped:
        """Return the tokens of prompt and answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What the log knows of the requests that could be taken."""

    candidates: tuple[Candidate, ...]
    skipped: Counter[Skipped]


@dataclass(slots=True, kw_only=True)
class Taken:
    """What was taken so far, and why the rest was not."""

    entries: list[Entry] = field(default_factory=list)
    skipped: Counter[Skipped] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a harvest works with."""

    samples: Samples
    tokenizer: Tokenizer
    journal: Journal
    allowing: Callable[[], Collection[str]]
    """Names of the tenants that allow it now."""
    clock: Callable[[], float]
    drafts: Path
    """The registry's directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """What it is done for."""

    target: str
    """Digest of the target's weights."""
    tokenizer: str
    """Digest of its tokenizer and template."""
    words: str = ""
    """Why, in the operator's words; goes into the log."""


def survey(found: Iterable[Answered], wanted: Wanted) -> Survey:
    """
    Sort requests by what the log says of them; no content is read.

    Args:
        found: requests of tenants that allow it, the newest first.
        wanted: what the harvest is after.
    """
    candidates: list[Candidate] = []
    skipped: Counter[Skipped] = Counter()
    for each in found:
        judged = judge(each.request_id, each.tenant, each.entry, wanted)
        if isinstance(judged, Skipped):
            skipped[judged] += 1
        else:
            candidates.append(judged)
        if len(candidates) >= MOST_CANDIDATES:
            break
    return Survey(candidates=tuple(candidates), skipped=skipped)


def rehearse(selection: Selection) -> tuple[Candidate, ...]:
    """Return what would be taken if all of it could be used; nothing is read."""
    chosen = []
    while (candidate := selection.next()) is not None:
        if selection.take(candidate):
            chosen.append(candidate)
    return tuple(chosen)


def harvest(
    surveyed: Survey, selection: Selection, purpose: Purpose, parts: Parts
) -> tuple[Manifest, Counter[Skipped]]:
    """
    Make a data set, and say in the log that content was read for it.

    Args:
        surveyed: what the log knows.
        selection: of its candidates; nobody has asked it yet.
        purpose: what it is for.
        parts: what it works with.

    Returns:
        The manifest, which is written, and how many requests were not taken for each reason.

    Raises:
        AuditError: it could not be recorded, and nothing was read; or content cannot be read.
        DraftRefusedError: nothing can be taken.
        DraftStorageError: the tokenizer's process died, or the manifest cannot be written.
    """
    tenants = sorted({candidate.tenant for candidate in surveyed.candidates})
    if not tenants:
        raise DraftRefusedError(f"there is nothing to harvest ({in_words(surveyed.skipped)})")
    about: dict[str, JSON | None] = {"policy": POLICY, "purpose": purpose.words or None}
    _record(parts.journal, tenants, {**about, "stage": "begun"})
    taken = take(selection, purpose, parts)
    skipped = surveyed.skipped + taken.skipped
    manifest = Manifest(
        target=purpose.target,
        tokenizer=purpose.tokenizer,
        policy=POLICY,
        made=format_time(int(parts.clock() * 1000)),
        samples=tuple(sorted(taken.entries, key=lambda entry: entry.request_id)),
    )
    done: dict[str, JSON | None] = {
        **about,
        "stage": "done",
        "samples": len(manifest.samples),
        "tokens": sum(entry.tokens for entry in manifest.samples),
    }
    if not manifest.samples:
        _record(parts.journal, tenants, done)
        raise DraftRefusedError(f"nothing could be harvested ({in_words(skipped)})")
    path = save_manifest(parts.drafts, manifest)
    # A crash before the next line: a data set that can be used, and an entry that says it was begun.
    try:
        _record(parts.journal, tenants, {**done, "dataset": manifest.digest})
    except AuditError:
        # What the log does not know of is not to be trained on; the samples stay for the next time.
        with suppress(OSError):
            path.unlink()
        raise
    return manifest, skipped


def take(selection: Selection, purpose: Purpose, parts: Parts) -> Taken:
    """Read, tokenize and keep one request after the other, until there is enough; raises as `harvest`."""
    taken, prompts = Taken(), set[bytes]()
    allowing: Collection[str] = parts.allowing()
    count = 0
    while (candidate := selection.next()) is not None:
        count += 1
        if count % LOOK_AGAIN_AFTER == 0:
            allowing = parts.allowing()
        made = (
            _sample(candidate, purpose, parts, prompts) if candidate.tenant in allowing else Skipped.WITHDRAWN
        )
        if isinstance(made, Skipped):
            taken.skipped[made] += 1
        elif selection.take(candidate, len(made.token_ids)):
            taken.entries.append(_entry(made))
    left = selection.left + selection.without_room
    if left:
        taken.skipped[Skipped.NO_ROOM] += left
    # Whoever took the permission back meanwhile is not in it.
    allowing = parts.allowing()
    withdrawn = [entry for entry in taken.entries if entry.tenant not in allowing]
    if withdrawn:
        taken.skipped[Skipped.WITHDRAWN] += len(withdrawn)
        taken.entries = [entry for entry in taken.entries if entry.tenant in allowing]
    return taken


def in_words(skipped: Counter[Skipped]) -> str:
    """Reasons and their counts on one line."""
    return ", ".join(f"{count} {reason}" for reason, count in skipped.most_common()) or "no content is kept"


def _sample(candidate: Candidate, purpose: Purpose, parts: Parts, prompts: set[bytes]) -> Sample | Skipped:
    content = parts.samples.open_content(candidate.request_id, candidate.tenant)
    if isinstance(content, Skipped):
        return content
    kind = ROUTES[candidate.route]
    try:
        conversation = Conversation(
            asked=read_body(kind, content.body), answer=read_answer(kind, content.answer)
        )
    except UnusableError as error:
        return error.reason
    tokens = parts.tokenizer.tokenize(
        conversation,
        prompt_tokens=candidate.prompt_tokens,
        completion_tokens=candidate.completion_tokens,
    )
    if isinstance(tokens, Skipped):
        return tokens
    prompt, answer = tokens
    told_by = hashlib.sha256(",".join(map(str, prompt)).encode()).digest()
    if told_by in prompts:
        return Skipped.DUPLICATE
    kept = parts.samples.keep(
        Sample(
            request_id=candidate.request_id,
            tenant=candidate.tenant,
            template=candidate.template,
            context=candidate.context,
            token_ids=prompt + answer,
            loss_mask=(False,) * len(prompt) + (True,) * len(answer),
            tokenizer=purpose.tokenizer,
        )
    )
    if isinstance(kept, Sample):
        prompts.add(told_by)
    return kept


def _entry(sample: Sample) -> Entry:
    return Entry(
        request_id=sample.request_id,
        tenant=sample.tenant,
        template=sample.template,
        context=sample.context,
        tokens=len(sample.token_ids),
        digest=sample.digest,
        held_out=is_held_out(sample.request_id),
    )


def _record(journal: Journal, tenants: Sequence[str], fields: dict[str, JSON | None]) -> None:
    """Write an entry, or several where the tenants' names do not fit into one; counts are in the first."""
    for start in range(0, len(tenants), TENANTS_PER_ENTRY):
        named = tuple(tenants[start : start + TENANTS_PER_ENTRY])
        journal(EntryType.DRAFT_HARVESTED, {**fields, "tenants": named})
        fields = {name: value for name, value in fields.items() if name not in {"samples", "tokens"}}
