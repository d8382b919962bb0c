"""The controller's page in a browser: GET / and the two files that it loads.

Owns: which files there are, and what a browser may do with them (nothing but ask this controller).
Must not know: what they show; they ask the API as everybody does, with a token where it takes one,
so that they themselves are nobody's secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from aiohttp import web
from kvcast.service.http import Handler, Routes, file_answer

_FOLDER: Final = Path(__file__).parent / "files"
_FILES: Final[Mapping[str, tuple[str, str]]] = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
"""Path -> file, content type."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> Routes:
    """The page's routes; its files are read once, here."""
    return {path: {"GET": _answer(*file)} for path, file in _FILES.items()}


def _answer(name: str, content_type: str) -> Handler:
    body = (_FOLDER / name).read_bytes()

    async def answer(_request: web.BaseRequest) -> web.Response:
        return file_answer(body, content_type, HEADERS)

    return answer
