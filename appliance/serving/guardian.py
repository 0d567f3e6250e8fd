"""
The guardian: a small process above each worker that ends all of the worker's processes.

Verified by experiment: if vLLM's API server is killed, its children survive and keep the GPU's memory.  The
guardian adopts orphaned processes (`PR_SET_CHILD_SUBREAPER`) and kills all of them when the worker ends, or
when its standard input closes, which the kernel does even if the supervisor is killed.

It runs from its own source, in an interpreter that finds none of our packages.
"""

import inspect


def guardian_source(ruleset: int | None = None) -> str:
    """`ruleset`: an inherited descriptor of Landlock, to restrict the guardian and its command by."""
    return f"{inspect.getsource(guard)}\nguard({ruleset})\n"


def guard(ruleset: int | None) -> None:  # noqa: C901, PLR0912, PLR0915 - a program of its own
    """
    Run the command in `sys.argv[1:]`, outlive it, and kill every process it leaves.

    Prints the command's process id, forwards SIGTERM to it, and ends with its exit status.
    """
    import ctypes, glob, os, resource, select, signal, sys  # noqa: E401, I001, PLC0415

    set_pdeathsig, set_child_subreaper, set_no_new_privileges, landlock_restrict_self = 1, 36, 38, 446
    libc = ctypes.CDLL(None, use_errno=True)
    prctl = libc.prctl
    prctl(set_child_subreaper, 1, 0, 0, 0)
    if ruleset is not None:
        if prctl(set_no_new_privileges, 1, 0, 0, 0) or libc.syscall(landlock_restrict_self, ruleset, 0):
            sys.exit(f"the file wall could not be raised: {os.strerror(ctypes.get_errno())}")
        os.close(ruleset)
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    guardian, child = os.getpid(), os.fork()
    if child == 0:
        os.setpgid(0, 0)
        # If the guardian is killed, the API server still ends its children before it exits.
        prctl(set_pdeathsig, signal.SIGTERM, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        if os.getppid() != guardian:
            os._exit(1)
        os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 - the plan's own command
    os.write(1, f"{child}\n".encode())

    status = None
    while status is None and not select.select([0], [], [], 0)[0]:
        news = signal.sigtimedwait(awaited, 0.2)
        if news is not None and news.si_signo == signal.SIGTERM:
            os.kill(child, signal.SIGTERM)
        reaped = child
        while reaped and status is None:
            reaped, ended_with = os.waitpid(-1, os.WNOHANG)
            status = ended_with if reaped == child else None

    victims = [-child]
    while True:
        for victim in victims:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            reaped, ended_with = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        status = ended_with if reaped == child else status
        # A process that dies leaves its children to us: scan again after each death until there is none.
        victims = []
        for path in glob.glob("/proc/[0-9]*/stat"):  # noqa: PTH207 - without pathlib it starts faster
            try:
                with open(path, "rb") as stat:  # noqa: PTH123
                    pid, _, rest = stat.read().partition(b" ")
            except OSError:
                continue
            if int(rest.rpartition(b")")[2].split()[1]) == guardian:
                victims.append(int(pid))

    code = os.waitstatus_to_exitcode(status or 0)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(guardian, -code)
    sys.exit(code)
