"""
The last signed head, kept apart from the database it describes.

A database restored from an old backup is consistent in itself.  This file keeps the size at which the log was
last signed, so that a rollback is detected.  It is written before the checkpoint is visible anywhere else: no
other party holds a newer head than the sealed one.
"""

from pathlib import Path

from appliance.audit.checkpoint import MAX_NOTE_CHARACTERS
from appliance.errors import AuditUnavailableError, AuditVerificationError
from appliance.infra.files import write_atomically


class SealedHead:
    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> str | None:
        """
        Return the sealed checkpoint, or None if there is none yet.

        Raises AuditUnavailableError, or AuditVerificationError if the file is not text.
        """
        try:
            with self.path.open("rb") as file:
                return file.read(4 * MAX_NOTE_CHARACTERS).decode()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise AuditUnavailableError(
                f"cannot read the sealed head {self.path}: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            raise AuditVerificationError(f"the sealed head {self.path} is damaged") from error

    def write(self, note: str) -> None:
        """
        Replace the sealed checkpoint; a crash on any line leaves the old or the new one, whole.

        Raises AuditUnavailableError if it could not be made durable.
        """
        fresh = self.path.with_name(f"{self.path.name}.new")
        try:
            # The directory is flushed, too: a power cut that brought the older head back would let a
            # rollback of the same age pass unnoticed.
            write_atomically(self.path, note.encode(), temporary=fresh)
        except OSError as error:
            raise AuditUnavailableError(
                f"cannot write the sealed head {self.path}: {error.strerror}"
            ) from error
