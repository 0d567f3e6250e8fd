"""
Promotions on disk: `promotions/<id>.json` below the registry's directory.

Each step is written before it is taken, so after a crash the file is at most one step ahead, and ending the
promotion is the same either way.  Fails closed: a promotion that cannot be written does not begin.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from appliance.drafts.promotion.promotion import Promotion, decode
from appliance.drafts.registry.active_draft import ACTIVE_DRAFTS, read_active_draft, write_active_draft
from appliance.errors import DraftStorageError
from appliance.infra.files import write_private

DIRECTORY = "promotions"
KEPT = 100
"""Promotions on disk; older ones are in the audit log only."""


class PromotionStore:
    """The promotions of one registry; for one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._registry = directory
        self._directory = directory / DIRECTORY

    def write(self, promotion: Promotion) -> None:
        """
        Write a promotion durably.

        Raises:
            DraftStorageError: it cannot be written.
        """
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(self._path(promotion.promotion_id), promotion.encode() + "\n")
        except OSError as error:
            message = f"cannot write {self._path(promotion.promotion_id)} ({error.strerror}): make room there"
            raise DraftStorageError(message) from error

    def list(self) -> tuple[tuple[Promotion, ...], tuple[str, ...]]:
        """
        The promotions, newest first, and the names of damaged files.

        Raises:
            DraftStorageError: the directory cannot be read.
        """
        try:
            # Ids begin with the time, so their order is chronological.
            files = sorted(self._directory.glob("*.json"), reverse=True)
        except OSError as error:
            message = f"cannot read {self._directory} ({error.strerror}): give this account access to it"
            raise DraftStorageError(message) from error
        found: list[Promotion] = []
        unreadable: list[str] = []
        for file in files:
            try:
                found.append(decode(file.read_text(encoding="utf-8")))
            except (OSError, ValueError, RecursionError):
                unreadable.append(file.name)
        return tuple(found), tuple(unreadable)

    def prune(self) -> None:
        """Delete the oldest that are over; raises `OSError`."""
        promotions, _ = self.list()
        for promotion in promotions[KEPT:]:
            if promotion.is_over:
                self._path(promotion.promotion_id).unlink(missing_ok=True)

    def clear_orphaned_promotions(self, known: Collection[str]) -> tuple[str, ...]:
        """
        Remove promotions that are not `known` (ids) from every active-draft file.

        Their file is lost, damaged or says they are over; workers would keep starting with their draft.

        Returns:
            The names of the files that were changed or are damaged.

        Raises:
            DraftStorageError: a file cannot be written.
        """
        changed: list[str] = []
        for file in sorted((self._registry / ACTIVE_DRAFTS).glob("*.json")):
            try:
                active = read_active_draft(self._registry, f"sha256:{file.stem}")
            except DraftStorageError:
                # No worker starts by a damaged one: it falls back to the draft of its settings.
                changed.append(file.name)
                continue
            if active.promotion is not None and active.promotion not in known:
                write_active_draft(self._registry, replace(active, promotion=None, candidate=None))
                changed.append(file.name)
        return tuple(changed)

    def _path(self, promotion_id: str) -> Path:
        return self._directory / f"{promotion_id}.json"
