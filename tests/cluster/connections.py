"""
Which connections a pod can make.
"""

import json
import time
from collections.abc import Callable

from tests.cluster.cluster import Namespace

ATTEMPT = """
import concurrent.futures, json, socket, sys
def opens(target):
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True
with concurrent.futures.ThreadPoolExecutor(100) as side_by_side:
    print(json.dumps(dict(zip(sys.argv[1:], side_by_side.map(opens, sys.argv[1:])))))
"""
PORTS = (5432, 8000, 8001, 8080, 8081, 9002, 9090)
LISTEN = f"""
import socketserver, threading
class Close(socketserver.BaseRequestHandler):
    pass
socketserver.ThreadingTCPServer.allow_reuse_address = True
for port in {PORTS}:
    threading.Thread(target=socketserver.ThreadingTCPServer(("", port), Close).serve_forever).start()
"""
"""A pod that listens on `PORTS`."""
ENFORCED_SECONDS = 30
"""Maximum time until a new policy holds."""


def open_from(namespace: Namespace, pod: str, *targets: str) -> dict[str, bool]:
    """Whether a pod can connect, by `host:port`."""
    return json.loads(namespace.python(pod, ATTEMPT, *targets))


def soon(condition: Callable[[], object], seconds: float = ENFORCED_SECONDS) -> bool:
    """Whether a condition holds before the time is over."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True
