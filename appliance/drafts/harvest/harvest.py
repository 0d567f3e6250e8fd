"""
Turns kept content into a data set.

    survey ─► log `begun` ─► open, tokenize, seal with the content ─► manifest ─► log `done`

No content is read before the `begun` entry is durable.  A crash leaves samples that no manifest names; they
are erased with their requests, and the next harvest reuses them.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from appliance.audit.content.samples import Answered
from appliance.audit.entry import JSON, format_time
from appliance.audit.entry_types import EntryType
from appliance.drafts.harvest.candidate import POLICY, ROUTES, HarvestCandidate, HarvestFilter, classify
from appliance.drafts.harvest.content_vault import ContentVault
from appliance.drafts.harvest.conversation import Conversation, Skipped, UnusableError
from appliance.drafts.harvest.dataset import save_manifest
from appliance.drafts.harvest.dataset_manifest import DatasetManifest, ManifestEntry, is_held_out
from appliance.drafts.harvest.request_body import read_body
from appliance.drafts.harvest.response_body import read_answer
from appliance.drafts.harvest.sample import TrainingSample
from appliance.drafts.harvest.selection import SampleSelection
from appliance.drafts.harvest.tokenizer import TargetTokenizer
from appliance.errors import AuditError, DraftRefusedError

MAX_CANDIDATES = 200_000
"""Maximum candidates taken from the log, newest first."""
RECHECK_AFTER = 100
"""Requests read between two checks of the tenants' permissions."""
TENANTS_PER_ENTRY = 40
"""Tenant names (up to 63 characters) that fit into one entry."""

Journal = Callable[[EntryType, dict[str, JSON | None]], int]
"""Writes one audit entry, durable on return; raises AuditError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    candidates: tuple[HarvestCandidate, ...]
    skipped: Counter[Skipped]


@dataclass(slots=True, kw_only=True)
class HarvestResult:
    entries: list[ManifestEntry] = field(default_factory=list)
    skipped: Counter[Skipped] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class HarvestTools:
    samples: ContentVault
    tokenizer: TargetTokenizer
    journal: Journal
    permitted: Callable[[], Collection[str]]
    """Names of the tenants that allow harvesting now."""
    clock: Callable[[], float]
    drafts: Path
    """The registry's directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarvestPurpose:
    target: str
    """Digest of the target's weights."""
    tokenizer: str
    """Digest of its tokenizer and template."""
    text: str = ""
    """The operator's reason, for the log."""


def survey(found: Iterable[Answered], wanted: HarvestFilter) -> Survey:
    """Filter requests (newest first) by their audit entries; reads no content."""
    candidates: list[HarvestCandidate] = []
    skipped: Counter[Skipped] = Counter()
    for each in found:
        judged = classify(each.request_id, each.tenant, each.entry, wanted)
        if isinstance(judged, Skipped):
            skipped[judged] += 1
        else:
            candidates.append(judged)
        if len(candidates) >= MAX_CANDIDATES:
            break
    return Survey(candidates=tuple(candidates), skipped=skipped)


def preview(selection: SampleSelection) -> tuple[HarvestCandidate, ...]:
    """Candidates that a harvest would take if all were usable; reads no content."""
    chosen = []
    while (candidate := selection.next()) is not None:
        if selection.take(candidate):
            chosen.append(candidate)
    return tuple(chosen)


