"""Registers a finished draft and records its training in the audit log."""

from collections.abc import Callable
from pathlib import Path

from appliance.audit.checkpoint import NoteSigner
from appliance.audit.entry import JSON
from appliance.audit.entry_types import EntryType
from appliance.drafts.harvest.dataset import Dataset
from appliance.drafts.registry.draft_source import DraftSource, read_source
from appliance.drafts.registry.registry import DraftRegistry
from appliance.drafts.training.outcome import USED
from appliance.drafts.training.parent_draft import refuse_misfit
from appliance.errors import DraftRefusedError, DraftStorageError
from appliance.serving.weights import Weights

Journal = Callable[[EntryType, dict[str, JSON | None]], int]


def publish(
    draft: Path,
    target: Weights,
    *,
    registry: DraftRegistry,
    signer: Callable[[], NoteSigner],
    journal: Journal,
    context: int | None = None,
) -> str:
    """
    Register a draft that was trained here, after its audit entries are durable; returns its digest.

    A draft that cannot be recorded is not registered.  After a crash in between, the entries are written
    again.  `context` is the longest context the worker serves.
    """
    source = read_source(draft)
    refuse_misfit(target, draft, context=context)
    if registry.registered(source, target=target.digest) is None:
        key = signer()
        origin: dict[str, JSON | None] = {
            "draft": source.digest,
            "target": target.digest,
            "parent": source.record.parent,
            "dataset": source.record.dataset,
            "record": source.record_hash,
        }
        journal(EntryType.DRAFT_TRAINED, {**origin, **_training(source)})
        journal(EntryType.DRAFT_IMPORTED, {**origin, "signer": key.verifier_key.name})
        registry.register(source, target=target.digest, how="trained", signer=key)
    return source.digest


def refuse_erased(draft: Path, dataset: Dataset) -> None:
    """Raise DraftRefusedError if a training sample was erased during the training."""
    try:
        used = {line.split()[0] for line in (draft / USED).read_text(encoding="utf-8").splitlines()}
    except OSError as error:
        raise DraftStorageError(f"cannot read {draft / USED}: {error.strerror}") from error
    there = {sample.request_id for sample in dataset.read(held_out=False)}
    if gone := used - there:
        raise DraftRefusedError(
            f"{len(gone)} of the {len(used)} samples were erased during the training, so the draft is not "
            "registered: train again with another --run"
        )


def _training(source: DraftSource) -> dict[str, JSON | None]:
    training = source.weights.training
    return {
        "recipe": str(source.record.recipe.get("tool", "unknown")),
        "samples": training.get("samples"),
        "missing": training.get("missing"),
    }
