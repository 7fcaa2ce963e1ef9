"""Names in the answer to a request for a model that there is not.

vLLM 0.28 answers without any, and 0.32 leaves adapters out.  This can go with a vLLM whose
``BaseServing._check_model`` lists both.
"""

from http import HTTPStatus
from typing import Any

from attnres_serve.compat import openai_app
from attnres_serve.compat.patch import Patch


def _listing_names(original: Any) -> Any:
    """Have every route that vLLM serves list the names of models and adapters."""

    async def _check_model(self, request):
        answer = await original(self, request)
        if answer is not None and answer.error.code == HTTPStatus.NOT_FOUND:
            answer.error.message = openai_app.no_such_model(self.models, request.model)
        return answer

    return _check_model


PATCH = Patch(
    targets=("vllm.entrypoints.serve.engine.serving:BaseServing._check_model",),
    make=_listing_names,
    why="a refusal did not list the served names",
    models="every model of our server",
    first=(0, 28),
)