def harvest(
    surveyed: Survey, selection: SampleSelection, purpose: HarvestPurpose, parts: HarvestTools
) -> tuple[DatasetManifest, Counter[Skipped]]:
    """
    Make a data set and record that content was read for it.

    Returns the saved manifest, and the number of skipped requests per reason.  Raises AuditError if the
    harvest could not be recorded (nothing was read then) or content cannot be read.
    """
    tenants = sorted({candidate.tenant for candidate in surveyed.candidates})
    if not tenants:
        raise DraftRefusedError(f"nothing to harvest ({describe_skipped(surveyed.skipped)})")
    common: dict[str, JSON | None] = {"policy": POLICY, "purpose": purpose.text or None}
    _record(parts.journal, tenants, {**common, "stage": "begun"})
    taken = take(selection, purpose, parts)
    skipped = surveyed.skipped + taken.skipped
    manifest = DatasetManifest(
        target=purpose.target,
        tokenizer=purpose.tokenizer,
        policy=POLICY,
        made=format_time(int(parts.clock() * 1000)),
        samples=tuple(sorted(taken.entries, key=lambda entry: entry.request_id)),
    )
    done: dict[str, JSON | None] = {
        **common,
        "stage": "done",
        "samples": len(manifest.samples),
        "tokens": sum(entry.tokens for entry in manifest.samples),
    }
    if not manifest.samples:
        _record(parts.journal, tenants, done)
        raise DraftRefusedError(f"nothing could be harvested ({describe_skipped(skipped)})")
    path = save_manifest(parts.drafts, manifest)
    # A crash before the next line leaves a usable data set and only its `begun` entry.
    try:
        _record(parts.journal, tenants, {**done, "dataset": manifest.digest})
    except AuditError:
        # A data set without its entry must not be trained on; the samples stay for the next harvest.
        with suppress(OSError):
            path.unlink()
        raise
    return manifest, skipped


def take(selection: SampleSelection, purpose: HarvestPurpose, parts: HarvestTools) -> HarvestResult:
    taken, prompts = HarvestResult(), set[bytes]()
    permitted: Collection[str] = parts.permitted()
    for count, candidate in enumerate(iter(selection.next, None), start=1):
        if count % RECHECK_AFTER == 0:
            permitted = parts.permitted()
        is_permitted = candidate.tenant in permitted
        made = _sample(candidate, purpose, parts, prompts) if is_permitted else Skipped.WITHDRAWN
        if isinstance(made, Skipped):
            taken.skipped[made] += 1
        elif selection.take(candidate, len(made.token_ids)):
            taken.entries.append(_entry(made))
    left = selection.left + selection.without_room
    if left:
        taken.skipped[Skipped.NO_ROOM] += left
    # Drop tenants that withdrew their permission meanwhile.
    permitted = parts.permitted()
    withdrawn = [entry for entry in taken.entries if entry.tenant not in permitted]
    if withdrawn:
        taken.skipped[Skipped.WITHDRAWN] += len(withdrawn)
        taken.entries = [entry for entry in taken.entries if entry.tenant in permitted]
    return taken


def describe_skipped(skipped: Counter[Skipped]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in skipped.most_common()) or "no content is kept"


def _sample(
    candidate: HarvestCandidate, purpose: HarvestPurpose, parts: HarvestTools, prompts: set[bytes]
) -> TrainingSample | Skipped:
    content = parts.samples.open_content(candidate.request_id, candidate.tenant)
    if isinstance(content, Skipped):
        return content
    kind = ROUTES[candidate.route]
    body, answered = content
    try:
        conversation = Conversation(prompt=read_body(kind, body), answer=read_answer(kind, answered))
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
    prompt_hash = hashlib.sha256(",".join(map(str, prompt)).encode()).digest()
    if prompt_hash in prompts:
        return Skipped.DUPLICATE
    kept = parts.samples.keep(
        TrainingSample(
            request_id=candidate.request_id,
            tenant=candidate.tenant,
            template=candidate.template,
            context=candidate.context,
            token_ids=prompt + answer,
            loss_mask=(False,) * len(prompt) + (True,) * len(answer),
            tokenizer=purpose.tokenizer,
        )
    )
    if isinstance(kept, TrainingSample):
        prompts.add(prompt_hash)
    return kept


def _entry(sample: TrainingSample) -> ManifestEntry:
    return ManifestEntry(
        request_id=sample.request_id,
        tenant=sample.tenant,
        template=sample.template,
        context=sample.context,
        tokens=len(sample.token_ids),
        digest=sample.digest,
        held_out=is_held_out(sample.request_id),
    )


def _record(journal: Journal, tenants: Sequence[str], fields: dict[str, JSON | None]) -> None:
    """Write one entry, or several if the tenants' names do not fit; only the first has the counts."""
    for start in range(0, len(tenants), TENANTS_PER_ENTRY):
        named = tuple(tenants[start : start + TENANTS_PER_ENTRY])
        journal(EntryType.DRAFT_HARVESTED, {**fields, "tenants": named})
        fields = {name: value for name, value in fields.items() if name not in {"samples", "tokens"}}
