"""Draft models beside a target with more than one kind of cache.

vLLM 0.32: the runner's ``_build_attention_metadata`` hands drafters of EAGLE's kind the blocks of
their own group of layers, and a draft model those of the first group.  The draft then writes into
the target's recurrent states, or into the keys and values of layers with a window.
"""

from attnres_serve.errors import SettingError


def read_own_blocks() -> None:
    """Let vLLM take the drafter of a draft model for one of EAGLE's kind there (idempotent).

    Everywhere else in the runner both kinds are named together.
    """
    try:
        from vllm.v1.spec_decode.draft_model import DraftModelProposer
        from vllm.v1.spec_decode.eagle import EagleProposer
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    except ImportError:  # a vLLM with other drafters
        return
    if DraftModelProposer.__bases__ != (SpecDecodeBaseProposer,):
        return

    class OfAGroup(EagleProposer):
        def __init__(self, **given) -> None:
            SpecDecodeBaseProposer.__init__(self, **given)

        def validate_same_kv_cache_group(self, kv_cache_config) -> None:
            try:
                super().validate_same_kv_cache_group(kv_cache_config)
            except AssertionError:
                raise SettingError(
                    "the layers of the draft model are in several groups of the KV cache beside "
                    "this model's, which vLLM's drafter cannot read; choose a draft with fewer "
                    "layers and one kind of attention."
                ) from None

    DraftModelProposer.__bases__ = (OfAGroup,)
