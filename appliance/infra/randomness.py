"""Random bytes for ids, read from the kernel many at a time: a system call costs more than making an id."""

import os

CALLS = 256
"""Results that one read is for."""
_ready: dict[int, list[bytes]] = {}
os.register_at_fork(after_in_child=_ready.clear)


def random_bytes(count: int) -> bytes:
    """As `os.urandom`, from any thread; not for keys, because what is read waits in memory."""
    ready = _ready.setdefault(count, [])
    try:
        return ready.pop()
    except IndexError:
        read = os.urandom(count * CALLS)
        ready.extend([read[at : at + count] for at in range(count, len(read), count)])
        return read[:count]
