"""
The file wall: a worker and its children cannot open, change or remove the gateway's files.

vLLM parses what strangers send, so it is the likeliest part to fall; on one machine it runs beside the
signing key, the payload keys and the log.  Landlock has no rule that denies a path, so the ruleset allows
everything beside the hidden paths at every level above them.  Names can still be listed: Python lists the
directories that it imports from, and those may lie above the data.
"""

import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ConfigurationError
from appliance.sovereignty import landlock
from appliance.sovereignty.wall import REASONS, Mode

CACHES = (".cache", ".config", ".triton", ".nv")
"""Directories in a home that vLLM and its libraries create."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWall:
    hidden: frozenset[Path]
    """Resolved paths, whether or not they exist yet."""
    shown: frozenset[Path]
    """Resolved paths that stay open although they lie below a hidden one."""
    temporary: Path | None = None
    """A directory for the worker's temporary files, if a hidden path lies below that of the system."""
    caches: tuple[Path, ...] = ()
    """Directories that vLLM could not create, because a hidden path lies below its home."""

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Create the directories; the temporary one is removed at the end.  Raises OSError."""
        for cache in self.caches:
            cache.mkdir(mode=0o700, exist_ok=True)
        if self.temporary is None:
            yield
            return
        self.temporary.mkdir(mode=0o700)
        try:
            yield
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def open_ruleset(self) -> int:
        """A descriptor that a process restricts itself by; the caller closes it.  Raises OSError."""
        return landlock.open_file_ruleset(visible_paths(self.hidden, self.shown))


def plan_file_wall(
    mode: Mode, hidden: Iterable[Path], shown: Iterable[Path], *, home: Path
) -> tuple[FileWall | None, str]:
    """
    The wall, None without one, and one line for operators.

    Directly above a hidden path a worker can create nothing, so that `prepared` does, for its `home` and for
    temporary files.  Raises ConfigurationError if the wall is required and this kernel cannot.
    """
    if mode == "off":
        return None, "off, by sovereignty.wall"
    try:
        landlock.abi_version()
    except OSError as error:
        reason = REASONS.get(error.errno or 0, str(error.strerror))
        if mode == "required":
            raise ConfigurationError(f"sovereignty.wall is required, but {reason}") from error
        return None, f"not up: {reason}"
    below = frozenset(path.resolve() for path in hidden)
    visible, temporary = {path.resolve() for path in shown}, None
    shared = Path(tempfile.gettempdir()).resolve()
    if _is_above(shared, below):
        # Short: vLLM makes sockets in it, and their paths have at most 107 bytes.
        temporary = shared / f"appliance-{secrets.token_hex(4)}"
        visible.add(temporary)
    places = ", ".join(str(path) for path in sorted(below) if not _is_below(path.parent, below))
    wall = FileWall(
        hidden=below,
        shown=frozenset(visible),
        temporary=temporary,
        caches=tuple(home / name for name in CACHES) if _is_above(home.resolve(), below) else (),
    )
    return wall, f"the worker cannot open files in {places}"


def visible_paths(hidden: frozenset[Path], shown: Iterable[Path]) -> frozenset[Path]:
    """What exists beside the hidden paths, at every level above them, and `shown`."""
    above = {parent for path in hidden for parent in path.parents}
    beside = {
        entry
        for directory in above
        if not _is_below(directory, hidden)
        for entry in _entries(directory)
        if entry not in above and entry not in hidden
    }
    # A shown path that has hidden ones below it is covered entry by entry, above.
    return frozenset(beside | {path for path in shown if path not in above and path not in hidden})


def _is_below(directory: Path, hidden: frozenset[Path]) -> bool:
    return directory in hidden or any(parent in hidden for parent in directory.parents)


def _is_above(directory: Path, hidden: frozenset[Path]) -> bool:
    return any(directory in path.parents for path in hidden)


def _entries(directory: Path) -> Iterator[Path]:
    """Without symbolic links: what they lead to is allowed or hidden by its own path."""
    try:
        yield from (entry for entry in directory.iterdir() if not entry.is_symlink())
    except OSError:
        return
