"""A server that is asked and does not run."""

from typing import Any

import httpx
import pytest


def asked_server(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answer every request of httpx with ``["answer"]``; what was asked is kept beside it."""
    asked: dict[str, Any] = {}

    def request(method: str, url: str, **options: Any) -> httpx.Response:
        asked.update(options, url=url)
        return asked["answer"]

    monkeypatch.setattr(httpx, "request", request)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return asked
