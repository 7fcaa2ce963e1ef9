"""Draft models beside a target with more than one kind of cache.

vLLM 0.32: the runner's ``_build_attention_metadata`` hands drafters of EAGLE's kind the blocks of
their own group of layers, and a draft model those of the first group.  The draft then writes into
the target's recurrent states, or into the keys and values of layers with a window.
"""


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

    DraftModelProposer.__bases__ = (OfAGroup,)
