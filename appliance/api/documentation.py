"""
The documentation at `/docs`, if `make docs` has built it into this installation; it has no secret.
"""

from http import HTTPStatus
from pathlib import Path

from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

PREFIX = "/docs"
BUILT_SITE = Path(__file__).with_name("site")
POLICY_FILE = "content-security-policy.txt"
"""Written by the build: it names the inline scripts by their hashes."""


def find_site() -> Path | None:
    return BUILT_SITE if (BUILT_SITE / POLICY_FILE).is_file() else None


def documentation_routes(site: Path | None) -> list[BaseRoute]:
    if site is None:
        return []
    return [
        Route(PREFIX, lambda _: RedirectResponse(f"{PREFIX}/index.html", HTTPStatus.SEE_OTHER)),
        Mount(PREFIX, _Pages(site)),
    ]


class _Pages(StaticFiles):
    def __init__(self, site: Path) -> None:
        super().__init__(directory=site, html=True)
        self._headers = {
            "Content-Security-Policy": (site / POLICY_FILE).read_text(encoding="utf-8").strip(),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            # An upgrade changes the pages: browsers ask with the entity tag.
            "Cache-Control": "no-cache",
        }

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(self._headers)
        return response
