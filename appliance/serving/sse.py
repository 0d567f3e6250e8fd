"""
Server-sent events as bytes: split a stream of reads into whole frames.

Patterns match a key with unescaped quotes.  Inside any JSON string a quote is escaped, so a completion that
contains `"usage":` cannot be mistaken for the member.
"""

import re

SEPARATOR = b"\n\n"
DONE = b"data: [DONE]"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients ignore it, and it keeps proxies from closing the stream."""
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_ERROR = re.compile(rb'^data:\s*\{\s*"error"\s*:')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"([a-z_]{1,32})"')


class FrameBuffer:
    """Holds back the part of a frame that has not arrived yet."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, read: bytes) -> bytes:
        """All whole frames so far as one run of bytes, each with its blank line."""
        held = self.rest + read if self.rest else read
        end = held.rfind(SEPARATOR)
        if end < 0:
            self.rest = held
            return b""
        end += len(SEPARATOR)
        # In an odd run of newlines the last one belongs to the next frame, wherever a read ends.
        end -= (end - len(held[:end].rstrip(b"\n"))) % len(SEPARATOR)
        self.rest = held[end:]
        return held[:end]


def split_frames(frames: bytes) -> list[bytes]:
    return [frame + SEPARATOR for frame in frames.split(SEPARATOR)[:-1]]


def needs_care(frames: bytes) -> bool:
    """Whether a run of frames contains one that must be parsed before it is forwarded."""
    return DONE in frames or b'"usage"' in frames or b'"error"' in frames


def payload(frame: bytes) -> str:
    return frame.decode("utf-8", "replace").removeprefix("data:").strip()


def is_usage(frame: bytes) -> bool:
    """Whether this frame carries a usage object, alone or next to content."""
    return _USAGE.search(frame) is not None


def is_error(frame: bytes) -> bool:
    return _ERROR.match(frame) is not None


def is_done(frame: bytes) -> bool:
    return frame.strip() == DONE


def finish_reason(frames: bytes) -> str | None:
    found = _FINISH.findall(frames)
    return found[-1].decode() if found else None
