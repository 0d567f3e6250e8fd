"""
Landlock: a process irrevocably gives up connecting to all ports, and opening all files, except some.

The kernel enforces it for all code in the process and for all of its children; no privilege is needed.
System calls and structures are those of `linux/landlock.h`, described in
https://docs.kernel.org/userspace-api/landlock.html.  Of connections it filters ports: no addresses, and no
protocol but plain TCP.  A process that is restricted cannot trace or read the memory of one that is not.
"""

import ctypes
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, the same on every architecture that vLLM runs on."""
ASK_FOR_VERSION = 1
RULE_PATH_BENEATH, RULE_NET_PORT = 1, 2
CONNECT_TCP = 2
WRITE_FILE, READ_FILE, TRUNCATE = 1 << 1, 1 << 2, 1 << 14
REMOVE_AND_MAKE = 0b1_1111_1111 << 4
"""Removing and making directories, files, devices, sockets, pipes and links."""
REFER = 1 << 13
REFER_ABI, TRUNCATE_ABI = 2, 3
"""First versions that know the two; before, linking across directories is always refused."""
SET_NO_NEW_PRIVILEGES = 38
NETWORK_ABI = 4
"""First version with network rules: Linux 6.7."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64), ("handled_access_net", ctypes.c_uint64))


class _PortRule(ctypes.Structure):
    _fields_ = (("allowed_access", ctypes.c_uint64), ("port", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def abi_version() -> int:
    """The kernel's version of Landlock; raises OSError if it has none, or it is disabled."""
    return _call(CREATE_RULESET, None, 0, ASK_FOR_VERSION)


def allow_connections(ports: Iterable[int]) -> None:
    """
    Make the kernel refuse TCP connections of this process to other ports, with `EACCES`.

    Binding, accepting and open connections are unaffected.  The process also gives up gaining privileges by
    set-user-id programs, which the kernel requires of an unprivileged process.  Raises OSError if nothing has
    changed; `EBUSY` if the process has threads already, which would not be covered.
    """
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise OSError(errno.EBUSY, "threads are running already and would not be covered")
    attributes = _Ruleset(handled_access_net=CONNECT_TCP)
    ruleset = _call(CREATE_RULESET, ctypes.byref(attributes), ctypes.sizeof(attributes), 0)
    try:
        for port in ports:
            rule = _PortRule(allowed_access=CONNECT_TCP, port=port)
            _call(ADD_RULE, ruleset, RULE_NET_PORT, ctypes.byref(rule), 0)
        _check(_libc().prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _call(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def open_file_ruleset(visible: Iterable[Path]) -> int:
    """
    A ruleset that refuses to open, make, change or remove any file that is not `visible` or below it.

    Returns its descriptor; the caller closes it.  A process that restricts itself by it gives up gaining
    privileges first.  Paths that do not exist are skipped.  Listing directories, and what is open already,
    are unaffected.  Raises OSError.
    """
    version = abi_version()
    on_files = WRITE_FILE | READ_FILE | (TRUNCATE if version >= TRUNCATE_ABI else 0)
    on_directories = on_files | REMOVE_AND_MAKE | (REFER if version >= REFER_ABI else 0)
    attributes = _Ruleset(handled_access_fs=on_directories)
    size = _Ruleset.handled_access_net.offset  # older kernels know no more of the structure
    ruleset = _call(CREATE_RULESET, ctypes.byref(attributes), size, 0)
    try:
        for path in visible:
            try:
                parent = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                is_directory = stat.S_ISDIR(os.fstat(parent).st_mode)
                rule = _PathRule(
                    allowed_access=on_directories if is_directory else on_files, parent_fd=parent
                )
                _call(ADD_RULE, ruleset, RULE_PATH_BENEATH, ctypes.byref(rule), 0)
            finally:
                os.close(parent)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def _call(number: int, *arguments: object) -> int:
    return _check(_libc().syscall(number, *arguments))


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
