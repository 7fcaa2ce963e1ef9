"""``GET /attn_res``: a static page that streams a completion and shows its depth attention.

The files are public (``guard``); the data in the page is not.
"""

from pathlib import Path

from fastapi import APIRouter, HTTPException
from fastapi.responses import FileResponse, RedirectResponse, Response

FOLDER = Path(__file__).parents[1] / "static"
INDEX = "index.html"
TYPES = {
    ".html": "text/html",
    ".svg": "image/svg+xml",
    ".css": "text/css",
    ".json": "application/json",
    ".txt": "text/plain",
    ".js": "text/javascript",
}
# A client's path is only looked up here, never used as a path of a file.
FILES = {path.name: TYPES[path.suffix] for path in FOLDER.iterdir() if path.suffix in TYPES}
# Only these files run, and only this server is requested.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def root() -> Response:
    """Redirect the root to the page."""
    return RedirectResponse("attn_res", headers=HEADERS)


@router.get("/attn_res")
async def page() -> Response:
    return _file(INDEX)


@router.get("/attn_res/{name:path}")
async def file(name: str) -> Response:
    """A file of the page, by its name in ``FILES``."""
    if not name:  # addresses in the page are relative to the address without a slash
        return RedirectResponse("../attn_res", headers=HEADERS)
    if name not in FILES:
        raise HTTPException(404)
    return _file(name)


def _file(name: str) -> Response:
    return FileResponse(FOLDER / name, media_type=FILES[name], headers=HEADERS)
