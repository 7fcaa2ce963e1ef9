"""Made-up traces, and a made-up server of them for a page in a browser, without an engine."""

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.testclient import TestClient

from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.server.routes import page
from attnres_serve.tracing import answer as trace_answer
from attnres_serve.tracing.answer import TraceAnswer
from attnres_serve.tracing.statistics import StatisticsAnswer, of_site, sums

TEXTS = ("import", " os", "\n", "def", " $x$", "\t", "你", "é")
SITE = "http://localhost"  # which browsers trust as they trust https
ANSWER_ID = 900  # of the first token of an answer


def made_up(
    layers: int,
    block: int,
    texts: Sequence[str | None] = TEXTS,
    model: str = "folder/demo",
    **options: Any,
) -> TraceAnswer:
    """A trace with random numbers, through what makes the route's answer.

    Args:
        layers: of the model, of two sublayers each.
        block: sublayers of a block.
        texts: of the tokens; None for one that has none alone.
        model: its name.
        options: further parts of a specification.
    """
    draw, count = np.random.default_rng(0), len(texts)
    spec = AttnResSpec.uniform(Layout.of(layers), block, 1e-6, **options)
    content = trace_answer.without_sites(model, range(100, 100 + count), count, range(count), texts)
    content["sites"] = []
    for site in [site for site in sites(spec) if site.mixes]:
        weights = draw.dirichlet(np.ones(site.num_sources), count).astype(np.float32)
        rms = draw.uniform(1, 2, (count, site.num_sources)).astype(np.float32)
        both = weights.tobytes(), rms.tobytes()
        content["sites"].append(trace_answer.traced_site(site, *both, count))
    return TraceAnswer.model_validate(content)


def made_up_trace(layers: int, block: int, texts: Sequence[str | None]) -> dict[str, Any]:
    """The same as JSON has it, of a model that is called so."""
    return made_up(layers, block, texts, "made up").model_dump()


class MadeUpServer:
    """Answers as a server does, with weights that mean nothing, and refuses what is too large.

    A token is a character of the prompt, or a letter of the answer.

    Attributes:
        asked: the bodies of the traces that were asked for.
        ends_at: tokens of an answer, if it ends before it is as long as it may be.
    """

    def __init__(self, layers: int, block: int, weights: int = 2**18, key: str = "") -> None:
        self.layers, self.block, self.key = layers, block, key
        self.asked: list[dict[str, Any]] = []
        self.ends_at = 10**6
        traced = made_up_trace(layers, block, ["a"])["sites"]
        names = {(None if name != "partial" else site["index"], name) for site in traced
                 for name in site["sources"]}  # fmt: skip
        self.vectors = [*sorted(names, key=str), *((site["index"], "mix") for site in traced)]
        self.limits = {
            "weights": weights,
            "weights_per_token": sum(len(site["sources"]) for site in traced),
            "lens": 2**14,
            "lens_per_token": len(self.vectors),
        }
        app = FastAPI()
        app.include_router(page.router)
        app.get("/v1/models")(lambda: {"data": [{"id": "made up"}]})
        app.get("/v1/attn_res")(self._info)
        app.get("/v1/attn_res/statistics")(self._statistics)
        app.post("/v1/completions")(self._complete)
        app.post("/v1/attn_res/trace")(self._trace)
        self.client = TestClient(app, SITE, follow_redirects=False)

    def serve(self, tab) -> None:
        """Answer every request of a browser's tab."""
        tab.route("**/*", self._answer)

    def _answer(self, route) -> None:
        request = route.request
        path = urlsplit(request.url).path
        headers = {name: value for name, value in request.headers.items() if name != "host"}
        wanted = f"Bearer {self.key}" if self.key and path.startswith("/v1") else None
        if wanted and headers.get("authorization") != wanted:
            said = "This route needs an API key; send it as `Authorization: Bearer KEY`."
            route.fulfill(status=401, json={"error": {"message": said}})
            return
        found = self.client.request(
            request.method, path, headers=headers, content=request.post_data_buffer
        )
        route.fulfill(status=found.status_code, headers=dict(found.headers), body=found.content)

    def _info(self) -> dict[str, Any]:
        counts = {"blocks": 2 * self.layers // self.block, "sites": 2 * self.layers + 1}
        return {"format": "house", "backbone": "llama", **counts, "trace": self.limits}

    def _statistics(self) -> dict[str, Any]:
        """Of four tokens of prompts and twelve of answers."""
        tokens = {"prefill": 4, "decode": 12}
        places = [
            site for site in sites(AttnResSpec.uniform(Layout.of(self.layers), self.block, 1e-6))
        ]
        found = {}
        for site in places:
            rows = np.random.default_rng(site.index).dirichlet(np.ones(site.num_sources), 16)
            found[site.index] = of_site(site, sums(rows, 4), tokens).model_dump()
        return StatisticsAnswer(
            model="made up", tokens=tokens, sites=[*found.values()]
        ).model_dump()

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        prompt = [ord(letter) for letter in body["prompt"]]
        answer = [*range(ANSWER_ID, ANSWER_ID + min(body["max_tokens"], self.ends_at))]
        choice = {"text": "x" * len(answer), "token_ids": answer, "prompt_token_ids": prompt}
        events = [json.dumps({"choices": [choice]}), "[DONE]"]
        text = "".join(f"data: {event}\n\n" for event in events)
        return Response(text, media_type="text/event-stream")

    async def _trace(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        ids = body["prompt"]
        ids = [ord(letter) for letter in ids] if isinstance(ids, str) else ids
        ids += range(ANSWER_ID, ANSWER_ID + min(body.get("max_tokens", 0), self.ends_at))
        asked = body["tokens"]
        start, end = (asked["start"], asked["end"]) if isinstance(asked, dict) else (0, 1)
        places = range(start, min(end, len(ids)))
        each = self.limits["weights_per_token"] + body.get("logprobs", 0) * (
            2 if body.get("edits") else 1
        )
        each += body.get("lens", 0) * self.limits["lens_per_token"]
        if body.get("sites") != [] and (end - start) * each > self.limits["weights"]:
            said = f"A trace has at most {self.limits['weights']} weights, logprobs among them."
            return JSONResponse({"error": {"message": said}}, 400)
        found = made_up_trace(self.layers, self.block, ["a"] * len(places))
        if body.get("sites") == []:
            found["sites"] = []
        found["tokens"] = [
            {"position": at, "id": ids[at], "text": chr(ids[at])} for at in places
        ]  # fmt: skip
        found |= {"total_tokens": len(ids), "edits": body.get("edits", [])}
        likely = [
            {"id": 7, "text": "\n  x", "logprob": -0.5},
            {"id": 8, "text": " ", "logprob": -2},
        ]
        rows = [{"position": at, "next": -1.0, "top": likely} for at in places]
        found["logprobs"] = {"unedited": rows, "edited": rows if body.get("edits") else None}
        if "logprobs" not in body:
            found["logprobs"] = None
        found["lens"] = None
        if "lens" in body:
            found["lens"] = [
                {"site": site, "vector": name, "predictions": rows} for site, name in self.vectors
            ]
        return JSONResponse(found)
