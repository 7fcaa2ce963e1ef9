"""Token ids without a row in the model, which vLLM accepts and which end the engine.

vLLM compares ids with the larger vocabulary of tokenizer and model, and checks none on a server
without a tokenizer.  It does not check end-of-sequence tokens of config.json or the tokenizer, nor
the tokens of ``bad_words``.  A tokenizer decodes such ids to no text, or fails on more than 32
bits.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from attnres_serve.compat.patch import Patch
from attnres_serve.compat.workarounds.request_refusals import refusal, refuse_by


def refuse_ids_without_row(client) -> None:
    """Refuse requests with such ids."""
    rows = client.vllm_config.model_config.get_vocab_size()
    refuse_by(client, lambda request: problem(request, rows))


def problem(request, rows: int) -> str | None:
    """Error sentence for the first id of a request without a row; None if all have one.

    Args:
        request: from vLLM's input processor.
        rows: of the embedding, which is the number of logits.
    """
    sampling = request.sampling_params
    parts: dict[str, Iterable[int]] = {"the prompt": request.prompt_token_ids or ()}
    if sampling is not None:
        bad_words = sampling.bad_words_token_ids or ()
        parts["`bad_words`"] = [token for word in bad_words for token in word]
        if sampling.min_tokens:
            parts["what ends an answer, beside `min_tokens`"] = sampling.all_stop_token_ids
    for part, ids in parts.items():
        if sentence := _outside(ids, part, rows):
            return sentence
    return None


def name_the_field(client) -> None:
    """Name the field in errors about ids that neither the model nor its tokenizer has.

    vLLM validates ids of prompts, with another error.  It decodes ids for ``/detokenize``, and of
    prompts with ``echo``, before any validation.
    """
    renderer, rows = client.renderer, client.vllm_config.model_config.get_vocab_size()

    def require_known(ids: Iterable[int], part: str) -> None:
        if renderer.tokenizer is not None:
            rows_of_both = max(rows, renderer.tokenizer.max_token_id + 1)
            if sentence := _outside(ids, part, rows_of_both):
                raise refusal(sentence)

    def validate_token_ids(token_ids, *, parameter=None) -> None:
        require_known(token_ids, f"`{parameter or 'prompt'}`")

    def detokenizing(decode: Callable) -> Callable:
        async def _detokenize_prompt_async(prompt):
            require_known(prompt["prompt_token_ids"], "`tokens` or `prompt`")
            return await decode(prompt)

        return _detokenize_prompt_async

    if VALIDATES.is_due():
        VALIDATES.apply_to(renderer, lambda original: validate_token_ids)
    DECODES.apply_to(renderer, detokenizing)


def _outside(ids: Iterable[int], part: str, rows: int) -> str | None:
    """Error sentence for the first id that is not below ``rows``."""
    outside = next((token for token in ids if not 0 <= token < rows), None)
    if outside is None:
        return None
    return (
        f"Token {outside} of {part} is not in the vocabulary of {rows} tokens; the model has "
        f"those from 0 to {rows - 1}."
    )


DECODES = Patch(
    targets=("_detokenize_prompt_async",),
    of="one engine's renderer",
    why="ids without a token were decoded to no text, or refused without a field",
    models="every model of our server",
    first=(0, 28),
)
VALIDATES = replace(DECODES, targets=("validate_token_ids",), first=(0, 32))
