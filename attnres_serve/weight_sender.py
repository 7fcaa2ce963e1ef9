"""A trainer's side of an update: its tensors go to a server on the same machine."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from attnres_serve.compat import tensor_file


class WeightSender:
    """Replaces the weights of a server that was started with ``--enable-weight-updates``.

    Args:
        url: of the server.
        key: its API key; that in ``OPENAI_API_KEY`` if None.
        partial: whether tensors that are not sent stay as they are.
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
            tensors: by their names in the checkpoint, in the house format, or as transformers has
                them in memory.
            version: what the weights are called from then on.
            running: what becomes of running requests: the update waits for them, aborts them, or
                keeps them, and they go on with the new weights.

        Raises:
            RuntimeError: the server refuses, with its sentence.  The old weights stay and are
                served, unless it says that they are not whole; then it serves nothing.
        """
        with tensor_file.file_of(tensors) as path:
            try:
                self.post(f"pause?mode={running}")
                self._replace(path, version)
            except BaseException:
                with suppress(RuntimeError, OSError):
                    self.post("shutdown_weight_transfer_engine")  # ends the update
                with suppress(RuntimeError, OSError):
                    self.post("resume")  # which an engine without whole weights refuses
                raise
            self.post("resume")

    def _replace(self, path: str, version: str | None) -> None:
        self.post("init_weight_transfer_engine", init_info={"partial": self._partial})
        self.post("start_weight_update")
        self.post("update_weights", update_info={"path": path})
        self.post("finish_weight_update", weight_version=version)

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        """What a route of the server answers.

        Raises:
            RuntimeError: it refuses.
        """
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        request = Request(f"{self._url}/{route}", json.dumps(body).encode(), headers, method="POST")
        try:
            with urlopen(request) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except HTTPError as error:
            raise RuntimeError(_sentence(error.read())) from None


def _sentence(body: bytes) -> str:
    """The sentence of a refusal."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
