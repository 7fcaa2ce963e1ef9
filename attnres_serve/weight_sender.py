"""The trainer's side of a weight update: it sends tensors to a server on the same machine."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from attnres_serve.compat import tensor_file


class WeightSender:
    """Replaces the weights of a server with ``--enable-weight-updates``.

    Args:
        url: of the server.
        key: its API key; None for the one in ``OPENAI_API_KEY``.
        partial: whether unsent tensors stay unchanged.
    """

    def __init__(self, url: str, key: str | None = None, partial: bool = False) -> None:
        self._url, self._key = url.rstrip("/"), key or os.environ.get("OPENAI_API_KEY")
        self._partial = partial

    def send(
        self,
        tensors: Iterable[tuple[str, Any]],
        version: str | None = None,
        running: Literal["wait", "abort", "keep"] = "wait",
    ) -> None:
        """Replace the weights; new requests wait meanwhile.

        Args:
            tensors: tensors with names of the checkpoint, of the house format, or of transformers
                in memory.
            version: the name of the new weights.
            running: the treatment of running requests: the update waits for them, aborts them, or
                keeps them, and they continue with the new weights.

        Raises:
            RuntimeError: the server's refusal.  It still serves the old weights, unless it says
                that they are not whole; then it serves nothing.
        """
        with tensor_file.file_of(tensors) as path:
            try:
                self.post(f"pause?mode={running}")
                self._replace(path, version)
            except BaseException:
                with suppress(RuntimeError, OSError):
                    self.post("shutdown_weight_transfer_engine")  # ends the update
                with suppress(RuntimeError, OSError):
                    self.post("resume")  # refused by an engine without whole weights
                raise
            self.post("resume")

    def _replace(self, path: str, version: str | None) -> None:
        self.post("init_weight_transfer_engine", init_info={"partial": self._partial})
        self.post("start_weight_update")
        self.post("update_weights", update_info={"path": path})
        self.post("finish_weight_update", weight_version=version)

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        """The answer of a route of the server.

        Raises:
            RuntimeError: it refuses.
        """
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        request = Request(f"{self._url}/{route}", json.dumps(body).encode(), headers, method="POST")
        try:
            with urlopen(request) as answer:
                content: dict[str, Any] = json.loads(answer.read())
                return content
        except HTTPError as error:
            raise RuntimeError(_sentence(error.read())) from None


def _sentence(body: bytes) -> str:
    """The sentence of a refusal."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
