"""The static pages of the dashboard and the chat. They contain no data, need no build step and load no files from other
servers. `vendor/` contains an unchanged third-party library and its licence."""

import functools
from pathlib import Path

from starlette.responses import Response

FILES = {
    "/dashboard": ("index.html", "text/html"),
    "/dashboard/style.css": ("style.css", "text/css"),
    "/dashboard/dashboard.js": ("dashboard.js", "text/javascript"),
    "/dashboard/charts.js": ("charts.js", "text/javascript"),
    "/dashboard/icon.svg": ("icon.svg", "image/svg+xml"),
    "/chat": ("chat.html", "text/html"),
    "/chat/chat.css": ("chat.css", "text/css"),
    "/chat/chat.js": ("chat.js", "text/javascript"),
    "/chat/timeline.js": ("timeline.js", "text/javascript"),
    "/chat/chats.js": ("chats.js", "text/javascript"),
    "/chat/markdown.js": ("markdown.js", "text/javascript"),
    "/chat/marked.js": ("vendor/marked.esm.js", "text/javascript"),
}
"""File name and media type of each path."""

_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def file(path: str) -> Response:
    """Serve one of `FILES`."""
    name, media_type = FILES[path]
    return Response(_read(name), headers=_HEADERS, media_type=media_type)


@functools.cache
def _read(name: str) -> bytes:
    return (Path(__file__).parent / name).read_bytes()
