"""
Whether a form was sent from a page of ours.

A session's forms carry its token.  The login form has no session yet, so for every form the browser's own
word is asked for as well: where the request was made.  It fails closed: without that word, no.
"""

from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request

MOST_BYTES = 8192
"""Of a form: the longest thing in one is a token of an identity provider."""

MOST_FIELDS = 10


def is_from_here(request: Request) -> bool:
    """Whether the browser says that a page of this origin sent it."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin, host = request.headers.get("origin"), request.headers.get("host")
    # The scheme is left out: a proxy in front may have ended TLS.
    return origin is not None and host is not None and urlsplit(origin).netloc == host


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a small form; none if it is not one."""
    length = request.headers.get("content-length", "")
    is_number = length.isascii() and length.isdigit() and len(length) <= len(str(MOST_BYTES))
    if not is_number or int(length) > MOST_BYTES:
        return {}
    try:
        text = (await request.body()).decode()
        return dict(parse_qsl(text, max_num_fields=MOST_FIELDS))
    except ValueError:
        return {}
