"""Reads the console's forms, and tells those of its own pages from those of other sites."""

from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request

MAX_FORM_BYTES = 8192
"""Maximum size of a form; its longest value is a token of an identity provider."""
MAX_FORM_FIELDS = 12


def is_from_here(request: Request) -> bool:
    """
    Whether the browser says that a page of this origin sent a form; fails closed without such a header.

    The login form has no session and so no token, which is why every form is checked this way as well.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin, host = request.headers.get("origin"), request.headers.get("host")
    # The scheme is not compared: a proxy may have terminated TLS.
    return origin is not None and host is not None and urlsplit(origin).netloc == host


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a small form; none if it is malformed or too large."""
    length = request.headers.get("content-length", "")
    is_number = length.isascii() and length.isdigit() and len(length) <= len(str(MAX_FORM_BYTES))
    if not is_number or int(length) > MAX_FORM_BYTES:
        return {}
    try:
        text = (await request.body()).decode()
        return dict(parse_qsl(text, max_num_fields=MAX_FORM_FIELDS))
    except ValueError:
        return {}
