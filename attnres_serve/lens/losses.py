"""Losses of texts under masks, by a server whose edits change.

A mask is a site and a source that it does not read.  What was measured is a line of a file.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from attnres_serve.errors import SettingError
from attnres_serve.lens import ask
from attnres_serve.lens.ask import Server

EDITS = "/v1/attn_res/edits"
BATCH = 64  # texts of a request
SAME = 0.01  # nats per token, by which no model differs from itself, even in a 16-bit type

Increase = tuple[float, float | None]  # and its standard error
Mask = tuple[int, str]  # index of a site, name of a source


def increase(masked: np.ndarray, unedited: np.ndarray, tokens: np.ndarray) -> Increase:
    """How much more texts cost in nats per token, and the standard error, None for one text.

    Args:
        masked: ``[texts]``, nats of all tokens of a text together.
        unedited: the same without a mask; a text is a pair with itself.
        tokens: ``[texts]``, how many have a loss.
    """
    pairs = masked - unedited
    mean, count = float(pairs.sum() / tokens.sum()), len(pairs)
    if count == 1:
        return mean, None
    rest = pairs - mean * tokens  # a ratio of sums, as texts differ in length
    error = np.sqrt(count / (count - 1) * np.square(rest).sum()) / tokens.sum()
    return mean, float(error)


def edits(masks: Sequence[Mask]) -> list[dict[str, Any]]:
    """The masks as a request has them, an edit for each source."""
    sites: dict[str, list[int]] = {}
    for site, source in sorted(masks):
        sites.setdefault(source, []).append(site)
    return [{"mask": True, "sites": indices, "sources": [name]} for name, indices in sites.items()]


class Losses:
    """What was measured, and measures.

    Attributes:
        tokens: ``[texts]``, how many have a loss: all but the first of a text.
    """

    def __init__(
        self, server: Server, client: Any, model: str, texts: Sequence[str], path: Path
    ) -> None:
        """Measure without a mask, beside what the file has of the same model and texts.

        Raises:
            OSError: the file cannot be read or written.
            SettingError: it is of another model, or the server has edits or does not answer.
        """
        self._server, self._client, self._texts, self._path = server, client, texts, path
        self._name = hashlib.sha256(json.dumps([model, texts]).encode()).hexdigest()
        self._known: dict[tuple[Mask, ...], np.ndarray] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with suppress(ValueError):  # of a line that was cut short
                name, masks, nats = json.loads(line)
                if name == self._name:
                    self._known[tuple(map(tuple, masks))] = np.array(nats)
        if not self._known and self._ask("GET", EDITS)["edits"]:  # else they were left there
            raise SettingError(
                "the server has edits, and masks are compared with the model without any; take "
                f"them away by PUT {EDITS}, or leave out --attnres-edit."
            )
        now, self.tokens = self._measure(())
        if not self.tokens.sum():
            raise SettingError("a text has one token; give longer texts, whose logprobs change.")
        if abs(increase(self.under(()), now, self.tokens)[0]) > SAME:
            raise SettingError(f"--resume: {path} is of other weights or flags; remove it.")

    def under(self, masks: Sequence[Mask]) -> np.ndarray:
        """``[texts]``, nats of all tokens of a text together, measured once and kept."""
        key = tuple(sorted(masks))
        if key not in self._known:
            self._known[key], _ = self._measure(key)
            with self._path.open("a", encoding="utf-8") as file:  # behind what was cut short
                file.write("\n" + json.dumps([self._name, key, self._known[key].tolist()]))
        return self._known[key]

    def increase(self, masks: Sequence[Mask], part: slice = slice(None)) -> Increase:
        """That of some of the texts under masks."""
        return increase(self.under(masks)[part], self.under(())[part], self.tokens[part])

    def serve(self, masks: Sequence[Mask]) -> str:
        """Let the server have these masks; the version by which its answers name them."""
        version: str = self._ask("PUT", EDITS, {"edits": edits(masks)})["version"]
        return version

    def _measure(self, masks: Sequence[Mask]) -> tuple[np.ndarray, np.ndarray]:
        """Nats of each text, and how many tokens have some."""
        version, pairs = self.serve(masks), []
        for begin in range(0, len(self._texts), BATCH):
            texts = {"prompt": self._texts[begin : begin + BATCH], "prompt_logprobs": 0}
            answer = self._ask("POST", "/v1/completions", texts | {"max_tokens": 1})
            if answer["weight_versions"] != [version]:
                raise SettingError("another client changed the weights or edits of the server.")
            for choice in answer["choices"]:
                logprobs = [next(iter(row.values())) for row in choice["prompt_logprobs"] if row]
                pairs.append((-sum(one["logprob"] for one in logprobs), len(logprobs)))
        nats, tokens = np.array(pairs).T
        return nats, tokens

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        return ask.request(self._server, method, path, body, client=self._client)
