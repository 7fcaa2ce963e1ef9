"""Token ids that vLLM accepts although the model has no row for them, and so ends the engine.

It compares ids with the larger of tokenizer and model, and those of a server without a tokenizer
with nothing.  Tokens that end an answer, by config.json or the tokenizer, and what ``bad_words``
become it compares with nothing either.
"""

from collections.abc import Iterable

from attnres_serve.compat.workarounds.request_refusals import refuse_by


def refuse_ids_without_row(client) -> None:
    """Have an engine refuse requests with such ids."""
    rows = client.vllm_config.model_config.get_vocab_size()
    refuse_by(client, lambda request: without_row(request, rows))


def without_row(request, rows: int) -> str | None:
    """Error sentence for the first id of a request without a row; None if all have one.

    Args:
        request: as vLLM's input processor makes it.
        rows: those of the embedding, as many as there are logits.
    """
    sampling = request.sampling_params
    parts: dict[str, Iterable[int]] = {"the prompt": request.prompt_token_ids or ()}
    if sampling is not None:
        words = sampling.bad_words_token_ids or ()
        parts["`bad_words`"] = [token for word in words for token in word]
        if sampling.min_tokens:
            parts["what ends an answer, beside `min_tokens`"] = sampling.all_stop_token_ids
    for part, ids in parts.items():
        found = next((token for token in ids if not 0 <= token < rows), None)
        if found is not None:
            return (
                f"Token {found} of {part} is not in the vocabulary of {rows} tokens; the model has "
                f"those from 0 to {rows - 1}."
            )
    return None
