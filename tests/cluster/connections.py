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
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError:
        return False
    return True
with concurrent.futures.ThreadPoolExecutor() as side_by_side:
    print(json.dumps(dict(zip(sys.argv[1:], side_by_side.map(opens, sys.argv[1:])))))
"""
LISTEN = """
import socketserver, threading
class Close(socketserver.BaseRequestHandler):
    pass
socketserver.ThreadingTCPServer.allow_reuse_address = True
servers = [socketserver.ThreadingTCPServer(("", port), Close) for port in (8000, 8001)]
threading.Thread(target=servers[0].serve_forever).start()
servers[1].serve_forever()
"""
"""A pod that listens on the ports 8000 and 8001."""
ENFORCED_SECONDS = 30
"""Maximum time until a new policy holds."""


def open_from(namespace: Namespace, pod: str, *targets: str) -> dict[str, bool]:
    """Whether a pod can connect, by `host:port`."""
    return json.loads(namespace.python(pod, ATTEMPT, *targets))


def soon(condition: Callable[[], object]) -> bool:
    """Whether a condition holds before `ENFORCED_SECONDS` are over."""
    until = time.monotonic() + ENFORCED_SECONDS
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True
