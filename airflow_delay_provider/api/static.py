"""The files of the UI, which the browser loads before the user is known."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Response
from fastapi.staticfiles import StaticFiles

DIST = Path(__file__).parents[1] / "ui" / "dist"


def mount_static(app: FastAPI) -> None:
    """Serve the files under ``/static``. A mounted application skips the access checks of ``app``."""
    app.mount("/static", _HashedFiles(directory=DIST))


def static_url(file: str) -> str:
    """Return the URL of a file, relative to ``[api] base_url``; it changes with the content."""
    return f"delay/static/{file}?v={_read_hashes()[file]}"


@cache
def _read_hashes() -> dict[str, str]:
    """Return the hash of each file of the bundle, as the build wrote it."""
    files: dict[str, str] = json.loads((DIST / "build.json").read_bytes())["files"]
    return {name: digest[:16] for name, digest in files.items()}


class _HashedFiles(StaticFiles):
    """Lets browsers keep a file for ever if its URL names the content, and else ask again each time."""

    async def get_response(self, path: str, scope: MutableMapping[str, Any]) -> Response:
        response = await super().get_response(path, scope)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        is_current = query.get("v") == [_read_hashes().get(path)]
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable" if is_current else "no-cache"
        return response
