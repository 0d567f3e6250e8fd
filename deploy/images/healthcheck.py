"""
Whether the server of this container answers: healthcheck.py PORT PATH.

The exit code says so, and an answer other than 200 is printed.

It asks over loopback.  A certificate names the address clients use, so it is not compared here.
"""

import http.client
import ssl
import sys

SECONDS = 4
OK = 200
BYTES = 4096


def answers(port: int, path: str) -> bool:
    """Whether the server answers 200, over plain HTTP or TLS."""
    unchecked = ssl._create_unverified_context()  # noqa: S323, SLF001 - loopback
    for connection in (
        http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS),
        http.client.HTTPSConnection("127.0.0.1", port, timeout=SECONDS, context=unchecked),
    ):
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != OK:
                sys.stdout.write(answer.read(BYTES).decode(errors="replace") + "\n")
        except (OSError, http.client.HTTPException):
            continue
        else:
            return answer.status == OK
        finally:
            connection.close()
    return False


if __name__ == "__main__":
    sys.exit(0 if answers(int(sys.argv[1]), sys.argv[2]) else 1)
