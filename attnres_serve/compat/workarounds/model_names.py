"""Names of models in the answer to a request for an unknown model.

vLLM 0.28 lists none, and 0.32 omits adapters.  Remove this with a vLLM whose
``BaseServing._check_model`` lists both.
"""

from http import HTTPStatus
from typing import Any

from attnres_serve.compat import openai_app
from attnres_serve.compat.patch import Patch


def _listing_names(original: Any) -> Any:
    """List the names of models and adapters in every route of vLLM."""

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
