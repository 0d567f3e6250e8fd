"""
What a disk holds after a power cut, worked out from a trace of every write and every sync.

A model, stricter than a real file system: of what was written, only what a sync call on the same
file has covered is sure to be there, and a new or renamed file only once it or its directory was
synced.  Of the rest, any part may be there, in pieces of a disk sector.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

SECTOR_BYTES = 512
CALLS = "openat,write,pwrite64,fsync,fdatasync,ftruncate,rename,renameat2,unlink"
STRACE = [
    f"--trace={','.join(f'?{call}' for call in CALLS.split(','))}",
    "-xx",
    "--string-limit=1000000",
    "--columns=0",
]

_LINE = re.compile(r"(?P<thread>\d+) +(?:<\.\.\. (?P<resumed>\w+) resumed>|(?P<call>\w+)\()(?P<rest>.*)")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_DESCRIPTOR = re.compile(r"\d+<([^>]*)>")
UNFINISHED = " <unfinished ...>"
REPORT = "1<"
"""Standard output, on which the writer reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One system call that took effect."""

    call: str
    path: str
    content: bytes = b""
    offset: int = 0
    """Where it wrote; for `ftruncate` the new length."""
    target: str = ""
    truncates: bool = False


def parse_trace(trace: str) -> Iterator[Step]:
    """
    Yield the calls that succeeded, in the order in which they took effect.

    Reports count from their beginning, everything else from its end: what was promised is never
    dated too late, nor what was synced too early.
    """
    begun: dict[str, tuple[str, str]] = {}
    for line in trace.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        if match["resumed"]:
            call, start = begun.pop(match["thread"])
            if not start.startswith(REPORT):
                yield from _step(call, start + match["rest"])
        elif match["rest"].endswith(UNFINISHED):
            rest = match["rest"].removesuffix(UNFINISHED)
            begun[match["thread"]] = (match["call"], rest)
            if rest.startswith(REPORT):
                yield from _step(match["call"], f"{rest}) = 0")
        else:
            yield from _step(match["call"], match["rest"])


def _step(call: str, rest: str) -> Iterator[Step]:  # noqa: C901 - one case for each system call
    arguments, _, result = rest.rpartition(") = ")
    if not arguments or result.startswith(("-1", "?")):
        return
    strings = [_bytes(found) for found in _STRING.findall(arguments)]
    descriptor = _DESCRIPTOR.match(arguments)
    file = _readable(descriptor[1]) if descriptor else ""
    numbers = re.findall(r", (\d+)(?=,|$)", arguments)
    match call:
        case "openat":
            flags = arguments.rpartition('"')[2]
            if "O_CREAT" in flags or "O_TRUNC" in flags:
                yield Step(call=call, path=strings[0].decode(), truncates="O_TRUNC" in flags)
        case "write" if arguments.startswith(REPORT):
            yield Step(call="report", path="", content=strings[0])
        case "write":
            yield Step(call=call, path=file, content=strings[0])
        case "pwrite64":
            yield Step(call=call, path=file, content=strings[0], offset=int(numbers[-1]))
        case "ftruncate":
            yield Step(call=call, path=file, offset=int(numbers[-1]))
        case "fsync" | "fdatasync":
            yield Step(call="sync", path=file)
        case "rename" | "renameat2":
            yield Step(call="rename", path=strings[0].decode(), target=strings[1].decode())
        case "unlink":
            yield Step(call=call, path=strings[0].decode())


@dataclass(slots=True)
class Disk:
    """Files of one directory, as programs see them and as a power cut would leave them."""

    directory: str
    seen: dict[str, bytes] = field(default_factory=dict)
    durable: dict[str, bytes] = field(default_factory=dict)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    """Renames and removals (to nothing) that no sync of the directory has covered."""

    @classmethod
    def of(cls, directory: Path) -> "Disk":
        """Return the disk as it is, all of it durable."""
        files = {str(path): path.read_bytes() for path in directory.iterdir() if path.is_file()}
        return cls(directory=str(directory), seen=dict(files), durable=files)

    def follow(self, step: Step) -> None:
        """Let one call take effect."""
        path, content = step.path, self.seen.get(step.path, b"")
        match step.call:
            case "openat":
                self.seen[path] = b"" if step.truncates else content
            case "write":  # only whole new files are written so, from their beginning on
                self.seen[path] = content + step.content
            case "pwrite64":
                padded = content.ljust(step.offset, b"\0")
                end = step.offset + len(step.content)
                self.seen[path] = padded[: step.offset] + step.content + padded[end:]
            case "ftruncate":
                self.seen[path] = content[: step.offset].ljust(step.offset, b"\0")
            case "rename":
                self.seen[step.target] = self.seen.pop(path)
                self.renamed.append((path, step.target))
            case "unlink":
                self.seen.pop(path, None)
                self.renamed.append((path, ""))
            case "sync" if path == self.directory:
                self._apply_renames()
            case "sync":
                self.durable[path] = content

    def after_power_cut(self, chance: Random | None = None) -> dict[str, bytes]:
        """The files after a power cut; of unsynced data nothing, or what `chance` picks."""
        left = dict(self.durable)
        if chance is None:
            return left
        _rename(left, self.renamed[: chance.randint(0, len(self.renamed))])
        # A rename moves a file as it is: it is under one name or the other, never a mixture.
        moved = {name for pair in self.renamed for name in pair}
        for path, content in self.seen.items():
            old = self.durable.get(path, b"")
            if old != content and path not in moved and not path.endswith("-shm"):
                left[path] = _mixed(old, content, chance)
        return left

    def _apply_renames(self) -> None:
        _rename(self.durable, self.renamed)
        self.renamed.clear()


def _rename(files: dict[str, bytes], renamed: list[tuple[str, str]]) -> None:
    for path, target in renamed:
        content = files.pop(path, None)
        if target and content is not None:
            files[target] = content


def _mixed(old: bytes, new: bytes, chance: Random) -> bytes:
    """A file with some old and some new sectors."""
    length = max(len(old), len(new)) if chance.random() < 0.5 else len(new)
    old, new = old.ljust(length, b"\0"), new.ljust(length, b"\0")
    parts = []
    for at in range(0, length, SECTOR_BYTES):
        sectors = old[at : at + SECTOR_BYTES], new[at : at + SECTOR_BYTES]
        parts.append(chance.choice(sectors))
    return b"".join(parts)


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _readable(text: str) -> str:
    return _bytes(text).decode() if text.startswith("\\x") else text
