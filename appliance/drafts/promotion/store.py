"""
Where promotions are kept: `promotions/<id>.json` below the registry's directory.

Each step is on disk before it is taken.  A crash between the two leaves a promotion that is less far
than the file says, which ends it the same way.  Fails closed: what cannot be written is not begun.
"""

from pathlib import Path

from appliance.drafts.promotion.promotion import Promotion, decode
from appliance.errors import DraftStorageError
from appliance.infra.data_directory import write_private

DIRECTORY = "promotions"
KEPT = 100
"""Promotions that are remembered; older ones are in the audit log alone."""


class PromotionStore:
    """The promotions of one registry; for one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """
        Prepare; nothing is read yet.

        Args:
            directory: of the registry.
        """
        self._directory = directory / DIRECTORY

    def write(self, promotion: Promotion) -> None:
        """
        Keep a promotion as it is now; it survives a power cut.

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
        Every promotion, newest first, and the names of files that cannot be read as one.

        Raises:
            DraftStorageError: the directory cannot be read.
        """
        try:
            # Ids begin with the time, so their order is that of their making.
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
        """Forget the oldest that are over; what cannot be removed stays."""
        promotions, _ = self.list()
        for promotion in promotions[KEPT:]:
            if promotion.is_over:
                self._path(promotion.promotion_id).unlink(missing_ok=True)

    def _path(self, promotion_id: str) -> Path:
        return self._directory / f"{promotion_id}.json"
