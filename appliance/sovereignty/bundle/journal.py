"""
How far a load has come, so that one that was cut off goes on where it stopped.

A line for each step that is done and on the disk, flushed before the next step begins.  A crash loses
at most the step it was in, which is then done again; every step may be done twice.
"""

import json
from contextlib import suppress
from pathlib import Path

from appliance.infra.files import sync_directory, sync_file
from appliance.sovereignty.bundle.copying import storage_error


class Journal:
    """The steps of one load."""

    def __init__(self, path: Path, manifest: str) -> None:
        """
        Take up the journal at `path`, or begin one if it is of another bundle or there is none.

        Args:
            path: the file.
            manifest: digest of the bundle's manifest.

        Raises:
            BundleStorageError: it cannot be written.
        """
        self._path = path
        lines = _lines(path)
        self.resumed = lines[:1] == [manifest]
        """Whether an earlier run of this bundle did not end."""
        self._done = set(lines[1:]) if self.resumed else set()
        try:
            kept = [manifest, *sorted(self._done)]
            # Written anew, so that the half line of a crash is not continued.
            with path.open("w", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(line)}\n" for line in kept)
                sync_file(file)
            sync_directory(path.parent)
        except OSError as error:
            raise storage_error(path, error) from error

    def has(self, step: str) -> bool:
        """Whether a step is done."""
        return step in self._done

    def note(self, step: str) -> None:
        """Note that a step is done; raises BundleStorageError."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(step)}\n")
                sync_file(file)
        except OSError as error:
            raise storage_error(self._path, error) from error
        self._done.add(step)

    def finish(self) -> None:
        """Remove the journal: the load is over.  A crash before this repeats steps that change nothing."""
        with suppress(FileNotFoundError):
            self._path.unlink()


def _lines(path: Path) -> list[str]:
    """The whole lines of a journal; none where there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    lines: list[str] = []
    for line in text.split("\n")[:-1]:
        try:
            lines.append(str(json.loads(line)))
        except ValueError:
            break
    return lines
