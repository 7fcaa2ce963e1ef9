"""Names in the answer to a request for a model that there is not.

vLLM 0.28 answers without any, and 0.32 leaves adapters out.  This can go with a vLLM whose
``BaseServing._check_model`` lists both.
"""

from http import HTTPStatus
from typing import Any

from attnres_serve.compat import openai_app


def list_in_refusals() -> None:
    """Have every route that vLLM serves list the names of models and adapters (idempotent)."""
    from vllm.entrypoints.serve.engine import serving

    cls: Any = serving.BaseServing
    own = cls._check_model
    if getattr(own, "lists_names", False):
        return

    async def _check_model(self, request):
        answer = await own(self, request)
        if answer is not None and answer.error.code == HTTPStatus.NOT_FOUND:
            answer.error.message = openai_app.no_such_model(self.models, request.model)
        return answer

    _check_model.lists_names = True  # type: ignore[attr-defined]
    cls._check_model = _check_model
