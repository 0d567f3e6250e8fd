"""
A finished draft enters the registry, and the audit log says that it was trained here.
"""

from collections.abc import Callable
from pathlib import Path

from appliance.audit.checkpoint import NoteSigner
from appliance.audit.entry import JSON
from appliance.audit.registry import EntryType
from appliance.drafts.registry.registry import DraftRegistry
from appliance.drafts.registry.source import DraftSource, read_source
from appliance.drafts.training.origin import refuse_misfit
from appliance.drafts.training.outcome import USED
from appliance.drafts.training.samples import DatasetLike
from appliance.errors import DraftRefusedError, DraftStorageError
from appliance.serving.weights import Weights

Journal = Callable[[EntryType, dict[str, JSON | None]], int]
"""Writes one entry of the audit log."""


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
    Register a draft that was trained here, once it is in the audit log; returns its digest.

    What cannot be recorded is not registered.  After a crash in between, the entries are written again.

    Args:
        draft: directory of the finished draft.
        target: its target, with digest.
        registry: of this site.
        signer: opens the site's key, where it is needed.
        journal: writes an entry of the audit log.
        context: longest context the worker serves.

    Raises:
        DraftRefusedError: vLLM would not serve it.
        DraftStorageError: it could not be written.
        AuditError: it could not be recorded, and was not registered.
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


def refuse_erased(draft: Path, dataset: DatasetLike) -> None:
    """
    See that everything a draft learnt from may still be learnt from now.

    Content can be erased while a training lasts; what is erased may be in no draft that is made after it.

    Raises:
        DraftRefusedError: something was erased meanwhile; the draft has to be trained again without it.
        DraftStorageError: the list of what was used cannot be read.
    """
    try:
        used = {line.split()[0] for line in (draft / USED).read_text(encoding="utf-8").splitlines()}
    except OSError as error:
        raise DraftStorageError(f"cannot read {draft / USED}: {error.strerror}") from error
    there = {sample.request_id for sample in dataset.read(held_out=False)}
    if gone := used - there:
        raise DraftRefusedError(
            f"{len(gone)} of the {len(used)} samples were erased while the draft was trained, so it is not "
            "registered: train again with another --run"
        )


def _training(source: DraftSource) -> dict[str, JSON | None]:
    training = source.weights.training
    return {
        "recipe": str(source.record.recipe.get("tool", "unknown")),
        "samples": training.get("samples"),
        "missing": training.get("missing"),
    }
