"""Draft models beside a target with several kinds of caches.

vLLM 0.32: the runner's ``_build_attention_metadata`` gives EAGLE drafters the blocks of their group
of layers, but a draft model the blocks of the first group.  The draft then writes into the target's
recurrent states, or into the keys and values of layers with a window.
"""

from attnres_serve.compat.patch import Patch
from attnres_serve.errors import SettingError


def _of_eagles_kind(bases: tuple[type, ...]) -> tuple[type, ...]:
    """Let vLLM treat the drafter of a draft model like an EAGLE drafter there.

    Elsewhere the runner treats both kinds alike.
    """
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    if bases != (SpecDecodeBaseProposer,):
        return bases

    class OfAGroup(EagleProposer):
        def __init__(self, **options) -> None:
            SpecDecodeBaseProposer.__init__(self, **options)

        def validate_same_kv_cache_group(self, kv_cache_config) -> None:
            try:
                super().validate_same_kv_cache_group(kv_cache_config)
            except AssertionError:
                raise SettingError(
                    "the layers of the draft model are in several groups of the KV cache beside "
                    "this model's, which vLLM's drafter cannot read; choose a draft with fewer "
                    "layers and one kind of attention."
                ) from None

    return (OfAGroup,)


PATCH = Patch(
    targets=("vllm.v1.spec_decode.draft_model:DraftModelProposer.__bases__",),
    make=_of_eagles_kind,
    why="a draft model wrote into the target's cache",
    models="AttnRes models with `--speculative-config`",
    first=(0, 28),
    report="draft-models-beside-two-caches",
)
